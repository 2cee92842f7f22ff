"""Soft deletes by files, rewritten or marked: the rows equal those of the changes applied one by one. No JVM."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.apply import by_files, key_exchange, key_reader
from pgsieve.assets.steps.apply.key_conflicts import KeyConflictError
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.deleted_rows import DELETED_ROW_COLUMNS
from pgsieve.decoding.changes.metadata_columns import metadata_schema, metadata_type
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.resources.lake.delta.row_removal import enable_marking
from tests.fixtures.replica_changes import (
    COLUMNS,
    SPARK_COLUMNS,
    Change,
    Changes,
    Row,
    draw_changes,
    followed,
    row,
    update,
)

pytestmark = pytest.mark.slow

_METADATA = [(name, kind) for kind, name in DELETED_ROW_COLUMNS.items()]
_ALL = [*COLUMNS, *((each.name, each.type) for each in metadata_schema(_METADATA))]
_LIVES = {"_deleted": False, "_filtered": False, "_deleted_at": None}
_ENDED = {**_LIVES, "_deleted": True}
_DEFINITION = Definition(
    (*SPARK_COLUMNS, *((name, metadata_type(kind).spark_type) for name, kind in _METADATA)),
    ("k",),
    Layout(1, (), 3, ()),
    metadata=tuple(_METADATA),
)


def _soft(change: Change) -> Change:
    """The change as the history has it in a subscription with soft deletes."""
    new = None if change.new is None else {**change.new, **_LIVES}
    return replace(change, new=new, old=None if change.old is None else {**change.old, **_ENDED})


def _followed(rows: list[Row], changes: list[Change]) -> list[Row]:
    """The rows after the changes, applied one by one."""
    living, ended = {row["k"]: {**row, **_LIVES} for row in rows}, dict[object, Row]()
    for change in changes:
        if change.operation == "truncate":
            ended |= {key: {**row, **_ENDED} for key, row in living.items()}
            living = {}
            continue
        side = change.new if change.old is None else change.old
        assert side is not None
        row = {} if change.operation == "insert" else living.get(side["k"])
        if row is None:
            continue
        if change.operation != "insert" and (change.new is None or change.new["k"] != side["k"]):
            ended[side["k"]] = {**living.pop(side["k"]), **_ENDED}
        if change.new is not None:
            living[change.new["k"]] = {**row, **change.new, **_LIVES}
            ended.pop(change.new["k"], None)
    return sorted([*living.values(), *ended.values()], key=lambda row: str(row["k"]))


@pytest.mark.parametrize("way", ["rewritten", "marked", "merged", "parts rewritten", "parts marked"])
def test_random_changes_keep_deleted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Parts of the keys decide all changes, unless they conflict. The change data feed has the same changes."""
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 3)
    ended = compared = truncated = 0
    by_parts = way.startswith("parts")
    for seed in range(24):
        rows, changes = draw_changes(random.Random(seed))
        if way == "merged" and any(change.operation == "truncate" for change in changes):
            continue  # Spark applies it
        lives = [{**row, **_LIVES} for row in rows]
        made = Changes(tmp_path / str(seed), lives, [_soft(each) for each in changes], _ALL)
        since, before = made.enable_feed(), made.count_rows()
        if way.endswith("marked"):
            assert made.lake.delta_rs is not None
            made.lake.policy = replace(made.lake.policy, rewritten_bytes=-1)
            enable_marking(made.lake.delta_rs, made.path)
        apply = made.by_key_parts if by_parts else made.by_files
        with monkeypatch.context() as alone:
            if by_parts and followed(rows, changes, ("k",)) is not None:
                alone.setattr(by_files, "make_keyed_changes", None)
                alone.setattr(key_exchange, "_MAX_ROWS_PER_CHANGE", seed % 3)
            try:
                (made.one_by_one if way == "merged" else apply)(_DEFINITION)
            except KeyConflictError:
                continue
        left = sorted(made.rows(), key=lambda row: str(row["k"]))
        assert left == _followed(rows, changes), f"seed {seed}"
        if DeltaTable(made.path).version() >= since:
            feed = made.read_feed(since)
            assert not feed["delete"]
            updated = before - feed["update_preimage"] + feed["update_postimage"]
            assert updated + feed["insert"] == made.count_rows(), f"seed {seed}"
        ended += sum(bool(row["_deleted"]) for row in left)
        compared += 1
        truncated += by_parts and any(change.operation == "truncate" for change in changes)
    assert compared > 5
    assert truncated > 1 or not by_parts
    assert ended > 20


