"""Versions of a replica's rows: at each commit the rows of that time, whichever writer writes them."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from pgsieve.assets.steps.apply import key_exchange, key_reader
from pgsieve.assets.steps.apply.batch import AppliedChanges
from pgsieve.assets.steps.apply.by_files import FilesWriter
from pgsieve.assets.steps.apply.row_versions import VersionsWriter, read_commits
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableBatch
from pgsieve.assets.steps.apply.versions_by_parts import VersionPartsWriter
from pgsieve.assets.steps.apply.ways import UNSUITED_ERRORS
from pgsieve.assets.steps.history import versions
from pgsieve.assets.steps.history.shared_rows import SharedRows
from pgsieve.assets.steps.history.versions import VersionTable
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.columns import ROW_OPERATIONS, changes_schema
from pgsieve.decoding.changes.versions import Commits
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.delta.tables import share_tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.lake.stores.store import Store
from tests.fixtures.histories import COLUMNS, Change, Values, applied, delete, history, insert, update
from tests.fixtures.lakes import no_session
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.replica_changes import find_many_changes

_COLUMNS = (("k", pa.int64()), ("b", pa.string()), ("c", pa.string()))
_DEFINITION = Definition((("k", "bigint"), ("b", "string"), ("c", "string")), ("k",), Layout(1, (), 3, ()))
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_TRUNCATE = Change("truncate", None, None)
#: The begin of the slices, and the LSN of the copy.
_COPIED = 100


class World:
    """A replica at LSN 100, and changes in slices. Commit n has LSN 110 + 10 * n."""

    #: Which of the changes that its versions lack the replica lacks, too.
    replica_lacks = "nothing"

    def __init__(
        self, folder: Path, replica: dict[int, Values], *, marks: bool, by_parts: bool = False
    ) -> None:
        # No batch counts as small. With `marks` rows are marked, without it files are rewritten.
        settings = LakeSettings(-1, -1 if marks else 2**40, thread_count=2)
        if by_parts:
            settings = replace(settings, min_parted_changes=0)
        self.lake = Lake(str(folder), no_session, settings)
        self.log = self.lake.paths.change_history("s", "public", "t")
        self.replica = self.lake.paths.replica("s", "public", "t")
        self.table = VersionTable(self.lake, "s", ("public", "t"), _DEFINITION, pa.schema(_COLUMNS))
        self.write(replica)
        self.table.begin_anew(_COPIED, _BEGIN)

    def write(self, replica: dict[int, Values], position: int = _COPIED) -> None:
        assert self.lake.delta_rs is not None
        rows = [{"k": key, **values} for key, values in replica.items()]
        self.lake.delta_rs.write(
            self.replica, pa.Table.from_pylist(rows, pa.schema(_COLUMNS)), Commit(position, overwrite=True)
        )

    def apply_in_two_slices(self, changes: Sequence[tuple[int, Change]], middle: int) -> None:
        """Apply the changes of the commits before the one with the number `middle`, and then the other changes."""
        for end, part in (
            (110 + 10 * middle - 5, [c for c in changes if c[0] < middle]),
            (500, [c for c in changes if c[0] >= middle]),
        ):
            if part:
                self.apply(part, end)

    def apply(self, changes: Sequence[tuple[int, Change]], end: int) -> None:
        """Apply a slice. Each change has the number of its commit."""
        assert self.lake.delta_rs is not None
        rows = [
            {
                "slice": end,
                "commit_lsn": 110 + 10 * commit,
                "commit_time": _BEGIN + timedelta(seconds=commit),
                "ordinal": number,
                "number": None if change is _TRUNCATE else number,
                "operation": change.operation,
                "unchanged": [c for c in COLUMNS if change.operation == "update" and c not in change.values],
                "old": None if change.old is None else {"k": change.old},
                "new": None if change.new is None else {"k": change.new, **change.values},
            }
            for number, (commit, change) in enumerate(changes)
        ]
        self.lake.delta_rs.append(self.log, pa.Table.from_pylist(rows, changes_schema(_COLUMNS)), end)
        unsent = tuple(sorted({name for row in rows for name in row["unchanged"]}))
        sent = {kind: sum(c.operation == kind for _, c in changes) for kind in ROW_OPERATIONS}
        truncates = [(110 + 10 * n, at) for at, (n, c) in enumerate(changes) if c is _TRUNCATE]
        slice_ = TableChanges(
            end,
            "public",
            "t",
            10 * len(changes),
            sent_counts=sent,
            truncate_count=len(truncates),
            last_truncate=max(truncates, default=None),
            key_change_count=sum(c.is_move for _, c in changes),
            unsent_columns=unsent,
        )

        decided = retry_after_conflict(self.decided)(slice_)

        # The versions are computed only once, although a separate commit gives the table deletion vectors.
        pending = PendingChanges([slice_], self.lake.records.head(self.table.path))
        VersionsWriter(self.table, self.log, pending, _COPIED, decided).apply()

    def decided(self, slice_: TableChanges) -> AppliedChanges | None:
        """The decisions of the replica's apply: of the same changes, or of other slices if the replica was behind."""
        if self.replica_lacks == "nothing":
            return None
        pending, rows = (
            PendingChanges([slice_], self.lake.records.head(self.replica)),
            SharedRows(2**20, ["k"]),
        )
        many = find_many_changes(TableBatch(self.lake, self.replica, self.log, _DEFINITION, pending))
        assert many is not None
        assert many.net_change is not None
        assert many.net_change.keyed_changes is not None
        FilesWriter(self.lake, self.replica, pending, slice_.slice_end, rows).apply(many)
        slices = pending.slice_ends if self.replica_lacks == "the same" else [0]
        return AppliedChanges(
            slices, pending.since_lsn, many.stored.groups, many.net_change.keyed_changes, rows
        )

    def rows(self) -> list[dict[str, Any]]:
        assert self.lake.delta_rs is not None
        return self.lake.delta_rs.read_all_rows(self.table.path).to_pylist()

    def at(self, lsn: int) -> dict[int, Values]:
        """The rows that are valid after the commit at `lsn`. Assert that no key has two."""
        return _valid(self.rows(), lsn)


