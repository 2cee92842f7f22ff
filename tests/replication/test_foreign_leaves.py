"""Foreign leaves of a partition tree that is published as its root: their rows are copied, and no change of them is sent.

The publisher is an installed server: the wheel has no foreign data wrapper that reads rows.
"""

from __future__ import annotations

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario
from tests.fixtures.shop import Shop

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


FAR_TREE = """
CREATE TABLE tree (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE tree_1 PARTITION OF tree FOR VALUES FROM (0) TO (20);
CREATE FOREIGN TABLE tree_2 PARTITION OF tree FOR VALUES FROM (20) TO (30) SERVER itself OPTIONS (table_name 'far');
ALTER SERVER itself OPTIONS (SET port '1');
INSERT INTO tree VALUES (1, 'here');
CREATE PUBLICATION far FOR TABLE tree WITH (publish_via_partition_root, publish = 'insert')
"""


def test_a_foreign_server_that_does_not_answer_stops_no_other_table(shop: Shop) -> None:
    """In both modes; the next run copies the table, as a subscriber tries it again."""
    shop.database.execute(WRAPPER.format(shop.database.info) + ";" + FAR_TREE)
    both = {"source": "shop", "publications": ["p", "far"]}
    shop.configure(subscriptions={"one": both, "two": {**both, "row_filter": "publisher"}})
    shop.copy()
    shop.database.execute("INSERT INTO orders VALUES (5, 0); INSERT INTO tree VALUES (2, 'here')")
    code, output = shop.cli("run")
    assert code == 1, output
    reason = 'cannot read table "public.tree" (could not connect to server "itself")'
    assert output.count(f"problem: public.tree is to be copied: {reason}") == 2, output
    assert shop.cli("status")[1].count(f"public.tree: {reason}") == 2
    assert shop.ids("one", "orders") == shop.ids("two", "orders") == [2, 3, 4, 5], output
    shop.database.execute(f"ALTER SERVER itself OPTIONS (SET port '{shop.database.info.port}')")
    assert (ran := shop.cli("run"))[0] == 0, ran
    assert shop.ids("one", "tree") == shop.ids("two", "tree") == [1, 2, 21, 22]
    shop.database.execute("ALTER SERVER itself OPTIONS (SET port '1')")
    code, output = shop.cli("check")
    assert code == 1, output
    assert output.count('public.tree: not compared, could not connect to server "itself"') == 2
    assert "not compared: 2 of 6 tables" in output
