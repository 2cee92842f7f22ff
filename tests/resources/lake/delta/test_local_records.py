"""Small writes to a lake in a folder while others write: no row is written twice, and an overwrite leaves no former row."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from pgsieve.resources.lake.delta import commits
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import OvertakenError, find_missing_file
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit, TableHead
from pgsieve.resources.lake.delta.tables import Tables
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.background import always
from tests.fixtures.lakes import find_slices

Write = Callable[..., None]


def rows(*values: int) -> pa.Table:
    return pa.table({"slice": pa.array(values, pa.int64())})


def write(path: str, table: pa.Table, position: int, overwrite: bool, **planned: int) -> None:
    DeltaRsRecords().write(path, table, Commit(position, overwrite=overwrite, **planned))


def commit(path: str, table: pa.Table, position: int, overwrite: bool, **planned: int) -> None:
    files = [f for batch in write_files(path, table.schema, table.to_batches()) for f in batch.to_pylist()]
    DeltaRsRecords().commit(path, table.schema, files, Commit(position, overwrite=overwrite, **planned))


def compact(path: str) -> None:
    DeltaTable(path).optimize.compact()


def again_and_again(work: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """In the block another writer works all the time. Its work may be refused."""

    def attempt() -> None:
        with contextlib.suppress(DeltaError):
            work()

    return always(attempt)


@pytest.mark.parametrize("by", [write, commit])
def test_one_of_two_writers_of_a_position_writes(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    by(path, rows(0), 1, False)
    with ThreadPoolExecutor(4) as pool:
        for position in range(2, 8):
            list(pool.map(lambda number, at=position: by(path, rows(at), at, False), range(4)))
    assert sorted(row["slice"] for row in DeltaRsRecords().rows(path)) == [0, *range(2, 8)]


@pytest.mark.parametrize("by", [write, commit])
def test_an_overwrite_during_a_compaction_leaves_no_former_row(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    by(path, rows(0), 1, False)
    with again_and_again(partial(compact, path)):
        for position in range(2, 17, 3):
            by(path, rows(position), position, False)
            by(path, rows(position + 1), position + 1, False)
            by(path, rows(position + 2), position + 2, True)
            assert DeltaRsRecords().rows(path) == [{"slice": position + 2}]


@pytest.mark.parametrize("by", [write, commit])
def test_an_append_during_deletes_is_not_refused(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    by(path, rows(-1), 1, False)
    with again_and_again(lambda: DeltaTable(path).delete("slice < 0")):
        for position in range(2, 8):
            by(path, rows(position, -position), position, False)
    kept = [row["slice"] for row in DeltaRsRecords().rows(path) if row["slice"] > 0]
    assert sorted(kept) == list(range(2, 8))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    write(path, rows(1), 1, False)
    (file,) = Path(path).glob("*.parquet")
    file.unlink()
    with pytest.raises(DeltaError) as raised:
        DeltaRsRecords().rows(path)
    assert find_missing_file(raised.value) == str(file)


def test_a_table_that_was_put_back_is_distinguished_from_one_that_others_wrote(tmp_path: Path) -> None:
    path, records = str(tmp_path / "t"), DeltaRsRecords()
    for position in (1, 2, 3):
        write(path, rows(position), position, False)
    assert not records.is_restored(path, 2)
    DeltaTable(path).delete("slice = 1")
    DeltaTable(path).optimize.compact()
    assert not records.is_restored(path, 2)
    DeltaTable(path).restore(1)
    assert records.is_restored(path, 2)


def test_the_commit_of_a_position_is_distinguished_from_commits_that_kept_it(tmp_path: Path) -> None:
    path, records = str(tmp_path / "t"), DeltaRsRecords()
    for position in (1, 2):
        write(path, rows(position), position, False)
    records.set_properties(path, {"delta.logRetentionDuration": "interval 9 days"})
    others = CommitProperties(custom_metadata={"userMetadata": '["not pgsieve\'s"]'})
    write_deltalake(path, rows(9), mode="append", commit_properties=others)
    DeltaTable(path).restore(0)
    assert [records.version_of_position(path, position) for position in (1, 2, 3)] == [0, 1, None]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("by", [write, commit])
@pytest.mark.parametrize("other", [write, commit, compact])
def test_a_write_planned_from_a_version_follows_no_later_one(
    tmp_path: Path, by: Write, other: Callable[..., None], overwrite: bool
) -> None:
    path = str(tmp_path / "t")
    for position in (1, 2):
        write(path, rows(position), position, False)
    base = DeltaRsRecords().head(path)
    assert base == TableHead(1, 2)
    other(path) if other is compact else other(path, rows(3), 3, False)
    planned = partial(by, path, rows(2, 3), 4, overwrite, expected_version=base.version)
    with pytest.raises(OvertakenError):
        planned()
    assert DeltaRsRecords().read_all_rows(path)["slice"].to_pylist().count(2) == 1
    by(path, rows(4), 4, overwrite, expected_version=DeltaRsRecords().version(path))
    assert DeltaRsRecords().position(path) == 4


@pytest.mark.parametrize("by", [write, commit])
def test_a_table_that_another_process_created_is_not_created_again(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    write(path, rows(1), 1, False)
    with pytest.raises(OvertakenError):
        by(path, rows(1, 2), 2, False, expected_version=-1)
    with pytest.raises(OvertakenError):
        by(path, rows(1, 2), 2, False, expected_position=0)
    assert DeltaRsRecords().read_all_rows(path)["slice"].to_pylist() == [1]


@pytest.mark.parametrize("by", [write, commit])
def test_a_write_after_a_position_follows_no_other(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    for position in (1, 2):
        by(path, rows(position), position, False, expected_position=position - 1)
    with pytest.raises(OvertakenError):
        by(path, rows(2, 3), 3, False, expected_position=1)
    compact(path)  # moves no position
    by(path, rows(3), 3, False, expected_position=2)
    assert sorted(DeltaRsRecords().read_all_rows(path)["slice"].to_pylist()) == [1, 2, 3]


@pytest.mark.parametrize("before", [True, False])
def test_the_position_of_a_version_is_its_commits_whatever_others_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    path, mine = str(tmp_path / "t"), DeltaRsRecords(tables=Tables(Store()))
    other = DeltaRsRecords(tables=Tables(Store()))
    mine.append(path, pa.table({"id": [1]}), 1)
    write = commits.write_deltalake

    def beside_another(table: DeltaTable, *rows: Any, **options: Any) -> None:
        monkeypatch.setattr(commits, "write_deltalake", write)
        if before:
            other.append(path, pa.table({"id": [3]}), 3)
        write(table, *rows, **options)
        if not before:
            other.append(path, pa.table({"id": [3]}), 3)
            table.update_incremental()

    monkeypatch.setattr(commits, "write_deltalake", beside_another)
    with contextlib.suppress(DeltaError):
        mine.append(path, pa.table({"id": [2]}), 2)
    assert mine.head(path) == DeltaRsRecords(tables=Tables(Store())).head(path)
    mine.append(path, pa.table({"id": [4]}), 4)
    assert mine.head(path) == DeltaRsRecords(tables=Tables(Store())).head(path)
    assert mine.position(path) == 4


def test_a_merge_follows_no_later_version_than_its_plans(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    write(path, rows(1), 1, False)
    write(path, rows(2), 2, False)
    source = pa.table({"action": ["upsert"], "k": pa.array([2], pa.int64())})
    merge = partial(DeltaRsRecords().merge, path, source, Merge({"slice": "k"}, {"slice": "k"}))
    with pytest.raises(OvertakenError):
        merge(Commit(3, expected_version=0))
    merge(Commit(3, expected_version=1))
    assert DeltaRsRecords().head(path) == TableHead(2, 3)


def test_one_of_several_writers_that_plan_from_a_version_commits(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    write(path, rows(0), 1, False)

    def increment(by: Write) -> None:
        for _ in range(20):
            head = DeltaRsRecords().head(path)
            assert head.position is not None
            with contextlib.suppress(OvertakenError):
                by(path, rows(head.position), head.position + 1, False, expected_version=head.version)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, [write, commit, write, commit]))
    numbers = sorted(DeltaRsRecords().read_all_rows(path)["slice"].to_pylist())
    assert numbers == list(range(len(numbers)))
    assert DeltaRsRecords().position(path) == len(numbers)


@pytest.mark.parametrize("number", range(10))
def test_one_of_several_writers_that_create_a_table_commits(tmp_path: Path, number: int) -> None:
    path, ready = str(tmp_path / str(number)), threading.Barrier(4)

    def first(by: Write) -> int:
        ready.wait()
        try:
            by(path, rows(1), 1, False, expected_position=0)
        except OvertakenError:
            return 0
        return 1

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(first, [write, commit, write, commit])) == 1
    assert DeltaRsRecords().read_all_rows(path)["slice"].to_pylist() == [1]


def test_conditions_and_newest_rows_equal_those_of_all_rows(tmp_path: Path) -> None:
    path, records = str(tmp_path / "t"), DeltaRsRecords()
    assert records.newest_rows(path, "slice") == records.rows(path, "slice > 1") == []
    for position, value in enumerate((3, 7, 5, 7), 1):
        write(path, rows(value), position, overwrite=False)
    for _ in range(2):
        assert records.newest_rows(path, "slice") == [{"slice": 7}, {"slice": 7}]
        assert sorted(row["slice"] for row in records.rows(path, "slice > 3")) == [5, 7, 7]
        compact(path)
    DeltaTable(path).delete("slice = 7")
    assert records.newest_rows(path, "slice") == [{"slice": 5}]
    DeltaTable(path).delete("slice > 0")
    assert records.newest_rows(path, "slice") == []


def test_a_file_rewritten_by_delta_rs_is_read_as_any_other(tmp_path: Path) -> None:
    """The schema of such a file has views of text and bytes, which Arrow cannot filter."""
    records, path = DeltaRsRecords(), str(tmp_path / "t")
    row = pa.struct({"k": pa.int64(), "v": pa.string()})
    schema = pa.schema(
        {
            "slice": pa.int64(),
            "commit_lsn": pa.int64(),
            "ordinal": pa.int64(),
            "operation": pa.string(),
            "unchanged": pa.list_(pa.string()),
            "data": pa.binary(),
            "new": row,
        }
    )
    changes = [
        {
            "slice": end,
            "commit_lsn": end - 10,
            "ordinal": number,
            "operation": "insert",
            "unchanged": ["v"],
            "data": b"x",
            "new": {"k": number, "v": "y"},
        }
        for end in (100, 200, 300)
        for number in range(3)
    ]
    records.write(path, pa.Table.from_pylist(changes, schema), Commit(300))

    def everything() -> list[object]:
        records = DeltaRsRecords()
        keys = pa.table({"operation": ["insert"], "ordinal": [1]})
        plain = [find_slices(records, path, ends).read_rows().to_pylist() for ends in ([200, 300], [300])]
        return [
            *plain,
            records.slices(path, 100),
            set(records.find_rows(path, keys, keys.schema)[0].tolist()),
        ]

    before = everything()
    DeltaTable(path).delete("slice = 100")
    assert "view" in str(pq.read_schema(DeltaTable(path).file_uris()[0])), "delta-rs no longer writes views"
    assert everything() == before
    assert len(before[0]) == 6  # type: ignore[arg-type]
