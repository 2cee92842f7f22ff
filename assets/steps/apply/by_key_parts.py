"""Applies very many changes to one replica table. The keys are divided into parts, and a task decides each part.

A task decides a part: it computes from the changes of these keys which rows come and go. A batch is the changes that are
applied in one commit. In a table without a key, the digest of the whole row takes the place of the key
(`pgsieve.decoding.changes.digests`).

In: a batch's changes in the files of the change history (the Delta table that has all changes). Out: `TableResult`,
after one commit. Raises LakeError. Raises one of `UNSUITED_ERRORS` if the changes cannot be divided by keys; then `by_files`
applies them, with all keys in the memory of this process.

Tasks read the changes, decide which rows come and go, and write the files. This process only commits: it receives the
names of files and numbers of rows, but no rows and no keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.apply.by_files import StoredChanges
from pgsieve.assets.steps.apply.files_task import FilesTask
from pgsieve.assets.steps.apply.key_exchange import TaskResults, exchange_keys
from pgsieve.assets.steps.apply.key_reader import BatchParts, Division, KeyReader
from pgsieve.assets.steps.apply.part_deciders import KeyDecider, KeyExaminer, MultisetDecider, PartDecider
from pgsieve.assets.steps.apply.part_files import FilesPlan, list_key_bounds
from pgsieve.assets.steps.apply.part_writer import PartWriter
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.apply.table_result import TableBatch, TableResult, make_batch_result
from pgsieve.decoding.changes.digests import DIGEST_SCHEMA
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.resources.lake.delta.key_lookup import Bounds, find_stored_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.row_deletion import RowDeletion
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import divide_groups


@dataclass(frozen=True)
class KeyPartsWriter:
    """Applies a batch, which ends at the LSN `end`, to one replica table, divided by its keys."""

    batch: TableBatch
    end: int

    def apply(self, stored_changes: StoredChanges) -> TableResult:
        """Apply the changes.

        Raises one of `UNSUITED_ERRORS` if that is not possible part by part, for example if a change gives a row the key of
        another row.
        """
        with self.batch.lake.access.translate_errors(self.batch.path):
            plan = self._plan(stored_changes)
            results = self._decide(
                stored_changes, plan, lambda reader: self._make_tasks(stored_changes, plan, reader)
            )
            return self._commit(stored_changes, plan, results)

    def examine(self, stored_changes: StoredChanges) -> None:
        """Let the tasks decide the changes to a table with a key, but write nothing.

        Raises one of `UNSUITED_ERRORS` if `apply` would raise it.
        """
        with self.batch.lake.access.translate_errors(self.batch.path):
            self._decide(
                stored_changes,
                self._plan(stored_changes),
                lambda reader: (KeyExaminer(reader.batch_parts, stored_changes.empties_replica), None),
            )

    def _decide(
        self,
        stored_changes: StoredChanges,
        plan: FilesPlan,
        make_tasks: Callable[[KeyReader], tuple[PartDecider, PartWriter | None]],
    ) -> TaskResults:
        """Let tasks decide the changes, and return their results."""
        reader = self._make_reader(stored_changes, plan)
        return exchange_keys(self._runner, reader, plan.row_count, make_tasks)

    def _list_bounds(self, stored_changes: StoredChanges) -> list[Mapping[str, Bounds]]:
        """List ranges of keys. Only files that may have a key in one of them are searched.

        Without a key, any file may have a row that changes, unless a TRUNCATE removes all files. In a replica that keeps
        deleted rows, a TRUNCATE ends rows of all files.
        """
        if not self.batch.definition.key:
            return [] if stored_changes.empties_replica else [{}]
        if self.batch.definition.soft_delete_columns and self.batch.pending.truncated_at is not None:
            return [{}]
        with self.batch.lake.access.translate_errors(self.batch.changes_path):
            store = stored_changes.committer.delta_rs.store
            return list_key_bounds(store, stored_changes.groups, self._make_key_schema(stored_changes))

    def _plan(self, stored_changes: StoredChanges) -> FilesPlan:
        """Find the replica's files that may have one of the keys, and decide how to remove rows from them."""
        path, pending, columns, committer = (
            self.batch.path,
            self.batch.pending,
            self.batch.definition.names,
            stored_changes.committer,
        )
        table = committer.delta_rs.open_table(path)
        files = find_stored_files(table, self._list_bounds(stored_changes))
        deletion = RowDeletion(
            self.batch.lake, committer, path, columns, pending.size_bytes, writes_feed=True
        )
        # In a replica that keeps deleted rows, an INSERT may replace a deleted row.
        removes_rows = not stored_changes.empties_replica and (
            bool(self.batch.definition.soft_delete_columns) or pending.count("update", "delete") > 0
        )
        return FilesPlan.make(deletion, files, pending.head.version, removes_rows=removes_rows)

    def _make_tasks(
        self, stored_changes: StoredChanges, plan: FilesPlan, reader: KeyReader
    ) -> tuple[PartDecider, PartWriter]:
        """Make the tasks that decide the changes, and those that write."""
        path, committer, schema = self.batch.path, stored_changes.committer, stored_changes.schema
        batch_parts, store = reader.batch_parts, reader.store
        decider = (KeyDecider if self.batch.definition.key else MultisetDecider)(
            batch_parts, stored_changes.empties_replica
        )
        selection = RowSelection(batch_parts.extent, Stamp(stored_changes.stamp_column))
        replica_schema, target_file_bytes = (
            committer.delta_rs.arrow_schema(path),
            committer.find_target_file_bytes(path, {}),
        )
        files_task = FilesTask(store, path, schema, replica_schema, target_file_bytes, (), (), (), selection)
        return decider, PartWriter(batch_parts, files_task, reader.change_parts, plan.files, plan.marks_rows)

    @property
    def _runner(self) -> Runner:
        return self.batch.lake.policy.choose_runner(self.batch.pending.size_bytes)

    def _make_reader(self, stored_changes: StoredChanges, plan: FilesPlan) -> KeyReader:
        """Make the task that reads the changes and the replica's files."""
        pending, key, schema = self.batch.pending, self.batch.definition.key, stored_changes.schema
        parallelism = self._runner.parallelism
        change_parts = divide_groups(stored_changes.groups, parallelism)
        # Without a key, an UPDATE sends the whole old row, which has the values that the new row lacks.
        batch_parts = BatchParts(
            self._make_key_schema(stored_changes),
            sorted(pending.unsent_columns) if key else (),
            pending.extent,
            len(change_parts),
            len(plan.files),
            self.batch.definition.soft_delete_columns,
            has_moves=not key or pending.key_change_count > 0,
            has_feed=plan.has_feed,
            row_schema=None if key else schema,
        )
        return KeyReader(
            batch_parts,
            stored_changes.committer.make_table_store(self.batch.path),
            self.batch.path,
            change_parts,
            plan.files,
            Division.make(pending.row_change_count, len(plan.files), parallelism),
        )

    def _make_key_schema(self, stored_changes: StoredChanges) -> pa.Schema:
        key, schema = self.batch.definition.key, stored_changes.schema
        return pa.schema([schema.field(name) for name in key]) if key else DIGEST_SCHEMA

    def _commit(self, stored_changes: StoredChanges, plan: FilesPlan, results: TaskResults) -> TableResult:
        batch, pending = self.batch, self.batch.pending
        if results.changed_files or results.counts["changes"] or pending.truncated_at is not None:
            commit = Commit(
                self.end, overwrite=stored_changes.empties_replica, expected_version=pending.head.version
            )
            plan.commit(stored_changes.committer, batch.path, stored_changes.schema, results, commit)
        counts = pending.adjust_row_counts(results.counts)
        return make_batch_result(batch.lake, batch.path, pending, self.end, **counts)
