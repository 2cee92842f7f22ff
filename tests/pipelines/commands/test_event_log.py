"""Dagster's event log keeps its connections open while a command works, and is the same for everybody else."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from dagster._core.storage.event_log import SqliteEventLogStorage

from pgsieve.pipelines.commands import event_log
from pgsieve.pipelines.commands.event_log import connections_kept

KEY = dg.AssetKey("a")


@dg.asset(key=KEY)
def a() -> None: ...


def test_others_see_what_was_recorded_and_few_databases_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = list[str]()
    create = event_log.create_engine
    monkeypatch.setattr(
        event_log, "create_engine", lambda url, **how: engines.append(url) or create(url, **how)
    )
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance, dg.DagsterInstance.get() as other:
        with connections_kept(instance.event_log_storage):
            storage = instance.event_log_storage
            assert isinstance(storage, event_log.KeptEventLog)
            for number in range(5):
                instance.report_runless_asset_event(dg.AssetMaterialization(KEY, metadata={"n": number}))
            runs = [dg.materialize([a], instance=instance).run_id for _ in range(3)]
            initialised = []
            monkeypatch.setattr(
                event_log.KeptEventLog, "_initdb", lambda _, engine: initialised.append(engine)
            )
            runs.append(dg.materialize([a], instance=instance).run_id)
            assert not initialised, "made like the first run's"
            assert not list(tmp_path.rglob("*.making"))
            assert len(engines) <= 2 + 2 * len(runs), "not one for each event"
            assert len(storage._engines) <= event_log._KEPT
            assert len(other.fetch_materializations(KEY, limit=100).records) == 5 + len(runs)
            instance.delete_run(runs[0])
            assert not other.all_logs(runs[0])
        assert type(instance.event_log_storage) is SqliteEventLogStorage
        assert len(instance.fetch_materializations(KEY, limit=100).records) == 5 + len(runs) - 1
