"""Changes of a table without a key, by files and by parts of the digests: the rows and counts equal those of the changes applied
one by one. No JVM.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.apply import by_files, key_exchange
from pgsieve.assets.steps.apply.keyless_changes import select_first_matches
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.digests import WantedDigests, compute_row_digests
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.deletion_vectors import find_deleted_rows
from pgsieve.resources.lake.delta.row_removal import enable_marking, mark_rows
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from tests.fixtures.lakes import find_marked_files, no_session
from tests.fixtures.replica_changes import Change, Changes, Row, delete, insert, update

pytestmark = pytest.mark.slow

_COLUMNS = (("n", pa.int64()), ("f", pa.float64()), ("t", pa.string()), ("l", pa.list_(pa.float64())))
_KEYLESS = Definition(
    (("n", "bigint"), ("f", "double"), ("t", "string"), ("l", "array<double>")), (), Layout(1, (), 4, ())
)
_NAN = float("nan")
#: Rows that differ, some only in their spelling.
_ROWS: list[Row] = [
    {"n": 1, "f": 0.0, "t": "1.0", "l": [0.0]},
    {"n": 1, "f": -0.0, "t": "1.0", "l": [0.0]},
    {"n": 1, "f": 0.0, "t": "1.00", "l": [0.0]},
    {"n": 1, "f": 0.0, "t": "1.0", "l": [-0.0]},
    {"n": None, "f": _NAN, "t": '{"a": 1}', "l": None},
    {"n": None, "f": None, "t": None, "l": [_NAN, None]},
    {"n": None, "f": None, "t": None, "l": []},
    {"n": 2, "f": 2.5, "t": "", "l": None},
]


def _random(draw: random.Random) -> tuple[list[Row], list[Change]]:
    """A replica's rows, some missing because a publication left out their INSERTs, and random changes."""
    published = [draw.choice(_ROWS) for _ in range(draw.randint(0, 25))]
    rows = [each for each in published if draw.random() < 0.9]
    changes, truncating = list[Change](), draw.random() < 0.3
    for _ in range(draw.randint(1, 30)):
        new = draw.choice(_ROWS)
        if truncating and draw.random() < 0.1:
            changes.append(Change("truncate"))
            published = []
        elif not published or draw.random() < 0.3:
            changes.append(insert(new))
            published.append(new)
        else:
            old = published.pop(draw.randrange(len(published)))
            changes.append(update(new, old) if draw.random() < 0.6 else delete(old))
            published += [new] if changes[-1].new else []
    return rows, changes


def _followed(rows: list[Row], changes: list[Change]) -> tuple[Counter[str], int]:
    """The rows after the changes, applied one by one, and how many changes after the last TRUNCATE found no row."""
    now, missing = Counter(map(str, rows)), 0
    for change in changes:
        if change.operation == "truncate":
            now, missing = Counter(), 0
            continue
        if change.old is not None and not now[str(change.old)]:
            missing += 1
            continue
        if change.old is not None:
            now[str(change.old)] -= 1
        if change.new is not None:
            now[str(change.new)] += 1
    return +now, missing


def _mark(changes: Changes, gone: list[Row]) -> None:
    """Mark as deleted the first row of the replica that equals each of `gone`."""
    local, lake, schema = changes.lake.delta_rs, changes.lake, changes.schema
    assert local is not None
    enable_marking(local, changes.path)
    counts = Counter(map(str, gone))
    distinct = [row for row in _ROWS if counts[str(row)]]
    sought = WantedDigests(compute_row_digests(pa.RecordBatch.from_pylist(distinct, schema)))
    row_matches = FileCommitter(lake.delta_rs, lake.access).find_row_matches(
        changes.path, sought, schema, CALLING_THREAD
    )
    matches = select_first_matches(row_matches, np.array([counts[str(row)] for row in distinct]))
    base = local.version(changes.path)
    marked = find_marked_files(local, changes.path, matches, base)
    mark_rows(local, changes.path, marked, [], 110, base)


