"""`pgsieve check` and Dagster's checks: what they compare, report and repair. Copies are small and need no JVM."""

from __future__ import annotations

import json
from dataclasses import replace

import dagster as dg
import pytest

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from tests.fixtures.shop import Shop


def test_dagster_shows_what_a_check_has_applied_found_and_repaired(shop: Shop) -> None:
    def materialised(name: str) -> dg.AssetMaterialization:
        event = dagster.get_latest_materialization_event(dg.AssetKey(["one", *name.split(".")]))
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization

    def checked(check: str) -> tuple[bool, bool]:
        """Whether the check has passed, and whether it is about the newest materialization."""
        key = dg.AssetKey(["one", "public", "notes"])
        check_key = dg.AssetCheckKey(key, check)
        record = dagster.event_log_storage.get_latest_asset_check_execution_by_key([check_key])[check_key]
        assert record.evaluation is not None
        target = record.evaluation.target_materialization_data
        assert target is not None
        newest = dagster.fetch_materializations(key, limit=1).records[0]
        return record.evaluation.passed, target.storage_id == newest.storage_id

    config = load_config(shop.path)
    with open_instance(config) as dagster:
        shop.run()
        orders = materialised("public.orders")
        shop.database.execute("insert into notes values (5, 5)")
        assert shop.cli("check")[0] == 0
        assert materialised("public.orders") == orders, "it has not changed"
        entries = materialised("public.notes").metadata
        assert (entries["inserted"].value, entries["dagster/row_count"].value) == (1, 5)
        assert "dagster/column_schema" in entries
        assert checked("subscriber_consistency") == checked("sync_state") == (True, True)
        cut = materialised("cut").metadata["LSN"].value
        assert cut == entries["LSN"].value
        shop.run()
        assert materialised("public.notes").metadata == entries, "nothing is left to report"

        shop.table("one", "notes").delete("id = 1")
        assert shop.cli("check")[0] == 1
        assert checked("subscriber_consistency") == (False, True)

        # The check in the web interface applies changes, too.
        shop.database.execute("insert into notes values (6, 6)")
        defs = build_ui_definitions(config)
        (checks,) = [c for c in defs.asset_checks or [] if c.node_def.name == "one_consistency"]
        dg.materialize(
            [checks],
            resources=defs.resources,
            selection=dg.AssetSelection.all_asset_checks(),
            instance=dagster,
        )
        assert materialised("public.notes").metadata["inserted"].value == 1
        assert checked("subscriber_consistency") == (False, True)


@pytest.mark.drawn
@pytest.mark.spark
def test_dagster_shows_the_rows_of_a_repair(shop: Shop) -> None:
    with open_instance(load_config(shop.path)) as dagster:
        shop.run()
        shop.table("one", "notes").delete("id = 1")
        assert shop.cli("check", "--repair")[0] == 1
        event = dagster.get_latest_materialization_event(dg.AssetKey(["one", "public", "notes"]))
        assert event is not None
        assert event.asset_materialization is not None
        entries = event.asset_materialization.metadata
        assert (entries["inserted"].value, entries["dagster/row_count"].value) == (1, 4)


def test_names_are_printed_as_sql_has_them(shop: Shop) -> None:
    shop.database.execute("""
    create schema "Logi Stik"; create table "Logi Stik"."Order Lines" (id int primary key);
    create publication odd for table "Logi Stik"."Order Lines" where (id > 0) with (publish = 'insert');
    """)
    shop.configure(subscriptions={"odd": {"source": "shop", "publications": ["odd"]}})
    shop.copy()
    code, output = shop.cli("check")
    assert code == 0
    assert 'comparing "Logi Stik"."Order Lines" of odd: started' in output
    shop.database.execute('alter publication odd set table "Logi Stik"."Order Lines" where (erf(id) < 2)')
    code, output = shop.cli("validate")
    assert code == 1
    assert 'row filter of "Logi Stik"."Order Lines" cannot be evaluated' in output


def test_a_check_counts_the_rows_that_differ_on_each_side(shop: Shop) -> None:
    shop.database.execute("create table log (n int); insert into log values (1), (1), (2)")
    shop.database.execute("alter publication q add table log")
    shop.copy()
    notes, log = shop.table("one", "notes"), shop.table("two", "log")
    notes.delete("id = 1")
    notes.update(updates={"n": "n + 10"}, predicate="id in (2, 3)")
    notes.update(updates={"id": "40"}, predicate="id = 4")
    log.update(updates={"n": "3"}, predicate="n = 2")
    code, output = shop.cli("check")
    assert code == 1
    assert (
        "one public.notes: 2 rows only at the publisher; 1 row only in the replica; 2 rows with other values;"
        " differing keys (id)=("
    ) in output
    assert (
        "two public.log: 1 row only at the publisher; 1 row only in the replica; differing keys a row"
        in output
    )
    code, output = shop.cli("check", "--json")
    counts = {
        table["name"]: (table["only_publisher"], table["only_replica"], table["different"])
        for table in json.JSONDecoder().raw_decode(output)[0]["tables"]
    }
    assert counts == {"orders": (0, 0, 0), "notes": (2, 1, 2), "stock": (0, 0, 0), "log": (1, 1, 0)}


def test_repair_copies_the_tables_that_the_next_run_would_copy(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("alter table notes add column c int default (random() * 10)::int")
    assert shop.cli("check", "one")[0] == 1
    code, printed = shop.cli("check", "--repair", "one")
    assert code == 0, printed
    assert len(shop.ids("one", "notes", "c")) == 4


def test_the_check_of_a_table_that_is_set_aside_or_disabled_fails_with_the_reason(shop: Shop) -> None:
    def evaluated() -> dict[str, tuple[bool, str | None]]:
        defs = build_ui_definitions(load_config(shop.path))
        (checks,) = [c for c in defs.asset_checks or [] if c.node_def.name == "one_sync_state"]
        result = dg.materialize(
            [checks],
            resources=defs.resources,
            selection=dg.AssetSelection.all_asset_checks(),
            raise_on_error=False,
        )
        evaluations = result.get_asset_check_evaluations()
        return {e.asset_key.path[-1]: (e.passed, e.description) for e in evaluations}

    shop.copy()
    assert evaluated() == {"orders": (True, None), "notes": (True, None)}
    notes = TableStates(shop.lake, "one").read_newest()["public", "notes"]
    TableStates(shop.lake, "one").append([replace(notes, state=SyncState.SET_ASIDE, reason="a value")])
    assert evaluated() == {"orders": (True, None), "notes": (False, "a value")}
    SubscriptionRecord(shop.lake, "one").disable("another value")
    assert evaluated() == {"orders": (False, "another value"), "notes": (False, "another value")}
