"""Partition trees published as their root: the identity of a row's leaf finds the row.

The tests have a tree for each combination of identities of a root and its leaves. The publisher sends old rows by the leaf's identity,
but describes the root (maybe_send_schema() of pgoutput.c). If the two identities differ, a subscriber stops with an error
(SQLSTATE 55000) or loses rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.fixtures.oracle import Scenario
from tests.fixtures.shop import Shop

TREE = """
CREATE TABLE {0} (id int NOT NULL, d int NOT NULL, b int NOT NULL, v text) PARTITION BY RANGE (d);
CREATE TABLE {0}_1 PARTITION OF {0} FOR VALUES FROM (0) TO (10);
CREATE TABLE {0}_2 PARTITION OF {0} FOR VALUES FROM (10) TO (20);
{1}
"""
ROWS = """
INSERT INTO {0} SELECT i, i, i, 'old' FROM generate_series(1, 6) i;
INSERT INTO {0} SELECT i, i + 10, i + 10, 'old' FROM generate_series(1, 3) i
"""
#: Rows keep their identity, change it, are deleted, and move to another leaf.
CHANGES = """
UPDATE {0} SET v = 'a' WHERE id = 1 AND d < 10; UPDATE {0} SET b = 22 WHERE id = 2 AND d < 10;
UPDATE {0} SET id = 33 WHERE d = 3; DELETE FROM {0} WHERE d = 4; UPDATE {0} SET d = 15 WHERE d = 5;
UPDATE {0} SET d = 7 WHERE d = 6; UPDATE {0} SET v = 'c', b = 99 WHERE d = 11
"""
IDENTITIES = {
    "none": "",
    "pk": "ALTER TABLE {0} ADD PRIMARY KEY (id, d);",
    "pkid": "ALTER TABLE {0} ADD PRIMARY KEY (id);",
    "full": "ALTER TABLE {0} REPLICA IDENTITY FULL;",
    "index": "CREATE UNIQUE INDEX {0}_i ON {0} (b, d); ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_i;",
    "indexb": "CREATE UNIQUE INDEX {0}_b ON {0} (b); ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_b;",
    "nothing": "ALTER TABLE {0} REPLICA IDENTITY NOTHING;",
}
IDENTITIES |= {f"{kind}pk": IDENTITIES["pk"] + IDENTITIES[kind] for kind in ("full", "nothing")}


def tree(root: str, leaf: str, other: str | None = None) -> tuple[str, str]:
    """A tree's name and definition. The second leaf may have another identity than the first."""
    name = "_".join(["t", root, leaf, *([other] if other else [])])
    leaves = IDENTITIES[leaf].format(f"{name}_1") + IDENTITIES[other or leaf].format(f"{name}_2")
    return name, TREE.format(name, IDENTITIES[root].format(name) + leaves)


#: A subscriber finds all rows, or loses some because the leaves do not send the root's key. pgsieve holds the same rows.
AS_SUBSCRIBER = [
    *product(("pk", "fullpk"), ("none", "full", "indexb")),
    *product(("index",), ("full", "pkid", "indexb")),
    ("full", "full"),
]
#: The leaves' identity differs from the root's, or is FULL: a subscriber stops or loses rows, pgsieve holds the publisher's rows.
AS_PUBLISHER = [
    *product(("none",), ("pk", "full", "index")),
    *product(("nothingpk",), ("none", "full", "index")),
    ("nothing", "pk"),
    ("full", "pk"),
    ("index", "pk"),
    ("none", "full", "none"),
    ("full", "full", "fullpk"),
    ("none", "pk", "fullpk"),
]
#: `make test-long` runs the other combinations.
SOME = [
    *product(("none",), ("pk", "full", "pkid")),
    ("nothingpk", "none"),
    ("full", "indexb"),
    ("none", "full", "none"),
    ("none", "full", "pk"),
]
#: The publisher refuses changes of its second leaf, so a publication of pgsieve.yaml must not list the table.
UNCHANGEABLE = "t_none_full_none"
REFUSED = [
    *product(("none", "full"), ("pkid", "indexb")),
    ("nothingpk", "indexb"),
    ("none", "full", "pk"),
    ("full", "pk", "full"),
]


