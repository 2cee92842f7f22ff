"""Applies a batch to one replica table by writing its files. All changes become one commit of their net change.

A batch is the changes that one commit applies. The net change of a key is what all changes of the key do together: at
most one row is added, and at most one is removed.

In: a batch's changes, in the files of the change history (the Delta table that has all changes of a replica's table).
Out: `TableResult`. Raises LakeError.

First this process computes the net change of each key, on whole columns (`pgsieve.decoding.changes.net_change`). Then
executors read the new rows from the row groups of the change history, and write them into new files of the replica.
Executors also write the files again that contain deleted rows, without these rows. If such files are too large, or have
deletion vectors already, the deleted rows are marked in deletion vectors instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.change_feed import ChangeFeed, FilesTaskWithFeed
from pgsieve.assets.steps.apply.completion import MissingValues
from pgsieve.assets.steps.apply.ended_rows import EndedRows, RowEndings
from pgsieve.assets.steps.apply.files_task import FilesTask
from pgsieve.assets.steps.apply.keyed_changes import KeyConflict, KeyedChanges
from pgsieve.assets.steps.apply.keyless_changes import KeylessChanges, read_digests, select_first_matches
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.apply.table_result import (
    PendingChanges,
    TableBatch,
    TableResult,
    make_batch_result,
)
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes, read_changes
from pgsieve.assets.steps.history.shared_rows import SharedRows
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.digests import WantedDigests
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.net_rows import NetRows, find_net_rows
from pgsieve.decoding.changes.value_sources import Completion
from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.change_data import is_change_file
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile
from pgsieve.resources.lake.delta.key_lookup import FileMatches, Flag
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_deletion import DeletedRows, RowDeletion
from pgsieve.resources.lake.stores.store import RowGroup, Store, divide_groups

#: The most memory for the `KeyedChanges` of a batch: the key and a few numbers of each change. If a table's changes need
#: more, Spark applies them.
KEY_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True)
class ReplicaChange:
    """The net change of a batch for a replica.

    - `new_rows`: the rows to write, and the changes that have them
    - `deleted_rows`: the rows to remove from the replica's files
    - `counts`: the numbers of inserted, updated, deleted and missing rows, as in `make_batch_result`
    - `has_changes`: True if there is anything to commit
    - `conflict`: the first change that gives a row the key of another row; None if there is none
    - `ended_metadata`: the metadata columns of rows that the batch inserts and deletes again, in a replica that keeps
      deleted rows
    - `ended_rows`: in such a replica, the removed rows that are written again, marked as deleted
    - `keyed_changes`: the changes by key; None for a table without a key
    """

    new_rows: NetRows
    deleted_rows: DeletedRows
    counts: Mapping[str, int]
    has_changes: bool
    conflict: KeyConflict | None = None
    ended_metadata: Sequence[Completion] = ()
    ended_rows: Sequence[EndedRows] = ()
    keyed_changes: KeyedChanges | None = None

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        keyed_bytes = 0 if self.keyed_changes is None else self.keyed_changes.nbytes
        return (
            self.deleted_rows.nbytes
            + self.new_rows.nbytes
            + sum(rows.nbytes for rows in self.ended_rows)
            + keyed_bytes
        )


@dataclass(frozen=True)
class StoredChanges:
    """The changes of a batch in the files of the change history.

    - `committer`: commits files to the replica
    - `groups`: the row groups of the change history that have the changes
    - `schema`: the replica's columns
    - `empties_replica`: True if the batch removes all rows that the replica has now
    - `stamp_column`: the column with the time at which changes are applied; None if the replica has no such column
    """

    committer: FileCommitter
    groups: Sequence[RowGroup]
    schema: pa.Schema
    empties_replica: bool = False
    stamp_column: str | None = None


@dataclass(frozen=True)
class ManyChanges:
    """The changes of a batch, which are not read into memory as a whole, and their net change.

    `net_change` is None if a table without a key has only INSERTs.
    """

    stored: StoredChanges
    net_change: ReplicaChange | None

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return 0 if self.net_change is None else self.net_change.nbytes


def add_net_change(batch: TableBatch, stored_changes: StoredChanges) -> ManyChanges:
    """Compute the net change of a batch.

    Raises UnmarkableError if the files with the rows to remove can neither be rewritten nor get deletion vectors, and
    UnsuitedWayError if the changes by key exceed `KEY_BYTES`.
    """
    if not (batch.definition.key or batch.pending.count("update", "delete")):
        return ManyChanges(stored_changes, None)
    computation = _NetChangeComputation(
        batch.lake,
        stored_changes.committer,
        batch.path,
        batch.changes_path,
        batch.definition,
        batch.pending,
        stored_changes.groups,
        stored_changes.schema,
    )
    net_change = computation.compute_by_key() if batch.definition.key else computation.compute_by_row()
    return ManyChanges(stored_changes, net_change)


@dataclass(frozen=True)
class _NetChangeComputation:
    """Computes the net change of a batch. Its methods raise the errors of `add_net_change`."""

    lake: Lake
    committer: FileCommitter
    path: str
    changes_path: str
    definition: Definition
    pending: PendingChanges
    groups: Sequence[RowGroup]
    schema: pa.Schema

    def compute_by_key(self) -> ReplicaChange:
        """Compute the net change of a table with a key."""
        pending, lake, soft_delete_columns = self.pending, self.lake, self.definition.soft_delete_columns
        key_schema = pa.schema([self.schema.field(name) for name in self.definition.key])
        with lake.access.translate_errors(self.changes_path):
            files, unsent = dict.fromkeys(group.file for group in self.groups), sorted(pending.unsent_columns)
            change_tables = read_changes(lake.store, files, key_schema, unsent, soft_delete_columns)
            keyed_changes = make_keyed_changes(
                change_tables, key_schema, unsent, pending.extent, KEY_BYTES, soft_delete_columns
            )
        matches = self._find_matching_rows(keyed_changes)
        living_rows = self._find_living_rows(matches) if soft_delete_columns else matches
        is_emptied = empties_replica(self.definition, pending)
        outcome = keyed_changes.decide(
            (match.key_indices for match in living_rows), empties_replica=is_emptied
        )
        net, had_row, has_row = outcome.net, outcome.had_row, outcome.has_row
        if is_emptied:
            matches = []
        is_removed = outcome.mask_removed_keys(retain_ended=bool(soft_delete_columns))
        removed_rows = [
            match.select_keys(is_removed) for match in matches if is_removed[match.key_indices].any()
        ]
        ended_rows, ended_metadata = list[EndedRows](), list[Completion]()
        if soft_delete_columns:
            endings = RowEndings(keyed_changes, net, has_row, self._find_truncated_rows(keyed_changes))
            (removed_rows, ended_rows), ended_metadata = (
                endings.split_rows(removed_rows),
                endings.make_completions(self.schema),
            )
        deleted_rows = self._deletion.decide(removed_rows)
        counts = pending.adjust_row_counts(net.count_rows(had_row))
        has_changes = outcome.has_row_changes or pending.truncated_at is not None
        new_rows = find_net_rows(
            keyed_changes.effective_places,
            net,
            has_row & (net.last_changes != NONE),
        )
        return ReplicaChange(
            new_rows,
            deleted_rows,
            counts,
            has_changes,
            outcome.conflict,
            ended_metadata,
            ended_rows,
            keyed_changes,
        )

    def _find_living_rows(self, matches: Sequence[FileMatches] | None) -> Sequence[FileMatches]:
        """Find the rows among `matches` that are not marked as deleted. With None, search all rows of the replica."""
        deleted_column = self.definition.deleted_column
        assert deleted_column is not None
        return self.committer.find_flagged_rows(self.path, Flag(deleted_column, is_set=False), matches)

    def _find_truncated_rows(self, keyed_changes: KeyedChanges) -> Sequence[FileMatches]:
        """Find the rows that a TRUNCATE marks as deleted: all living rows. Empty if the batch has no TRUNCATE."""
        return () if keyed_changes.truncated_metadata is None else self._find_living_rows(None)

    def compute_by_row(self) -> ReplicaChange:
        """Compute the net change of a table without a key."""
        lake, pending, matches = self.lake, self.pending, list[FileMatches]()
        row_schema = pa.schema([self.schema.field(name) for name, _ in self.definition.table_columns])

        def count_rows(sought: WantedDigests) -> Numbers:
            if pending.truncated_at is None:
                runner = lake.policy.choose_runner(lake.records.size_bytes(self.path))
                matches[:] = self.committer.find_row_matches(self.path, sought, row_schema, runner)
            counts = np.zeros(len(sought), np.int64)
            for match in matches:
                counts += np.bincount(match.key_indices, minlength=len(sought))
            return counts

        with lake.access.translate_errors(self.changes_path):
            digests = read_digests(
                lake.store, self.groups, row_schema, lake.policy.choose_runner(pending.size_bytes)
            )
        changes = KeylessChanges.from_digests(digests, pending.extent)
        outcome = changes.compute_net_change(count_rows)
        net = outcome.net_change
        deleted_rows = self._deletion.decide(
            select_first_matches(matches, net.deletion_counts[outcome.looked_up_rows])
        )
        places, deleted_count = changes.places[net.inserting_changes], int(net.deletion_counts.sum())
        counts = {"inserted": len(places), "deleted": deleted_count, "missing": net.missing_count}
        has_changes = bool(len(places) or deleted_count or pending.truncated_at is not None)
        no_places = np.full(len(places), NONE)
        return ReplicaChange(NetRows(places, {}, no_places, no_places), deleted_rows, counts, has_changes)

    def _find_matching_rows(self, keyed_changes: KeyedChanges) -> Sequence[FileMatches]:
        """Find the replica's rows with the keys of the changes."""
        max_bytes = None if self._deletion.can_mark_rows else self._deletion.max_rewritten_bytes
        return self.committer.find_key_matches(
            self.path, keyed_changes.keys, keyed_changes.lookup_masks, max_bytes
        )

    @cached_property
    def _deletion(self) -> RowDeletion:
        return RowDeletion(
            self.lake,
            self.committer,
            self.path,
            self.definition.names,
            self.pending.size_bytes,
            writes_feed=True,
        )


