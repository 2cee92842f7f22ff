"""Small batches are searched for conflicts without a JVM. Only those files of the replica are read that may contain a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgsieve.assets.steps.apply.in_process import read_few_changes
from pgsieve.assets.steps.apply.key_conflicts import ConflictSearch, KeyConflictError
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableBatch
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.subscription import Definition, FormerLayout
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.resources.lake.committers import InProcessCommitter
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake

_ROW = pa.struct({"k": pa.int64(), "v": pa.string()})
_CHANGES = pa.schema(
    {
        "slice": pa.int64(),
        "commit_lsn": pa.int64(),
        "ordinal": pa.int64(),
        "number": pa.int64(),
        "operation": pa.string(),
        "old": _ROW,
        "new": _ROW,
    }
)
#: An operation, the key of the row before it, and the key after it.
Change = tuple[str, int | None, int | None]


def _no_spark() -> object:
    raise AssertionError("Spark is asked")


def _look(
    folder: Path, *slices: Sequence[Change], former: FormerLayout | None = None, position: int | None = None
) -> None:
    """Search a batch for conflicts. The replica has the keys 1 to 3, copied at `position`."""
    log = str(folder / f"changes_{len(list(folder.glob('changes_*')))}")
    path = str(folder / "replica")
    table = []
    for number, changes in enumerate(slices, 1):
        rows = [
            {
                "slice": number * 100,
                "commit_lsn": number * 100 - 10,
                "ordinal": ordinal,
                "number": ordinal,
                "operation": operation,
                "old": None if old is None else {"k": old},
                "new": None if new is None else {"k": new},
            }
            for ordinal, (operation, old, new) in enumerate(changes)
        ]
        write_deltalake(log, pa.Table.from_pylist(rows, _CHANGES), mode="append")
        sent = {kind: sum(c[0] == kind for c in changes) for kind in ("insert", "update", "delete")}
        moves = sum(operation == "update" and old not in (None, new) for operation, old, new in changes)
        table.append(
            TableChanges(number * 100, "public", "t", size=1, sent_counts=sent, key_change_count=moves)
        )
    if not Path(path).exists():
        write_deltalake(path, pa.table({"k": [1, 2, 3], "v": ["", "", ""]}))
    definition = Definition((("k", "bigint"), ("v", "string")), ("k",), Layout(1, (), 2, ()), former=former)
    lake = Lake(str(folder), _no_spark)  # type: ignore[arg-type]
    head = replace(lake.records.head(path), position=position)
    batch = TableBatch(lake, path, log, definition, PendingChanges(table, head))
    assert lake.delta_rs is not None
    committer = InProcessCommitter(lake.delta_rs, lake.access)
    ConflictSearch(batch).refuse(read_few_changes(batch, committer))


@pytest.mark.parametrize(
    ("slices", "conflict", "key", "lsn"),
    [
        ([[("insert", None, 4), ("insert", None, 3)]], "insert_exists", 3, 90),
        ([[("insert", None, 4)], [("insert", None, 4)]], "insert_exists", 4, 190),
        ([[("insert", None, 1), ("delete", 1, None)]], "insert_exists", 1, 90),
        ([[("insert", None, 1)], [("truncate", None, None)]], "insert_exists", 1, 90),
        ([[("update", None, 1), ("insert", None, 1)]], "insert_exists", 1, 90),
        ([[("delete", 1, None), ("insert", None, 1)], [("insert", None, 1)]], "insert_exists", 1, 190),
        ([[("update", 1, 2)]], "update_exists", 2, 90),
        ([[("insert", None, 4), ("update", 4, 3), ("delete", 3, None)]], "update_exists", 3, 90),
        ([[("update", 1, 4), ("insert", None, 1)], [("update", 4, 1)]], "update_exists", 1, 190),
    ],
)
def test_the_first_change_that_conflicts_with_a_row_of_its_key_is_refused(
    slices: list[list[Change]], conflict: str, key: int, lsn: int, tmp_path: Path
) -> None:
    with pytest.raises(KeyConflictError) as refused:
        _look(tmp_path, *slices)
    assert refused.value.message == (
        f'conflict detected on relation "public.t": conflict={conflict}:'
        f" Key already exists in the replica, Key (k)=({key}), in the transaction finished at 0/{lsn:X}"
    )
    assert (refused.value.conflict_name, refused.value.commit_lsn, refused.value.sqlstate) == (
        conflict,
        lsn,
        "23505",
    )


@pytest.mark.parametrize(
    "slices",
    [
        [[("insert", None, 4), ("insert", None, 5)]],
        [[("delete", 1, None)], [("insert", None, 1)]],
        [[("truncate", None, None), ("insert", None, 1)]],
        [[("update", 1, 4), ("update", 2, 1), ("update", 4, 2)]],
        [[("update", 9, 1), ("update", 1, 1), ("update", None, 2)]],  # finds no row, and does nothing
        [[("delete", 9, None), ("insert", None, 9)], [("delete", 9, None), ("insert", None, 9)]],
    ],
)
def test_changes_without_a_conflict_are_not_refused(slices: list[list[Change]], tmp_path: Path) -> None:
    _look(tmp_path, *slices)


def test_no_file_is_read_for_keys_outside_of_its_range(tmp_path: Path) -> None:
    _look(tmp_path, [("insert", None, 4)])
    (file,) = DeltaTable(tmp_path / "replica").file_uris()
    Path(file).unlink()
    _look(tmp_path, [("insert", None, 5)], [("insert", None, 6), ("update", 6, 7)])
    with pytest.raises(Exception, match=r"parquet|No such file"):
        _look(tmp_path, [("insert", None, 2)])


def test_changes_under_an_earlier_key_are_not_searched_by_the_present_one(tmp_path: Path) -> None:
    former = FormerLayout(Layout(1, (), 2, ()), frozenset({7}), until=95)
    _look(tmp_path, [("insert", None, 1)], former=former)
    with pytest.raises(KeyConflictError):
        _look(
            tmp_path / "later",
            [("insert", None, 1)],
            former=FormerLayout(former.layout, former.key, until=90),
        )


def test_changes_that_a_later_copy_contains_do_not_conflict_with_their_own_rows(tmp_path: Path) -> None:
    _look(tmp_path, [("insert", None, 1)], position=95)
    with pytest.raises(KeyConflictError):
        _look(tmp_path, [("insert", None, 1)], position=85)


def test_changes_that_another_run_applied_do_not_conflict_with_their_own_rows(tmp_path: Path) -> None:
    rows = pa.table({"k": [1], "v": [""]})
    DeltaRsRecords().write(str(tmp_path / "replica"), rows, Commit(99))
    with pytest.raises(KeyConflictError):
        _look(tmp_path, [("insert", None, 1)])
    DeltaRsRecords().write(str(tmp_path / "replica"), pa.table({"k": [2], "v": [""]}), Commit(100))
    _look(tmp_path, [("insert", None, 2)])
