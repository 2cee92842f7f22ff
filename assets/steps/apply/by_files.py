"""Applies a batch to one replica table by writing its files: transformed changes -> one commit of their net change.

In: a batch's changes in the files of the change history. Out: `TableResult`. Raises LakeError.

First this process computes the net change of each key, on whole columns (`pgsieve.decoding.changes.net_change`). Then
executors read the new rows from the row groups of the change history, and write them into new files of the replica.
They also rewrite the replica's files that contain deleted rows. If these files are too large, or have deletion vectors
already, the deleted rows are marked in deletion vectors instead.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.chosen_rows import ChosenRows
from pgsieve.assets.steps.apply.completion import Completion, NetRows, completions, net_rows
from pgsieve.assets.steps.apply.ended_rows import EndedRows, Endings
from pgsieve.assets.steps.apply.keyed_changes import (
    KeyConflict,
    KeyedChanges,
    keyed_changes,
    stored_changes,
)
from pgsieve.assets.steps.apply.keyless_changes import KeylessChanges, first_matches, stored_digests
from pgsieve.assets.steps.apply.table_result import (
    PendingChanges,
    TableResult,
    batch_result,
    former_key_until,
)
from pgsieve.assets.steps.history.shared_rows import SharedRows
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.digests import WantedDigests
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.decoding.changes.net_change import NONE, Numbers
from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile
from pgsieve.resources.lake.delta.key_lookup import FileMatches, Flag
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.derived_rows import remove_rows
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_deletion import DeletedRows, RowDeletion
from pgsieve.resources.lake.stores.store import RowGroup, Store, divide_groups, join_path
from pgsieve.resources.parts import Guard

#: The most memory for the keys of a batch. If they need more, Spark applies the batch.
KEY_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True)
class ReplicaChange:
    """The net change of a batch for a replica.

    - `new_rows`: the rows to write, by the changes that made them
    - `deleted_rows`: the rows to remove from the replica's files
    - `counts`: the numbers of rows by kind, as in `batch_result`
    - `has_changes`: True if there is anything to commit
    - `conflict`: the first key conflict; None if there is none
    - `ended_metadata`: in a replica that keeps deleted rows, the metadata of new rows that the batch deletes again
    - `ended_rows`: in such a replica, the removed rows that are written again, marked as deleted
    - `keyed`: the changes by key; None for a table without a key
    """

    new_rows: NetRows
    deleted_rows: DeletedRows
    counts: Mapping[str, int]
    has_changes: bool
    conflict: KeyConflict | None = None
    ended_metadata: Sequence[Completion] = ()
    ended_rows: Sequence[EndedRows] = ()
    keyed: KeyedChanges | None = None

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        keyed = 0 if self.keyed is None else self.keyed.nbytes
        return (
            self.deleted_rows.nbytes
            + self.new_rows.nbytes
            + sum(rows.nbytes for rows in self.ended_rows)
            + keyed
        )


@dataclass(frozen=True)
class ManyChanges:
    """The changes of a batch in the change history, and their net change.

    - `committer`: commits files to the replica
    - `groups`: the row groups of the change history that have the changes
    - `schema`: the replica's columns
    - `net`: the net change; None if it is not computed yet, or if a table without a key has only INSERTs
    - `empties_replica`: True if no row that the replica has now stays
    - `stamp`: the name of the column with the time of the apply; None if the replica has no such column
    """

    committer: FileCommitter
    groups: Sequence[RowGroup]
    schema: pa.Schema
    net: ReplicaChange | None
    empties_replica: bool = False
    stamp: str | None = None

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return 0 if self.net is None else self.net.nbytes


def many_changes(
    lake: Lake, path: str, log: str, definition: Definition, pending: PendingChanges
) -> ManyChanges | None:
    """A batch's changes, if they can be applied by writing files; otherwise None.

    `path` is the replica, `log` its change history.
    """
    stored = stored_batch(lake, path, log, definition, pending)
    return None if stored is None else with_net_change(lake, path, log, definition, pending, stored)


def with_net_change(
    lake: Lake, path: str, log: str, definition: Definition, pending: PendingChanges, stored: ManyChanges
) -> ManyChanges | None:
    """A batch's changes with their net change; the parameters and the result are those of `many_changes`."""
    if not (definition.key or pending.count("update", "delete")):
        return stored
    decider = _Decider(lake, stored.committer, path, log, definition, pending, stored.groups, stored.schema)
    net = decider.decide_by_key() if definition.key else decider.decide_by_row()
    return None if net is None else replace(stored, net=net)