def _valid(versions: Sequence[dict[str, Any]], lsn: int) -> dict[int, Values]:
    """The rows of these versions that are valid after the commit at `lsn`. Assert that no key has two."""
    valid = [
        row
        for row in versions
        if row["valid_from_lsn"] <= lsn and (row["is_current"] or lsn < row["valid_to_lsn"])
    ]
    rows = {row["k"]: {name: row[name] for name in COLUMNS} for row in valid}
    assert len(rows) == len(valid)
    return rows


def _after(changes: Sequence[tuple[int, Change]], commit: int, rows: dict[int, Values]) -> dict[int, Values]:
    """The rows after the changes up to a commit."""
    upto = [change for number, change in changes if number <= commit]
    begin = max((at + 1 for at, change in enumerate(upto) if change is _TRUNCATE), default=0)
    return applied(upto[begin:], {} if begin else rows)


def _drawn(drawn: random.Random) -> tuple[list[tuple[int, Change]], dict[int, Values]]:
    made, replica = history(drawn, drawn.randint(4, 20))
    commits = sorted(drawn.randint(0, 7) for _ in made)
    changes = list(zip(commits, made, strict=True))
    if drawn.random() < 0.4 and changes:
        at = drawn.randrange(len(changes))
        # Later changes find no earlier row, so only INSERTs have one.
        changes.insert(at, (changes[at][0], _TRUNCATE))
    return changes, replica


def test_integers_of_keys_are_stored_as_differences(tmp_path: Path) -> None:
    world = World(tmp_path, {1: {"b": "x", "c": "y"}}, marks=True)
    world.apply([(0, insert(2, b="x", c="y")), (1, update(1, b="z"))], 200)
    assert len(world.rows()) == 3
    files = list(Path(world.table.path).glob("*.parquet"))
    assert len(files) > 1
    for file in files:
        columns = pq.ParquetFile(file).metadata.row_group(0)
        encodings = {
            (column := columns.column(number)).path_in_schema: column.encodings
            for number in range(columns.num_columns)
        }
        assert "DELTA_BINARY_PACKED" in encodings["k"]


