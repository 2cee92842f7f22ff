"""Dagster's event log keeps its connections open while a command works. Other processes see the same log."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.base import AssetRecord
from sqlalchemy import Connection

from pgsieve.pipelines.commands import event_log
from pgsieve.pipelines.commands.event_log import cache_event_log, store_reports_together

pytestmark = pytest.mark.slow

KEY = dg.AssetKey("a")


@dg.asset(key=KEY)
def a() -> None: ...


def test_other_processes_see_the_records_and_few_databases_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = list[str]()
    create = event_log.create_engine
    monkeypatch.setattr(
        event_log, "create_engine", lambda url, **how: engines.append(url) or create(url, **how)
    )
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance, dg.DagsterInstance.get() as other:
        with cache_event_log(instance.event_log_storage):
            storage = instance.event_log_storage
            assert isinstance(storage, event_log.CachedEventLog)
            for number in range(5):
                instance.report_runless_asset_event(dg.AssetMaterialization(KEY, metadata={"n": number}))
            runs = [dg.materialize([a], instance=instance).run_id for _ in range(3)]
            initialised = []
            monkeypatch.setattr(
                event_log.CachedEventLog, "_initdb", lambda _, engine: initialised.append(engine)
            )
            runs.append(dg.materialize([a], instance=instance).run_id)
            assert not initialised, "a later run's database is not copied from the first"
            assert not list(tmp_path.rglob("*.making"))
            assert len(engines) <= 2 + 2 * len(runs), "a connection was opened for each event"
            assert len(storage._connections) <= event_log._MAX_OPEN_DATABASES
            assert len(other.fetch_materializations(KEY, limit=100).records) == 5 + len(runs)
            instance.delete_run(runs[0])
            assert not other.all_logs(runs[0])
        assert type(instance.event_log_storage) is SqliteEventLogStorage
        assert len(instance.fetch_materializations(KEY, limit=100).records) == 5 + len(runs) - 1


@dg.asset
def b() -> None: ...


def test_a_batch_is_stored_completely_and_no_event_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    stored, batches = list[str](), list[int]()
    insert, store_batch = event_log.CachedEventLog._insert_event, event_log.CachedEventLog.store_event_batch

    def failing_once(storage: event_log.CachedEventLog, event: EventLogEntry) -> None:
        insert(storage, event)
        stored.append(event.run_id)
        if len(stored) == 2:
            raise OSError("no room for the second")

    def counted(storage: event_log.CachedEventLog, events: Sequence[EventLogEntry]) -> None:
        batches.append(len(events))
        store_batch(storage, events)

    monkeypatch.setattr(event_log.CachedEventLog, "_insert_event", failing_once)
    monkeypatch.setattr(event_log.CachedEventLog, "store_event_batch", counted)
    planned = dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED
    with dg.DagsterInstance.get() as instance, dg.DagsterInstance.get() as other:
        with cache_event_log(instance.event_log_storage):
            for _ in range(2):
                run = dg.materialize([a, b], instance=instance)
                assert len(other.all_logs(run.run_id, of_type=planned)) == 2
            of_a = other.event_log_storage.get_event_records(dg.EventRecordsFilter(planned, asset_key=KEY))
            assert len(of_a) == 2
        assert "DAGSTER_EVENT_BATCH_SIZE" not in os.environ
    assert batches == [2, 2]
    assert "no room for the second" in capfd.readouterr().err


def test_a_batch_whose_second_database_cannot_be_opened_leaves_no_transaction_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    store_batch = event_log.CachedEventLog.store_event_batch
    connection = event_log.CachedEventLog._open_connection
    opened = list[str]()

    def counted(storage: event_log.CachedEventLog, events: Sequence[EventLogEntry]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(event_log.CachedEventLog, "_open_connection", failing_second)
            store_batch(storage, events)

    def failing_second(storage: event_log.CachedEventLog, shard: str) -> Connection:
        opened.append(shard)
        if len(opened) == 2:
            raise OSError("no file can be opened")
        return connection(storage, shard)

    monkeypatch.setattr(event_log.CachedEventLog, "store_event_batch", counted)
    with (
        dg.DagsterInstance.get() as instance,
        dg.DagsterInstance.get() as other,
        cache_event_log(instance.event_log_storage),
    ):
        run = dg.materialize([a, b], instance=instance)
        planned = dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED
        assert len(opened) == 2
        assert len(other.all_logs(run.run_id, of_type=planned)) == 2
        assert len(other.fetch_materializations(KEY, limit=100).records) == 1


def test_a_record_is_read_again_once_anybody_has_changed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    read, read_records = list[int](), SqliteEventLogStorage.get_asset_records

    def counted(
        storage: SqliteEventLogStorage, keys: Sequence[dg.AssetKey] | None = None
    ) -> Sequence[AssetRecord]:
        read.append(len(keys or ()))
        return read_records(storage, keys)

    monkeypatch.setattr(SqliteEventLogStorage, "get_asset_records", counted)
    keys = [KEY, dg.AssetKey("b"), dg.AssetKey("of nobody")]
    with (
        dg.DagsterInstance.get() as instance,
        dg.DagsterInstance.get() as other,
        cache_event_log(instance.event_log_storage),
    ):

        def numbers() -> dict[dg.AssetKey, object]:
            records = instance.get_asset_records([*keys, KEY])
            assert len(records) <= 2
            newest = {r.asset_entry.asset_key: r.asset_entry.last_materialization for r in records}
            made = {key: entry and entry.asset_materialization for key, entry in newest.items()}
            return {key: event and event.metadata["n"].value for key, event in made.items() if event}

        def change(by: dg.DagsterInstance, key: dg.AssetKey, number: int) -> None:
            by.report_runless_asset_event(dg.AssetMaterialization(key, metadata={"n": number}))

        assert numbers() == {}
        assert numbers() == {}
        assert read == [3], "also where there is none"
        change(instance, KEY, 1)
        assert numbers() == {KEY: 1}
        change(instance, keys[1], 1)
        assert numbers() == {KEY: 1, keys[1]: 1}
        assert read == [3, 1, 1], "of what has changed"
        change(other, KEY, 2)
        assert numbers() == {KEY: 2, keys[1]: 1}
        change(instance, keys[1], 2)
        assert numbers() == {KEY: 2, keys[1]: 2}
        assert read == [3, 1, 1, 3, 1]
        for number in range(event_log._MAX_OPEN_DATABASES):  # Until the database of all runs is opened anew.
            with instance.event_log_storage.run_connection(f"run {number}"):
                pass
        change(other, KEY, 3)
        assert numbers()[KEY] == 3
        instance.wipe_assets([KEY])
        assert numbers() == {keys[1]: 2}, "wiped without an event"


@dg.multi_asset(
    outs={
        "c": dg.AssetOut(dagster_type=dg.Nothing),
        "d": dg.AssetOut(dagster_type=dg.Nothing, is_required=False),
    },
    check_specs=[dg.AssetCheckSpec("is_sound", asset="c"), dg.AssetCheckSpec("is_new", asset="c")],
    can_subset=True,
)
def c_and_d(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
    columns = dg.TableSchema([dg.TableColumn("n", "int", description='"quoted" \u2028 \\')])
    context.log.info("a line")
    yield dg.MaterializeResult(asset_key="c", data_version=dg.DataVersion("1"), metadata={"columns": columns})
    context.instance.report_runless_asset_event(dg.AssetObservation("observed", metadata={"n": 1}))
    yield dg.AssetCheckResult(asset_key="c", check_name="is_sound", passed=True)
    yield dg.AssetCheckResult(asset_key="c", check_name="is_new", passed=False, metadata={"n": 2})


def test_the_databases_have_the_rows_that_dagster_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    storages = [SqliteEventLogStorage(str(tmp_path / name)) for name in ("dagster", "cached")]
    for storage in storages:
        storage.register_instance(dg.DagsterInstance.get())
    with (
        dg.DagsterInstance.get() as instance,
        cache_event_log(storages[1]),
        store_reports_together(storages[1]),
    ):
        runs = [dg.materialize([a, c_and_d], instance=instance).run_id for _ in range(2)]
        for run in runs:
            for event in instance.all_logs(run):
                for storage in storages:
                    storage.store_event(event)
        for record in instance.fetch_observations(dg.AssetKey("observed"), limit=2).records:
            for storage in storages:
                storage.store_event(record.event_log_entry)
    for name in ("index", *runs):
        rows = [_rows(Path(storage.path_for_shard(name))) for storage in storages]
        assert rows[0] == rows[1]
        assert rows[0]["event_logs"]
    assert all(_rows(tmp_path / "cached" / "index.db").values())


def _rows(path: Path) -> dict[str, list[dict[str, object]]]:
    """The rows of Dagster's tables of events, without the times at which they were written."""
    tables = ("event_logs", "asset_keys", "asset_event_tags", "asset_check_executions")
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        return {
            table: [
                {column: row[column] for column in row.keys() if column != "create_timestamp"}  # noqa: SIM118
                for row in database.execute(f"select * from {table} order by id")
            ]
            for table in tables
        }


