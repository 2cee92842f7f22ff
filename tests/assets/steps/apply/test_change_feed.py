"""A replica's change data feed, as delta-rs reads it, has what a batch changed. No JVM."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.apply import by_files, key_reader
from pgsieve.assets.steps.apply.by_files import FilesWriter, StoredChanges, add_net_change
from pgsieve.assets.steps.apply.by_key_parts import KeyPartsWriter
from pgsieve.assets.steps.apply.choice import apply_by_ways, choose_apply
from pgsieve.assets.steps.apply.ways import Way
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.row_removal import enable_marking
from tests.fixtures.replica_changes import (
    ENDS,
    Change,
    Changes,
    Row,
    definition,
    delete,
    draw_changes,
    followed,
    row,
    update,
)


def _draw(seed: int, key: tuple[str, ...]) -> tuple[list[Row], list[Change]] | None:
    """Draw the rows of a replica and changes; None if a change conflicts with a row of its key.

    Without a key, some rows are twice in the replica, and once deleted.
    """
    rows, changes = draw_changes(random.Random(seed))
    if not key:
        inserts = [change for change in changes if change.operation == "insert"]
        return [*rows, *rows[:4]], [*inserts, *map(delete, rows[2:6])]
    return None if followed(rows, changes, key) is None else (rows, changes)


@pytest.mark.slow
@pytest.mark.parametrize("marking", [False, True])
@pytest.mark.parametrize("key", [("k",), ("t", "k"), ()])
@pytest.mark.parametrize("way", ["by_files", "by_key_parts"])
def test_the_feed_has_the_rows_that_random_changes_add_remove_and_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...], way: str, *, marking: bool
) -> None:
    monkeypatch.setattr(key_reader, "_PART_CHANGES", 3)
    applied, updated = 0, 0
    for seed in range(9):
        if (drawn := _draw(seed, key)) is None:
            continue
        replica = Changes(tmp_path / f"{seed}", *drawn)
        since, before = replica.enable_feed(), replica.count_rows()
        if marking:
            assert replica.lake.delta_rs is not None
            replica.lake.policy = replace(replica.lake.policy, rewritten_bytes=-1)
            enable_marking(replica.lake.delta_rs, replica.path)
        with monkeypatch.context() as alone:
            if way == "by_key_parts":
                alone.setattr(by_files, "make_keyed_changes", None)
                alone.setattr(by_files, "read_digests", None)
            getattr(replica, way)(definition(*key))
        after = replica.count_rows()
        if DeltaTable(replica.path).version() < since:
            assert before == after, f"seed {seed}"
            continue
        feed = replica.read_feed(since)
        removed, added = feed["delete"] + feed["update_preimage"], feed["insert"] + feed["update_postimage"]
        assert removed <= before, f"seed {seed}"
        assert before - removed + added == after, f"seed {seed}"
        if not any(change.operation == "truncate" for change in drawn[1]):
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


def test_a_feed_is_left_to_a_merge_if_the_log_lacks_statistics_of_a_file(tmp_path: Path) -> None:
    """This process cannot write the log's entry then, also if the file is to be rewritten."""
    replica = Changes(tmp_path, [row(key, "before") for key in range(3)], [update(row(1, "after"))])
    replica.enable_feed()
    log_entry = Path(replica.path, "_delta_log", f"{0:020}.json")
    actions = [json.loads(line) for line in log_entry.read_text().splitlines()]
    for action in actions:
        action.get("add", {}).pop("stats", None)
    log_entry.write_text("\n".join(map(json.dumps, actions)))
    replica.lake.policy = replace(replica.lake.policy, min_parted_changes=0)
    batch = replica.batch(definition("k"))
    choice = choose_apply(batch)
    assert choice.way == Way.KEY_PARTS
    assert isinstance(choice.means, StoredChanges)
    with pytest.raises(UnmarkableError, match="lacks the actions or statistics"):
        KeyPartsWriter(batch, ENDS[-1]).apply(choice.means)
    changes = add_net_change(batch, choice.means)
    with pytest.raises(UnmarkableError, match="lacks the actions or statistics"):
        FilesWriter(replica.lake, replica.path, batch.pending, ENDS[-1]).apply(changes)
    merged = apply_by_ways(
        batch, lambda choice: choice.way, dict.fromkeys([Way.KEY_PARTS, Way.FILES], "refused")
    )
    assert merged == Way.MERGE_BY_SPARK  # The lake of this test has no small changes.
