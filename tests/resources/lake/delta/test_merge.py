"""One description of a MERGE gives SQL for Spark and clauses for delta-rs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.merge import Merge, make_clauses_without_key
from pgsieve.resources.lake.delta.records import Commit, quote_name

MERGE = Merge({"id": "k0"}, {"id": "v0", "a`b": "v1"})


def test_spark_gets_the_clauses_as_sql() -> None:
    assert MERGE.make_clauses(quote_name).format_statement("x", "y") == (
        "merge into x t using y s on t.`id` = s.k0"
        " when matched and s.action = 'delete' then delete"
        " when matched then update set t.`id` = s.v0, t.`a``b` = s.v1"
        " when not matched and s.action = 'upsert' then insert (`id`, `a``b`) values (s.v0, s.v1)"
    )


def test_without_a_key_every_matched_row_is_deleted() -> None:
    assert make_clauses_without_key("t.`a` <=> s.row.`a`", ["a"]).format_statement("x", "y") == (
        "merge into x t using y s on s.action = 'delete' and t.`a` <=> s.row.`a`"
        " when matched then delete"
        " when not matched and s.action = 'insert' then insert (`a`) values (s.row.`a`)"
    )


def test_delta_rs_merges_by_the_same_clauses(tmp_path: Path) -> None:
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    local.write(path, pa.table({"id": [1, 2, 3, 4], "a`b": ["w", "x", "y", "z"]}), Commit(10))
    source = pa.table(
        {
            "k0": [1, 3, 5, 6],
            "v0": [None, 7, 5, None],
            "v1": [None, "new", "come", None],
            "action": ["delete", "upsert", "upsert", "delete"],
        }
    )
    local.merge(path, source, MERGE, Commit(20, expected_version=local.version(path)))
    rows = sorted((row["id"], row["a`b"]) for row in local.rows(path))
    assert rows == [(2, "x"), (4, "z"), (5, "come"), (7, "new")]
    assert local.position(path) == 20


def test_an_ended_row_gets_only_some_columns(tmp_path: Path) -> None:
    merge = Merge({"id": "k0"}, {"id": "v0", "a": "v1", "gone": "v2"}, ended_columns=["gone"])
    assert " when matched and s.action = 'end' then update set t.`gone` = s.v2 when matched then update" in (
        merge.make_clauses(quote_name).format_statement("x", "y")
    )
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    local.write(path, pa.table({"id": [1, 2], "a": ["w", "x"], "gone": [False, True]}), Commit(10))
    source = pa.table(
        {
            "k0": [1, 2, 3],
            "v0": [None, 2, 3],
            "v1": [None, "again", "came and went"],
            "v2": [True, False, True],
            "action": ["end", "upsert", "upsert"],
        }
    )
    local.merge(path, source, merge, Commit(20, expected_version=local.version(path)))
    rows = sorted((row["id"], row["a"], row["gone"]) for row in local.rows(path))
    assert rows == [(1, "w", True), (2, "again", False), (3, "came and went", True)]