def test_what_a_step_reports_is_seen_when_the_next_begins_and_by_all_that_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    seen = dict[str, list[str]]()

    @dg.asset(key="first")
    def first(context: dg.AssetExecutionContext) -> None:
        seen["first"] = messages(context.run_id)

    @dg.asset(key="second", deps=["first"])
    def second(context: dg.AssetExecutionContext) -> None:
        seen["second"] = messages(context.run_id)
        context.log.info("a line")
        assert not any("a line" in message for message in messages(context.run_id))
        own_messages = [entry.message for entry in context.instance.all_logs(context.run_id)]
        assert any("a line" in message for message in own_messages)
        assert messages(context.run_id) == own_messages

    def messages(run: str) -> list[str]:
        return [entry.message for entry in other.all_logs(run)]

    with dg.DagsterInstance.get() as instance, dg.DagsterInstance.get() as other:
        with cache_event_log(instance.event_log_storage), store_reports_together(instance.event_log_storage):
            run = dg.materialize([first, second], instance=instance).run_id
            assert messages(run) == [entry.message for entry in instance.all_logs(run)]
        types = [
            entry.dagster_event and entry.dagster_event.event_type_value for entry in other.all_logs(run)
        ]
    assert seen["first"][-1].endswith('Started execution of step "first".')
    assert any("Materialized value first" in message for message in seen["second"])
    assert seen["second"][-1].endswith('Started execution of step "second".')
    step_types = ["STEP_START", "STEP_OUTPUT", "ASSET_MATERIALIZATION", "STEP_SUCCESS"]
    assert [each for each in types if each in step_types] == step_types * 2
    assert types[-1] == "PIPELINE_SUCCESS"


