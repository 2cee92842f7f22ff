"""Metadata columns are enabled, renamed and disabled for existing replicas, and refused where they are impossible."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.shop import Shop


def _rows(shop: Shop, table: str = "notes") -> dict[int, tuple[Any, ...]]:
    """The rows by their id, without the id."""
    read = shop.table("one", table).to_pyarrow_table()
    assert read.column_names[0] == "id"
    return {row[0]: row[1:] for row in zip(*(c.to_pylist() for c in read.columns), strict=True)}


def _columns(shop: Shop, **names: str) -> tuple[int, str]:
    shop.written["subscriptions"]["one"]["layout"] = {"columns": names}
    shop.configure()
    return shop.cli("run")


@pytest.mark.drawn
@pytest.mark.spark
def test_metadata_columns_are_enabled_renamed_and_disabled(shop: Shop) -> None:
    """It may take long: many runs of the whole graph, and Spark rewrites the replica."""
    assert shop.cli("run")[0] == 0
    version = shop.table("one", "notes").version()
    assert _columns(shop, operation="_op", commit_lsn="_lsn")[0] == 0
    assert _rows(shop) == {i: (i, None, None) for i in range(1, 5)}, "existing rows have no metadata"
    assert shop.table("one", "notes").version() == version + 1
    code, picture = shop.cli("validate")
    assert code == 0
    assert "metadata columns: _lsn (commit_lsn), _op (operation)" in picture

    shop.database.execute(
        "update notes set n = 0 where id = 1; alter table notes add t text; insert into notes values (5, 5, 't')"
    )
    assert _columns(shop, operation="op", commit_lsn="_lsn")[0] == 0
    rows = shop.table("one", "notes").to_pyarrow_table().to_pylist()
    assert {row["id"]: (row["n"], row["t"], row["op"]) for row in rows} == {
        **{i: (i, None, None) for i in (2, 3, 4)},
        1: (0, None, "update"),
        5: (5, "t", "insert"),
    }
    assert [row["_lsn"] is None for row in sorted(rows, key=lambda row: int(row["id"]))] == [
        False,
        True,
        True,
        True,
        False,
    ]

    shop.database.execute("update notes set n = 7 where id = 2")
    assert shop.cli("check")[0] == 0, "check compares the rows with metadata columns"
    assert _columns(shop)[0] == 0
    assert _rows(shop)[2] == (7, None)
    assert shop.cli("check")[0] == 0
    assert shop.table("one", "notes").schema().to_arrow().names == ["id", "n", "t"]


@pytest.mark.drawn
def test_metadata_columns_are_refused_where_they_are_impossible(shop: Shop) -> None:
    """It takes long: ten commands run one after the other, and some copy all tables again."""
    shop.database.execute("create table plain (a int, _op text); alter table plain replica identity full")
    shop.database.execute("alter publication p add table plain; insert into plain values (1, 'x')")
    for names, message in (
        ({"commit_lsn": "_lsn"}, 'table "public.plain" has no key'),
        ({"operation": "_OP"}, 'table "public.plain" has a column "_op"'),
    ):
        code, output = _columns(shop, **names)
        assert code == 1
        assert message in " ".join(output.split())
        assert len(_rows(shop)) == 4, "the other tables continue"
        code, output = shop.cli("validate")
        assert code == 1
        assert message in " ".join(output.split())
    shop.written["subscriptions"]["one"]["layout"] = {
        "columns": {"operation": "_OP"},
        "tables": {"public.plain": {"columns": {}}},
    }
    shop.configure()
    assert shop.cli("validate")[0] == 0
    assert shop.cli("run")[0] == 0
    assert shop.table("one", "plain").to_pyarrow_table().to_pylist() == [{"a": 1, "_op": "x"}]
    shop.database.execute("delete from plain; alter table plain add primary key (a)")
    assert _columns(shop, operation="_operation")[0] == 0
    shop.database.execute("insert into plain values (1, 'y')")
    assert shop.cli("run")[0] == 0
    assert shop.table("one", "plain").to_pyarrow_table().to_pylist() == [
        {"a": 1, "_op": "y", "_operation": "insert"}
    ]


@pytest.mark.drawn
def test_changes_that_the_publisher_filters_name_neither_a_partition_nor_the_row_filter(shop: Shop) -> None:
    """It filters a slice with an alteration. The tree's leaves are captured, because another subscription publishes them."""
    shop.database.execute("""
        create table tree (id int primary key, n int) partition by range (id);
        create table low partition of tree for values from (0) to (1000);
        create publication root for table tree where (id < 100) with (publish_via_partition_root);
        create publication leaves for table tree;
        insert into tree values (1, 1)
    """)
    one, two = shop.written["subscriptions"].values()
    one |= {
        "publications": ["root"],
        "layout": {"deletes": "soft", "columns": {"source_table": "_source", "filtered": "_filtered"}},
    }
    two["publications"] = ["leaves"]
    shop.configure()
    assert shop.cli("run")[0] == 0

    def read_sources() -> dict[int, tuple[Any, ...]]:
        rows = shop.table("one", "tree").to_pyarrow_table().to_pylist()
        return {row["id"]: (row["_source"], row["_deleted"], row["_filtered"]) for row in rows}

    shop.database.execute("insert into tree values (2, 2), (3, 3); update tree set id = 103 where id = 3")
    assert shop.cli("run")[0] == 0
    expected = {
        1: ("public.low", False, False),
        2: ("public.low", False, False),
        3: ("public.low", True, True),
    }
    assert read_sources() == expected
    shop.database.execute("alter publication root add table notes; insert into tree values (4, 4), (5, 5)")
    shop.database.execute("update tree set id = 105 where id = 5")
    assert shop.cli("run")[0] == 0
    assert read_sources() == expected | {4: (None, False, False), 5: (None, True, False)}
    assert shop.cli("check")[0] == 0


@pytest.mark.spark
@pytest.mark.drawn
def test_repaired_rows_have_no_metadata(shop: Shop) -> None:
    assert _columns(shop, operation="_op")[0] == 0
    shop.table("one", "notes").update({"n": "9"}, predicate="id = 1")
    assert shop.cli("check", "--repair")[0] in {0, 1}
    assert _rows(shop)[1] == (1, None)
    assert _rows(shop)[2] == (2, "copy")
