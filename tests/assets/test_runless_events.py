"""An unchanged cut is reported to Dagster without a run, as often as a freshness policy needs. A new cut is reported at once."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from pgsieve.assets.automation_condition import at_cut
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_definitions
from pgsieve.pipelines.following.follow import follow
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Quiet, Shop

CUT = dg.AssetKey(["one", "cut"])
CHECKS = [dg.AssetCheckKey(CUT, name) for name in ("sync_state", "freshness")]


@pytest.fixture(autouse=True)
def own_records(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of Dagster for this test alone, because all tests have the same assets."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))


def often(patch: pytest.MonkeyPatch) -> None:
    """Report several times a second what is otherwise reported every few minutes."""
    patch.setattr("pgsieve.assets.runless_events._REPORTS_PER_FRESHNESS", 15 * 60 * 10)
    patch.setattr("pgsieve.pipelines.following.follower._CUT_SECONDS", 0.3)


def recorded_cut(shop: Shop) -> tuple[list[dict[str, Any]], dict[str, bool | None]]:
    """The materializations of the cut, and its checks: whether they passed, or None if they belong to another materialization."""
    with open_instance(load_config(shop.path)) as dagster:
        records = dagster.fetch_materializations(CUT, limit=100, ascending=True).records
        last = dagster.event_log_storage.get_latest_asset_check_execution_by_key(CHECKS)
        checks = {}
        for key, record in last.items():
            assert record.evaluation is not None
            target = record.evaluation.target_materialization_data
            of_last = target is not None and target.storage_id == records[-1].storage_id
            checks[key.name] = record.evaluation.passed if of_last else None
    materializations = [r.asset_materialization for r in records]
    return [
        {**m.tags, "run": r.run_id} for m, r in zip(materializations, records, strict=True) if m and m.tags
    ], checks


def stale_causes(shop: Shop) -> list[str]:
    """Why Dagster calls the cut "unsynced"."""
    graph = build_definitions(shop.path).resolve_asset_graph()
    with open_instance(load_config(shop.path)) as dagster:
        resolver = CachingStaleStatusResolver(dagster, graph, LoadingContextForTest(dagster))
        return [f"{cause.reason}: {cause.dependency}" for cause in resolver.get_stale_causes(CUT)]


@pytest.mark.drawn
def test_a_run_without_changes_reports_the_cut_if_the_last_report_is_old(shop: Shop) -> None:
    shop.run()
    (first,), checks = recorded_cut(shop)
    assert checks == {"sync_state": True, "freshness": True}
    shop.run()
    assert recorded_cut(shop)[0] == [first], "a young report is repeated"
    with pytest.MonkeyPatch.context() as patch:
        often(patch)
        sleep(0.2)
        shop.run()
    materializations, checks = recorded_cut(shop)
    assert (len(materializations), checks) == (2, {"sync_state": True, "freshness": True})
    assert materializations[1]["run"] == ""
    assert materializations[1]["dagster/data_version"] == first["dagster/data_version"], (
        "nothing that reads it is stale"
    )
    sleep(1.1)  # Dagster compares whole seconds
    shop.run()
    assert len(recorded_cut(shop)[0]) == 2, "this run materialised the cut, and not only its tables"
    assert stale_causes(shop) == []


@pytest.mark.drawn
def test_a_cut_also_depends_on_unchanged_tables(shop: Shop) -> None:
    shop.run()
    assert stale_causes(shop) == []
    for table in ("orders", "notes"):
        shop.database.execute(f"insert into {table} values (20, 20)")
        shop.run()
        assert stale_causes(shop) == [], table
    shop.database.execute("alter publication p drop table notes")
    shop.database.execute("insert into orders values (30, 30)")
    shop.run()
    assert stale_causes(shop) == [], "the table that left the publication"


@dg.asset(automation_condition=at_cut("one"))
def revenue() -> None: ...


def test_assets_of_users_run_at_new_rows_and_not_at_compaction(shop: Shop) -> None:
    """Maintenance writes the newest cut again, because it compacts the replicas."""
    shop.run("one")
    defs = dg.Definitions.merge(build_definitions(shop.path), dg.Definitions([revenue]))
    with open_instance(load_config(shop.path)) as dagster:
        cursor = dg.evaluate_automation_conditions(defs, dagster).cursor

        def is_requested() -> bool:
            nonlocal cursor
            with pytest.MonkeyPatch.context() as patch:
                often(patch)
                shop.run("one")
            request_counts = []
            for _ in range(2):  # The second evaluation notices what the first has requested.
                result = dg.evaluate_automation_conditions(defs, dagster, cursor=cursor)
                cursor = result.cursor
                request_counts.append(result.get_num_requested(revenue.key))
            return request_counts == [1, 0]

        for number in range(2):
            shop.database.execute("insert into orders values (%s, 0)", [20 + number])
            assert is_requested(), "there is a new row"
            cut = Cuts(shop.lake, "one").read_last()
            code, output = shop.cli("maintain", "one")
            assert code == 0, output
            compacted_cut = Cuts(shop.lake, "one").read_last()
            assert cut is not None
            assert compacted_cut is not None
            assert compacted_cut.tables != cut.tables, "nothing was compacted"
            assert not is_requested(), "the rows are the same"


@pytest.mark.drawn
def test_a_set_aside_table_fails_one_run_even_if_nothing_is_new(
    shop: Shop,
) -> None:
    shop.run()
    before = recorded_cut(shop)[0]
    states = TableStates(shop.lake, "one")
    for reason, ends in (("it is so", ("FAILURE", "SUCCESS")), ("for another reason", ("FAILURE",))):
        ready = states.read_newest()["public", "notes"]
        states.append([replace(ready, state=SyncState.SET_ASIDE, reason=reason)])
        for end in ends:
            assert shop.run("one").problems, "the command does not report the table each time"
            with open_instance(load_config(shop.path)) as dagster:
                assert dagster.get_runs(limit=1)[0].status == dg.DagsterRunStatus[end]
            materializations, checks = recorded_cut(shop)
            assert (materializations, checks["sync_state"]) == (before, False)


@pytest.mark.drawn
def test_an_idle_followed_source_stays_fresh(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    often(monkeypatch)
    shop.run()
    before = len(recorded_cut(shop)[0])

    def stop() -> None:
        try:
            wait_until(lambda: len(recorded_cut(shop)[0]) > before + 1, lambda: "nothing is reported", 60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=stop)
    watcher.start()
    config = load_config(shop.path)
    assert follow(config, config.select(["one"]), Quiet(), lambda _: None) == ()
    watcher.join()
    materializations, checks = recorded_cut(shop)
    assert (len(materializations) > before + 1, checks) == (True, {"sync_state": True, "freshness": True})
    assert len({each["dagster/data_version"] for each in materializations}) == 1