def test_an_event_that_cannot_be_stored_does_not_keep_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    insert = event_log.CachedEventLog._insert_event

    def failing(storage: event_log.CachedEventLog, event: EventLogEntry) -> None:
        insert(storage, event)
        if event.dagster_event and event.dagster_event.is_step_materialization:
            raise OSError("no room for a materialization")

    monkeypatch.setattr(event_log.CachedEventLog, "_insert_event", failing)
    with dg.DagsterInstance.get() as instance, dg.DagsterInstance.get() as other:
        with cache_event_log(instance.event_log_storage), store_reports_together(instance.event_log_storage):
            result = dg.materialize([a], instance=instance, raise_on_error=False)
            assert not result.success
            assert instance.get_latest_materialization_event(KEY) is None
        types = {
            entry.dagster_event and entry.dagster_event.event_type_value
            for entry in other.all_logs(result.run_id)
        }
        assert {"STEP_OUTPUT", "PIPELINE_FAILURE"} <= types
        assert "ASSET_MATERIALIZATION" not in types
        assert other.get_latest_materialization_event(KEY) is None


def test_a_record_of_what_was_just_stored_is_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    keys = [KEY, dg.AssetKey("c"), dg.AssetKey("d"), dg.AssetKey("observed")]
    with (
        dg.DagsterInstance.get() as instance,
        dg.DagsterInstance.get() as other,
        cache_event_log(instance.event_log_storage),
        store_reports_together(instance.event_log_storage),
    ):
        monkeypatch.setattr(event_log, "_MAX_KEPT_MATERIALIZATIONS", 2)
        for step in range(4):
            if step == 2:
                instance.wipe_assets([KEY])
            else:
                dg.materialize([a, c_and_d], instance=instance)
            for _ in range(2):
                records = instance.get_asset_records(keys)
                assert sorted(records, key=str) == sorted(other.get_asset_records(keys), key=str)
                for key in keys:
                    observations = instance.fetch_observations(key, limit=1).records
                    assert observations == other.fetch_observations(key, limit=1).records
        other.report_runless_asset_event(dg.AssetObservation("observed", metadata={"n": 2}))
        last = instance.fetch_observations(dg.AssetKey("observed"), limit=1).records[0]
        assert last.event_log_entry.asset_observation
        assert last.event_log_entry.asset_observation.metadata["n"].value == 2
