"""Soft deletes are enabled and disabled for existing replicas. `check` compares the living rows; `--repair` keeps the others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.checks.conformity import check_conformity
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from tests.fixtures.shop import Shop


def _deletes(shop: Shop, **layout: Any) -> tuple[int, str]:
    shop.written["subscriptions"]["one"]["layout"] = layout
    shop.configure()
    return shop.cli("run")


def _rows(shop: Shop) -> dict[int, tuple[Any, ...]]:
    """The notes by id: the number, whether the row is deleted or left the filter, and whether it has a time."""
    return _by_id(shop.table("one", "notes").to_pyarrow_table().to_pylist())


def _by_id(rows: Iterable[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {
        row["id"]: (row["n"], row["_deleted"], row["_filtered"], row["_deleted_at"] is not None)
        for row in rows
    }


@pytest.mark.drawn
@pytest.mark.spark
def test_deleted_rows_stay_once_soft_deletes_are_enabled(shop: Shop) -> None:
    """It may take long: many commands with runs of the whole graph, and Spark rewrites the replica."""
    assert shop.cli("run")[0] == 0
    assert _deletes(shop, deletes="soft")[0] == 0
    assert _rows(shop) == {i: (i, False, False, False) for i in range(1, 5)}, "existing rows are living"
    code, picture = shop.cli("validate")
    assert code == 0
    assert "deletes: soft, the row stays, marked as deleted" in picture

    shop.database.execute("delete from notes where id = 1; update notes set id = 20 where id = 2")
    assert shop.cli("run")[0] == 0
    gone = {1: (1, True, False, True), 2: (2, True, False, True)}
    lives = {i: (n, False, False, False) for i, n in ((3, 3), (4, 4), (20, 2))}
    assert _rows(shop) == gone | lives
    assert shop.cli("check")[0] == 0, "check compares the living rows"
    shop.database.execute("insert into notes values (1, 10); alter table notes add t text default 'd'")
    assert shop.cli("run")[0] == 0
    assert _rows(shop) == {2: gone[2]} | lives | {1: (10, False, False, False)}, (
        "ALTER TABLE keeps deleted rows"
    )
    assert shop.cli("check")[0] == 0, "check also compares columns of text"
    shop.database.execute("truncate notes")
    assert shop.cli("run")[0] == 0
    assert {key: row[1:] for key, row in _rows(shop).items()} == dict.fromkeys(
        (1, 2, 3, 4, 20), (True, False, True)
    )

    assert _deletes(shop)[0] == 0
    assert shop.table("one", "notes").schema().to_arrow().names == ["id", "n", "t"]
    assert shop.ids("one", "notes") == [], "without soft deletes the table is copied again"


def test_the_feed_has_a_row_that_a_truncate_ends_in_the_batch_of_its_insert_as_inserted(shop: Shop) -> None:
    """Only a row that was there before is updated. Threads write the feed. No JVM."""
    settings = {"spark.pgsieve.smallBytes": "-1"}
    shop.configure(spark={"master": "threads[2]", "engine": "off", "conf": settings})
    layout = {"deletes": "soft", "properties": {"delta.enableChangeDataFeed": True}}
    assert _deletes(shop, **layout)[0] == 0
    shop.database.execute(
        "begin; insert into notes values (9, 9); truncate notes; insert into notes values (3, 30), (8, 8); commit"
    )
    assert shop.cli("run")[0] == 0
    replica = shop.table("one", "notes")
    feed = pa.table(replica.load_cdf(replica.version()).read_all()).to_pylist()
    ids: dict[str, list[int]] = {}
    for row in sorted(feed, key=lambda row: int(row["id"])):
        ids.setdefault(row["_change_type"], []).append(row["id"])
    living = [1, 2, 3, 4]
    assert ids == {"update_preimage": living, "update_postimage": living, "insert": [8, 9]}


def test_reads_at_any_moment_have_the_replicas_deleted_rows(shop: Shop, tmp_path: Path) -> None:
    """The moments are between two cuts. No JVM."""

    def at() -> str:
        row = shop.database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return str(row[0])

    assert _deletes(shop, deletes="soft")[0] == 0
    shop.database.execute("delete from notes where id in (1, 2); update notes set id = 5 where id = 3")
    first = at()
    shop.database.execute("insert into notes values (1, 10)")
    shop.database.execute("truncate notes")
    second = at()
    shop.database.execute("insert into notes values (2, 20)")
    assert shop.cli("run")[0] == 0
    lives, gone = (False, False, False), (True, False, True)
    ended = {i: (i, *gone) for i in (1, 2, 3)}
    expected = {
        first: ended | {4: (4, *lives), 5: (3, *lives)},
        second: ended | {1: (10, *gone), 4: (4, *gone), 5: (3, *gone)},
    }
    for lsn, rows in expected.items():
        code, printed = shop.cli("read", "one", "public.notes", "--at", lsn, "--json")
        assert code == 0, printed
        assert _by_id(json.loads(line) for line in printed.splitlines()) == rows
        folder = tmp_path / lsn.replace("/", "-")
        assert shop.cli("restore", "one", str(folder), "--at", lsn)[0] == 0
        assert _by_id(DeltaTable(str(folder / "one/public/notes")).to_pyarrow_table().to_pylist()) == rows


def test_row_filters_are_checked_on_living_rows(shop: Shop) -> None:
    assert _deletes(shop, deletes="soft")[0] == 0
    shop.database.execute("delete from orders where id = 2")
    shop.database.execute("alter publication p set table orders where (id > 2), notes")
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [2, 3, 4]
    subscription = build_project(load_config(shop.path)).subscriptions["one"]
    conformity = check_conformity(subscription, shop.lake, ("public", "orders"))
    assert (conformity.rows, conformity.failing, conformity.problem) == (2, 0, None)


@pytest.mark.drawn
@pytest.mark.spark
def test_repair_marks_rows_and_brings_them_back(shop: Shop) -> None:
    """It may take long: several commands."""
    assert _deletes(shop, deletes="soft")[0] == 0
    shop.database.execute("delete from notes where id = 4")
    assert shop.cli("run")[0] == 0
    notes = shop.table("one", "notes")
    notes.update({"_deleted": "true"}, predicate="id = 1")
    notes.update({"id": "9"}, predicate="id = 2")
    assert shop.cli("check")[0] == 1
    assert shop.cli("check", "--repair")[0] in {0, 1}
    assert shop.cli("check")[0] == 0
    assert {key: row[1] for key, row in _rows(shop).items()} == {
        1: False,
        2: False,
        3: False,
        4: True,
        9: True,
    }


def test_soft_deletes_are_refused_without_a_key(shop: Shop) -> None:
    shop.database.execute("create table plain (a int); alter table plain replica identity full")
    shop.database.execute("alter publication p add table plain; insert into plain values (1)")
    code, output = _deletes(shop, deletes="soft")
    assert code == 1
    assert 'table "public.plain" has no key' in " ".join(output.split())
    assert len(_rows(shop)) == 4, "the other tables continue"
    assert _deletes(shop, deletes="soft", tables={"public.plain": {"deletes": "hard"}})[0] == 0
    shop.database.execute("delete from plain; delete from notes where id = 1")
    assert shop.cli("run")[0] == 0
    assert shop.table("one", "plain").to_pyarrow_table().num_rows == 0
    assert _rows(shop)[1] == (1, True, False, True)
    code, output = _deletes(shop, columns={"deleted": "gone"})
    assert code == 2
    assert "`deletes: soft`" in " ".join(output.split())