@pytest.mark.spark
def test_the_key_of_a_root_finds_and_misses_the_same_rows_as_a_subscriber(scenario: Scenario) -> None:
    names = []
    for identities in AS_SUBSCRIBER:
        name, definition = tree(*identities)
        names.append(name)
        scenario.publisher(definition + ";" + ROWS.format(name))
        scenario.subscriber(f"CREATE TABLE {name} (id int NOT NULL, d int NOT NULL, b int NOT NULL, v text)")
        scenario.subscriber(IDENTITIES[identities[0]].format(name))
    via_root = "WITH (publish_via_partition_root)"
    # Changes of an unlogged leaf are not in the WAL, but its rows are copied.
    scenario.publisher(
        tree("pk", "none")[1].replace("t_pk_none", "unsent") + "ALTER TABLE unsent_2 SET UNLOGGED;"
    )
    scenario.publisher(ROWS.format("unsent"))
    scenario.subscriber("CREATE TABLE unsent (id int, d int, b int NOT NULL, v text, PRIMARY KEY (id, d))")
    names.append("unsent")
    scenario.publisher(f"CREATE PUBLICATION pub FOR TABLE {', '.join(names)} {via_root}")
    # If only INSERTs are published, deleted rows stay, and their key may be inserted again.
    name, definition = tree("none", "pk")
    scenario.publisher(definition + ";" + ROWS.format(name))
    scenario.subscriber(f"CREATE TABLE {name} (id int, d int, b int, v text)")
    scenario.publisher(
        f"CREATE PUBLICATION inserts FOR TABLE {name} WITH (publish_via_partition_root, publish = 'insert')"
    )
    names.append(name)
    scenario.subscribe("pub", "inserts")
    for name in names:
        scenario.publisher(CHANGES.format(name))
    scenario.publisher("INSERT INTO t_none_pk VALUES (4, 4, 4, 'again')")
    rows = scenario.check(*names)
    lost = {name for name in names if sorted(scenario.publisher(f"TABLE {name}")) != sorted(rows[name])}
    assert lost == {"t_pk_indexb", "t_fullpk_indexb", "t_index_pkid", "t_index_indexb", "unsent", "t_none_pk"}


def _publish(shop: Shop, trees: Iterable[tuple[str, str]], **more: object) -> None:
    """Replicate the trees: a publication of the server in both modes, and a publication of pgsieve.yaml, each via the root."""
    names = [name for name, _ in trees]
    for name, definition in trees:
        shop.database.execute(definition + ";" + ROWS.format(name))
    listed = ", ".join(names)
    shop.database.execute(f"CREATE PUBLICATION trees FOR TABLE {listed} WITH (publish_via_partition_root)")
    tables = [{"table": f"public.{name}"} for name in names if name != UNCHANGEABLE]
    own = {"publish_via_partition_root": True, "tables": tables}
    shop.written["sources"]["shop"]["publications"] = {"own": own}
    shop.configure(
        subscriptions={
            "pipe": {"source": "shop", "publications": ["trees"]},
            "file": {"source": "shop", "publications": ["own"]},
            "publ": {"source": "shop", "publications": ["trees"], "row_filter": "publisher"},
        },
        **more,
    )


def _differing(
    shop: Shop, names: Iterable[str], subscriptions: Sequence[str] = ("pipe", "file", "publ")
) -> set[tuple[str, str]]:
    """The subscriptions and tables whose rows differ from the publisher's."""
    differing = set()
    for name in names:
        expected = sorted(shop.database.execute(f"TABLE {name}").fetchall())
        for subscription in subscriptions:
            if (subscription, name) == ("file", UNCHANGEABLE):
                continue
            rows = shop.table(subscription, name).to_pyarrow_table().to_pylist()
            if sorted(tuple(row.values()) for row in rows) != expected:
                differing.add((subscription, name))
    return differing


