"""Dagster's records do not grow with runs that have nothing to do, nor with unchanged tables. No JVM."""

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from pgsieve.pipelines.commands.dagster_runs import (
    IDLE_TAG,
    delete_earlier_idle_runs,
    delete_old_runs,
    make_run_tags,
)
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.config.model import load_config
from tests.fixtures import commands
from tests.fixtures.dagster_in_memory import in_memory
from tests.fixtures.shop import Shop


@pytest.mark.drawn
@pytest.mark.slow
def test_processes_that_start_together_share_the_databases_that_one_creates(
    shop: Shop, tmp_path: Path
) -> None:
    """It takes long: six commands, three at a time."""
    shop.copy()
    for attempt in range(2):
        environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / f"dagster_{attempt}")}
        log = tmp_path / "log"
        runs = [
            commands.start(["-c", str(shop.path), "run", name], log, environment=environment)
            for name in ("one", "two", "one")
        ]
        for run in runs:
            run.join()
        assert [run.exitcode for run in runs] == [0, 0, 0], log.read_text()


def _events(shop: Shop) -> tuple[int, int]:
    """The number of runs, and the number of events of runs that had nothing to do."""
    with open_instance(load_config(shop.path)) as dagster:
        idle = dagster.get_runs(dg.RunsFilter(tags={IDLE_TAG: "true"}))
        return dagster.get_runs_count(), sum(len(dagster.all_logs(run.run_id)) for run in idle)


@pytest.mark.drawn
def test_an_idle_run_leaves_the_same_number_of_events_whatever_is_published(shop: Shop) -> None:
    counted = []
    for tables in (0, 8):
        for number in range(tables):
            shop.database.execute(f"create table idle_{number} (id int primary key)")
            shop.database.execute(f"alter publication q add table idle_{number}")
        shop.run()
        shop.run()
        before = _events(shop)
        assert not any(subscription.changed for subscription in shop.run().subscriptions)
        assert _events(shop) == before, "the records of the earlier idle run are not deleted"
        counted.append(before[1])
    assert counted[0] == counted[1] > 0


@dg.asset
def change_log(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(metadata={"slices": int(context.run.tags["slices"])})


def _run(dagster: dg.DagsterInstance, slices: int, tags: dict[str, str]) -> str:
    result = dg.materialize([change_log], instance=dagster, tags={"slices": str(slices), **tags})
    delete_earlier_idle_runs(dagster, result)
    return result.run_id


def test_young_runs_with_work_are_kept() -> None:
    with in_memory() as dagster:
        copy = _run(dagster, 1, make_run_tags("copy", {"dagster/partition": "public.t"}))
        foreign = _run(dagster, 0, {})
        runs = [_run(dagster, slices, make_run_tags("drain", None)) for slices in (0, 2, 0, 0, 3, 0)]
        other = _run(dagster, 0, make_run_tags("another drain", None))
        kept = {copy, foreign, runs[1], runs[4], runs[5], other}
        assert {run.run_id for run in dagster.get_runs()} == kept
        assert delete_old_runs(dagster, None) == delete_old_runs(dagster, timedelta(days=1)) == 0
        assert delete_old_runs(dagster, timedelta()) == 3
        # The newest materialization of the asset belongs to the last run.
        assert {run.run_id for run in dagster.get_runs()} == {copy, foreign, other}
