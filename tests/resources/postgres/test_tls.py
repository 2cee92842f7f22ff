"""Every connection supports TLS as libpq does, up to verify-full, and SCRAM passwords. Few privileges suffice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.pipelines.commands.validate import validate
from pgsieve.pipelines.config.model import Config, load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError, SourcePermissionError, SourceUnreachableError
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import export_snapshot, read_chunk
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.servers import drop_slots
from tests.fixtures.streamed import consume_stream
from tests.fixtures.tls import PASSWORD, TlsServer


@pytest.fixture(scope="module", autouse=True)
def role(tls_server: TlsServer) -> Iterator[None]:
    """A role with REPLICATION, and SELECT only on the published table."""
    with tls_server.admin() as admin:
        admin.execute("create table t (id int primary key, note text)")
        admin.execute("create table other (id int primary key)")
        admin.execute("insert into t values (1, 'one')")
        admin.execute("create publication p for table t")
        quoted = PASSWORD.replace("'", "''")
        admin.execute(
            f"set password_encryption = 'scram-sha-256'; create role replicator login replication password E'{quoted.replace(chr(92), chr(92) * 2)}'"
        )
        admin.execute("grant select on t to replicator")
        yield


def _config(tls_server: TlsServer, folder: Path) -> Config:
    conninfo = tls_server.conninfo().replace("${", "$${")
    written = {
        "lake": "./lake",
        "sources": {"shop": {"conninfo": conninfo}},
        "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
    }
    path = folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(written))
    return load_config(path)


def test_replication_and_select_suffice_after_the_printed_sql(tls_server: TlsServer, tmp_path: Path) -> None:
    config = _config(tls_server, tmp_path)
    project = build_project(config)
    subscription, lake = project.subscriptions["sales"], project.lake.open()
    with pytest.raises(SourcePermissionError):
        drain_slot(subscription.slot_stream, lake, [subscription], print)
    with tls_server.admin() as admin:
        for statement in validate(config).statements:
            admin.execute(statement)
    log_begins = tls_server.server.log_path.stat().st_size
    (copied,) = copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), print)
    assert (copied.problem, copied.rows) == (None, 1)
    with tls_server.admin() as admin:
        admin.execute("insert into t values (2, 'two')")
        drained = drain_slot(subscription.slot_stream, lake, [subscription], print)
        assert drained.slices == 1
        admin.execute("insert into t values (3, 'three')")
        consume_stream(subscription.slot_stream, lake, read_current_lsn(admin))
        assert len(lake.records.slices(lake.paths.change_log("shop"), 0)) == 2
        drop_slots(admin)
    with tls_server.server.log_path.open() as log:
        log.seek(log_begins)
        accepted = [line for line in log if "connection authorized: user=replicator" in line]
    assert accepted
    assert [line for line in accepted if "SSL enabled" not in line] == []


REFUSED = {
    "another authority": lambda server: {"sslrootcert": str(server.stranger)},
    "another host name": lambda _: {"host": "127.0.0.1"},
    "no authority": lambda server: {"sslrootcert": str(server.stranger) + ".missing"},
    "no TLS": lambda _: {"sslmode": "disable"},
    "another password": lambda _: {"password": "of somebody else"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_every_connection_refuses_what_libpq_refuses(
    tls_server: TlsServer, tmp_path: Path, reason: str
) -> None:
    conninfo = tls_server.conninfo(**REFUSED[reason](tls_server))
    source = Source("shop", conninfo)
    with pytest.raises(SourceUnreachableError) as plain, source.connect():
        pass
    with pytest.raises(SourceUnreachableError) as walsender, export_snapshot(source):
        pass
    with pytest.raises(Exception, match=r"libpq|connection|certificate|password") as adbc:
        list(read_chunk(Conninfo(conninfo), "00000003-00000001-1", "select 1"))
    for raised in (plain, walsender, adbc):
        assert PASSWORD not in str(raised.value)
        assert "of somebody else" not in str(raised.value)
    lake = Lake(str(tmp_path), print)  # type: ignore[arg-type]
    slot_stream = SlotStream("shop", source, "shop", "shop", False, {"sales": ("p",)})
    with pytest.raises(SourceError):
        drain_slot(slot_stream, lake, [Subscription("sales", slot_stream)], print)


def test_executors_connect_although_their_environment_differs(
    tls_server: TlsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PGPASSWORD": PASSWORD,
        "PGSSLMODE": "verify-full",
        "PGSSLROOTCERT": str(tls_server.authority),
    }.items():
        monkeypatch.setenv(name, value)
    source = Source("shop", tls_server.server.conninfo(host="localhost", user="replicator"))
    conninfo = source.make_executor_conninfo()
    for name in ("PGPASSWORD", "PGSSLMODE", "PGSSLROOTCERT"):
        monkeypatch.delenv(name)
    with conninfo.connect() as connection:
        (row,) = connection.execute("select ssl from pg_stat_ssl where pid = pg_backend_pid()").fetchall()
    assert row == (True,)
    assert dict(part.split("=", 1) for part in conninfo.text.split() if part.startswith("sslmode")) == {
        "sslmode": "verify-full"
    }
    assert PASSWORD not in repr(source)