@pytest.mark.drawn
@pytest.mark.parametrize("combinations", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_the_identity_that_all_leaves_share_finds_rows_or_the_table_is_refused(
    shop: Shop, combinations: str
) -> None:
    """It takes long: a tree of tables for each pair of identities, and several commands for all of them."""
    chosen = [
        [*kinds] if combinations == "all" else [k for k in kinds if k in SOME]
        for kinds in (AS_PUBLISHER, REFUSED)
    ]
    accepted, refused = ([tree(*each) for each in kinds] for kinds in chosen)
    _publish(shop, [*accepted, *refused])
    names, waiting = [name for name, _ in accepted], [name for name, _ in refused]
    report = json.loads(shop.cli("validate", "--json")[1])
    for subscription in ("pipe", "file", "publ"):
        problems = [p for p in report["problems"] if p["object"] == subscription and p["sqlstate"] == "55000"]
        unfound = {p["message"].split('"')[1] for p in problems if "publisher did not send" in p["message"]}
        assert unfound == {f"public.{name}" for name in waiting}
    assert shop.cli("run")[0] != 0
    for subscription in ("pipe", "file", "publ"):
        assert shop.state(subscription, waiting[0]) == "to be copied"
    for name in names:
        changes = CHANGES.format(name).split(";")
        if name == UNCHANGEABLE:
            changes = [change for change in changes if "d = 11" not in change and "d = 6" not in change]
        for change in changes:
            shop.database.execute(change)
    # Follow the advice while changes arrive.
    for name in waiting:
        shop.database.execute(CHANGES.format(name))
        for leaf in (f"{name}_1", f"{name}_2"):
            shop.database.execute(f"ALTER TABLE {leaf} REPLICA IDENTITY FULL")
        shop.database.execute(f"UPDATE {name} SET v = 'd' WHERE d = 1; DELETE FROM {name} WHERE d = 2")
    assert shop.cli("run")[0] == 0
    assert _differing(shop, [*names, *waiting]) == set()
    for name in waiting:
        shop.database.execute(f"UPDATE {name} SET v = 'e' WHERE d = 3; UPDATE {name} SET d = 16 WHERE d = 7")
    # Leaves with identity FULL get a key.
    for leaf in ("t_none_full_1", "t_none_full_2"):
        shop.database.execute(f"ALTER TABLE {leaf} ADD PRIMARY KEY (id, d), REPLICA IDENTITY DEFAULT")
    shop.database.execute("UPDATE t_none_full SET v = 'e' WHERE d = 3; DELETE FROM t_none_full WHERE d = 7")
    assert shop.cli("run")[0] == 0
    assert _differing(shop, [*waiting, "t_none_full"]) == set()


#: Alterations of one leaf between two runs that are undone again, each with a change under the temporary identity.
UNDONE = {
    "full": "ALTER TABLE {0}_1 REPLICA IDENTITY USING INDEX {0}_1_i; {1}; ALTER TABLE {0}_1 REPLICA IDENTITY FULL",
    "pk": "ALTER TABLE {0}_1 REPLICA IDENTITY USING INDEX {0}_1_i; {1}; ALTER TABLE {0}_1 REPLICA IDENTITY DEFAULT",
    "attached": "CREATE TABLE {0}_3 PARTITION OF {0} (PRIMARY KEY (id)) FOR VALUES FROM (20) TO (30);"
    "INSERT INTO {0} VALUES (7, 21, 7, 'new'), (8, 22, 8, 'new'); UPDATE {0} SET v = 'x' WHERE d = 21;"
    "UPDATE {0} SET d = 9 WHERE d = 22; DELETE FROM {0} WHERE d > 20; ALTER TABLE {0} DETACH PARTITION {0}_3",
    "dropped": "CREATE TABLE {0}_3 PARTITION OF {0} (PRIMARY KEY (id)) FOR VALUES FROM (20) TO (30);"
    "INSERT INTO {0} VALUES (8, 22, 8, 'new'); UPDATE {0} SET d = 9 WHERE d = 22; DROP TABLE {0}_3",
}


@pytest.mark.drawn
def test_a_temporary_change_of_identity_loses_no_row(shop: Shop) -> None:
    """It may take long: runs for several trees in both modes."""
    trees = []
    for kind in UNDONE:
        name, definition = tree("none", kind if kind in IDENTITIES else "full")
        definition = definition.replace(name, f"t_{kind}")
        indexes = "".join(f"CREATE UNIQUE INDEX t_{kind}_{n}_i ON t_{kind}_{n} (b);" for n in (1, 2))
        trees.append((f"t_{kind}", definition + indexes))
    _publish(shop, trees)
    # Because of a subscription to the leaves, the slot captures leaves; a subscription to the root receives their changes.
    listed = ", ".join(name for name, _ in trees)
    shop.database.execute(f"CREATE PUBLICATION bare FOR TABLE {listed}")
    subscriptions = shop.written["subscriptions"] | {"bare": {"source": "shop", "publications": ["bare"]}}
    del subscriptions["file"]
    shop.configure(subscriptions=subscriptions)
    assert shop.cli("run")[0] == 0
    for kind, altered in UNDONE.items():
        name = f"t_{kind}"
        changes = f"UPDATE {name} SET id = 40, v = 'u' WHERE d = 3; DELETE FROM {name} WHERE d = 2"
        for statement in altered.format(name, changes).split(";"):
            shop.database.execute(statement)
    assert shop.cli("run")[0] == 0
    assert _differing(shop, [name for name, _ in trees], ("pipe", "publ")) == set()


def _shown(output: str) -> dict[str, Any]:
    """The JSON that a command printed, without the text of stderr after it."""
    shown: dict[str, Any] = json.JSONDecoder().raw_decode(output)[0]
    return shown


@pytest.mark.drawn
def test_validate_warns_of_rows_that_are_not_found_or_not_sent(shop: Shop) -> None:
    """It may take long: five commands for several trees in both modes."""
    trees = [tree("pk", "indexb"), tree("pk", "none")]
    _publish(shop, [(name, text + f"ALTER TABLE {name}_2 SET UNLOGGED;") for name, text in trees])
    # Leaves below an inner partition, and a foreign leaf, from which nothing is read here.
    shop.database.execute(
        "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
        "CREATE TABLE deep (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE deep_1 PARTITION OF deep FOR VALUES FROM (0) TO (20) PARTITION BY RANGE (id);"
        "CREATE UNLOGGED TABLE deep_1_1 PARTITION OF deep_1 FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE beside (LIKE deep) PARTITION BY RANGE (id);"
        "CREATE FOREIGN TABLE beside_1 PARTITION OF beside FOR VALUES FROM (0) TO (10) SERVER s"
    )
    shop.database.execute("CREATE PUBLICATION bare FOR TABLE t_pk_none, deep, beside")
    shop.configure(
        subscriptions=shop.written["subscriptions"] | {"two": {"source": "shop", "publications": ["bare"]}}
    )
    code, output = shop.cli("validate", "--json")
    report = json.loads(output)
    assert (code, report["problems"]) == (0, [])
    warned = {(w["object"], w["message"]) for w in report["warnings"]}
    for subscription in ("pipe", "file", "publ"):
        messages = [message for name, message in warned if name == subscription]
        assert any(
            'table "public.t_pk_indexb": an UPDATE or DELETE of rows of public.t_pk_indexb_1 changes nothing'
            in m
            for m in messages
        )
    unsent = {
        **{
            subscription: {
                f'table "public.{name}": changes of public.{name}_2 are not in the WAL' for name, _ in trees
            }
            for subscription in ("pipe", "file", "publ")
        },
        "two": {
            f'table "public.{table}": public.{leaf} are not replicated'
            for table, leaf in {"t_pk_none": "t_pk_none_2", "deep": "deep_1_1", "beside": "beside_1"}.items()
        },
    }

    def unsent_leaves(warnings: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
        """By subscription, the warnings about leaves whose changes are not sent, up to the reason."""
        leaves_of: dict[str, set[str]] = {}
        for subscription, message in warnings:
            for end in ("are not in the WAL", "are not replicated"):
                if end in message:
                    leaves_of.setdefault(subscription, set()).add(message.partition(end)[0] + end)
        return leaves_of

    assert unsent_leaves(warned) == unsent
    assert not [m for n, m in warned if n == "shop"]
    assert "no problems" not in shop.cli("validate")[1]
    # `run`, `status` and `check` warn, too.
    for command in ("run", "status"):
        code, output = shop.cli(command, "--json")
        each = _shown(output)["subscriptions"]
        assert (code, unsent_leaves((s["name"], w) for s in each for w in s["warnings"])) == (0, unsent), (
            command
        )
    shop.database.execute("UPDATE t_pk_none SET v = 'x' WHERE d = 11")
    code, output = shop.cli("check", "--json")
    report = _shown(output)
    differing = {(t["subscription"], t["name"]) for t in report["tables"] if not t["equal"]}
    assert (code, differing) == (1, {(s, "t_pk_none") for s in ("pipe", "file", "publ")})
    assert unsent_leaves(tuple(w.split(": ", 1)) for w in report["warnings"]) == unsent
    # Because of a publication of pgsieve.yaml, a table is captured that no publication of the server lists.
    own = shop.written["sources"]["shop"]["publications"] | {"more": {"tables": [{"table": "public.stock"}]}}
    shop.written["sources"]["shop"]["publications"] = own
    shop.database.execute("DROP PUBLICATION q")
    shop.configure(subscriptions={"two": {"source": "shop", "publications": ["more"]}})
    (warning,) = json.loads(shop.cli("validate", "--json")[1])["warnings"]
    assert warning["message"].startswith("once the capture publication lists public.stock")