def stored_batch(
    lake: Lake, path: str, log: str, definition: Definition, pending: PendingChanges
) -> ManyChanges | None:
    """A batch's changes before their net change is computed; None if the replica cannot be written as files.

    Also None if some changes may be from before the table's key was altered: several of their rows may have the same
    value of the present key.
    """
    if pending.since < former_key_until(definition):
        return None
    stored = lake.find_stored_slices(log, pending.slice_ends, must_exist=True)
    if stored is None:
        return None
    rows = stored.schema.field("new").type
    schema = pa.schema([rows.field(name) for name in definition.names])
    empties = empties_replica(definition, pending)
    committer = lake.policy.choose_file_committer(path, schema, overwrite=empties)
    if committer is None:
        return None
    stamp = definition.metadata_column(APPLIED_AT)
    return ManyChanges(committer, stored.row_groups, schema, None, empties, stamp)


@dataclass(frozen=True)
class _Decider:
    """Computes the net change of a batch.

    Its methods return None if the rows to remove can neither be left out of rewritten files nor be marked as deleted.
    """

    lake: Lake
    committer: FileCommitter
    path: str
    log: str
    definition: Definition
    pending: PendingChanges
    groups: Sequence[RowGroup]
    schema: pa.Schema

    def decide_by_key(self) -> ReplicaChange | None:
        """The net change of a table with a key. It is also None if the keys take more than `KEY_BYTES`."""
        pending, lake, soft_delete_columns = self.pending, self.lake, self.definition.soft_delete_columns
        keys = pa.schema([self.schema.field(name) for name in self.definition.key])
        with lake.access.translate_errors(self.log):
            files, unsent = dict.fromkeys(group.file for group in self.groups), sorted(pending.unchanged)
            stored = stored_changes(lake.store, files, keys, unsent, soft_delete_columns)
            keyed = keyed_changes(stored, keys, unsent, pending.extent, KEY_BYTES, soft_delete_columns)
        matches = None if keyed is None else self._matching_rows(keyed)
        if keyed is None or matches is None:
            return None
        living = self._living_rows(matches) if soft_delete_columns else matches
        empties = empties_replica(self.definition, pending)
        decided = keyed.decide((match.key_indices for match in living), empties=empties)
        net, had_row, remains = decided.net, decided.before, decided.remains
        if empties:
            matches = []
        # In a replica that keeps deleted rows, a row leaves its file only if the batch writes another row of its key.
        is_replaced = np.zeros_like(had_row)
        is_replaced[net.keys[remains] if soft_delete_columns else net.keys] = True
        leaving = [
            match.select_keys(is_replaced) for match in matches if is_replaced[match.key_indices].any()
        ]
        ended_rows, ended_metadata = list[EndedRows](), list[Completion]()
        if soft_delete_columns:
            endings = Endings(keyed, net, remains, self._truncated_rows(keyed))
            (leaving, ended_rows), ended_metadata = (
                endings.split_rows(leaving),
                endings.completions(self.schema),
            )
        deletion = self._deletion.decide(leaving)
        if deletion is None:
            return None
        totals = pending.row_counts(net.counts(had_row))
        has_changes = decided.changes_rows or pending.truncated_at is not None
        new_rows = net_rows(keyed.places[keyed.first_effective :], net, remains & (net.last != NONE))
        return ReplicaChange(
            new_rows, deletion, totals, has_changes, decided.conflict, ended_metadata, ended_rows, keyed
        )

    def _living_rows(self, matches: Sequence[FileMatches] | None) -> Sequence[FileMatches]:
        """The rows that are not marked as deleted: those in `matches`, or all of the replica if `matches` is None."""
        deleted = self.definition.deleted_column
        assert deleted is not None
        return self.committer.find_flagged_rows(self.path, Flag(deleted, is_set=False), matches)

    def _truncated_rows(self, keyed: KeyedChanges) -> Sequence[FileMatches]:
        """The rows that a TRUNCATE marks as deleted, which are all living ones; empty if the batch has no TRUNCATE."""
        return () if keyed.truncated_metadata is None else self._living_rows(None)

    def decide_by_row(self) -> ReplicaChange | None:
        """The net change of a table without a key."""
        lake, pending, matches = self.lake, self.pending, list[FileMatches]()

        def count_rows(sought: WantedDigests) -> Numbers:
            if pending.truncated_at is None:
                runner = lake.policy.choose_runner(lake.records.size_bytes(self.path))
                matches[:] = self.committer.find_row_matches(self.path, sought, self.schema, runner)
            counts = np.zeros(len(sought), np.int64)
            for match in matches:
                counts += np.bincount(match.key_indices, minlength=len(sought))
            return counts

        with lake.access.translate_errors(self.log):
            digests = stored_digests(
                lake.store, self.groups, self.schema, lake.policy.choose_runner(pending.size)
            )
        changes = KeylessChanges.of(digests, pending.extent)
        outcome = changes.net_change(count_rows)
        net = outcome.net
        deletion = self._deletion.decide(first_matches(matches, net.deleted[outcome.looked_up]))
        if deletion is None:
            return None
        places, deleted = changes.places[net.inserted], int(net.deleted.sum())
        counts = {"inserted": len(places), "deleted": deleted, "missing": net.missing}
        is_changed = bool(len(places) or deleted or pending.truncated_at is not None)
        return ReplicaChange(NetRows(places, {}, np.full(len(places), NONE)), deletion, counts, is_changed)

    def _matching_rows(self, keyed: KeyedChanges) -> Sequence[FileMatches] | None:
        """The replica's rows with these keys.

        None if rows cannot be marked as deleted, and the files with these rows are too large to be rewritten.
        """
        max_bytes = None if self._deletion.can_mark_rows else self._deletion.max_rewritten_bytes
        return self.committer.find_key_matches(self.path, keyed.keys, keyed.lookups, max_bytes)

    @cached_property
    def _deletion(self) -> RowDeletion:
        return RowDeletion(self.lake, self.committer, self.path, self.definition.names, self.pending.size)


