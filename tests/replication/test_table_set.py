"""Several subscriptions of one slot are added to pgsieve.yaml and removed from it while the source is in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.publications.catalog import PublicationError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.spark_settings import SESSION_SETTINGS
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import engine

pytestmark = pytest.mark.spark


class Sharing:
    """The subscriptions that share one slot, as pgsieve.yaml currently lists them."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        spark = engine().session.newSession()
        for key, value in SESSION_SETTINGS.items():
            spark.conf.set(key, value)
        self.lake = Lake(str(folder / "lake"), lambda: spark)
        self.source = Source("publisher", scenario.publisher_conninfo)
        self.name = scenario.name

    def run(self, **publications: str) -> None:
        """Do what `pgsieve run` does with these subscriptions; each has one publication."""
        names = {name: (publication,) for name, publication in publications.items()}
        slot_stream = SlotStream(self.name, self.source, self.name, self.name, False, names)
        subscriptions = [Subscription(name, slot_stream) for name in names]
        for _ in range(2):
            for each in subscriptions:
                copy_tables(each, self.lake, find_tables_to_copy(each, self.lake), print)
            drain_slot(slot_stream, self.lake, subscriptions, print)
            for each in subscriptions:
                transform(each, self.lake, print)
                apply(each, self.lake, print)

    def rows_of(self, subscription: str, table: str) -> list[int]:
        """The rows of one replica."""
        assert self.lake.delta_rs is not None
        path = self.lake.paths.replica(subscription, "public", table)
        return sorted(self.lake.delta_rs.read_all_rows(path)["a"].to_pylist())


@pytest.fixture
def sharing(scenario: Scenario, tmp_path: Path) -> Sharing:
    scenario.publisher(
        """CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE u (a int PRIMARY KEY);
        CREATE PUBLICATION low FOR TABLE t WHERE (a < 10);
        CREATE PUBLICATION high FOR TABLE t WHERE (a > 5), u;
        INSERT INTO t VALUES (1), (7), (11)"""
    )
    return Sharing(scenario, tmp_path)


def test_each_subscription_has_the_rows_of_its_own_filters(scenario: Scenario, sharing: Sharing) -> None:
    sharing.run(a="low", b="high")
    scenario.publisher(
        """INSERT INTO t VALUES (2), (8), (12); ALTER PUBLICATION low SET TABLE t WHERE (a < 3);
        INSERT INTO t VALUES (0), (9), (13); DELETE FROM t WHERE a = 1"""
    )
    sharing.run(a="low", b="high")
    assert sharing.rows_of("a", "t") == [0, 2, 7, 8]
    assert sharing.rows_of("b", "t") == [7, 8, 9, 11, 12, 13]


@pytest.mark.drawn
def test_a_removed_subscription_stops_and_is_copied_when_it_returns(
    scenario: Scenario, sharing: Sharing
) -> None:
    sharing.run(a="low", b="high")
    scenario.publisher("INSERT INTO t VALUES (2), (8); INSERT INTO u VALUES (1)")
    sharing.run(a="low")
    tables = scenario.publisher(
        f"SELECT tablename FROM pg_publication_tables WHERE pubname = '{scenario.name}'"
    )
    assert tables == [("t",)], "no subscription reads u any more"
    scenario.publisher("INSERT INTO t VALUES (9); INSERT INTO u VALUES (2)")
    sharing.run(a="low")
    assert sharing.rows_of("a", "t") == [1, 2, 7, 8, 9]
    assert sharing.rows_of("b", "t") == [7, 11]
    scenario.publisher("DELETE FROM u WHERE a = 1")
    sharing.run(a="low", b="high", c="high")
    scenario.publisher("INSERT INTO u VALUES (3)")
    sharing.run(a="low", b="high", c="high")
    for name in ("b", "c"):
        assert sharing.rows_of(name, "t") == [7, 8, 9, 11]
        assert sharing.rows_of(name, "u") == [2, 3]


def test_a_dropped_publication_is_named_and_nothing_is_lost(scenario: Scenario, sharing: Sharing) -> None:
    sharing.run(b="high")
    scenario.publisher("INSERT INTO u VALUES (1); ALTER PUBLICATION high RENAME TO gone")
    with pytest.raises(PublicationError, match='publication "high" does not exist'):
        sharing.run(b="high")
    scenario.publisher("ALTER PUBLICATION gone RENAME TO high; INSERT INTO u VALUES (2)")
    sharing.run(b="high")
    assert sharing.rows_of("b", "u") == [1, 2]
