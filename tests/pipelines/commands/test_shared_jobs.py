"""`pgsieve run` of many subscriptions of one slot by Spark: they share its jobs, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.resources.failpoints import VARIABLE, Failpoint
from tests.fixtures import commands
from tests.fixtures.shop import Shop
from tests.fixtures.spark_servers import configured_cluster

pytestmark = pytest.mark.slow

_NUMBER = 6
#: The failpoint that the fourth subscription reaches.
_KILLED = [
    f"{point}:4"
    for point in (
        Failpoint.CHANGES_WRITTEN,
        Failpoint.SLICE_TRANSFORMED,
        Failpoint.REPLICA_COMMITTED,
        Failpoint.CUT_WRITTEN,
    )
]
_SPARK = {"master": "local[2]", "engine": "off", "conf": {"spark.pgsieve.smallBytes": "-1"}}


def _begin(shop: Shop) -> None:
    """Run six subscriptions whose row filters share the rows of `orders`, and one whose filter cannot be evaluated."""
    shop.configure(subscriptions={})
    for number in range(_NUMBER):
        shop.database.execute(
            f"create publication p{number} for table orders where (id % {_NUMBER} = {number}), stock"
        )
    shop.database.execute("create publication bad for table notes where (10 / n > 0), stock")
    names = [*(f"p{number}" for number in range(_NUMBER)), "bad"]
    shop.configure(
        subscriptions={name: {"source": "shop", "publications": [name]} for name in names}, spark={}
    )
    shop.copy()
    shop.configure(spark=_SPARK)


def _change(shop: Shop, first: int) -> None:
    """INSERTs, DELETEs, UPDATEs that move rows from one subscription to another, and UPDATEs of rows that all have."""
    shop.database.execute(
        f"insert into orders select i, i from generate_series({first}, {first + 59}) i;"
        f"update orders set id = id + 61 where id between {first} and {first + 6};"
        f"delete from orders where id between {first + 20} and {first + 25};"
        f"update stock set n = n + 1; insert into stock values ({first}, 1)"
    )


def _check(shop: Shop) -> None:
    ids = [row for (row,) in shop.database.execute("select id from orders order by 1")]
    stock = shop.database.execute("select id, n from stock order by 1").fetchall()
    for number in range(_NUMBER):
        name = f"p{number}"
        assert shop.ids(name, "orders") == [i for i in ids if i % _NUMBER == number]
        rows = shop.table(name, "stock").to_pyarrow_table().sort_by("id").to_pylist()
        assert [(row["id"], row["n"]) for row in rows] == stock


def _run(shop: Shop, code: int, failpoint: str = "none", words: Sequence[str] = ()) -> str:
    environment = {**os.environ, VARIABLE: failpoint}
    done = commands.run("-c", str(shop.path), "run", *words, environment=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def _change_all(shop: Shop) -> None:
    """Changes of which each subscription gets a part, and a row that one subscription cannot filter."""
    for first in (100, 200, 300):
        _change(shop, first)
    shop.database.execute("insert into notes values (7, 5), (8, 0)")


def _check_each(shop: Shop, results: Mapping[str, Mapping[str, Any]], engine: str) -> None:
    """Check the result of each subscription. One has a table set aside, and another table that continues."""
    _check(shop)
    assert shop.ids("bad", "stock") == shop.ids("p0", "stock")
    assert [name for name, each in results.items() if each["problems"]] == ["bad"]
    assert "division by zero" in str(results["bad"]["problems"])
    for each in results.values():
        spent = each["spent"]
        assert spent["engine"] == engine
        assert min(spent["tasks"] - 2, spent["bytes"], spent["seconds"]) > 0
    sent = Counter[str]()
    for number in range(_NUMBER):
        for changes in TransformedSlices(shop.lake, f"p{number}").read_slices(0).values():
            for change in (c for c in changes if c.table == "orders"):
                assert change.received_counts_by_operation == {"insert": 180, "update": 21, "delete": 18}
                sent += Counter(change.sent_counts)
    # An UPDATE that moves a row between two filters is a DELETE for one subscription and an INSERT for the other.
    assert (sent["insert"], sent["update"], sent["delete"]) == (180 + 21, 0, 18 + 21)


@pytest.mark.drawn
@pytest.mark.spark
def test_subscriptions_share_jobs_and_a_failure_stops_only_its_table(shop: Shop) -> None:
    """It takes long: Spark starts for two runs."""
    _begin(shop)
    _change_all(shop)
    results = {each.name: asdict(each) for each in shop.run().subscriptions}
    _check_each(shop, results, "Spark, local")


@pytest.mark.long
def test_subscriptions_share_jobs_of_a_cluster_whose_python_lacks_pgsieve(shop: Shop, tmp_path: Path) -> None:
    """It takes long: a Spark cluster starts."""
    _begin(shop)
    _change_all(shop)
    with configured_cluster(tmp_path) as (master, conf):
        shop.configure(spark={"master": master, "conf": {**conf, "spark.pgsieve.smallBytes": "-1"}})
        results = json.loads(_run(shop, 1, words=("--json",)))["subscriptions"]
    _check_each(shop, {each["name"]: each for each in results}, "Spark, cluster")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_of_many_subscriptions_is_completed_by_the_next(shop: Shop) -> None:
    """It takes long: eight processes start Spark."""
    _begin(shop)
    for first, failpoint in enumerate(_KILLED, 1):
        _change(shop, 100 * first)
        _run(shop, -signal.SIGKILL, failpoint)
        _change(shop, 1000 + 100 * first)
        _run(shop, 0)
        _check(shop)
        for number in range(_NUMBER):
            inserted = Counter(
                row["new"]["id"]
                for row in shop.lake.records.rows(
                    shop.lake.paths.change_history(f"p{number}", "public", "orders")
                )
                if row["operation"] == "insert"
            )
            assert set(inserted.values()) <= {1}, "a change was applied twice"
