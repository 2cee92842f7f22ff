"""A replica's change data feed, as delta-rs reads it, has what a batch changed. No JVM."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.apply import by_files, key_reader
from pgsieve.resources.lake.delta.row_removal import enable_marking
from tests.fixtures.replica_changes import Changes, Row, definition, draw_changes, followed


def _read_feed(path: str, since: int) -> dict[str, Counter[tuple[object, ...]]]:
    """By type: how often the feed has each row in the versions from `since` on."""
    rows = pa.table(DeltaTable(path).load_cdf(since).read_all()).to_pylist()
    feed: dict[str, Counter[tuple[object, ...]]] = {
        kind: Counter() for kind in ("insert", "delete", "update_preimage", "update_postimage")
    }
    for each in rows:
        feed[each["_change_type"]][_values(each)] += 1
    return feed


def _values(row: Row) -> tuple[object, ...]:
    return row["k"], row["t"], row["v"]


@pytest.mark.parametrize("marking", [False, True])
@pytest.mark.parametrize("key", [("k",), ("t", "k"), ()])
@pytest.mark.parametrize("way", ["by_files", "by_key_parts"])
def test_the_feed_has_the_rows_that_random_changes_add_remove_and_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...], way: str, *, marking: bool
) -> None:
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 3)
    applied, updated = 0, 0
    for seed in range(14):
        rows, changes = draw_changes(random.Random(seed))
        if not key:  # An UPDATE and a DELETE of a table without a key have the whole old row.
            changes = [change for change in changes if change.operation == "insert"]
            rows, changes = (
                [*rows, *rows[:2]],
                [
                    *changes,
                    *(
                        replace(change, operation="delete", old=row, new=None)
                        for change, row in zip(changes, rows, strict=False)
                    ),
                ],
            )
        if followed(rows, changes, key or ("k",)) is None:
            continue
        replica = Changes(tmp_path / f"{seed}", rows, changes)
        DeltaTable(replica.path).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
        if marking:
            assert replica.lake.delta_rs is not None
            replica.lake.policy = replace(replica.lake.policy, rewritten_bytes=-1)
            enable_marking(replica.lake.delta_rs, replica.path)
        before, since = Counter(map(_values, replica.rows())), DeltaTable(replica.path).version() + 1
        with monkeypatch.context() as alone:
            if way == "by_key_parts":
                alone.setattr(by_files, "make_keyed_changes", None)
                alone.setattr(by_files, "read_digests", None)
            getattr(replica, way)(definition(*key))
        after = Counter(map(_values, replica.rows()))
        if DeltaTable(replica.path).version() < since:
            assert before == after, f"seed {seed}"
            continue
        feed = _read_feed(replica.path, since)
        removed, added = feed["delete"] + feed["update_preimage"], feed["insert"] + feed["update_postimage"]
        assert removed <= before, f"seed {seed}"
        assert before - removed + added == after, f"seed {seed}"
        if not any(change.operation == "truncate" for change in changes):
            keys_of = {kind: sorted(row[0] for row in rows_of.elements()) for kind, rows_of in feed.items()}
            assert keys_of["update_preimage"] == keys_of["update_postimage"], f"seed {seed}"
            if key == ("k",):
                assert not {row[0] for row in feed["delete"]} & {row[0] for row in feed["insert"]}, (
                    f"seed {seed}"
                )
            updated += len(keys_of["update_preimage"])
        applied += 1
    assert applied > 4
    assert (updated > 0) == bool(key)
