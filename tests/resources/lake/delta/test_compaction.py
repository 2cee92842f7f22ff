"""OPTIMIZE keeps the rows of a table, whatever other processes write at the same moment. Only Spark's cases need a JVM.

delta-rs' own OPTIMIZE does not: if two run at the same version, both are committed, and every row exists twice.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, QueryBuilder, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from tenacity import retry, retry_if_exception_type

from pgsieve.resources.lake.delta import compaction
from pgsieve.resources.lake.delta.compaction import cluster_files, compact
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import OvertakenError, retry_after_conflict
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit, quote_name
from pgsieve.resources.lake.delta.row_removal import can_rewrite_files
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.pgsieve_replica import engine

Meanwhile = Callable[[str], object]

_FILES = 6
_WAYS = {
    "compact": compact,
    "cluster": lambda local, path: cluster_files(local, path, ["slice", "half"]),
}


def other_process() -> DeltaRsRecords:
    """The tables of another process, which opened them itself."""
    return DeltaRsRecords(tables=Tables(Store()))


def rows(*values: int) -> pa.Table:
    return pa.table({"slice": pa.array(values, pa.int64()), "half": [value / 2 for value in values]})


def written(path: str) -> str:
    """A table with one file per row."""
    for value in range(_FILES):
        other_process().write(path, rows(value), Commit(value + 1))
    return path


def replaced(local: DeltaRsRecords, path: str, gone: int, come: int) -> None:
    """Replace a row, and its file, by another."""
    assert can_rewrite_files(local, path, rows().column_names)
    matches = local.find_key_matches(path, rows(gone).select(["slice"]), [np.ones(1, np.bool_)], 2**40)
    assert matches is not None
    files = write_files(
        path, rows(come).schema, rows(come).to_batches(), store=local.store, target_bytes=2**20
    )
    added = [each for file in files for each in file.to_pylist()]
    removed = {match.log_path: match.size_bytes for match in matches}
    local.commit(
        path,
        rows(come).schema,
        added,
        Commit(9, expected_version=local.version(path)),
        removed_size_by_path=removed,
    )


def values(path: str) -> list[int]:
    return sorted(DeltaRsRecords().read_all_rows(path)["slice"].to_pylist())


def spark(path: str, statement: str) -> None:
    engine().session.sql(statement.format(f"delta.{quote_name(path)}")).collect()


_MEANWHILE: dict[str, tuple[Meanwhile, bool]] = {
    "nothing": (lambda _: None, True),
    "it is compacted": (lambda path: compact(other_process(), path), False),
    "it is clustered": (lambda path: cluster_files(other_process(), path, ["slice"]), False),
    "delta-rs compacts it": (lambda path: DeltaTable(path).optimize.compact(), False),
    "rows are appended": (lambda path: other_process().write(path, rows(7, 8), Commit(7)), True),
    "rows are replaced": (lambda path: replaced(other_process(), path, 3, 33), False),
    "rows are deleted": (lambda path: DeltaTable(path).delete("slice < 2"), False),
    "rows are overwritten": (
        lambda path: other_process().write(path, rows(9), Commit(9, overwrite=True)),
        False,
    ),
    "it gets a column": (
        lambda path: write_deltalake(
            path, rows(7).append_column("new", pa.array([1])), mode="append", schema_mode="merge"
        ),
        True,
    ),
    "it is described": (
        lambda path: other_process().set_comments(path, "rows", {"slice": "of the log"}),
        True,
    ),
}
_BY_SPARK: dict[str, tuple[Meanwhile, bool]] = {
    "Spark compacts it": (lambda path: spark(path, "optimize {0}"), False),
    "Spark marks rows as deleted": (
        lambda path: (
            spark(path, "alter table {0} set tblproperties (delta.enableDeletionVectors = true)"),
            spark(path, "optimize {0}"),
            spark(path, "delete from {0} where slice = 3"),
        ),
        False,
    ),
    "Spark goes back": (lambda path: spark(path, "restore {0} to version as of 2"), False),
}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("meanwhile", "goes_on"),
    [
        *(pytest.param(*case, id=name) for name, case in _MEANWHILE.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.spark) for name, case in _BY_SPARK.items()),
    ],
)
@pytest.mark.parametrize("way", _WAYS)
def test_a_commit_of_another_process_during_a_compaction_is_neither_lost_nor_doubled(
    way: str, meanwhile: Meanwhile, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's cases take long: Spark starts, and compacts while others write."""
    path, alone = written(str(tmp_path / "t")), written(str(tmp_path / "alone"))
    meanwhile(alone)
    write_files = compaction.write_files

    def written_slowly(*of: object, **more: object) -> Iterator[pa.RecordBatch]:
        yield from write_files(*of, **more)  # type: ignore[arg-type]
        monkeypatch.setattr(compaction, "write_files", write_files)
        meanwhile(path)

    monkeypatch.setattr(compaction, "write_files", written_slowly)
    with contextlib.nullcontext() if goes_on else pytest.raises(OvertakenError):
        assert _WAYS[way](other_process(), path) == _FILES - 1
    assert values(path) == values(alone)
    assert other_process().position(path) == other_process().position(alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_compactions_and_writers_leave_the_written_rows(tmp_path: Path, seed: int) -> None:
    path, drawn = written(str(tmp_path / "t")), random.Random(seed)

    def tend(number: int) -> None:
        for _ in range(8):
            way = drawn.choice(list(_WAYS))
            with contextlib.suppress(OvertakenError):
                retry_after_conflict(lambda way=way: _WAYS[way](other_process(), path))()

    def append() -> None:
        for value in range(_FILES, _FILES + 30):
            retry_after_conflict(
                lambda value=value: other_process().write(path, rows(value), Commit(value + 1))
            )()

    def delete() -> None:
        # Another engine's DELETE fails if a writer commits first, so it is repeated until it succeeds.
        until_it_wins = retry(retry=retry_if_exception_type(CommitFailedError))
        for value in range(0, _FILES, 2):
            until_it_wins(lambda value=value: DeltaTable(path).delete(f"slice = {value}"))()

    with ThreadPoolExecutor(5) as pool:
        for done in [*(pool.submit(tend, i) for i in range(3)), pool.submit(append), pool.submit(delete)]:
            done.result()
    assert values(path) == [*range(1, _FILES, 2), *range(_FILES, _FILES + 30)]
    assert other_process().position(path) == _FILES + 30


_PROCESS = """
import sys
from pgsieve.resources.lake.delta.compaction import compact
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import retry_after_conflict
print("ready", flush=True)
for line in sys.stdin:
    retry_after_conflict(lambda: compact(DeltaRsRecords(), line.strip()))()
    print("done", flush=True)
"""


@pytest.mark.drawn
def test_two_processes_compact_at_the_same_moment(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for number in range(10):
            path = written(str(tmp_path / str(number)))
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(f"{path}\n")
                process.stdin.flush()
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "done\n"
            assert values(path) == list(range(_FILES))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_delta_rs_still_doubles_rows_by_itself(tmp_path: Path) -> None:
    """If this test fails, delta-rs has corrected its OPTIMIZE, and pgsieve may use it again."""
    path = written(str(tmp_path / "t"))
    first, second = DeltaTable(path), DeltaTable(path)
    first.optimize.compact()
    with contextlib.suppress(DeltaError):
        second.optimize.compact()
    assert len(values(path)) == 2 * _FILES


#: By type, an expression of PostgreSQL for its values, and an expression that Delta's statistics can answer.
_COLUMNS = {
    "number": pa.array([1, None, -(2**63), 2**63 - 1], pa.int64()),
    "amount": pa.array(
        [decimal.Decimal(x) if x else None for x in ("1.50", None, "-" + "9" * 14, "9" * 36 + ".01")],
        pa.decimal128(38, 2),
    ),
    "text": ["a", None, "é" * 100, '"\\'],
    "day": pa.array([0, None, -(10**6), 2_145_042_905], pa.int32()).cast(pa.date32()),
    "at": pa.array([0, None, -1, 10**15], pa.timestamp("us", "UTC")),
    "local": pa.array([0, None, -1, 10**15], pa.timestamp("us")),
    "real": [1.5, None, float("nan"), float("-inf")],
    "bytes": [b"\0", None, b"", b"\xff"],
    "yes": [True, None, False, True],
    "list": pa.array([[1, None], None, [], [2]], pa.list_(pa.int64())),
    "row": pa.array([{"a": 1, "b": None}, None, {"a": None, "b": "x"}, {"a": 2, "b": "y"}]),
}


@pytest.mark.parametrize("way", ["compact", "cluster"])
def test_every_type_is_unchanged_also_in_files_older_than_a_column(tmp_path: Path, way: str) -> None:
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    table = pa.table(_COLUMNS)
    columns = table.column_names
    for i in range(table.num_rows):
        # The first files have fewer columns and fewer fields.
        row = table.slice(i, 1)
        if i == 0:
            row = row.select(columns[:-1]).append_column("row", pa.array([{"a": 1}]))
        local.write(path, row.combine_chunks(), Commit(i + 1))
    before = _printed(local, path)
    if way == "compact":
        compact(local, path)
    else:
        cluster_files(local, path, ["amount", "day", "text"])
    assert _printed(local, path) == before
    (added,) = [json.loads(line)["add"] for line in _newest_entry(path) if '"add"' in line]
    assert added["dataChange"] is False
    statistics = json.loads(added["stats"], parse_float=decimal.Decimal)
    assert statistics["numRecords"] == 4
    assert statistics["nullCount"] == {
        name: table[name].null_count for name in columns if name not in {"list", "row", "real"}
    }
    bounds = {
        name: (statistics["minValues"][name], statistics["maxValues"][name]) for name in ("amount", "number")
    }
    assert bounds["number"] == (-(2**63), 2**63 - 1)
    assert bounds["amount"] == (decimal.Decimal("-" + "9" * 14), decimal.Decimal("9" * 36 + ".01"))
    files = (
        QueryBuilder()
        .register("t", DeltaTable(path))
        .execute("select amount from t where amount > cast('2' as decimal(38, 2))")
    )
    assert pa.table(files.read_all()).num_rows == 1


def _printed(local: DeltaRsRecords, path: str) -> list[str]:
    """The rows as text, in which NaN equals NaN. Python has no dates that late."""
    rows = local.read_all_rows(path)
    days = rows["day"].cast(pa.int32())
    return sorted(map(str, rows.set_column(rows.column_names.index("day"), "day", days).to_pylist()))


def _newest_entry(path: str) -> list[str]:
    return max(Path(path, "_delta_log").glob("*.json")).read_text().splitlines()


def test_readers_that_use_bounds_find_every_row(tmp_path: Path) -> None:
    """First files of one row each, then one file of all. Each condition finds the same rows, with bounds or without."""
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    amounts = [decimal.Decimal(n).scaleb(-2) for n in (-1000, -1, 0, 1, 99, 100, 1000, 10**17)]
    days = [dt.date(2020, 1, 1) + dt.timedelta(n) for n in range(len(amounts))]
    rows = pa.table({"amount": pa.array(amounts, pa.decimal128(20, 2)), "day": days})
    for i in range(len(amounts)):
        local.write(path, rows.slice(i, 1), Commit(i + 1, properties={"delta.targetFileSize": "1"}))
    cluster_files(local, path, ["amount"])
    assert DeltaTable(path).get_add_actions().num_rows > 1
    for amount, day in zip(amounts, days, strict=True):
        for condition in (f"amount = cast('{amount}' as decimal(20, 2))", f"day = date '{day}'"):
            query = (
                QueryBuilder().register("t", DeltaTable(path)).execute(f"select * from t where {condition}")
            )
            assert pa.table(query.read_all()).to_pylist() == [{"amount": amount, "day": day}]


def test_small_files_become_one_row_group_and_large_ones_stay(tmp_path: Path) -> None:
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    large = pa.table({"t": [f"{i * 7919 % 10007:06d}" * 5 for i in range(2000)]})
    local.write(path, large, Commit(1))
    local.set_properties(path, {"delta.targetFileSize": "8192"})
    stays = DeltaTable(path).file_uris()
    for i in range(8):
        local.write(path, large.slice(i, 1), Commit(i + 2))
    assert compact(local, path) == 7
    (made,) = set(DeltaTable(path).file_uris()) - set(stays)
    assert set(stays) < set(DeltaTable(path).file_uris())
    assert pq.ParquetFile(made).num_row_groups == 1
    version = DeltaTable(path).version()
    assert compact(local, path) == 0
    assert DeltaTable(path).version() == version


def test_an_empty_table_is_unchanged(tmp_path: Path) -> None:
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    DeltaTable.create(path, rows().schema)
    assert compact(local, path) == cluster_files(local, path, ["slice"]) == 0
    assert DeltaTable(path).version() == 0


@pytest.mark.parametrize("name", ["a b", "a%20b", "ä#?", "a+b=c"])
@pytest.mark.parametrize(
    "way", [*_WAYS.values(), lambda local, path: replaced(local, path, 0, 0)], ids=[*_WAYS, "replaced"]
)
def test_a_file_of_any_name_is_replaced(
    tmp_path: Path, name: str, way: Callable[[DeltaRsRecords, str], object]
) -> None:
    path = written(str(tmp_path / "table"))
    _rename_first(Path(path), name, quote(name, safe="+="))
    way(other_process(), path)
    assert values(path) == list(range(_FILES))


@pytest.mark.parametrize("way", _WAYS.values(), ids=[*_WAYS])
def test_a_file_that_delta_rs_cannot_name_stays(
    tmp_path: Path, way: Callable[[DeltaRsRecords, str], object]
) -> None:
    path = written(str(tmp_path / "table"))
    _rename_first(Path(path), "a+b", "a%2Bb")
    way(other_process(), path)
    assert values(path) == list(range(_FILES))
    assert not can_rewrite_files(DeltaRsRecords(), path, rows().column_names)


def _rename_first(table: Path, name: str, logged: str) -> None:
    """Rename a file as another writer may name it: in its folder and in the log."""
    for log in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        for add in (action["add"] for action in actions if "add" in action):
            (table / add["path"]).rename(table / f"{name}.parquet")
            add["path"] = f"{logged}.parquet"
            log.write_text("\n".join(map(json.dumps, actions)) + "\n")
            return


def test_a_partitioned_table_is_left_to_other_writers(tmp_path: Path) -> None:
    """Files of a partitioned table lack columns, so rows would be rewritten without them."""
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    for value in range(2):
        write_deltalake(path, rows(value), partition_by=["slice"], mode="append")
    assert not local.is_readable(path)
    with pytest.raises(OvertakenError):
        compact(local, path)
    assert values(path) == [0, 1]


def test_rows_are_not_replaced_if_a_user_added_a_column(tmp_path: Path) -> None:
    path = written(str(tmp_path / "t"))
    table = DeltaTable(path)
    table.alter.add_columns([Field("mine", "string")])
    assert not can_rewrite_files(DeltaRsRecords(), path, rows().column_names)
