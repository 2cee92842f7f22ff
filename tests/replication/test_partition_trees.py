"""Several publications at several levels of one partition tree.

PostgreSQL documentation, Partitioned Tables; GetTopMostAncestorInPublication.

The tree has three levels, partitions in another schema, other column orders, dropped columns, and different identities.
Each test uses the whole tree.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario
from tests.fixtures.schema_changes import alter

pytestmark = pytest.mark.spark

TREE = """
CREATE SCHEMA other;
CREATE TABLE root (region int, id int, note text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE one (note text, gone int, id int NOT NULL, region int NOT NULL); ALTER TABLE one DROP COLUMN gone;
ALTER TABLE root ATTACH PARTITION one FOR VALUES IN (1);
CREATE TABLE other.inner (id int NOT NULL, note text, region int NOT NULL) PARTITION BY RANGE (id);
ALTER TABLE root ATTACH PARTITION other.inner FOR VALUES IN (2, 3);
CREATE TABLE other.low PARTITION OF other.inner FOR VALUES FROM (0) TO (10);
CREATE TABLE high (region int NOT NULL, id int NOT NULL, note text);
ALTER TABLE other.inner ATTACH PARTITION high FOR VALUES FROM (10) TO (20);
CREATE TABLE rest PARTITION OF root DEFAULT;
ALTER TABLE high REPLICA IDENTITY FULL
"""
ROWS = "INSERT INTO root SELECT r, i, 'copied' FROM generate_series(1, 4) r, generate_series(8, 11) i"
CHANGES = """
    INSERT INTO root SELECT r, i, 'added' FROM generate_series(1, 4) r, generate_series(4, 5) i;
    UPDATE root SET note = 'changed' WHERE id IN (5, 10); DELETE FROM root WHERE id = 4;
    UPDATE root SET region = region + 1, id = 7 WHERE id = 8 AND region < 4; UPDATE root SET id = 15 WHERE id = 9;
    BEGIN; UPDATE root SET region = 9 WHERE region = 2 AND id = 11; UPDATE root SET region = 2, id = 3 WHERE region = 9;
    UPDATE root SET note = NULL WHERE region = 2; COMMIT
"""
#: Publications of the tree, each with the tables that a subscription to all of them receives.
LEVELS = {
    "leaves of a root": (["root"], {"one", "rest", "other.low", "high"}),
    "the root": (["root WITH (publish_via_partition_root)"], {"root"}),
    "an inner table and leaves": (
        ["other.inner WITH (publish_via_partition_root)", "one, rest"],
        {"other.inner", "one", "rest"},
    ),
    "a leaf and the root": (
        ["high WHERE (id > 10)", "root WHERE (id > 8) WITH (publish_via_partition_root)"],
        {"root"},
    ),
    "an inner table beside the leaves": (
        ["root", "other.inner WHERE (id <> 10) WITH (publish_via_partition_root)"],
        {"one", "rest", "other.inner"},
    ),
    "the root and an inner table in one": (
        ["root, other.inner WITH (publish_via_partition_root)", "other.inner"],
        {"root"},
    ),
}

#: `make test-long` runs the others.
SHORT = {"leaves of a root", "an inner table beside the leaves", "the root and an inner table in one"}


def subscriber_tables(scenario: Scenario) -> None:
    """A plain table for each name of the tree."""
    scenario.subscriber("CREATE SCHEMA other")
    for name in ("root", "one", "rest", "high", "other.inner", "other.low"):
        scenario.subscriber(f"CREATE TABLE {name} (region int, id int, note text, PRIMARY KEY (region, id))")


@pytest.mark.drawn
@pytest.mark.parametrize(
    "level",
    [level if level in SHORT else pytest.param(level, marks=pytest.mark.long) for level in LEVELS],
)
def test_changes_go_to_the_topmost_ancestor_that_some_publication_names(
    scenario: Scenario, level: str, postgres_version: int
) -> None:
    publications, received = LEVELS[level]
    scenario.publisher(TREE)
    subscriber_tables(scenario)
    scenario.publisher(ROWS)
    for number, objects in enumerate(publications):
        scenario.publisher(f"CREATE PUBLICATION p{number} FOR TABLE {objects}")
    scenario.subscribe(*(f"p{number}" for number in range(len(publications))))
    subscribed = {name.removeprefix("public.") for name in scenario.subscribed()}
    # Before 16 a partition that one publication lists is copied, although another publication publishes it as its ancestor.
    assert subscribed == received if postgres_version >= 16 else subscribed >= received
    assert any(scenario.check(*received).values())
    scenario.publisher(CHANGES)
    scenario.check(*received)
    scenario.publisher(
        "TRUNCATE root; INSERT INTO root VALUES (1, 11, 'later'), (2, 12, 'later'), (3, 1, 'later')"
    )
    scenario.check(*received)


def test_a_schema_is_published_with_the_partitions_that_lie_in_it_and_below(scenario: Scenario) -> None:
    # Section 29.1, TABLES IN SCHEMA: a partitioned table of the schema includes its partitions in other schemas.
    scenario.publisher(TREE)
    subscriber_tables(scenario)
    scenario.publisher(ROWS)
    scenario.publisher("CREATE PUBLICATION pub FOR TABLES IN SCHEMA other")
    scenario.subscribe("pub")
    assert set(scenario.subscribed()) == {"other.low", "public.high"}
    scenario.publisher(CHANGES)
    scenario.check("other.low", "high")
    scenario.publisher("TRUNCATE high; INSERT INTO root VALUES (1, 1), (2, 2), (2, 12); TRUNCATE one")
    rows = scenario.check("other.low", "high")
    assert [len(rows[name]) > 1 for name in ("other.low", "high")] == [True, False]


@pytest.mark.drawn
def test_columns_of_a_tree_change_whether_its_root_or_its_leaves_are_published(scenario: Scenario) -> None:
    for name in ("via", "bare"):
        scenario.tables(
            f"""CREATE TABLE {name} (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
            CREATE TABLE {name}_1 (gone int, b text, a int NOT NULL); ALTER TABLE {name}_1 DROP COLUMN gone;
            ALTER TABLE {name} ATTACH PARTITION {name}_1 FOR VALUES FROM (0) TO (10);
            CREATE TABLE {name}_2 PARTITION OF {name} FOR VALUES FROM (10) TO (20)"""
        )
    scenario.publisher(
        f"""ALTER DATABASE {scenario.name} SET logical_decoding_work_mem = '64kB';
        CREATE PUBLICATION p0 FOR TABLE via WHERE (a <> 5) WITH (publish_via_partition_root);
        CREATE PUBLICATION p1 FOR TABLE bare"""
    )
    scenario.subscribe("p0", "p1", streaming="on")

    def change(statements: str) -> None:
        for name in ("via", "bare"):
            scenario.publisher(statements.format(name))

    change(
        "INSERT INTO {0} VALUES (1, 'x'), (2, 'y'), (5, 'z'), (11, 'w'); UPDATE {0} SET a = 12 WHERE a = 2"
    )
    alter(scenario, "ALTER TABLE via ADD COLUMN c int DEFAULT 7; ALTER TABLE bare ADD COLUMN c int DEFAULT 7")
    change("INSERT INTO {0} VALUES (3, 'x', 3), (13, 'y', NULL); UPDATE {0} SET c = a WHERE a IN (1, 11)")
    alter(scenario, "ALTER TABLE via RENAME COLUMN b TO d; ALTER TABLE bare RENAME COLUMN b TO d")
    # The changes are in one streamed transaction; the subscriber gets the column before it.
    scenario.subscriber("ALTER TABLE via ADD COLUMN e date; ALTER TABLE bare ADD COLUMN e date")
    scenario.publisher("BEGIN")
    for name in ("via", "bare"):
        scenario.publisher(
            f"""INSERT INTO {name} VALUES (4, repeat('x', 100000)), (14, repeat('y', 100000));
            ALTER TABLE {name} ADD COLUMN e date; UPDATE {name} SET e = '2024-02-29' WHERE a IN (3, 4, 12);
            INSERT INTO {name} (a, e) VALUES (6, '1999-12-31'), (16, NULL); UPDATE {name} SET a = 17 WHERE a = 6"""
        )
    scenario.publisher("COMMIT")
    alter(
        scenario,
        "".join(
            f"""CREATE TABLE {name}_3 (e date, c int, a int NOT NULL, d text);
            ALTER TABLE {name} ATTACH PARTITION {name}_3 FOR VALUES FROM (20) TO (30);"""
            for name in ("via", "bare")
        ),
    )
    change("INSERT INTO {0} VALUES (21, 'new', 1, '2000-01-01'); UPDATE {0} SET a = 22 WHERE a = 13")
    scenario.refresh()
    alter(scenario, "ALTER TABLE via DROP COLUMN c; ALTER TABLE bare DROP COLUMN c")
    change("UPDATE {0} SET d = 'last' WHERE a IN (4, 14, 22); DELETE FROM {0} WHERE a IN (1, 21)")
    rows = scenario.check("via", "bare_1", "bare_2", "bare_3")
    assert [row[0] for row in rows["via"]] == ["11", "12", "14", "16", "17", "22", "3", "4"]
    assert sum(len(rows[f"bare_{part}"]) for part in (1, 2, 3)) == len(rows["via"]) + 1


@pytest.mark.drawn
def test_inheritance_children_are_published_with_their_parent_except_with_only(scenario: Scenario) -> None:
    # CREATE PUBLICATION, ONLY and *: each child is a separate table.
    for name in ("with", "alone"):
        scenario.tables(
            f"CREATE TABLE {name}_parent (a int PRIMARY KEY); CREATE TABLE {name}_child (b text, PRIMARY KEY (a)) INHERITS"
            f" ({name}_parent); CREATE TABLE {name}_grandchild (PRIMARY KEY (a)) INHERITS ({name}_child)"
        )
        for number, part in enumerate(("parent", "child", "grandchild")):
            scenario.publisher(f"INSERT INTO {name}_{part} (a) VALUES ({number}), ({number + 10})")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE with_parent, ONLY alone_parent, alone_grandchild")
    scenario.subscribe("pub")
    scenario.publisher("""
        UPDATE with_parent SET a = a + 100 WHERE a >= 10; UPDATE alone_parent SET a = a + 100 WHERE a >= 10;
        UPDATE with_child SET b = 'x'; UPDATE alone_child SET b = 'x'; DELETE FROM with_parent WHERE a = 1
    """)
    expected = {
        "with_parent": ["0", "110"],
        "with_child": ["111|x"],
        "with_grandchild": ["2|x", "112|x"],
        "alone_parent": ["0", "110"],
        "alone_grandchild": ["2|x", "112|x"],
    }
    scenario.check("alone_child", expect=expected)
    assert set(scenario.subscribed()) == {f"public.{name}" for name in expected}
    scenario.publisher("TRUNCATE ONLY with_parent; TRUNCATE alone_parent")
    scenario.check(expect={**expected, "with_parent": [], "alone_parent": [], "alone_grandchild": []})