def empties_replica(definition: Definition, pending: PendingChanges) -> bool:
    """Whether a batch removes all rows that the replica had."""
    return pending.truncated_at is not None and not definition.soft_delete_columns


@dataclass(frozen=True)
class FilesWriter:
    """Writes the net change of a batch to one replica table, in one commit.

    If this process writes the files itself, it adds the new and the removed rows to `shared`.
    """

    lake: Lake
    path: str
    pending: PendingChanges
    end: int
    shared: SharedRows | None = None

    def apply(self, changes: ManyChanges) -> TableResult | None:
        """Apply changes that have no conflict; None if removed rows have to be marked as deleted, but cannot be."""
        lake, path, pending, end, net = self.lake, self.path, self.pending, self.end, changes.net
        marked = None
        if net is not None and net.has_changes and net.deleted_rows.are_marked:
            marked = changes.committer.prepare_marked_files(
                path, net.deleted_rows.matches, pending.head.version
            )
            if marked is None:
                return None
        if net is None:
            return batch_result(lake, path, pending, end, inserted=self._commit(changes, None))
        if net.has_changes:
            self._commit(changes, marked)
        return batch_result(lake, path, pending, end, **net.counts)

    def _commit(self, changes: ManyChanges, marked: Sequence[MarkedFile] | None) -> int:
        """Write the files and commit them; returns the number of rows in the new files.

        `marked` are the replica's files with their new deletion vectors. It is None if no rows are marked: then files
        with removed rows are rewritten.
        """
        lake, path, committer, net = self.lake, self.path, changes.committer, changes.net
        base = self.pending.head.version
        rewritten = net.deleted_rows.rewritten_files if net is not None else ()
        replica_schema, size = committer.table_schema(path), committer.target_file_bytes(path, {})
        runner = lake.policy.choose_runner(self.pending.size)
        ended_rows = net.ended_rows if net is not None else ()

        def write_parts() -> pa.Table:
            files, rewritten_files = [], rewritten
            # Each part of the work writes at least one file, so no more parts are made than can run at once.
            ended_parts = [
                part
                for number in range(runner.parallelism)
                if (part := ended_rows[number :: runner.parallelism])
            ]
            for chosen_rows in self._chosen_rows(changes):
                parts = divide_groups(changes.groups, runner.parallelism)
                task = RowsTask(
                    lake.store,
                    path,
                    changes.schema,
                    replica_schema,
                    size,
                    rewritten_files,
                    ended_parts,
                    parts,
                    chosen_rows,
                )
                files.append(runner.run(task, len(rewritten_files) + len(ended_parts) + len(parts)))
                rewritten_files, ended_parts = (), []
            return pa.concat_tables(files)

        if marked is not None:
            files = committer.commit_marked(write_parts, path, marked, self.end, base)
        else:
            commit = Commit(self.end, overwrite=changes.empties_replica, expected_version=base)
            removed = {match.log_path: match.size_bytes for match in rewritten}
            files = committer.commit(write_parts, path, changes.schema, commit, removed)
        return sum(json.loads(file["stats"])["numRecords"] for file in files)

    def _chosen_rows(self, changes: ManyChanges) -> Iterator[ChosenRows]:
        """Yield the choice of the changes that have the new rows.

        There are several parts if the values that changes left out (unchanged TOAST values) do not fit in memory at once.
        """
        pending, net, stamp = self.pending, changes.net, Stamp(changes.stamp)
        if net is None:
            yield ChosenRows(pending.extent, stamp)
            return
        read = self.lake.store, self.path, changes.groups, pending.slice_ends, net.deleted_rows.matches
        for places, values in completions(*read, net.new_rows, changes.schema):
            columns = [*values, *net.ended_metadata]
            yield ChosenRows(pending.extent, stamp, places, columns, shared=self.shared)


