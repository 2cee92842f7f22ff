"""Decides how a batch is applied to one replica table, before the changes are read.

A batch is the changes that are applied to a replica in one commit.

In: the numbers and sizes of the changes, the definition of the table, and what the Delta logs of the replica and of the
change history (the table's changes) require of writers and readers. Out: an `ApplyChoice`: the way, the committer, and the
reason. If the way finds out that it cannot apply the changes (`UNSUITED_ERRORS`), another one is chosen. Raises LakeError.

    files by key parts ──► files ──► MERGE by delta-rs ──► MERGE by Spark
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import pyarrow as pa

from pgsieve.assets.steps.apply.by_files import StoredChanges, empties_replica
from pgsieve.assets.steps.apply.damaged_tables import describe_missing_columns
from pgsieve.assets.steps.apply.table_result import TableBatch, find_key_alteration_lsn
from pgsieve.assets.steps.apply.ways import UNSUITED_ERRORS, Way
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT
from pgsieve.resources.lake.committers import (
    FileCommitter,
    InProcessCommitter,
    SmallCommitter,
    SparkCommitter,
)
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.slices import SparkSlices
from pgsieve.resources.lake.policy import CANNOT_ADD_FILES, estimate_merge_bytes

_Result = TypeVar("_Result")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApplyChoice:
    """How a batch is applied to a replica.

    - `way`: who decides the changes, and who writes the rows
    - `reason`: why this way is taken
    - `means`: if files are written, the changes in the files of the change history, with the committer of the replica's
      files; for a MERGE, its committer
    """

    way: Way
    reason: str
    means: StoredChanges | SmallCommitter


def apply_by_ways(
    batch: TableBatch,
    apply: Callable[[ApplyChoice], _Result],
    unsuited_ways: Mapping[Way, str] = MappingProxyType({}),
) -> _Result:
    """Call `apply` with the choice for a batch. After one of `UNSUITED_ERRORS`, call it with the next choice.

    `unsuited_ways` maps the ways that are not taken to the reasons.
    """
    reason_by_way = dict(unsuited_ways)
    while True:
        choice = choose_apply(batch, reason_by_way)
        _LOGGER.debug('Delta table "%s": %s (%s)', batch.path, choice.way, choice.reason)
        try:
            return apply(choice)
        except UNSUITED_ERRORS as error:
            reason_by_way[choice.way] = str(error)


def choose_apply(batch: TableBatch, unsuited_ways: Mapping[Way, str] = MappingProxyType({})) -> ApplyChoice:
    """Choose how to apply a batch. `unsuited_ways` maps the ways that cannot apply it to the reasons."""
    reason = unsuited_ways.get(Way.FILES)
    if reason is None:
        stored_changes = _find_stored_changes(batch)
        if isinstance(stored_changes, StoredChanges):
            return _choose_decider(batch, stored_changes, unsuited_ways)
        reason = stored_changes
    committer, merge_reason = _choose_merge_committer(batch)
    match committer:
        case InProcessCommitter() if Way.MERGE_IN_PROCESS not in unsuited_ways:
            _refuse_missing_columns(batch)
            return ApplyChoice(Way.MERGE_IN_PROCESS, reason, committer)
        case _:
            merge_reason = unsuited_ways.get(Way.MERGE_IN_PROCESS, merge_reason)
            by_spark = SparkCommitter(batch.lake.access)
            return ApplyChoice(Way.MERGE_BY_SPARK, f"{reason}; {merge_reason}", by_spark)


def _choose_decider(
    batch: TableBatch, stored_changes: StoredChanges, unsuited_ways: Mapping[Way, str]
) -> ApplyChoice:
    """Choose who decides the changes if files are written.

    Tasks decide very many changes. INSERTs into a table without a key need no decision.
    """
    pending, least_count = batch.pending, batch.lake.policy.min_parted_changes
    if pending.row_change_count < least_count:
        reason = f"less than {least_count} changes"
    elif not (batch.definition.key or pending.count("update", "delete")):
        reason = "only INSERTs, and no key"
    elif Way.KEY_PARTS in unsuited_ways:
        reason = unsuited_ways[Way.KEY_PARTS]
    else:
        return ApplyChoice(Way.KEY_PARTS, f"at least {least_count} changes", stored_changes)
    return ApplyChoice(Way.FILES, reason, stored_changes)


def _find_stored_changes(batch: TableBatch) -> StoredChanges | str:
    """Find the changes in the files of the change history. If the replica's files cannot be written, return the reason.

    Some changes may be from before the table's key was altered. Several of their rows may have the same value of the present
    key, so these changes are merged.
    """
    lake, definition, pending = batch.lake, batch.definition, batch.pending
    if pending.since_lsn < find_key_alteration_lsn(definition):
        return "some changes may be from before the key was altered"
    with lake.access.translate_errors(batch.changes_path):
        slices = lake.find_slices(batch.changes_path, pending.slice_ends, must_exist=True)
        if isinstance(slices, SparkSlices):
            return "only Spark reads the change history"
        row_type, groups = slices.schema.field("new").type, slices.row_groups
    schema = pa.schema([row_type.field(name) for name in definition.names])
    is_emptied = empties_replica(definition, pending)
    match lake.policy.choose_large_committer(batch.path, schema, overwrite=is_emptied, translates_names=True):
        case FileCommitter() as committer:
            stamp_column = definition.metadata_column(APPLIED_AT)
            return StoredChanges(committer, groups, schema, is_emptied, stamp_column)
        case SparkCommitter():
            return CANNOT_ADD_FILES


def _refuse_missing_columns(batch: TableBatch) -> None:
    """Raise LakeError if another writer has removed columns of the replica: an append of delta-rs would add them again."""
    problem = describe_missing_columns(batch.lake, batch.path, batch.definition)
    if problem is not None and batch.pending.truncated_at is None:
        raise LakeError(problem, sqlstate="42703")


def _choose_merge_committer(batch: TableBatch) -> tuple[SmallCommitter, str]:
    """Choose the committer of a MERGE, and give the reason."""
    lake, definition, pending = batch.lake, batch.definition, batch.pending
    needs_replica_rows = bool(definition.soft_delete_columns or pending.count("update", "delete"))
    is_truncated, by_spark = pending.truncated_at is not None, SparkCommitter(lake.access)
    if needs_replica_rows and not definition.key:
        return by_spark, "the table has no key"
    if is_truncated and definition.soft_delete_columns:
        return by_spark, "a TRUNCATE ends all rows of the replica, however few the changes are"
    type_by_column = dict(definition.columns)
    key_types = [type_by_column[name] for name in definition.key] if needs_replica_rows else []
    replica_bytes = lake.records.size_bytes(batch.path) if needs_replica_rows and not is_truncated else 0
    merge_bytes = estimate_merge_bytes(pending.size_bytes, replica_bytes)
    return lake.policy.choose_merge_committer(
        batch.path, definition.names, merge_bytes, overwrite=is_truncated, key_types=key_types
    )