@pytest.mark.parametrize("way", ["rewritten", "marked", "inline"])
def test_random_changes_leave_the_rows_of_changes_applied_one_by_one(tmp_path: Path, way: str) -> None:
    lost = 0
    for seed in range(12):
        rows, changes = _random(random.Random(seed))
        gone = random.Random(seed).choices(_ROWS, k=5) if way == "marked" else []
        made = Changes(tmp_path / str(seed), [*gone, *rows], changes, _COLUMNS)
        if way == "inline":
            made.lake = Lake(made.lake.uri, no_session)
        if way == "marked":
            made.lake.policy = replace(made.lake.policy, rewritten_bytes=-1)
            _mark(made, gone)
        done = made.by_files(_KEYLESS)
        after, missing = _followed(rows, changes)
        assert Counter(map(str, made.rows())) == after, f"seed {seed}"
        assert done.missing == missing, f"seed {seed}"
        before = 0 if done.truncated else len(rows)
        assert before + done.inserted - done.deleted == after.total(), f"seed {seed}"
        lost += missing > 0
    assert 0 < lost < 12


@pytest.mark.parametrize("marking", [False, True])
def test_parts_of_the_digests_leave_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, marking: bool
) -> None:
    """The driver decides no batch with an UPDATE or a DELETE."""
    by_parts = lost = 0
    for seed in range(40):
        rows, changes = _random(random.Random(seed))
        gone = random.Random(seed).choices(_ROWS, k=5) if marking else []
        made = Changes(tmp_path / str(seed), [*gone, *rows], changes, _COLUMNS)
        if marking:
            made.lake.policy = replace(made.lake.policy, rewritten_bytes=-1)
            _mark(made, gone)
        after, missing = _followed(rows, changes)
        with monkeypatch.context() as alone:
            alone.setattr(key_exchange, "_MAX_ROWS_PER_CHANGE", seed % 2 * 100)
            if any(change.old for change in changes):
                alone.setattr(by_files, "read_digests", None)
                by_parts += 1
            done = made.by_key_parts(_KEYLESS)
        assert Counter(map(str, made.rows())) == after, f"seed {seed}"
        assert done.missing == missing, f"seed {seed}"
        before = 0 if done.truncated else len(rows)
        assert before + done.inserted - done.deleted == after.total(), f"seed {seed}"
        lost += missing > 0
    assert by_parts > 10
    assert lost > 2


def test_parts_of_the_digests_remove_the_same_of_several_equal_rows(tmp_path: Path) -> None:
    """The first of them in the files, as the driver does."""
    draw, removed_count = random.Random(7), 0
    for number in range(6):
        rows = [draw.choice(_ROWS[:3]) for _ in range(40)]
        old_rows = draw.sample(rows, 12)
        changes = [
            update(draw.choice(_ROWS), old) if draw.random() < 0.5 else delete(old) for old in old_rows
        ]
        driver = Changes(tmp_path / f"{number}", rows, changes, _COLUMNS)
        driver.lake.policy = replace(driver.lake.policy, rewritten_bytes=-1)
        assert driver.lake.delta_rs is not None
        enable_marking(driver.lake.delta_rs, driver.path)
        shutil.copytree(driver.lake.uri, copied := tmp_path / f"{number}parts")
        parts = copy(driver)
        parts.lake = Lake(str(copied), no_session, LakeSettings(-1, -1, thread_count=2))
        parts.path, parts.log = (str(copied / name) for name in ("replica", "changes"))
        assert driver.by_files(_KEYLESS).deleted == parts.by_key_parts(_KEYLESS).deleted
        removed, expected = (
            {name: numbers.tolist() for name, numbers in find_deleted_rows(DeltaTable(way.path)).items()}
            for way in (parts, driver)
        )
        assert removed == expected
        removed_count += sum(map(len, removed.values()))
    assert removed_count > 30
