"""Rows that this process marks as deleted are gone for every reader, whoever else writes to the table and marks rows there."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.deletion_vectors import UnmarkableError
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.errors import OverrunError
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import quoted
from pgsieve.resources.lake.delta.row_removal import added_files, enable_marking, mark_rows
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.way import Way
from tests.fixtures.pgsieve_replica import engine

_ROWS = pa.schema({"id": pa.int64(), "n": pa.int64()})


def no_session() -> SparkSession:
    raise AssertionError("no session is needed here")


def table_of(path: str, keys: range, files: int = 3) -> LocalRecords:
    """A table in which rows may be marked; `n` is twice `id`."""
    local = LocalRecords()
    for number in range(files):
        ids = list(keys)[number::files]
        local.write(path, pa.table({"id": ids, "n": [2 * each for each in ids]}, _ROWS), number + 1)
    enable_marking(local, path)
    return local


def mark(
    local: LocalRecords, path: str, keys: list[int], position: int, rows: dict[int, int] | None = None
) -> None:
    """Mark the rows of some keys, and add others, in one commit."""
    base = local.version(path)
    matches = local.matches(
        path, pa.table({"id": pa.array(keys, pa.int64())}), [np.ones(len(keys), bool)], None
    )
    assert matches is not None
    added = added_files(local, path, matches, base)
    new = pa.table({"id": list(rows or {}), "n": list((rows or {}).values())}, _ROWS)
    files = [f for batch in write_files(path, _ROWS, new.to_batches()) for f in batch.to_pylist()]
    mark_rows(local, path, zip(matches, added, strict=True), files, position, base)


def rows_of(path: str) -> dict[int, int]:
    """What delta-rs reads of a table that nobody holds open."""
    rows = LocalRecords().table(path)
    assert len(set(rows["id"].to_pylist())) == rows.num_rows
    return dict(zip(rows["id"].to_pylist(), rows["n"].to_pylist(), strict=True))


def test_marked_rows_are_gone_and_the_position_is_reached_once(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    local = table_of(path, range(30))
    mark(local, path, [1, 2, 29, 1000], 10, {2: -2, 40: 80})
    expected = {n: 2 * n for n in range(30) if n not in {1, 29}} | {2: -2, 40: 80}
    assert rows_of(path) == expected
    version = local.version(path)
    assert local.position(path) == 10
    mark(local, path, [3], 10)
    assert (local.version(path), rows_of(path)) == (version, expected)
    mark(local, path, [2, 3], 11)
    assert rows_of(path) == {k: v for k, v in expected.items() if k not in {2, 3}}


def test_each_version_is_read_without_spark(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    local, expected = table_of(path, range(12)), {}
    for position, key in enumerate((3, 4, 5), 10):
        mark(local, path, [key], position)
        expected[local.version(path)] = {n for n in range(12) if not 3 <= n <= key}
    lake = Lake(str(tmp_path), no_session)
    assert lake.way_to_read(path) is Way.IN_PROCESS
    for version, keys in expected.items():
        batches = local.batches(path, version)
        assert sorted(n for batch in batches for n in batch.column("id").to_pylist()) == sorted(keys)


@pytest.mark.parametrize("how", ["overwrite", "merge", "delete"])
def test_delta_rs_writes_where_rows_are_marked(tmp_path: Path, how: str) -> None:
    path = str(tmp_path / "t")
    local, held = table_of(path, range(9)), {n: 2 * n for n in range(9) if n != 1}
    mark(local, path, [1], 10)
    table, rows = DeltaTable(path), pa.table({"id": [4], "n": [-4]}, _ROWS)
    match how:
        case "overwrite":
            local.write(path, rows, 11, overwrite=True)
            held = {4: -4}
        case "merge":
            merger = table.merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
            merger.when_matched_update({"n": "s.n"}).execute()
            held[4] = -4
        case "delete":
            table.delete("id = 4")
            del held[4]
    assert rows_of(path) == held
    mark(local, path, sorted(held), 12)
    assert rows_of(path) == {}


def test_a_file_of_which_all_rows_go_leaves_the_table(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    local = table_of(path, range(9))
    mark(local, path, [0, 3], 10)
    mark(local, path, [6, 1], 11)
    assert len(local.table_at(path).file_uris()) == 2
    assert rows_of(path) == {n: 2 * n for n in (2, 4, 5, 7, 8)}
    assert len(list((tmp_path / "t").glob("deletion_vector_*.bin"))) == 2


def test_who_was_slower_marks_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    local, other = table_of(path, range(9)), LocalRecords()
    base = local.version(path)
    key = pa.table({"id": [4]})
    matches = local.matches(path, key, [np.ones(1, bool)], None)
    assert matches
    added = added_files(local, path, matches, base)
    write_deltalake(path, pa.table({"id": [100], "n": [200]}, _ROWS), mode="append")
    with pytest.raises(OverrunError):
        mark_rows(local, path, zip(matches, added, strict=True), [], 10, base)
    # Also where the entry of the log comes only after the look at it.
    mark(other, path, [4], 11)
    with pytest.raises(OverrunError):
        mark_rows(local, path, zip(matches, added, strict=True), [], 12, base)
    assert rows_of(path) == {n: 2 * n for n in [*range(9), 100] if n != 4}
    assert not list((tmp_path / "t" / "_delta_log").glob("*.tmp"))


def test_a_log_that_does_not_tell_how_a_file_was_added_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    local = table_of(path, range(9))
    matches = local.matches(path, pa.table({"id": [4]}), [np.ones(1, bool)], None)
    assert matches
    (tmp_path / "t" / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(UnmarkableError):
        added_files(
            local, path, [*matches, matches[0].__class__("other.parquet", "", 0, *[np.empty(0, int)] * 3)], 3
        )


def test_features_are_no_more_than_a_writer_needs(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    local = table_of(path, range(3))
    protocol = local.table_at(path).protocol()
    assert set(protocol.reader_features or ()) == {"deletionVectors"}
    assert set(protocol.writer_features or ()) == {"appendOnly", "deletionVectors", "invariants"}
    assert local.has_deletion_vectors(path)
    assert local.position(path) == 3


@pytest.mark.spark
@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_spark_and_this_process_mark_rows_in_turns(tmp_path: Path, seed: int) -> None:
    path, spark, draw = str(tmp_path / "t"), engine().session, random.Random(seed)
    name = f"delta.{quoted(path)}"
    local, held = table_of(path, range(60)), {n: 2 * n for n in range(60)}
    spark.sql(f"alter table {name} set tblproperties ('delta.checkpointInterval' = '4')")
    for turn in range(12):
        keys = draw.sample(sorted(held), 3)
        match draw.choice(["mark", "mark", "delete", "update", "compact", "checkpoint"]):
            case "mark":
                mark(local, path, keys, 100 + turn, {keys[0]: turn, 1000 + turn: turn})
                held = {k: v for k, v in held.items() if k not in keys} | {keys[0]: turn, 1000 + turn: turn}
            case "delete":
                spark.sql(f"delete from {name} where id in ({keys[0]}, {keys[1]})")
                held = {k: v for k, v in held.items() if k not in keys[:2]}
            case "update":
                spark.sql(f"update {name} set n = {turn} where id = {keys[0]}")
                held[keys[0]] = turn
            case "compact":
                spark.sql(f"optimize {name}")
            case "checkpoint":
                DeltaTable(path).create_checkpoint()
        by_spark = {row["id"]: row["n"] for row in spark.read.format("delta").load(path).collect()}
        assert (by_spark, rows_of(path)) == (held, held), f"turn {turn}"
    assert spark.sql(f"select count(*) from {name}").collect()[0][0] == len(held)


def test_a_folder_without_hard_links_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "t")
    local = table_of(path, range(9))
    matches = local.matches(path, pa.table({"id": [4]}), [np.ones(1, bool)], None)
    assert matches

    def refuses(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    with pytest.raises(UnmarkableError, match="Operation not permitted"):
        added_files(local, path, matches, local.version(path))
    assert not list((tmp_path / "t" / "_delta_log").glob("*.tmp"))
