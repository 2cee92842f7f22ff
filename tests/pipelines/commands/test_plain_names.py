"""`layout: {names: snake}`: columns have plain names in the replica, however they change on the publisher. No JVM."""

from __future__ import annotations

import json

import pytest

from pgsieve.assets.steps.checks.conformity import check_conformity
from pgsieve.decoding.publications.replica_names import to_snake_case
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from tests.fixtures.shop import Shop


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *(("Line No", "line_no"), ("lineNo", "line_no"), ("HTTPPort", "http_port"), ("Preis (€)", "preis")),
        *(("_id", "_id"), ("a__b", "a__b"), ("1st", "_1st"), ("é", "e"), ("🦆", "_"), ("x=y,z", "x_y_z")),
    ],
)
def test_a_plain_name_is_made_once(name: str, plain: str) -> None:
    assert to_snake_case(name) == plain
    assert to_snake_case(plain) == plain


def _rows(shop: Shop, table: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = shop.table("one", table).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: str(sorted(row.items(), key=str)))


@pytest.mark.drawn
def test_columns_have_plain_names_through_changes_and_alterations(shop: Shop) -> None:
    """It may take long: many runs of the whole graph, one after each alteration."""
    run = shop.database.execute
    run('create table lines ("Line No" int primary key, "Preis €" numeric(8,2), "Kind of" text, rest text)')
    run("alter table lines alter rest set storage external")
    run('create table "Log" ("At Time" int, n int); alter table "Log" replica identity full')
    run('create table tree ("Id No" int, r text, primary key ("Id No", r)) partition by list (r)')
    run("create table tree_a partition of tree for values in ('a')")
    run("insert into lines select i, i, 'k', repeat('x', 9000) from generate_series(1, 6) i")
    run('insert into "Log" values (1, 1), (1, 1), (2, 2)')
    run(
        'create publication r for table lines where ("Line No" > 1), "Log", tree with (publish_via_partition_root)'
    )
    one = {
        "source": "shop",
        "publications": ["r"],
        "types": {'public.lines."Preis €"': "decimal(12,3)"},
        "layout": {
            "names": "snake",
            "cluster_by": ['"Line No"'],
            "tables": {"public.lines": {"columns": {"operation": "_operation"}, "deletes": "soft"}},
        },
    }
    shop.configure(subscriptions={"one": one})
    code, text = shop.cli("validate")
    assert code == 0, text
    assert 'in the replica: "Line No" is line_no, "Preis €" is preis, "Kind of" is kind_of' in text
    assert shop.cli("run")[0] == 0
    changes = (
        (
            'update lines set "Preis €" = 7.5 where "Line No" = 2; delete from lines where "Line No" = 3;'
            'update lines set "Line No" = 14 where "Line No" = 4; update lines set "Line No" = 0 where "Line No" = 5;'
            'delete from "Log" where ctid in (select ctid from "Log" limit 1); insert into "Log" values (3, 3);'
            "insert into tree values (1, 'a'); update tree set \"Id No\" = 2"
        ),
        (
            'alter table lines rename "Kind of" to "Sort Of"; alter table lines add "New One" int default 5;'
            "insert into lines values (20, 1, 'z', 'r', 9); update lines set \"Sort Of\" = 'y' where \"Line No\" = 2"
        ),
        (
            'alter table "Log" add "More Of" text; insert into "Log" values (4, 4, \'m\');'
            "alter table lines drop rest; insert into lines values (21, 2, 'w', 3)"
        ),
    )
    for number, change in enumerate(changes):
        run(change)
        if number == 0:
            (lsn,) = run("select pg_current_wal_insert_lsn()::text").fetchone() or ()
            then = run('select "Line No", "Kind of" from lines where "Line No" > 1 order by 1').fetchall()
        code, text = shop.cli("run")
        assert code == 0, (change, text)
    code, text = shop.cli("check")
    assert code == 0, text
    code, text = shop.cli("read", "one", "public.lines", "--at", lsn, "--json")
    assert code == 0, text
    read = [json.loads(line) for line in text.splitlines()]
    assert sorted((row["line_no"], row["kind_of"]) for row in read if not row["_deleted"]) == then
    named = "line_no", "preis", "sort_of", "new_one"
    expected = run('select * from lines where "Line No" > 1 order by "Line No"::text').fetchall()
    kept = sorted(_rows(shop, "lines"), key=lambda row: str(row["line_no"]))
    assert {row["line_no"] for row in kept if row["_deleted"]} == {3, 4, 5}
    rows = [row for row in kept if not row["_deleted"]]
    assert [tuple(row[name] for name in named) for row in rows] == expected
    assert {row["line_no"]: row["_operation"] for row in rows}[2] == "update"
    assert {tuple(row) for row in _rows(shop, "Log")} == {("at_time", "n", "more_of")}
    assert _rows(shop, "tree") == [{"id_no": 2, "r": "a"}]
    subscription = build_project(load_config(shop.path)).subscriptions["one"]
    conformity = check_conformity(subscription, shop.lake, ("public", "lines"))
    assert (conformity.rows, conformity.failing) == (len(rows), 0)


def test_two_columns_with_the_same_plain_name_are_refused_and_other_tables_are_not(shop: Shop) -> None:
    shop.database.execute('create table twins (id int primary key, "a b" int, "aB" int)')
    shop.database.execute("alter publication p add table twins")
    one = {**shop.written["subscriptions"]["one"], "layout": {"names": "snake"}}
    shop.configure(subscriptions={"one": one})
    code, text = shop.cli("validate", "--json")
    (problem,) = json.loads(text)["problems"]
    message = 'table "public.twins": columns "a b" and "aB" would both be a_b in the replica'
    assert (code, problem["message"], problem["sqlstate"]) == (1, message, "42701")
    code, text = shop.cli("run")
    assert code == 1
    assert message in " ".join(text.split())
    assert shop.ids("one", "orders") == [2, 3, 4]
    code, text = shop.cli("status")
    assert message in " ".join(text.split()), text
    code, text = shop.cli("resync", "one", "public.notes")
    assert "public.notes     4" in text, text
    assert (code, message in " ".join(text.split())) == (1, True), text
    shop.database.execute('alter table twins rename "aB" to c')
    assert shop.cli("run")[0] == 0
    assert shop.state("one", "twins") == "ready"
    # `status` shows the problem of a ready table before the next run has found it.
    shop.database.execute('alter table twins rename c to "aB"')
    code, text = shop.cli("status")
    assert message in " ".join(text.split()), text


@pytest.mark.drawn
def test_the_names_of_a_replica_may_be_changed_later(shop: Shop) -> None:
    shop.database.execute('create table lines ("Line No" int primary key, n int)')
    shop.database.execute("insert into lines values (1, 1), (2, 2); alter publication p add table lines")
    assert shop.cli("run")[0] == 0
    one = shop.written["subscriptions"]["one"]
    for number, (names, column) in enumerate((("snake", "line_no"), ("published", "Line No")), 3):
        shop.configure(subscriptions={"one": {**one, "layout": {"names": names}}})
        shop.database.execute(f"insert into lines values ({number}, 0)")
        for _ in range(2):
            assert shop.cli("run")[0] in {0, 1}
        assert shop.ids("one", "lines", column) == list(range(1, number + 1))
        assert shop.cli("check")[0] == 0
