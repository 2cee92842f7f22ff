"""Parts of the keys of a replica are decided by tasks of the runner: the rows and counts equal those of the changes applied one by one. No JVM."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pyarrow as pa
import pytest

from pgsieve.assets.steps.apply import by_files, key_exchange, key_reader
from pgsieve.assets.steps.apply.key_conflicts import KeyConflictError
from pgsieve.assets.steps.apply.key_reader import KeyReader
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.publications.evolution import Layout
from tests.fixtures.replica_changes import (
    Changes,
    Columns,
    Row,
    count_rows,
    definition,
    delete,
    draw_changes,
    find_outcome,
    insert,
    row,
    update,
)


@pytest.mark.slow
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
@pytest.mark.parametrize("marking", [False, True])
def test_parts_of_the_keys_leave_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...], *, marking: bool
) -> None:
    """Changes are never decided by all keys at once, unless they conflict."""
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 3)
    applied = moved = 0
    for seed in range(24):
        rows, changes = draw_changes(random.Random(seed))
        parts, few = (Changes(tmp_path / f"{seed}{way}", rows, changes) for way in ("parts", "few"))
        if marking:
            parts.lake.policy = replace(parts.lake.policy, rewritten_bytes=-1)
            parts.mark(parts.rows()[:1], 110, checkpointed=bool(seed % 2))
            few.mark(few.rows()[:1], 110, checkpointed=False)
        expected = find_outcome(few.one_by_one, key)
        with monkeypatch.context() as alone:
            if isinstance(expected, TableResult):
                alone.setattr(by_files, "make_keyed_changes", None)
                alone.setattr(key_exchange, "_MAX_ROWS_PER_CHANGE", seed % 3)
                moved += sum(change.is_move and bool(change.unchanged) for change in changes)
            done = find_outcome(parts.by_key_parts, key)
        if isinstance(expected, KeyConflictError):
            assert isinstance(done, KeyConflictError), f"seed {seed}"
            assert (done.message, done.commit_lsn) == (expected.message, expected.commit_lsn), f"seed {seed}"
            continue
        assert isinstance(done, TableResult), f"seed {seed}"
        assert count_rows(done) == count_rows(expected), f"seed {seed}"
        assert parts.rows() == few.rows(), f"seed {seed}"
        applied += 1
    assert applied > 12
    assert moved > 12


@pytest.mark.parametrize("lost_count", [1, 3, 9])
def test_moves_that_depend_on_a_missing_row_leave_the_rows_of_changes_applied_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_count: int
) -> None:
    """Each round of the parts finds one more of the moves. After many rounds the driver decides."""
    rows = [row(key, f"before {key}") for key in range(50, 70)]
    found = [update(row(key + 20, "found"), row(key, "")) for key in range(50, 60)]
    lost = [update(row(key + 1, "lost"), row(key, "")) for key in range(1, lost_count + 1)]
    # Key 2 gets no row by the first move, so this is no conflict.
    changes = [*lost, *found, delete(row(lost_count + 1, "")), insert(row(2, "inserted"))]
    parts, few = (Changes(tmp_path / way, rows, changes) for way in ("parts", "few"))
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 2)
    with monkeypatch.context() as alone:
        if lost_count < key_exchange._MAX_ATTEMPTS:
            alone.setattr(by_files, "make_keyed_changes", None)
        done = parts.by_key_parts(definition("k"))
    assert count_rows(done) == count_rows(few.one_by_one(definition("k")))
    assert parts.rows() == few.rows()
    assert row(2, "inserted") in parts.rows()


@pytest.mark.parametrize("move_count", [1, 2, 3, 4, 5, 11, 15, 16])
@pytest.mark.parametrize("sent", [True, False])
def test_a_value_is_found_that_none_of_several_moves_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move_count: int, *, sent: bool
) -> None:
    """n rounds of the resolvers follow 2**n - 1 moves. After even more moves the driver decides."""
    monkeypatch.setattr(key_exchange, "_RESOLVER_STAGES", (2, 4))
    rows = [row(key, f"before {key}") for key in range(50, 70)]
    begun = [insert(row(1, "sent"))] if sent else []
    first = 1 if sent else 50
    keys = [first, *range(100, 100 + move_count)]
    moves = [update(row(new, ""), row(old, ""), ["v"]) for old, new in pairwise(keys)]
    again = [insert(row(first, "again")), update(row(60, ""), None, ["v"])]
    changes = [*begun, *moves, *again]
    parts, few = (Changes(tmp_path / way, rows, changes) for way in ("parts", "few"))
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 2)
    with monkeypatch.context() as alone:
        if move_count < 16:
            alone.setattr(by_files, "make_keyed_changes", None)
        done = parts.by_key_parts(definition("k"))
    assert count_rows(done) == count_rows(few.one_by_one(definition("k")))
    assert parts.rows() == few.rows()
    assert row(keys[-1], "sent" if sent else "before 50") in parts.rows()


@pytest.mark.parametrize("key", [("k",), ()])
def test_few_rows_of_a_large_replica_are_divided_by_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...]
) -> None:
    sent = list[int]()

    def noted(reader: KeyReader, file_index: int) -> Iterator[pa.RecordBatch]:
        for message in send_rows(reader, file_index):
            sent.append(pa.ipc.open_stream(message.column("content")[0].as_buffer()).read_all().num_rows)
            yield message

    send_rows = KeyReader._send_rows
    monkeypatch.setattr(KeyReader, "_send_rows", noted)
    rows = [row(number, "before") for number in range(400)]
    changes = [update(row(number, "after"), row(number, "before")) for number in (7, 200, 399)]
    made = Changes(tmp_path, rows, changes)
    made.by_key_parts(definition(*key))
    assert sum(each["v"] == "after" for each in made.rows()) == 3
    assert 3 <= sum(sent) < 100


@pytest.mark.slow
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
def test_parts_of_the_keys_are_examined_for_conflicts_without_a_commit(
    tmp_path: Path, key: tuple[str, ...]
) -> None:
    refused = 0
    for seed in range(24):
        rows, changes = draw_changes(random.Random(seed))
        parts, few = (Changes(tmp_path / f"{seed}{way}", rows, changes) for way in ("parts", "few"))
        before = set(tmp_path.glob(f"{seed}parts/**/*"))
        can_be_applied = parts.can_be_applied_by_key_parts(definition(*key))
        assert set(tmp_path.glob(f"{seed}parts/**/*")) == before, f"seed {seed}"
        expected = find_outcome(few.one_by_one, key)
        if isinstance(expected, KeyConflictError):
            assert not can_be_applied, f"seed {seed}"
        else:
            assert can_be_applied, f"seed {seed}"
        refused += not can_be_applied
    assert 0 < refused < 20


@pytest.mark.parametrize(
    ("kind", "spark", "keys"),
    [
        (pa.date32(), "date", [dt.date(1, 1, 1), dt.date(2026, 1, 1), dt.date(9999, 12, 31)]),
        (
            pa.timestamp("us", "UTC"),
            "timestamp",
            [dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in (1, 2, 3)],
        ),
        (pa.list_(pa.int64()), "array<bigint>", [[1, None], [], [2]]),
        (pa.float64(), "double", [0.0, float("nan"), 2.5]),
    ],
    ids=str,
)
def test_keys_of_every_type_are_applied_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, spark: str, keys: list[object]
) -> None:
    columns: Columns = (("k", kind), ("v", pa.string()))
    replicated = Definition((("k", spark), ("v", "string")), ("k",), Layout(1, (), 2, ()))
    monkeypatch.setattr(by_files, "make_keyed_changes", None)
    for number, (kept, changed, added) in enumerate(permutations(keys)):
        rows: list[Row] = [{"k": kept, "v": "before"}, {"k": changed, "v": "before"}]
        changes = [insert({"k": added, "v": "new"}), update({"k": changed, "v": "after"})]
        made = Changes(tmp_path / str(number), rows, changes, columns)
        assert count_rows(made.by_key_parts(replicated)) == (1, 1, 0, 0)
        expected = {str(kept): "before", str(changed): "after", str(added): "new"}
        assert {str(each["k"]): each["v"] for each in made.rows()} == expected
