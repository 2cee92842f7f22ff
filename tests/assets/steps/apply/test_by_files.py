"""Many changes of a replica, applied by files: the rows and counts equal those of the changes applied one by one. No JVM."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake

from pgsieve.assets.steps.apply import by_files, completion
from pgsieve.assets.steps.apply.key_conflicts import KeyConflictError
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.decoding.values.datetimes import TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY
from pgsieve.resources.lake.delta.compaction import compact
from tests.fixtures.replica_changes import (
    ENDS,
    Changes,
    count_rows,
    definition,
    delete,
    draw_changes,
    find_many_changes,
    find_outcome,
    followed,
    insert,
    row,
    update,
)


@pytest.mark.slow
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
def test_random_changes_leave_the_rows_of_changes_applied_one_by_one(
    tmp_path: Path, key: tuple[str, ...]
) -> None:
    conflicts = 0
    for seed in range(14):
        rows, changes = draw_changes(random.Random(seed))
        files, few = (Changes(tmp_path / f"{seed}{way}", rows, changes) for way in ("files", "few"))
        before, after = files.rows(), followed(rows, changes, key)
        expected = find_outcome(few.one_by_one, key)
        done = find_outcome(files.by_files, key)
        assert (after is None) == isinstance(done, KeyConflictError), f"seed {seed}"
        if isinstance(expected, KeyConflictError):
            conflicts += 1
            assert isinstance(done, KeyConflictError), f"seed {seed}"
            assert (done.message, done.commit_lsn) == (expected.message, expected.commit_lsn), f"seed {seed}"
            assert files.rows() == before, f"seed {seed}"
            continue
        assert isinstance(done, TableResult), f"seed {seed}"
        assert count_rows(done) == count_rows(expected), f"seed {seed}"
        assert files.rows() == few.rows() == after, f"seed {seed}"
        written = files.lake.records.position(files.path) == ENDS[-1]
        assert written == (few.lake.records.position(few.path) == ENDS[-1]), f"seed {seed}"
    assert 0 < conflicts < 12


@pytest.mark.drawn
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_random_changes_leave_the_same_rows_with_deletion_vectors(
    tmp_path: Path, key: tuple[str, ...], checkpointed: bool
) -> None:
    applied = 0
    for seed in range(12):
        rows, changes = draw_changes(random.Random(seed))
        if not changes:
            continue
        # Rows that are already gone have deletion vectors: in files with other rows, and in a file without any.
        gone = [row(1000 + number, "gone") for number in range(14)]
        mixed = [each for pair in zip_longest(rows, gone) for each in pair if each]
        marked = Changes(tmp_path / f"{seed}marked", mixed, changes)
        marked.lake.policy = replace(marked.lake.policy, rewritten_bytes=-1)
        marked.mark(gone, 110, checkpointed=checkpointed)
        few = Changes(tmp_path / f"{seed}few", rows, changes)
        assert marked.rows() == few.rows(), f"seed {seed}"
        expected = find_outcome(few.one_by_one, key)
        done = find_outcome(marked.by_files, key)
        if isinstance(expected, KeyConflictError):
            assert isinstance(done, KeyConflictError), f"seed {seed}"
            assert (done.message, done.commit_lsn) == (expected.message, expected.commit_lsn), f"seed {seed}"
        else:
            assert isinstance(done, TableResult), f"seed {seed}"
            assert count_rows(done) == count_rows(expected), f"seed {seed}"
            applied += 1
        assert marked.rows() == few.rows(), f"seed {seed}"
        if checkpointed:
            DeltaTable(marked.path).create_checkpoint()
            assert marked.rows() == few.rows(), f"seed {seed}"
    assert applied > 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 20, 100])
@pytest.mark.parametrize("way", ["by_files", "by_key_parts"])
def test_unsent_values_beyond_the_memory_of_a_task_leave_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, way: str
) -> None:
    monkeypatch.setattr(completion, "MEMORY_BYTES", size)
    applied = 0
    for seed in range(12):
        rows, changes = draw_changes(random.Random(seed))
        if (after := followed(rows, changes, ("k",))) is None:
            continue
        files = Changes(tmp_path / f"{seed}", rows, changes)
        getattr(files, way)(definition("k"))
        assert files.rows() == after, f"seed {seed}"
        applied += any(change.unchanged for change in changes)
    assert applied > 4


def test_inserts_of_a_table_without_a_key_are_appended(tmp_path: Path) -> None:
    same = [row(1, "same")] * 3
    changes = Changes(tmp_path, same, [insert(row(1, "same"))] * 4)
    assert count_rows(changes.by_files(definition())) == (4, 0, 0, 0)
    assert changes.rows() == [row(1, "same")] * 7


def test_only_files_that_lose_rows_are_rewritten(tmp_path: Path) -> None:
    rows = [row(key, "before") for key in range(21)]
    changes = Changes(tmp_path, rows, [update(row(3, "after")), insert(row(30, "new"))])
    before = set((tmp_path / "replica").glob("*.parquet"))
    changes.by_files(definition("k"))
    local = changes.lake.delta_rs
    assert local is not None
    kept = {
        Path(p).name for p in pa.table(local.open_table(changes.path).get_add_actions())["path"].to_pylist()
    }
    assert len(kept & {path.name for path in before}) == len(before) - 1
    after = [row(3, "after"), row(30, "new")]
    assert {tuple(r.values()) for r in changes.rows()} == {
        tuple(r.values()) for r in [*(r for r in rows if r["k"] != 3), *after]
    }


@pytest.mark.parametrize(
    ("limit", "size"),
    [("KEY_BYTES", 10), ("rewritten_bytes", -1)],
)
def test_too_many_changes_for_this_process_are_left_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, size: int
) -> None:
    again = [delete(row(3, "")), insert(row(3, "a")), delete(row(3, "")), insert(row(3, "b"))]
    changes = Changes(tmp_path, [row(3, "before")], again, vectors=False)
    assert find_many_changes(changes.batch(definition("k")))
    if limit.islower():
        changes.lake.policy = replace(changes.lake.policy, **{limit: size})
    else:
        monkeypatch.setattr(by_files, limit, size)
    assert find_many_changes(changes.batch(definition("k"))) is None


def test_nothing_is_written_before_all_tables_are_searched_for_conflicts(tmp_path: Path) -> None:
    """A conflict in another table must leave this table unchanged."""
    changes = Changes(tmp_path, [row(3, "before")], [update(row(3, "after"))])
    changes.lake.policy = replace(changes.lake.policy, rewritten_bytes=-1)
    before = changes.lake.records.version(changes.path)
    decided = find_many_changes(changes.batch(definition("k")))
    assert decided is not None
    assert decided.net_change is not None
    assert decided.net_change.deleted_rows.are_marked
    assert 0 < decided.nbytes < 1_000
    assert changes.lake.records.version(changes.path) == before


_BC = -735_000  # days since 1970-01-01


@pytest.mark.parametrize(
    ("kind", "spark", "value", "text"),
    [
        (pa.date32(), "date", _BC, "0044-08-22 BC"),
        (pa.timestamp("us"), "timestamp_ntz", TIMESTAMP_MINUS_INFINITY, "-infinity"),
        (pa.timestamp("us", "UTC"), "timestamp", TIMESTAMP_INFINITY, "infinity"),
        (pa.timestamp("us", "UTC"), "timestamp", _BC * 86_400_000_000, "0044-08-22 00:00:00+00 BC"),
    ],
)
@pytest.mark.parametrize("way", ["by_files", "one_by_one"])
def test_a_conflict_shows_a_key_beyond_pythons_range_as_postgresql_prints_it(
    tmp_path: Path, way: str, kind: pa.DataType, spark: str, value: int, text: str
) -> None:
    key = pa.scalar(value, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    columns = (("k", kind), ("v", pa.string()))
    sent = [insert({"k": key, "v": "again"})]
    changes = Changes(tmp_path, [{"k": key, "v": "before"}], sent, columns)
    replicated = Definition((("k", spark), ("v", "string")), ("k",), Layout(1, (), 2, ()))
    with pytest.raises(KeyConflictError) as refused:
        getattr(changes, way)(replicated)
    assert f"Key (k)=({text})," in refused.value.message


def _adds_column(changes: Changes) -> None:
    """A user's column with a value in each row."""
    table = DeltaTable(changes.path)
    table.alter.add_columns([Field("mine", "string")])
    table.update({"mine": "'kept'"})