@dataclass(frozen=True)
class RowsTask:
    """Writes the files of a batch, part by part. The task is sent to executors.

    Parts are numbered in this order:
    1. `rewritten`: a file of the replica per part, written again without its removed rows
    2. `ended_rows`: rows that are written again, marked as deleted
    3. `parts`: row groups of the change history; `chosen` picks the new rows from them

    `schema` has the columns of new rows, `replica_schema` all columns of the replica. `size` is the size in bytes at
    which a new file begins.
    """

    store: Store
    path: str
    schema: pa.Schema
    replica_schema: pa.Schema
    size: int
    rewritten: Sequence[FileMatches]
    ended_rows: Sequence[Sequence[EndedRows]]
    parts: Sequence[Sequence[RowGroup]]
    chosen: ChosenRows

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write one part; yields a row (`FILE_SCHEMA`) per file."""
        if number < len(self.rewritten):
            match = self.rewritten[number]
            batches = self.store.read_batches(join_path(self.path, match.name), self.replica_schema)
            rows, schema = (
                remove_rows(batches, match.row_numbers, self._share_deleted_rows(match)),
                self.replica_schema,
            )
        elif (part := number - len(self.rewritten)) < len(self.ended_rows):
            rows, schema = self._ended_batches(self.ended_rows[part]), self.replica_schema
        else:
            rows = self._new_batches(self.parts[part - len(self.ended_rows)])
            schema = self.chosen.schema(self.schema)
        return write_files(self.path, schema, guard(rows), store=self.store, size=self.size)

    def _share_deleted_rows(self, match: FileMatches) -> Callable[[slice, pa.RecordBatch], None] | None:
        """A function that adds rows removed from a file to the shared rows; None if no rows are shared."""
        if (shared := self.chosen.shared) is None:
            return None
        return lambda part, rows: shared.add_removed_rows(match.key_indices[part], rows)

    def _ended_batches(self, rows: Sequence[EndedRows]) -> Iterator[pa.RecordBatch]:
        for file_rows in rows:
            yield from file_rows.batches(self.store, self.path, self.replica_schema, self.chosen.stamp)

    def _new_batches(self, groups: Sequence[RowGroup]) -> Iterator[pa.RecordBatch]:
        kind, store = pa.struct(self.schema), self.store
        with store.prefetch(
            groups, (self.chosen.rows(read, kind) for _, read in store.group_readers(groups))
        ) as read:
            yield from (rows for rows in read if rows is not None)
