"""Invalid input is refused with a specific error before anything is created, and leaves nothing half-created.

No test needs a JVM: all of this happens before any row is read.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA, ChangeLog
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.ready import prepare_slot
from pgsieve.assets.steps.slot_consumption.slot import SlotNotOwnedError, replace_lost_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.validation.waiting import describe_waiting_reason, find_table_problems
from pgsieve.decoding.errors import PgsieveError, UnsupportedFilterError
from pgsieve.decoding.lsn import parse_lsn
from pgsieve.decoding.publications.catalog import OPERATIONS, PublicationError
from pgsieve.decoding.publications.definition import DefinedPublication, DefinedTable
from pgsieve.decoding.publications.replica_identity import ReplicaIdentityError
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.advisory_locks import AdvisoryLock
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import (
    SourcePermissionError,
    SourceSettingError,
    SourceUnreachableError,
)
from pgsieve.resources.postgres.slot import (
    ServerSetBackError,
    SlotAheadError,
    SlotError,
    SlotInUseError,
    SlotMissingError,
    create_slot,
    read_slot_state,
)
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.lakes import no_session

pytestmark = pytest.mark.slow

_ACTIVE = "select 1 from pg_replication_slots where database = %s and active"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"), no_session)


@pytest.fixture
def conninfo(publisher_server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"refusals_{abs(hash(request.node.name)) % 10**9}"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        yield publisher_server.conninfo(dbname=name)
        deadline = time.monotonic() + 10
        while admin.execute(_ACTIVE, [name]).fetchone() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        admin.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s", [name]
        )
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture
def database(conninfo: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("create table t (a int primary key, b int, c text)")
        connection.execute("create publication p for table t")
        yield connection


def slot_stream(
    conninfo: str,
    *publications: str,
    defined: Mapping[str, DefinedPublication] | None = None,
    slot: str = "refused",
) -> SlotStream:
    subscriptions = {"s": publications or ("p",)}
    return SlotStream(
        "shop",
        Source("shop", conninfo),
        slot,
        "capture",
        filtered=False,
        subscriptions=subscriptions,
        defined_publications=defined or {},
    )


def left_behind(database: psycopg.Connection) -> tuple[list[str], list[str]]:
    slots = database.execute(
        "select slot_name from pg_replication_slots where database = current_database()"
    ).fetchall()
    publications = database.execute(
        "select pubname from pg_publication where pubname like 'capture%'"
    ).fetchall()
    return [row[0] for row in slots], [row[0] for row in publications]


def refused(slot_stream: SlotStream, lake: Lake) -> PgsieveError:
    with pytest.raises(PgsieveError) as raised:
        drain_slot(slot_stream, lake, [], lambda _: None)
    assert raised.value.hint
    return raised.value


def test_an_invalid_conninfo_is_refused_without_its_password(lake: Lake) -> None:
    error = refused(slot_stream("host=127.0.0.1 password=secret nonsense"), lake)
    assert isinstance(error, SourceUnreachableError)
    assert "secret" not in str(error)


def test_a_server_that_does_not_answer_is_named(lake: Lake) -> None:
    error = refused(slot_stream("host=127.0.0.1 port=1 dbname=x password=secret"), lake)
    assert isinstance(error, SourceUnreachableError)
    assert 'source "shop"' in error.message
    assert "secret" not in str(error)


def test_wal_level_must_be_logical(server_folder: Path, lake: Lake) -> None:
    with EmbeddedServer(server_folder / "replica_level", settings={"wal_level": "replica"}) as server:
        error = refused(slot_stream(server.conninfo()), lake)
    assert isinstance(error, SourceSettingError)
    assert error.sqlstate == "55000"


def test_a_missing_publication_is_refused_and_nothing_is_created(
    conninfo: str, database: psycopg.Connection, lake: Lake
) -> None:
    error = refused(slot_stream(conninfo, "nowhere"), lake)
    assert isinstance(error, PublicationError)
    assert '"nowhere"' in error.message
    assert left_behind(database) == ([], [])


def test_a_filter_that_cannot_be_evaluated_stops_its_table_and_not_the_slot_stream(
    conninfo: str, database: psycopg.Connection, lake: Lake
) -> None:
    database.execute(
        "create publication odd for table t where (a > 1 and power(a, 2) > 3) with (publish = 'insert')"
    )
    subscription = Subscription("s", slot_stream(conninfo, "odd"))
    (error,) = find_table_problems(subscription, read_catalog(database)).values()
    assert isinstance(error, UnsupportedFilterError)
    assert "row_filter: publisher" in str(error.hint)
    assert find_tables_to_copy(subscription, lake) == []
    state = TableStates(lake, "s").read_newest()["public", "t"]
    assert (state.state, state.reason) == (SyncState.INITIALIZE, describe_waiting_reason(error))
    drain_slot(subscription.slot_stream, lake, [subscription], lambda _: None)
    database.execute("alter publication odd set table t where (a > 1)")
    assert find_tables_to_copy(subscription, lake) == [("public", "t")]


def test_a_defined_filter_outside_the_replica_identity_is_refused_as_by_postgresql(
    conninfo: str, database: psycopg.Connection, lake: Lake
) -> None:
    own = DefinedPublication(
        "own", (DefinedTable("public", "t", "b > 1"),), frozenset(OPERATIONS), via_root=False
    )
    error = refused(slot_stream(conninfo, "own", defined={"own": own}), lake)
    assert isinstance(error, ReplicaIdentityError)
    assert error.sqlstate == "42P10"
    assert "not part of the replica identity" in error.message
    assert left_behind(database) == ([], [])


def test_a_role_without_replication_is_refused_and_nothing_is_created(
    conninfo: str, database: psycopg.Connection, lake: Lake
) -> None:
    database.execute("drop role if exists plain")
    database.execute("create role plain login")
    database.execute("grant create on database " + database.info.dbname + " to plain")
    database.execute("alter table t owner to plain")
    error = refused(slot_stream(psycopg.conninfo.make_conninfo(conninfo, user="plain")), lake)
    assert isinstance(error, SourcePermissionError)
    assert error.sqlstate == "42501"
    assert left_behind(database) == ([], [])
    database.execute("alter table t owner to postgres")
    database.execute("revoke create on database " + database.info.dbname + " from plain")
    database.execute("drop role plain")


def test_a_lake_that_cannot_be_written_is_refused(
    conninfo: str, database: psycopg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    error = refused(slot_stream(conninfo), Lake(str(tmp_path / "file"), no_session))
    assert isinstance(error, LakeError)
    assert left_behind(database) == ([], [])


def test_a_missing_slot_is_an_error_if_delta_has_progress(
    conninfo: str, database: psycopg.Connection, lake: Lake
) -> None:
    drain_slot(slot_stream(conninfo), lake, [], lambda _: None)
    database.execute("select pg_drop_replication_slot('refused')")
    error = refused(slot_stream(conninfo), lake)
    assert isinstance(error, SlotMissingError)
    assert "changes since then are lost" in error.message


def test_a_slot_that_another_client_advanced_is_an_error(
    conninfo: str, database: psycopg.Connection, lake: Lake
) -> None:
    drain_slot(slot_stream(conninfo), lake, [], lambda _: None)
    database.execute("insert into t values (1)")
    database.execute("select pg_replication_slot_advance('refused', pg_current_wal_lsn())")
    error = refused(slot_stream(conninfo), lake)
    assert isinstance(error, SlotAheadError)


def test_a_server_that_was_put_back_is_refused_until_a_full_copy(server_folder: Path, lake: Lake) -> None:
    data = server_folder / "data"
    with EmbeddedServer(data) as server, psycopg.connect(server.conninfo(), autocommit=True) as database:
        reading = slot_stream(server.conninfo())
        database.execute("create table t (a int primary key, b text); create publication p for table t")
        drain_slot(reading, lake, [], lambda _: None)
    # A snapshot of a disk has this: the same cluster on the same timeline, with its slot.
    subprocess.run(["cp", "--archive", data, server_folder / "before"], check=True)
    with server, psycopg.connect(server.conninfo(), autocommit=True) as database:
        database.execute("insert into t select i, repeat('x', 100) from generate_series(1, 1000) i")
        drain_slot(reading, lake, [], lambda _: None)
    shutil.rmtree(data)
    (server_folder / "before").rename(data)
    with server, psycopg.connect(server.conninfo(), autocommit=True) as database:
        database.execute("insert into t values (1, 'another')")
        error = refused(reading, lake)
        assert isinstance(error, ServerSetBackError)
        assert "`pgsieve resync s`" in str(error.hint)
        with pytest.raises(SlotError, match="has not reached again"):
            replace_lost_slot(reading, lake)
        database.execute("select pg_switch_wal()")
        assert isinstance(replace_lost_slot(reading, lake), SlotMissingError)
        drain_slot(reading, lake, [], lambda _: None)


def test_a_resync_does_not_replace_a_slot_that_another_lake_has_just_created(
    conninfo: str, database: psycopg.Connection, lake: Lake, tmp_path: Path
) -> None:
    reading = slot_stream(conninfo)
    drain_slot(reading, Lake(str(tmp_path / "other"), no_session), [], lambda _: None)
    slots = "select slot_name, confirmed_flush_lsn from pg_replication_slots where slot_name = 'refused'"
    created = database.execute(slots).fetchall()
    with pytest.raises(SlotNotOwnedError, match="another lake"):
        replace_lost_slot(reading, lake)
    assert database.execute(slots).fetchall() == created


def test_a_lock_that_may_not_wait_does_not_wait(conninfo: str) -> None:
    with (
        psycopg.connect(conninfo, autocommit=True) as holder,
        psycopg.connect(conninfo, autocommit=True, options="-c statement_timeout=5s") as other,
    ):
        AdvisoryLock(holder, "lock").take(0)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            AdvisoryLock(other, "lock").take(0)


@pytest.mark.drawn
@pytest.mark.slow
def test_a_slot_in_use_is_an_error(conninfo: str, database: psycopg.Connection, lake: Lake) -> None:
    consumed = slot_stream(conninfo)
    with consumed.source.connect() as connection:
        prepare_slot(connection, consumed, lake)
    walsender = psycopg.connect(conninfo, autocommit=True, replication="database")
    try:
        walsender.pgconn.send_query(
            b"START_REPLICATION SLOT refused LOGICAL 0/0 (proto_version '1', publication_names 'p')"
        )
        walsender.pgconn.get_result()
        database.execute("insert into t values (1)")
        error = refused(consumed, lake)
    finally:
        walsender.close()
    assert isinstance(error, SlotInUseError)
    assert error.sqlstate == "55006"


def test_a_slot_behind_delta_is_advanced(conninfo: str, database: psycopg.Connection, lake: Lake) -> None:
    reading = slot_stream(conninfo)
    with reading.source.connect() as connection:
        start = create_slot(connection, "shop", "refused")
        database.execute("create table noise (a int)")
        later = read_current_lsn(connection)
        lake.records.append(lake.paths.change_log("shop"), CHANGE_LOG_SCHEMA.empty_table(), later)
        prepare_slot(connection, reading, lake)
        state = read_slot_state(connection, "refused")
    assert state is not None
    assert start < later <= state.confirmed_lsn
    assert ChangeLog(lake, reading).read_position() == later


def test_a_new_slot_causes_a_copy_of_every_table(
    conninfo: str, database: psycopg.Connection, lake: Lake
) -> None:
    TableStates(lake, "s").append([TableState("public", "t", SyncState.READY, lsn=parse_lsn("0/10"))])
    reading = slot_stream(conninfo)
    with reading.source.connect() as connection:
        prepare_slot(connection, reading, lake)
    assert TableStates(lake, "s").read_newest()["public", "t"].state == SyncState.INITIALIZE


def test_an_idle_slot_does_not_retain_wal(conninfo: str, database: psycopg.Connection, lake: Lake) -> None:
    database.execute("create table unpublished (a text)")
    drain_slot(slot_stream(conninfo), lake, [], lambda _: None)
    database.execute(
        "insert into unpublished select repeat(md5(i::text), 30) from generate_series(1, 10000) i"
    )
    drained = drain_slot(slot_stream(conninfo), lake, [], lambda _: None)
    assert drained.slices == 0
    assert drained.lag < 1024 * 1024
    again = drain_slot(slot_stream(conninfo), lake, [], lambda _: None)
    assert again.from_lsn == again.to_lsn == drained.to_lsn
