"""FOR ALL TABLES EXCEPT: an excluded table is neither copied nor replicated (section 29.4 of the manual of 19)."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from pgsieve.decoding.publications.published_tables import find_published_relation, find_replicated_tables
from pgsieve.decoding.publications.routing import list_relations_with_rows
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario
from tests.fixtures.servers import own_database
from tests.fixtures.shop import Shop

pytestmark = pytest.mark.spark

#: Two trees, one of them with an inner level, and two tables, one of which inherits from the other.
TABLES = """
CREATE TABLE plain (a int PRIMARY KEY); CREATE TABLE secret (a int PRIMARY KEY);
CREATE TABLE hidden (a int) PARTITION BY RANGE (a);
CREATE TABLE hidden1 PARTITION OF hidden FOR VALUES FROM (0) TO (10);
CREATE TABLE hidden_mid PARTITION OF hidden FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (a);
CREATE TABLE hidden2 PARTITION OF hidden_mid FOR VALUES FROM (10) TO (20);
CREATE TABLE seen (a int PRIMARY KEY) PARTITION BY RANGE (a);
CREATE TABLE seen1 PARTITION OF seen FOR VALUES FROM (0) TO (10);
CREATE TABLE parent (a int); CREATE TABLE child () INHERITS (parent);
"""
NAMES = ("plain", "secret", "hidden", "seen", "parent", "child")
#: On the subscriber each relation is a separate table, which shows as which table a row was sent.
ALONE = "".join(
    f"CREATE TABLE {name} (a int{' PRIMARY KEY' if key else ''});"
    for name, key in {
        "plain": True, "secret": True, "hidden": False, "hidden1": False, "hidden_mid": False, "hidden2": False,
        "seen": True, "seen1": True, "parent": False, "child": False,
    }.items()
)  # fmt: skip


def filled(scenario: Scenario, number: int) -> None:
    """Insert a row into each table, and one into each leaf."""
    scenario.publisher("; ".join(f"INSERT INTO {name} VALUES ({number})" for name in NAMES))
    scenario.publisher(f"INSERT INTO hidden VALUES ({number + 10})")


def received(scenario: Scenario) -> dict[str, list[str]]:
    """The rows of every table of the built-in subscription, after a comparison with each replica."""
    return {name: rows.shown for name, rows in scenario.check(*scenario.subscribed()).items()}


@pytest.mark.drawn
@pytest.mark.parametrize("via_root", [False, pytest.param(True, marks=pytest.mark.long)])
def test_excluded_tables_and_partitions_of_excluded_roots_are_not_replicated(
    scenario: Scenario, via_root: bool
) -> None:
    """It may take long: two servers of 19 start, and three publications are compared."""
    scenario.publisher(TABLES)
    scenario.subscriber(ALONE)
    filled(scenario, 1)
    scenario.publisher(
        "CREATE PUBLICATION pub FOR ALL TABLES EXCEPT (TABLE secret, hidden, ONLY parent)"
        f" WITH (publish_via_partition_root = {via_root})"
    )
    scenario.subscribe("pub")
    filled(scenario, 2)
    tree = "public.seen" if via_root else "public.seen1"
    assert received(scenario) == {
        "public.child": ["1", "2"],
        "public.plain": ["1", "2"],
        tree: ["1", "2"],
    }
    # Each exclusion applies only to changes that were made under it.
    scenario.publisher("ALTER PUBLICATION pub SET ALL TABLES EXCEPT (TABLE hidden, plain)")
    filled(scenario, 3)
    scenario.publisher("ALTER PUBLICATION pub SET ALL TABLES EXCEPT (TABLE plain, seen, child)")
    filled(scenario, 4)
    scenario.publisher("ALTER PUBLICATION pub SET ALL TABLES EXCEPT (TABLE secret, hidden, ONLY parent)")
    filled(scenario, 5)
    rows = {"public.child": ["1", "2", "3", "5"], "public.plain": ["1", "2", "5"], tree: ["1", "2", "3", "5"]}
    assert received(scenario) == rows
    # A table that is excluded from now on keeps its rows; a table that no longer is gets copied.
    scenario.publisher("INSERT INTO plain VALUES (6)")
    scenario.publisher("ALTER PUBLICATION pub SET ALL TABLES EXCEPT (TABLE seen, plain)")
    filled(scenario, 7)
    rows["public.child"].append("7")
    rows["public.plain"].append("6")
    assert received(scenario) == rows
    scenario.refresh()
    seven, seventeen = ["1", "2", "3", "4", "5", "7"], ["11", "12", "13", "14", "15", "17"]
    rest = (
        {"public.hidden": sorted(seven + seventeen)}
        if via_root
        else {"public.hidden1": seven, "public.hidden2": seventeen}
    )
    kept = {"public.child": rows["public.child"], "public.parent": seven, "public.secret": seven}
    assert received(scenario) == kept | rest
    scenario.check("plain", tree, columns=["a"], expect={"plain": rows["public.plain"], tree: rows[tree]})


#: The part of a tree that a publication lists: nothing, or one of its levels.
LEVELS = (None, "", "_mid", "_leaf")


def test_every_combination_of_publications_sends_and_copies_the_servers_tables(
    publisher_server: EmbeddedServer,
) -> None:
    """It takes long: four publications, and a tree for each combination of the parts that they may list."""
    combinations = list(itertools.product([False, True], [False, True], LEVELS, LEVELS))
    with own_database(publisher_server, "excluded_tables") as database:
        for number in range(len(combinations)):
            database.execute(
                f"""CREATE TABLE t{number} (a int) PARTITION BY RANGE (a);
                CREATE TABLE t{number}_mid PARTITION OF t{number} FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (a);
                CREATE TABLE t{number}_leaf PARTITION OF t{number}_mid FOR VALUES FROM (0) TO (10);
                CREATE TABLE t{number}_other PARTITION OF t{number} DEFAULT"""
            )
        trees = [(f"t{number}", *combination) for number, combination in enumerate(combinations)]
        database.execute(
            f"""CREATE PUBLICATION p0 FOR ALL TABLES EXCEPT (TABLE {", ".join(t for t, out, *_ in trees if out)});
            CREATE PUBLICATION p1 FOR ALL TABLES EXCEPT (TABLE {", ".join(t for t, _, out, *_ in trees if out)})
                WITH (publish_via_partition_root);
            CREATE PUBLICATION p2 FOR TABLE {", ".join(t + level for t, _, _, level, _ in trees if level is not None)};
            CREATE PUBLICATION p3 FOR TABLE {", ".join(t + level for t, *_, level in trees if level is not None)}
                WITH (publish_via_partition_root)"""
        )
        database.execute("SELECT pg_create_logical_replication_slot('excluded_tables', 'pgoutput')")
        for tree, *_ in trees:
            database.execute(f"INSERT INTO {tree} VALUES (1), (11)")
        catalog = read_catalog(database)
        for names in [
            chosen
            for size in range(1, 5)
            for chosen in itertools.combinations(("p0", "p1", "p2", "p3"), size)
        ]:
            publications = catalog.select_publications(names)
            copied = database.execute(
                "SELECT DISTINCT relid::bigint FROM pg_get_publication_tables(VARIADIC %s::text[])",
                [list(names)],
            )
            tables = find_replicated_tables(publications, catalog)
            assert {r.table.oid for r in tables.values()} == {oid for (oid,) in copied}, names
            messages = database.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes('excluded_tables', NULL, NULL, 'proto_version', '1',"
                " 'publication_names', %s)",
                [",".join(names)],
            )
            sent = Counter(int.from_bytes(data[1:5]) for (data,) in messages if data[:1] == b"I")
            relations = [
                find_published_relation(t, publications, catalog) for t in list_relations_with_rows(catalog)
            ]
            assert sent == Counter(r.publish_as.oid for r in relations if r is not None), names


@pytest.mark.drawn
@pytest.mark.parametrize("in_file", [False, True])
def test_every_command_knows_the_excluded_tables(shop: Shop, in_file: bool) -> None:
    """A publication of the server, or one of pgsieve.yaml beside the user's capture publication, which excludes tables, too."""
    shop.database.execute("CREATE PUBLICATION most FOR ALL TABLES EXCEPT (TABLE notes)")
    if in_file:
        shop.database.execute("DROP PUBLICATION most")
        name = shop.written["sources"]["shop"]["capture"]
        shop.database.execute(f"CREATE PUBLICATION {name} FOR ALL TABLES EXCEPT (TABLE notes, stock)")
        most = {"most": {"all_tables": True, "except": ["public.notes"]}}
        shop.configure(sources={"shop": {**shop.written["sources"]["shop"], "publications": most}})
    shop.configure(subscriptions={"one": {"source": "shop", "publications": ["most"]}})
    ended, validated = shop.cli("validate", "--json")
    assert ended == 0
    [most] = [p for p in json.loads(validated)["publications"] if p["name"] == "most"]
    assert (most["all_tables"], most["excluded"]) == (True, [["public", "notes"]])
    assert "except table public.notes" in shop.cli("validate")[1]
    assert shop.cli("run")[0] == 0
    shop.database.execute("INSERT INTO notes VALUES (5, 5); INSERT INTO stock VALUES (5, 5)")
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "stock") == [1, 2, 3, 4, 5]
    [shown] = json.loads(shop.cli("status", "--json")[1])["subscriptions"]
    assert [table["name"] for table in shown["tables"]] == ["orders", "stock"]
    assert not Path(shop.lake.paths.replica("one", "public", "notes")).exists()
    assert shop.cli("check")[0] == 0