@pytest.mark.parametrize("marks", [False, True, None])
@pytest.mark.parametrize("seed", range(6))
def test_versions_valid_at_each_commit_are_the_rows_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, marks: bool | None
) -> None:
    """Files are written again, or rows are marked; None: rows are marked in the versions alone."""
    if marks is None:
        monkeypatch.setattr(versions, "_MAX_REWRITTEN_BYTES", -1)
    drawn = random.Random(seed)
    changes, replica = _drawn(drawn)
    world = World(tmp_path, replica, marks=bool(marks))
    world.replica_lacks = ("nothing", "the same", "others")[seed % 3]
    assert world.at(_COPIED - 1) == replica
    middle = drawn.randint(0, 8)
    world.apply_in_two_slices(changes, middle)
    rows = world.rows()
    for commit in range(-1, 8):
        assert _valid(rows, 110 + 10 * commit) == _after(changes, commit, replica), commit
    for row in rows:
        for name in ("valid_from", "valid_to"):
            lsn, time = row[f"{name}_lsn"], row[name]
            assert (time is None) is (lsn is None)
            assert lsn is None or lsn < 110 or time == _BEGIN + timedelta(seconds=(lsn - 110) // 10)
        assert row["is_current"] is (row["valid_to_lsn"] is None)


@pytest.mark.parametrize("marks", [False, True, None])
@pytest.mark.parametrize("seed", range(16))
def test_versions_by_parts_of_the_keys_are_those_of_all_keys_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, marks: bool | None
) -> None:
    if marks is None:
        monkeypatch.setattr(versions, "_MAX_REWRITTEN_BYTES", -1)
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 3)
    monkeypatch.setattr(key_exchange, "_MAX_ROWS_PER_CHANGE", seed % 3)
    decided = list[bool]()

    def noted(writer: VersionPartsWriter) -> None:
        try:
            apply_parts(writer)
        except UNSUITED_ERRORS:
            decided.append(False)
            raise
        decided.append(True)

    apply_parts = VersionPartsWriter.apply
    monkeypatch.setattr(VersionPartsWriter, "apply", noted)
    drawn = random.Random(seed)
    changes, replica = _drawn(drawn)
    middle, written = drawn.randint(0, 8), list[list[dict[str, Any]]]()
    for by_parts in (False, True):
        decided.clear()
        folder = tmp_path / ("parts" if by_parts else "whole")
        world = World(folder, replica, marks=bool(marks), by_parts=by_parts)
        world.apply_in_two_slices(changes, middle)
        rows = sorted(world.rows(), key=lambda row: (row["k"], row["valid_from_lsn"]))
        for commit in range(-1, 8):
            assert _valid(rows, 110 + 10 * commit) == _after(changes, commit, replica), commit
        written.append(rows)
        assert set(decided) == ({True} if by_parts else set())
    assert written[0] == written[1]


@pytest.mark.parametrize("marks", [False, True])
def test_a_truncate_in_the_slice_of_the_first_change_creates_no_row(tmp_path: Path, *, marks: bool) -> None:
    world = World(tmp_path, {2: {"b": "2", "c": "y"}}, marks=marks)
    world.apply([(0, insert(1, b="1")), (1, _TRUNCATE), (2, insert(1, b="3"))], 500)
    assert sorted(
        (row["k"], row["b"], row["valid_to_lsn"]) for row in world.rows() if row["valid_to_lsn"]
    ) == [
        (1, "1", 120),
        (2, "2", 120),
    ]
    assert world.at(130) == {1: {"b": "3", "c": None}}
    assert len(world.rows()) == 3


def test_beginning_again_ends_the_current_versions_once(tmp_path: Path) -> None:
    world = World(tmp_path, {1: {"b": "1", "c": "x"}, 2: {"b": "2", "c": "y"}}, marks=True)
    world.write({2: {"b": "2", "c": "y"}, 3: {"b": "3", "c": "z"}}, 300)
    assert world.table.begin_anew(300, _BEGIN)
    assert not world.table.begin_anew(300, _BEGIN)
    assert world.at(298) == {1: {"b": "1", "c": "x"}, 2: {"b": "2", "c": "y"}}
    assert world.at(299) == world.at(400) == {2: {"b": "2", "c": "y"}, 3: {"b": "3", "c": "z"}}
    assert world.lake.records.position(world.table.path) == 300


