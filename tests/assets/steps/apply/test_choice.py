"""The way in which a batch is applied is chosen before its changes are read, with the reason. No JVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgsieve.assets.steps.apply.by_files import StoredChanges
from pgsieve.assets.steps.apply.choice import ApplyChoice, apply_by_ways, choose_apply
from pgsieve.assets.steps.apply.ways import UnsuitedWayError, Way
from pgsieve.resources.lake.committers import InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.policy import CANNOT_ADD_FILES
from tests.assets.steps.apply.test_ended_rows import _ALL, _DEFINITION, _LIVES, _soft
from tests.fixtures.replica_changes import Change, Changes, definition, delete, insert, row, update


def _constrain(changes: Changes) -> None:
    DeltaTable(changes.path).alter.add_constraint({"small": "k < 1000"})


def _do_nothing(changes: Changes) -> None:
    pass


_UPDATES = (update(row(3, "after")), delete(row(4, "")))
_INSERTS = (insert(row(7, "new")),)


@pytest.mark.parametrize(
    ("key", "sent", "alter", "way", "reason"),
    [
        (("k",), _UPDATES, _do_nothing, Way.FILES, "less than 2000000 changes"),
        ((), _UPDATES, _do_nothing, Way.FILES, "less than 2000000 changes"),
        (("k",), _UPDATES, _constrain, Way.MERGE_IN_PROCESS, CANNOT_ADD_FILES),
        ((), _INSERTS, _constrain, Way.MERGE_IN_PROCESS, CANNOT_ADD_FILES),
        ((), _UPDATES, _constrain, Way.MERGE_BY_SPARK, f"{CANNOT_ADD_FILES}; the table has no key"),
    ],
)
def test_a_batch_of_few_changes_has_one_way(
    tmp_path: Path,
    key: Sequence[str],
    sent: Sequence[Change],
    alter: Callable[[Changes], None],
    way: Way,
    reason: str,
) -> None:
    changes = Changes(tmp_path, [row(3, "before"), row(4, "before")], list(sent))
    changes.lake.policy = replace(changes.lake.policy, small_bytes=2**20)
    alter(changes)
    choice = choose_apply(changes.batch(definition(*key)))
    assert (choice.way, choice.reason) == (way, reason)
    assert (
        type(choice.means)
        is {
            Way.FILES: StoredChanges,
            Way.MERGE_IN_PROCESS: InProcessCommitter,
            Way.MERGE_BY_SPARK: SparkCommitter,
        }[way]
    )


def test_inserts_add_no_column_that_another_writer_has_removed(tmp_path: Path) -> None:
    changes = Changes(tmp_path, [row(3, "before")], list(_INSERTS))
    changes.lake.policy = replace(changes.lake.policy, small_bytes=2**20)
    write_deltalake(changes.path, pa.table({"other": [1]}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(LakeError, match=r'no longer has the columns? "k"'):
        choose_apply(changes.batch(definition("k")))


@pytest.mark.parametrize(("key", "way"), [(("k",), Way.KEY_PARTS), ((), Way.FILES)])
def test_tasks_decide_many_changes_unless_there_is_nothing_to_decide(
    tmp_path: Path, key: Sequence[str], way: Way
) -> None:
    changes = Changes(tmp_path, [], list(_INSERTS))
    changes.lake.policy = replace(changes.lake.policy, min_parted_changes=1)
    assert choose_apply(changes.batch(definition(*key))).way == way


def test_a_truncate_of_a_replica_that_keeps_deleted_rows_is_merged_by_spark_if_no_files_can_be_written(
    tmp_path: Path,
) -> None:
    sent = [_soft(Change("truncate")), _soft(insert(row(7, "new")))]
    changes = Changes(tmp_path, [{**row(3, "before"), **_LIVES}], sent, _ALL)
    changes.lake.policy = replace(changes.lake.policy, small_bytes=2**20)
    _constrain(changes)
    choice = choose_apply(changes.batch(_DEFINITION))
    assert choice.way == Way.MERGE_BY_SPARK
    assert "however few the changes are" in choice.reason


def test_a_way_that_turns_out_to_be_unsuited_is_followed_by_the_next_one(tmp_path: Path) -> None:
    changes = Changes(tmp_path, [row(3, "before")], list(_UPDATES))
    changes.lake.policy = replace(changes.lake.policy, min_parted_changes=1, small_bytes=2**20)
    tried = list[ApplyChoice]()

    def refuse_all_but_spark(choice: ApplyChoice) -> Way:
        tried.append(choice)
        if choice.way == Way.MERGE_BY_SPARK:
            return choice.way
        raise UnsuitedWayError(f"{choice.way.name} is unsuited")

    assert apply_by_ways(changes.batch(definition("k")), refuse_all_but_spark) == Way.MERGE_BY_SPARK
    assert [(choice.way, choice.reason) for choice in tried] == [
        (Way.KEY_PARTS, "at least 1 changes"),
        (Way.FILES, "KEY_PARTS is unsuited"),
        (Way.MERGE_IN_PROCESS, "FILES is unsuited"),
        (Way.MERGE_BY_SPARK, "FILES is unsuited; MERGE_IN_PROCESS is unsuited"),
    ]
