"""`pgsieve maintain` and the nightly job run the same assets. The job is off until a user enables it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import psycopg
import pytest
import yaml
from deltalake import DeltaTable
from typer.testing import CliRunner

from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.pipelines.command_line import cli
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import drop_slots
from tests.fixtures.shop import Shop

pytestmark = pytest.mark.slow
_FILES, _LOG = "delta.deletedFileRetentionDuration", "delta.logRetentionDuration"


@pytest.fixture
def file(publisher_server: EmbeddedServer, tmp_path: Path) -> Iterator[Path]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database maintained")
        conninfo = publisher_server.conninfo(dbname="maintained")
        with psycopg.connect(conninfo, autocommit=True) as database:
            database.execute("create table t (id int primary key)")
            database.execute("insert into t select generate_series(1, 10)")
            database.execute("create publication p for table t")
            written = {
                "lake": "./lake",
                "retention": {"change_log": "off", "changes": "off"},
                "sources": {"shop": {"conninfo": conninfo}},
                "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
            }
            path = tmp_path / "pgsieve.yaml"
            path.write_text(yaml.safe_dump(written))
            yield path
            drop_slots(database)
        admin.execute("drop database maintained with (force)")


def test_a_lake_continues_after_maintenance(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def pgsieve(*command: str) -> str:
        result = CliRunner().invoke(cli.app, [*command, "-c", str(file)], prog_name="pgsieve")
        assert result.exit_code == 0, result.output
        return result.stdout

    pgsieve("run")
    printed = pgsieve("maintain")
    assert "sales/maintenance" in printed
    assert "shop/change_log_maintenance" in printed
    assert "nothing new" in pgsieve("run")
    # One state is of the copy, one of being ready.
    assert DeltaTable(str(file.parent / "lake/sales/_table_states")).get_add_actions().num_rows == 1


@pytest.mark.drawn
@pytest.mark.spark
def test_a_subscription_restored_to_a_state_before_deleted_changes_is_copied_again(
    file: Path, publisher_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take long: many commands, some with runs of the whole graph."""
    monkeypatch.setenv("COLUMNS", "400")

    def pgsieve(*command: str, ends: int = 0) -> str:
        result = CliRunner().invoke(cli.app, [*command, "-c", str(file)], prog_name="pgsieve")
        assert result.exit_code == ends, result.output
        return result.output

    def rows() -> int:
        return DeltaTable(str(sales / "public" / "t")).to_pyarrow_table().num_rows

    sales, backup = file.parent / "lake" / "sales", file.parent / "backup"
    pgsieve("run")
    shutil.copytree(sales, backup)
    with psycopg.connect(publisher_server.conninfo(dbname="maintained"), autocommit=True) as database:
        database.execute("insert into t values (11)")
        pgsieve("run")
        pgsieve("maintain")
        database.execute("insert into t values (12)")
        shutil.rmtree(sales)
        shutil.copytree(backup, sales)
        output = pgsieve("run", ends=1)
        assert "are deleted from the change log" in output
        assert "`pgsieve resync sales public.t`" in output
        assert rows() == 10
        pgsieve("resync", "sales", "public.t")
        assert rows() == 12
        database.execute("insert into t values (13)")
        pgsieve("run")
        assert rows() == 13
        pgsieve("check")


def test_maintenance_has_a_schedule_that_is_off(file: Path) -> None:
    made = build_ui_definitions(load_config(file))
    schedule = made.resolve_schedule_def("shop_maintenance_schedule")
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED
    job = made.resolve_job_def("shop_maintenance")
    assert {key.to_user_string() for key in job.asset_layer.executable_asset_keys} == {
        "sales/maintenance",
        "shop/change_log_maintenance",
    }


@pytest.mark.drawn
def test_old_files_of_a_running_copy_are_kept(shop: Shop) -> None:
    shop.copy()
    states = TableStates(shop.lake, "one")
    copying = replace(states.read_newest()["public", "orders"], state=SyncState.DATA_SYNC, lsn=0)
    states.append([copying])
    files = {}
    for table in ("orders", "notes"):
        files[table] = Path(shop.lake.paths.replica("one", "public", table), "part-of-a-copy.parquet")
        files[table].write_bytes(b"")
        os.utime(files[table], (0, 0))
    code, output = shop.cli("maintain")
    assert code == 0, output
    assert {table: file.exists() for table, file in files.items()} == {"orders": True, "notes": False}


@pytest.mark.drawn
def test_a_maintenance_waits_for_another_of_the_same_tables(shop: Shop) -> None:
    shop.copy()
    project = build_project(load_config(shop.path))
    slot_stream = project.subscriptions["one"].slot_stream
    with slot_stream.source.hold_lock("maintenance of one"):
        maintaining = threading.Thread(target=shop.cli, args=("maintain",))
        maintaining.start()
        maintaining.join(3)
        assert maintaining.is_alive()
    maintaining.join(60)
    assert not maintaining.is_alive()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({_FILES: "interval 90 days", _LOG: "interval 13 weeks"}, ("interval 90 days", "interval 13 weeks")),
        ({_FILES: "interval 90 days"}, ("interval 90 days", "interval 2160 hours")),
        ({_LOG: "90 days"}, ("interval 960 hours", "90 days")),
        ({_FILES: "interval 39 days 23 hours", _LOG: "interval 1 day"}, ("interval 960 hours",) * 2),
        ({}, ("interval 960 hours",) * 2),
    ],
)
def test_a_longer_retention_that_a_user_gave_a_replica_stays(
    shop: Shop, own: dict[str, str], expected: tuple[str, str]
) -> None:
    shop.configure(retention={"versions": "40 days"})
    shop.copy()
    shop.table("one", "orders").alter.set_table_properties(own)
    code, output = shop.cli("maintain", "one")
    assert code == 0, output
    properties = shop.table("one", "orders").metadata().configuration
    assert (properties[_FILES], properties[_LOG]) == expected


def test_files_stay_as_long_as_the_user_wants(shop: Shop) -> None:
    shop.copy()
    removed_file = Path(shop.lake.paths.replica("one", "public", "orders"), "removed.parquet")
    for own, days, stays in (("interval 90 days", 80, True), ("interval 90 days", 91, False)):
        removed_file.write_bytes(b"")
        written = time.time() - days * 24 * 3600
        os.utime(removed_file, (written, written))
        shop.table("one", "orders").alter.set_table_properties({_FILES: own})
        code, output = shop.cli("maintain", "one")
        assert code == 0, output
        assert removed_file.exists() == stays, days
