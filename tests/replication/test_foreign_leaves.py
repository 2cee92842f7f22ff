"""Foreign leaves of a partition tree that is published as its root: their rows are copied, but their changes are not sent.

The publisher is an installed server, because the wheel has no foreign data wrapper that reads rows.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.following.follow import follow
from pgsieve.resources.postgres import foreign_servers
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario
from tests.fixtures.shop import Quiet, Shop

WRAPPER = """
CREATE EXTENSION postgres_fdw;
CREATE SERVER itself FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{0.host}', port '{0.port}', dbname '{0.dbname}');
CREATE USER MAPPING FOR CURRENT_USER SERVER itself OPTIONS (user '{0.user}', password_required 'false');
CREATE TABLE far (id int, v text); INSERT INTO far VALUES (21, 'far'), (22, 'filtered');
CREATE TABLE farther (id int, v text); INSERT INTO farther VALUES (41, 'farther')
"""
LEAVES = """
CREATE FOREIGN TABLE tree_2 PARTITION OF tree FOR VALUES FROM (20) TO (30) SERVER itself OPTIONS (table_name 'far');
CREATE TABLE middle PARTITION OF tree FOR VALUES FROM (30) TO (50) PARTITION BY RANGE (id);
CREATE UNLOGGED TABLE middle_1 PARTITION OF middle FOR VALUES FROM (30) TO (40);
CREATE FOREIGN TABLE middle_2 PARTITION OF middle FOR VALUES FROM (40) TO (50) SERVER itself OPTIONS (table_name 'farther')
"""


@pytest.fixture
def publisher_server(decoding_server: EmbeddedServer) -> EmbeddedServer:
    return decoding_server


@pytest.mark.slow
def test_rows_of_foreign_leaves_are_copied_and_their_changes_are_not_sent(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE tree (id int, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE tree_1 PARTITION OF tree FOR VALUES FROM (0) TO (10)"
    )
    scenario.subscriber("CREATE TABLE tree_2 PARTITION OF tree FOR VALUES FROM (10) TO (100)")
    scenario.publisher(WRAPPER.format(scenario.publisher.connection.info) + ";" + LEAVES)
    scenario.publisher("INSERT INTO tree VALUES (1, 'here'), (2, 'filtered'), (31, 'unlogged')")
    scenario.publisher(
        "CREATE PUBLICATION pub FOR TABLE tree WHERE (v <> 'filtered')"
        " WITH (publish_via_partition_root, publish = 'insert')"
    )
    scenario.subscribe("pub")
    copied = ["1|here", "21|far", "31|unlogged", "41|farther"]
    scenario.check(expect={"tree": copied})
    scenario.publisher("INSERT INTO tree VALUES (3, 'here'), (23, 'far'), (32, 'unlogged'), (42, 'farther')")
    scenario.check(expect={"tree": [*copied, "3|here"]})


FAR_TREES = """
CREATE SERVER mute FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{0.host}', port '{0.port}', dbname '{0.dbname}');
CREATE USER MAPPING FOR CURRENT_USER SERVER mute OPTIONS (user '{0.user}', password_required 'false');
CREATE TABLE tree (id int, v text) PARTITION BY RANGE (id); CREATE TABLE silent (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE tree_1 PARTITION OF tree FOR VALUES FROM (0) TO (20);
CREATE TABLE silent_1 PARTITION OF silent FOR VALUES FROM (0) TO (20);
CREATE FOREIGN TABLE tree_2 PARTITION OF tree FOR VALUES FROM (20) TO (30) SERVER itself OPTIONS (table_name 'far');
CREATE FOREIGN TABLE silent_2 PARTITION OF silent FOR VALUES FROM (20) TO (30) SERVER mute OPTIONS (table_name 'far');
INSERT INTO tree VALUES (1, 'here'); INSERT INTO silent VALUES (1, 'here');
CREATE PUBLICATION far FOR TABLE tree, silent WITH (publish_via_partition_root, publish = 'insert')
"""


@dataclass
class _Far:
    """Two subscriptions, one per mode, to plain tables and two trees with rows on other servers."""

    shop: Shop

    @contextmanager
    def without_answers(self) -> Iterator[Callable[[], None]]:
        """Until the block ends or its function is called, one server refuses connections, and the other accepts them but never answers."""
        with socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
            self._move(1, mute.getsockname()[1])

            def answering() -> None:
                self._move(self.shop.database.info.port, self.shop.database.info.port)
                mute.close()

            yield answering
            answering()

    def _move(self, itself: int, mute: int) -> None:
        for server, port in {"itself": itself, "mute": mute}.items():
            self.shop.database.execute(f"ALTER SERVER {server} OPTIONS (SET port '{port}')")


@pytest.fixture
def far(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> _Far:
    monkeypatch.setattr(foreign_servers, "ANSWER_SECONDS", 0.5)
    shop.database.execute((WRAPPER + ";" + FAR_TREES).format(shop.database.info))
    both = {"source": "shop", "publications": ["p", "far"]}
    shop.configure(subscriptions={"one": both, "two": {**both, "row_filter": "publisher"}})
    return _Far(shop)


def test_a_foreign_server_that_does_not_answer_stops_no_other_table(far: _Far) -> None:
    """This holds in both modes. The next run copies the table, as a subscriber tries it again."""
    shop, reasons = far.shop, {"tree": 'could not connect to server "itself"'}
    reasons["silent"] = "the server of public.silent_2 does not answer"
    with far.without_answers():
        shop.copy()
        shop.database.execute("INSERT INTO orders VALUES (5, 0); INSERT INTO tree VALUES (2, 'here')")
        code, output = shop.cli("run")
        assert code == 1, output
        shown = shop.cli("status")[1]
        for table, reason in reasons.items():
            problem = f'cannot read table "public.{table}" ({reason})'
            assert output.count(f"problem: public.{table} is to be copied: {problem}") == 2, output
            assert shown.count(f"public.{table}: {problem}") == 2, shown
        assert shop.ids("one", "orders") == shop.ids("two", "orders") == [2, 3, 4, 5], output
    assert (ran := shop.cli("run"))[0] == 0, ran
    for table, ids in {"tree": [1, 2, 21, 22], "silent": [1, 21, 22]}.items():
        assert shop.ids("one", table) == shop.ids("two", table) == ids
    with far.without_answers():
        code, output = shop.cli("check")
        assert code == 1, output
        for table, reason in reasons.items():
            assert output.count(f"public.{table}: not compared, {reason}") == 2, output
        assert "not compared: 4 of 8 tables" in output


@pytest.mark.drawn
def test_a_follower_copies_once_the_foreign_server_answers(
    far: _Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it replicates changes of the other tables."""
    monkeypatch.setattr("pgsieve.pipelines.following.follower._FOREIGN_SECONDS", 0.0)
    shop, config = far.shop, load_config(far.shop.path)
    waiting = [(name, table) for name in ("one", "two") for table in ("tree", "silent")]
    summaries = []

    def tell(summary: RunSummary) -> None:
        summaries.append(summary)
        if len(summaries) == 1:
            shop.database.execute("INSERT INTO orders VALUES (5, 0)")
        elif all(shop.ids(name, "orders")[-1] == 5 for name in ("one", "two")):
            answering()
        if {shop.state(*each) for each in waiting} == {"ready"}:
            os.kill(os.getpid(), signal.SIGTERM)

    late = threading.Timer(100, os.kill, [os.getpid(), signal.SIGTERM])
    late.start()
    try:
        with far.without_answers() as answering:
            assert follow(config, config.select([]), Quiet(), tell) == ()
    finally:
        late.cancel()
    assert [shop.ids(*each) for each in waiting] == [[1, 21, 22]] * 4
