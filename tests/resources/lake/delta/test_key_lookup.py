"""Look-ups of keys read only files that may contain them. The bounds of a file are true for every reader."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from pgsieve.decoding.changes.keys import SoughtKeys, find_equal_rows
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.key_lookup import (
    find_files_within,
    find_key_bounds,
    find_rows,
    find_single_value_files,
)
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.stores.store import Store

_DAY = dt.date(2000, 1, 1)
_TIME = dt.datetime(2000, 1, 1, 12, 0, 0, 1)  # noqa: DTZ001 - of a type without a zone
_AT = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)

#: By type: three growing keys, two keys of a file with a gap between them, and one key beyond.
KEYS = {
    "int": ([1, 2, 3], pa.int32()),
    "bigint": ([-(2**62), 0, 2**62], pa.int64()),
    "text": (["a", "b", "é\U0010ffff"], pa.string()),
    "uuid": ([f"{n}0000000-0000-0000-0000-000000000000" for n in "0af"], pa.string()),
    "long text": (["x" * 70 + "a", "x" * 70 + "b", "x" * 70 + "c"], pa.string()),
    "date": ([_DAY, _DAY + dt.timedelta(1), _DAY + dt.timedelta(2)], pa.date32()),
    "timestamp": (
        [_TIME, _TIME + dt.timedelta(milliseconds=2), _TIME + dt.timedelta(seconds=9)],
        pa.timestamp("us"),
    ),
    "instant": (
        [_AT, _AT + dt.timedelta(milliseconds=2), _AT + dt.timedelta(seconds=9)],
        pa.timestamp("us", "UTC"),
    ),
    "infinity": ([-(2**62), 2**61, 2**62], pa.timestamp("us", "UTC")),
    "bool": ([False, True, None], pa.bool_()),
    "bytes": ([b"", b"\x00", b"\xff"], pa.binary()),
}
#: Types without statistics.
READ_ALWAYS = {"long text", "infinity", "bool", "bytes"}


def _by_executors(path: Path, rows: pa.Table) -> None:
    files = [
        row for batch in write_files(str(path), rows.schema, rows.to_batches()) for row in batch.to_pylist()
    ]
    DeltaRsRecords().commit(str(path), rows.schema, files, Commit())


def _by_this_process(path: Path, rows: pa.Table) -> None:
    write_deltalake(str(path), rows, mode="append")


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("write", [_by_executors, _by_this_process])
def test_keys_are_looked_up_in_the_files_that_may_have_them(kind: str, write: object, tmp_path: Path) -> None:
    values, type_ = KEYS[kind]
    column = pa.array(values, type_)
    assert callable(write)
    for n in range(2):
        write(tmp_path, pa.table({"k": column[n : n + 1], "v": [n]}))
    for n, is_present in enumerate([True, True, False]):
        keys = pa.table({"k": column[n : n + 1]})
        numbers, rows = find_rows(DeltaTable(tmp_path), str(tmp_path), Store(), keys, keys.schema)
        assert numbers.tolist() == ([0] if is_present else [])
        assert rows.equals(keys.slice(0, len(numbers)))
        files = find_files_within(DeltaTable(tmp_path), find_key_bounds(keys))
        if write is _by_executors:
            assert len(files) == (2 if kind in READ_ALWAYS else int(is_present)), (n, files)
        # Another reader skips files by the same statistics.
        read = (
            QueryBuilder()
            .register("t", DeltaTable(tmp_path))
            .execute("select k from t order by v")
            .read_all()
        )
        assert (
            pa.table(read)["k"].cast(type_).to_pylist() == column[:2].to_pylist()
            if kind != "infinity"
            else True
        )


@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_looked_up_in_a_file_that_a_merge_has_rewritten(kind: str, tmp_path: Path) -> None:
    values, type_ = KEYS[kind]
    column, path, local = pa.array(values, type_), str(tmp_path), DeltaRsRecords()
    for added, number in ((column, 1), (column.slice(1), 2)):
        local.write(f"{path}/{number}", pa.table({"k": added, "v": [0] * len(added)}), Commit(1))
        source = {"k0": column[1:2], "v0": column[1:2], "v1": [1], "action": ["upsert"]}
        local.merge(
            f"{path}/{number}",
            pa.table(source),
            Merge.from_numbered_columns(["k"], ["k", "v"], ()),
            Commit(2, expected_version=0),
        )
        keys = pa.table({"k": column})
        schema = pa.schema({"k": type_, "v": pa.int64()})
        numbers, rows = local.find_rows(f"{path}/{number}", keys, schema)
        # NULL equals nothing.
        begin = len(column) - len(added)
        assert sorted(numbers.tolist()) == [n for n in range(begin, len(column)) if column[n].is_valid]
        assert rows.filter(pa.array(numbers == 1))["v"].to_pylist() == [1]


def test_keys_of_several_columns_are_looked_up_as_a_whole(tmp_path: Path) -> None:
    rows = pa.table({"b": ["x", "y"], "a": [1, 2], "c": [0, 0]})
    _by_executors(tmp_path, rows)
    keys = pa.table({"a": [1, 2, 1], "b": ["y", "y", "z"]})
    numbers, matches = find_rows(DeltaTable(tmp_path), str(tmp_path), Store(), keys, rows.schema)
    assert (numbers.tolist(), matches.to_pylist()) == ([1], [{"b": "y", "a": 2, "c": 0}])
    assert find_files_within(DeltaTable(tmp_path), find_key_bounds(pa.table({"a": [1], "b": ["z"]}))) == []


def test_a_truncated_bound_is_still_a_bound(tmp_path: Path) -> None:
    # Spark truncates times to milliseconds, also the greatest one.
    at = dt.datetime(2000, 1, 1, 12, 0, 0, 123_456, tzinfo=dt.UTC)
    _by_executors(tmp_path, pa.table({"k": pa.array([at], pa.timestamp("us", "UTC"))}))
    entry = tmp_path / "_delta_log" / f"{1:020d}.json"
    lines = [json.loads(line) for line in entry.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            assert json.loads(line["add"]["stats"])["maxValues"] == {"k": "2000-01-01T12:00:00.123456Z"}
            cut = {"numRecords": 1, "minValues": {"k": "2000-01-01T12:00:00.123Z"}}
            line["add"]["stats"] = json.dumps(cut | {"maxValues": cut["minValues"]})
    entry.write_text("\n".join(map(json.dumps, lines)))
    keys = pa.table({"k": pa.array([at], pa.timestamp("us", "UTC"))})
    assert find_rows(DeltaTable(tmp_path), str(tmp_path), Store(), keys, keys.schema)[0].tolist() == [0]


@pytest.mark.parametrize(
    ("kind", "held", "wanted"),
    [
        (pa.float64(), [0.0, float("nan"), 2.0], [3.0, -float("nan"), -0.0]),
        (pa.list_(pa.float64()), [[0.0], [], [2.0, None]], [[3.0], [], [-0.0]]),
    ],
)
def test_keys_that_postgresql_finds_equal_are_found(
    tmp_path: Path, kind: pa.DataType, held: list[object], wanted: list[object]
) -> None:
    path, keys = str(tmp_path / "t"), pa.table({"k": pa.array(wanted, kind)})
    _by_this_process(Path(path), pa.table({"k": pa.array(held, kind)}))
    numbers, rows = find_rows(DeltaTable(path), path, Store(), keys, keys.schema)
    assert (sorted(numbers.tolist()), rows.num_rows) == ([1, 2], 2)


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (pa.array([5, 1, 9, 7, 5]), pa.array([7, 5, 4])),
        (pa.array([5, None, 9], pa.int32()), pa.array([9, 2], pa.int32())),
        (pa.array([-(2**63), 0, 2**63 - 1]), pa.array([2**63 - 1, -(2**63)])),
        (pa.array([0, 2**63 - 1, -(2**63)]), pa.array([0, 1])),
        (pa.array([2**63 - 1, -(2**63), 2 - 2**63, 1 - 2**63]), pa.array([-(2**63), 2 - 2**63])),
        (pa.array([-(2**63), 2**63 - 1, 2**63 - 3, 2**63 - 2]), pa.array([2**63 - 1, 2**63 - 3])),
        (pa.array([-(2**63), 2**63 - 1, 2 - 2**63, 1 - 2**63]), pa.array([1 - 2**63, 3 - 2**63])),
        (pa.array(range(100, 140)), pa.array([10**9, 139, -(10**9), 100, 120])),
        (pa.array([-(2**63), 3 - 2**63, -(2**63)]), pa.array([2**63 - 1, 3 - 2**63, -(2**63)])),
        (pa.array([2**63 - 1, 2**63 - 4]), pa.array([2**63 - 1, -(2**63), 2**63 - 3])),
        (pa.array([5, -5]), pa.array([10**9, -(10**9)])),
        (pa.array(["b", None, "a", "b"]), pa.array(["a", "b", None])),
        (pa.array([1, 2], pa.timestamp("us", "UTC")), pa.array([2, 3], pa.timestamp("us", "UTC"))),
        (pa.array([0.0, None, float("nan")]), pa.array([-0.0, float("nan")])),
        (pa.array([[0.0], None, [], [1.0, None]]), pa.array([[1.0, None], [-0.0], None, [2.0]])),
        (pa.array([True, None, False]), pa.array([False])),
        (pa.array([b"b", None, b""]), pa.array([b"", b"b", b"a"])),
        (pa.array([Decimal("1.50"), None, Decimal("2.00")]), pa.array([Decimal("2.00"), Decimal("1.51")])),
        (pa.array([1, 2]), pa.array([], pa.int64())),
    ],
    ids=str,
)
def test_keys_of_one_column_are_found_as_a_join_finds_them(rows: pa.Array, keys: pa.Array) -> None:
    both = pa.table({"k0": rows}), pa.table({"k0": keys})
    expected = sorted(zip(*(each.tolist() for each in find_equal_rows(*both)), strict=True))
    row, key = SoughtKeys.from_keys(both[1]).find_rows(both[0])
    assert list(zip(row.tolist(), key.tolist(), strict=True)) == expected


@pytest.mark.parametrize("distance", [1, 1000, 10**7], ids=lambda distance: f"{distance} apart")
def test_keys_are_found_in_many_rows(distance: int) -> None:
    """The rows are more than are looked up at a time, in several batches. The keys are dense or sparse."""
    integers = np.random.default_rng(distance).permutation(300_000)
    keys = np.arange(0, 300 * distance, distance, dtype=np.int64)[::-1]
    rows = pa.table({"k": pa.chunked_array(np.split(integers, [200_000, 200_000, 210_000]))})
    row, key = SoughtKeys.from_keys(pa.table({"k": keys})).find_rows(rows)
    assert integers[row].tolist() == keys[key].tolist()
    assert row.tolist() == np.flatnonzero(np.isin(integers, keys)).tolist()


def test_numbers_far_from_the_keys_are_no_keys() -> None:
    sought = SoughtKeys.from_keys(pa.table({"k": pa.array([10, 12], pa.int64())}))
    row, key = sought.find_rows(
        pa.table({"k": pa.array([-(2**63), 12, 9, 10, 11, 13, 2**63 - 1], pa.int64())})
    )
    assert (row.tolist(), key.tolist()) == ([1, 3], [1, 0])
    row, key = sought.find_rows(pa.table({"k": pa.array([12, 10], pa.int64())}))
    assert (row.tolist(), key.tolist()) == ([0, 1], [1, 0])


def test_statistics_name_the_files_with_one_value(tmp_path: Path) -> None:
    for values in ([5, 5], [5, 6], [None, None], [7, None], [8]):
        _by_executors(tmp_path, pa.table({"n": pa.array(values, pa.int64())}))
    table = DeltaTable(tmp_path)
    names = find_single_value_files(table, "n")
    paths = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert sorted(file["min.n"] for file in paths if file["path"] in names) == [5, 8]
    assert find_single_value_files(table, "none") == set()
