"""Checks of a replica: whether its rows match the row filter, and how long changes have been waiting."""

from __future__ import annotations

import time

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgsieve.assets.steps.checks.conformity import TableConformity, check_conformity
from pgsieve.assets.steps.checks.freshness import check_freshness
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.pipelines.project import build_project
from tests.fixtures.shop import Shop

pytestmark = pytest.mark.spark

_CHECKS = ("row_filter_conformity", "freshness")


def _conformity(shop: Shop, table: str) -> TableConformity:
    project = build_project(load_config(shop.path))
    return check_conformity(project.subscriptions["one"], project.lake.open(), ("public", table))


@pytest.mark.drawn
def test_only_rows_that_no_filter_could_let_in_are_a_failure(shop: Shop) -> None:
    """Per operation: a filter of inserts alone accepts rows that a filter of updates would reject, and vice versa."""
    shop.database.execute(
        "drop publication p; alter table orders replica identity full; create publication p for table orders where (id > 1)"
        " with (publish = 'insert, update, delete');"
        "create table events (id int primary key, n int); insert into events select i, i from generate_series(1, 4) i;"
        "create publication inserts for table events where (n >= 2) with (publish = 'insert');"
        "create publication updates for table events where (id > 3) with (publish = 'update, delete');"
        "create publication plain for table stock"
    )
    one = {"source": "shop", "publications": ["p", "inserts", "updates", "plain"]}
    shop.configure(subscriptions={"one": one})
    assert not shop.run().failures
    # An unpublished change of a key, rows that leave a filter, and rows that start to match one.
    shop.database.execute("insert into events values (0, 9), (7, 0)")
    shop.database.execute("update events set n = 0 where id = 4")
    shop.database.execute("update events set id = -3 where id = 3")
    shop.database.execute("update orders set id = 1 - id where id > 2; insert into orders values (8, 8)")
    assert not shop.run().failures
    assert shop.ids("one", "orders") == [2, 8]
    assert shop.ids("one", "events") == [0, 2, 3, 4]
    assert _conformity(shop, "orders") == TableConformity(rows=2)
    assert _conformity(shop, "events") == TableConformity(rows=4)

    path = shop.lake.paths.replica("one", "public", "orders")
    schema = DeltaTable(path).schema().to_arrow()
    write_deltalake(path, pa.Table.from_pylist([{"id": 1, "n": None}], pa.schema(schema)), mode="append")
    assert _conformity(shop, "orders") == TableConformity(3, 1, ("(id)=(1)",))

    # After the filter was altered, rows may violate it without an error: they came by the earlier filter.
    shop.database.execute("alter publication p set table orders where (id > 5)")
    assert _conformity(shop, "orders") == TableConformity(3, 2, ("(id)=(1)", "(id)=(2)"), altered=True)
    assert not shop.run().failures
    shop.database.execute("alter publication p set table orders where (id > 1)")
    assert _conformity(shop, "orders").altered, "the filter was a different one for a while"

    defs = build_ui_definitions(load_config(shop.path))
    result = dg.materialize(
        list(defs.asset_checks or []),
        resources=defs.resources,
        selection=dg.AssetSelection.checks(
            *(k for checks in defs.asset_checks or [] for k in checks.check_keys if k.name in _CHECKS)
        ),
        raise_on_error=False,
    )
    evaluations = {(e.check_name, e.asset_key.path[-1]): e for e in result.get_asset_check_evaluations()}
    assert evaluations.keys() == {
        *(("row_filter_conformity", table) for table in ("orders", "events")),
        *(("freshness", table) for table in ("orders", "events", "stock")),
    }
    failed = evaluations["row_filter_conformity", "orders"]
    assert (failed.passed, failed.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert failed.metadata["keys"].value == ["(id)=(1)"]
    assert all(e.passed for e in evaluations.values() if e is not failed)


@pytest.mark.drawn
def test_a_replicas_age_is_that_of_its_oldest_waiting_commit(shop: Shop) -> None:
    project = build_project(load_config(shop.path))
    lake = project.lake.open()

    def behind(name: str) -> float:
        return check_freshness(project.subscriptions[name], lake).seconds

    assert check_freshness(project.subscriptions["two"], lake).problem
    shop.copy()
    # Changes that are not published make no replica stale.
    shop.database.execute("create table noise (a text); insert into noise values ('x')")
    assert (behind("one"), behind("two")) == (0, 0)
    shop.database.execute("insert into stock values (5, 5)")
    time.sleep(1)
    shop.database.execute("insert into stock values (6, 6)")
    assert 1 <= behind("two") < 60
    assert not shop.run().failures
    assert behind("two") == 0