def _constrains(changes: Changes) -> None:
    DeltaTable(changes.path).alter.add_constraint({"small": "k < 1000"})


def _partitions(changes: Changes) -> None:
    """Rewrite the replica partitioned, as another writer might. Its position stays."""
    local = changes.lake.delta_rs
    assert local is not None
    rows = local.read_all_rows(changes.path)
    local.remove(changes.path)
    write_deltalake(changes.path, rows, partition_by=["t"])
    local.append(changes.path, rows.schema.empty_table(), 100)


def _mine(changes: Changes) -> set[tuple[object, ...]]:
    return {tuple(row.values()) for row in changes.rows()}


@pytest.mark.parametrize("alter", [_adds_column, _constrains, _partitions])
def test_a_replica_that_a_user_altered_is_written_by_a_writer_that_respects_it(
    tmp_path: Path, alter: Callable[[Changes], None]
) -> None:
    changes = Changes(
        tmp_path,
        [row(3, "before"), row(4, "before")],
        [update(row(3, "after")), insert(row(7, "new"))],
    )
    assert find_many_changes(changes.batch(definition("k")))
    alter(changes)
    assert find_many_changes(changes.batch(definition("k"))) is None
    changes.one_by_one(definition("k"))
    mine = ("kept",) if alter is _adds_column else ()
    assert _mine(changes) == {
        (*row(3, "after").values(), *mine),
        (*row(4, "before").values(), *mine),
        (*row(7, "new").values(), *(None for _ in mine)),
    }


def test_inserts_keep_a_users_additions(tmp_path: Path) -> None:
    changes = Changes(tmp_path, [row(3, "before")], [insert(row(7, "new"))])
    _adds_column(changes)
    changes.by_files(definition("k"))
    assert changes.lake.delta_rs is not None
    compact(changes.lake.delta_rs, changes.path)
    assert _mine(changes) == {(*row(3, "before").values(), "kept"), (*row(7, "new").values(), None)}


@pytest.mark.parametrize("alter", [_constrains, _partitions])
def test_inserts_into_a_table_with_more_writer_features_are_not_written_as_files(
    tmp_path: Path, alter: Callable[[Changes], None]
) -> None:
    changes = Changes(tmp_path, [row(3, "before")], [insert(row(7, "new"))])
    alter(changes)
    assert find_many_changes(changes.batch(definition())) is None
    local, kept = changes.lake.delta_rs, row(3, "before")
    assert local is not None
    keys = pa.table({"t": pa.array([kept["t"], "t9"]), "k": pa.array([kept["k"], 3])})
    assert local.find_rows(changes.path, keys, keys.schema)[1].to_pylist() == [
        {"t": kept["t"], "k": kept["k"]}
    ]
