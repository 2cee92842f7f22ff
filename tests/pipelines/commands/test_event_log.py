"""Dagster's event log keeps its connections open while a command works. Other processes see the same log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.base import AssetRecord
from sqlalchemy import Connection

from pgsieve.pipelines.commands import event_log
from pgsieve.pipelines.commands.event_log import cache_event_log

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
    store, store_batch = event_log.CachedEventLog.store_event, event_log.CachedEventLog.store_event_batch

    def failing_once(storage: event_log.CachedEventLog, event: EventLogEntry) -> None:
        store(storage, event)
        stored.append(event.run_id)
        if len(stored) == 2:
            raise OSError("no room for the second")

    def counted(storage: event_log.CachedEventLog, events: Sequence[EventLogEntry]) -> None:
        batches.append(len(events))
        store_batch(storage, events)

    monkeypatch.setattr(event_log.CachedEventLog, "store_event", failing_once)
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