@pytest.mark.spark
def test_versions_begin_with_the_rows_of_a_replica_that_only_spark_reads(tmp_path: Path) -> None:
    world = World(tmp_path, {1: {"b": "1", "c": "x"}, 2: {"b": "2", "c": "y"}}, marks=False)
    shutil.rmtree(world.replica)
    rows = [{"k": 2, "b": None, "c": "y"}, {"k": 3, "b": "3", "c": None}]
    write_deltalake(world.replica, pa.Table.from_pylist(rows, pa.schema(_COLUMNS)), partition_by="c")
    share_tables.cache_clear()
    lake = Lake(world.lake.uri, lambda: engine().session)
    assert lake.policy.is_read_by_spark(world.replica)
    assert replace(world.table, lake=lake).begin_anew(300, _BEGIN)
    assert world.at(298) == {1: {"b": "1", "c": "x"}, 2: {"b": "2", "c": "y"}}
    assert world.at(299) == world.at(400) == {2: {"b": None, "c": "y"}, 3: {"b": "3", "c": None}}


def test_rows_that_the_replica_had_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_MAX_REWRITTEN_BYTES", -1)
    read = list[list[str]]()

    def noted(store: Store, file: str, schema: pa.Schema, *chosen: Any) -> Iterator[pa.RecordBatch]:
        if "is_current" in schema.names or "valid_from" in schema.names:
            read.append(schema.names)
        return batches(store, file, schema, *chosen)

    batches = Store.read_batches
    before: dict[int, Values] = {key: {"b": str(key), "c": "x"} for key in range(1, 9)}
    world = World(tmp_path, before, marks=False)
    world.replica_lacks = "the same"
    monkeypatch.setattr(Store, "read_batches", noted)
    world.apply([(0, update(3, b="4")), (1, delete(5))], 500)
    monkeypatch.undo()
    assert not read, "the statistics say that all versions of the file are present, and began with one commit"
    assert len(world.rows()) == len(before) + 1
    assert world.at(100) == before
    assert world.at(120) == {key: row for key, row in before.items() if key != 5} | {3: {"b": "4", "c": "x"}}


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [[(110, 1)] * 3],
        [[(110, 1), (110, None)], [(110, 1)], [(120, 2)]],
        [[(110, 1)], [(120, 2), (130, 2)]],
        [[(110, 1)], [(120, None)], [(110, 1), (110, 1)]],
        [[(110, None), (120, None)]],
    ],
    ids=str,
)
def test_commits_are_those_of_all_changes(groups: list[list[tuple[int, int | None]]], tmp_path: Path) -> None:
    """The statistics of row groups say which commits they have, if each has a single one."""
    schema = pa.schema({"commit_lsn": pa.int64(), "commit_time": pa.timestamp("us", "UTC")})
    file = str(tmp_path / "changes.parquet")
    with pq.ParquetWriter(file, schema) as writer:
        for group in groups:
            writer.write_table(
                pa.table([pa.array(values) for values in zip(*group, strict=True)], schema=schema)
            )
    commits, expected = (
        Commits.from_changes(changes) for changes in (read_commits(Store(), file), pq.read_table(file))
    )
    assert (commits.lsns, commits.times) == (expected.lsns, expected.times)


def test_rows_that_are_too_many_or_went_to_executors_are_read_again() -> None:
    numbers, rows = np.arange(3), pa.RecordBatch.from_pydict({"k": [1, 2, 3], "v": [4, 5, 6]})
    keys = rows.select(["k"])
    shared = SharedRows(rows.nbytes, ["k"])
    second, empty, first = (shared.begin_part(rows.schema) for _ in range(3))
    second.add(numbers + 3, rows)
    first.add(numbers, rows)
    assert [[kept for _, kept in part.keys] for part in (first, empty, second)] == [[keys], [], [keys]]
    assert shared.select_new_rows(np.arange(6), rows.schema) == [second, first]
    assert shared.select_new_rows(numbers, rows.schema) is None, "others came"
    assert shared.select_new_rows(np.arange(6), keys.schema) is None, "they have other columns"
    assert pickle.loads(pickle.dumps(shared)) is None
    shared.add_removed_rows(numbers, rows)
    assert shared.select_removed_rows(rows.schema) == [], "they do not fit"
    assert shared.select_new_rows(np.arange(6), rows.schema) == [second, first], "these did"
    second.add(numbers + 6, rows)
    assert shared.select_new_rows(np.arange(6), rows.schema) is None
    shared.add_removed_rows(numbers, rows)
    assert shared.select_removed_rows(rows.schema) == [(numbers, rows)]