def empties_replica(definition: Definition, pending: PendingChanges) -> bool:
    """Whether a batch removes all rows that the replica had."""
    return pending.truncated_at is not None and not definition.soft_delete_columns


@dataclass(frozen=True)
class FilesWriter:
    """Writes the net change of a batch to one replica table, in one commit.

    `end` is the LSN at which the batch ends; None for a repair, which keeps the replica's position. `metadata` is added to
    the user metadata of the commit. If this process writes the files itself, it adds the new and the removed rows to
    `shared_rows`, for the table of the rows' versions (`history: scd2`).
    """

    lake: Lake
    path: str
    pending: PendingChanges
    end: int | None
    shared_rows: SharedRows | None = None
    metadata: Mapping[str, Any] | None = None

    def apply(self, changes: ManyChanges) -> TableResult:
        """Apply changes that have no conflict.

        Raises UnmarkableError if the log lacks what the new entries of the files with removed rows need.
        """
        lake, path, pending, end, net_change = (
            self.lake,
            self.path,
            self.pending,
            self.end,
            changes.net_change,
        )
        if net_change is None:
            return make_batch_result(lake, path, pending, end, inserted=self._commit(changes, None, None))
        if net_change.has_changes:
            committer = changes.stored.committer
            feed, marked_files = self._make_feed(net_change, committer), None
            if feed is not None or net_change.deleted_rows.are_marked:
                marked_files = self._prepare_marked_files(committer, net_change.deleted_rows)
            self._commit(changes, marked_files, feed)
        return make_batch_result(lake, path, pending, end, **net_change.counts)

    def _prepare_marked_files(
        self, committer: FileCommitter, deleted_rows: DeletedRows
    ) -> Sequence[MarkedFile]:
        """Prepare the files whose rows are marked as deleted, or which are removed as a whole.

        If the replica has a change data feed, files that are written again without some rows are also removed in this way:
        only a commit that this process writes itself can add files of the feed.
        """
        matches, version = deleted_rows.matches, self.pending.head.version
        if deleted_rows.are_marked:
            return committer.prepare_marked_files(self.path, matches, version)
        names = {match.name for match in matches}
        actions = committer.find_markable_files(self.path, names, version, removes_files=True)
        return [MarkedFile.removed(action) for action in actions.values()]

    def _make_feed(self, net_change: ReplicaChange, committer: FileCommitter) -> ChangeFeed | None:
        """Find what the change data feed gets; None without a feed, or if the batch only adds rows or removes all."""
        matches = net_change.deleted_rows.matches
        if not (matches and committer.has_change_feed(self.path)):
            return None
        retain_ended = (
            net_change.keyed_changes is not None and net_change.keyed_changes.end_metadata is not None
        )
        return ChangeFeed.make(
            matches, net_change.new_rows, net_change.keyed_changes, retain_ended=retain_ended
        )

    def _commit(
        self, changes: ManyChanges, marked_files: Sequence[MarkedFile] | None, feed: ChangeFeed | None
    ) -> int:
        """Write the files and commit them; returns the number of rows in the new files.

        `marked_files` are the replica's files with their new deletion vectors, or to be removed as a whole. If it is None,
        the files with removed rows are rewritten. `feed` is what the replica's change data feed gets.
        """
        lake, path, stored, net_change = self.lake, self.path, changes.stored, changes.net_change
        committer = stored.committer
        base_version = self.pending.head.version
        files_to_rewrite = net_change.deleted_rows.rewritten_files if net_change is not None else ()
        replica_schema, target_file_bytes = (
            committer.read_table_schema(path),
            committer.find_target_file_bytes(path, {}),
        )
        runner, store = lake.policy.choose_runner(self.pending.size_bytes), committer.make_table_store(path)
        ended_rows = net_change.ended_rows if net_change is not None else ()

        def write_parts() -> pa.Table:
            # Each part writes files of its own. To get few files, the ended rows are divided into no more parts than can
            # run at the same time.
            ended_parts = [
                part
                for first in range(runner.parallelism)
                if (part := ended_rows[first :: runner.parallelism])
            ]
            parts = divide_groups(stored.groups, runner.parallelism)
            task = FilesTask(
                store,
                path,
                stored.schema,
                replica_schema,
                target_file_bytes,
                files_to_rewrite,
                ended_parts,
                parts,
                self._select_new_rows(changes, store),
                shared_rows=self.shared_rows,
            )
            task_with_feed = task if feed is None else FilesTaskWithFeed(task, feed)
            return runner.run(task_with_feed, task_with_feed.part_count)

        if marked_files is not None:
            files = committer.commit_marked_files(
                write_parts, path, marked_files, self.end, base_version, self.metadata
            )
        else:
            commit = Commit(
                self.end,
                overwrite=stored.empties_replica,
                expected_version=base_version,
                metadata=self.metadata,
            )
            bytes_by_removed_path = {match.log_path: match.size_bytes for match in files_to_rewrite}
            files = committer.commit(write_parts, path, stored.schema, commit, bytes_by_removed_path)
        return sum(json.loads(file["stats"])["numRecords"] for file in files if not is_change_file(file))

    def _select_new_rows(self, changes: ManyChanges, store: Store) -> RowSelection:
        """Select the changes that have the new rows."""
        pending, net_change, stamp = self.pending, changes.net_change, Stamp(changes.stored.stamp_column)
        if net_change is None:
            return RowSelection(pending.extent, stamp)
        rows = net_change.new_rows
        sources = (
            store,
            self.path,
            changes.stored.groups,
            pending.slice_ends,
            net_change.deleted_rows.matches,
        )
        missing_values = (
            MissingValues(*sources, changes.stored.schema, rows).reduce() if rows.sent_places else None
        )
        return RowSelection(
            pending.extent,
            stamp,
            rows.places,
            net_change.ended_metadata,
            missing_values,
        )