@pytest.mark.parametrize("way", ["by_files", "by_key_parts", "one_by_one"])
def test_former_keys_of_a_moved_row_keep_its_unsent_values(tmp_path: Path, way: str) -> None:
    moves = [update(row(key + 1, ""), row(key, ""), ["v"]) for key in (1, 2, 3)]
    made = Changes(tmp_path, [{**row(1, "large"), **_LIVES}], [_soft(each) for each in moves], _ALL)
    getattr(made, way)(_DEFINITION)
    assert {(each["k"], each["v"], each["_deleted"]) for each in made.rows()} == {
        *((key, "large", True) for key in (1, 2, 3)),
        (4, "large", False),
    }


def test_moves_of_a_missing_row_keep_no_deleted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round of the parts, each key has a row that ends, but its values cannot be found."""
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 1)
    moves = [update(row(key + 1, ""), row(key, ""), ["v"]) for key in (1, 2, 3, 4)]
    rows = [{**row(9, "other"), **_LIVES}]
    made = Changes(tmp_path, rows, [_soft(each) for each in moves], _ALL)
    assert made.by_key_parts(_DEFINITION).missing == len(moves)
    assert made.rows() == rows


@pytest.mark.parametrize("marking", [False, True])
def test_parts_without_changes_end_rows_with_the_metadata_of_the_first_truncate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, marking: bool
) -> None:
    of_commits = [("_lsn", "commit_lsn"), ("_ordinal", "ordinal"), ("_operation", "operation")]
    metadata = (*_METADATA, *of_commits)
    columns = [*COLUMNS, *((each.name, each.type) for each in metadata_schema(metadata))]
    types = tuple((name, metadata_type(kind).spark_type) for name, kind in metadata)
    replicated = replace(_DEFINITION, columns=(*SPARK_COLUMNS, *types), metadata=metadata)
    lives: Row = {**_LIVES, "_lsn": 1, "_ordinal": 1, "_operation": "insert"}
    rows: list[Row] = [{**row(key, "before"), **lives} for key in range(12)]
    rows[11] |= {**_ENDED, "_operation": "delete"}
    truncate, again = Change("truncate"), Change("insert", {**row(3, "again"), **lives})
    changed = [Change("update", {**row(key, "changed"), **lives}) for key in (3, 4)]
    monkeypatch.setattr(by_files, "make_keyed_changes", None)
    for number, changes in enumerate(
        ([changed[0], truncate], [*changed, truncate, again, truncate], [truncate, again])
    ):
        made = Changes(tmp_path / str(number), rows, changes, columns)
        if marking:
            assert made.lake.delta_rs is not None
            made.lake.policy = replace(made.lake.policy, rewritten_bytes=-1)
            enable_marking(made.lake.delta_rs, made.path)
        assert made.by_key_parts(replicated).truncated
        left = {each.pop("k"): each for each in made.rows()}
        lsns = {place: (150 if place < len(changes) // 2 else 250) for place in range(len(changes))}
        first = changes.index(truncate)
        # In the second slice ordinals begin anew.
        ordinal = 2 * (first if first < len(changes) // 2 else first - len(changes) // 2)
        untouched = {key: each for key, each in left.items() if key not in (3, 4, 11)}
        ended = {**_ENDED, "_lsn": lsns[first], "_ordinal": ordinal, "_operation": "truncate"}
        assert untouched == {
            key: {"t": f"t{key % 3}", "v": "before", **ended} for key in range(11) if key not in (3, 4)
        }
        assert left[11] == {name: value for name, value in rows[11].items() if name != "k"}
        assert left[3]["_operation"] == ("insert" if changes[-1] is again else "truncate")
        assert left[3]["v"] == ("again" if again in changes else "changed")
        assert left[4]["v"] == ("changed" if changed[1] in changes else "before")
