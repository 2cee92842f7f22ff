"""Applies very many changes to one replica table. The keys are divided into parts, and a task decides each part.

A task decides a part: it computes from the changes of these keys which rows come and go. A batch is the changes that are
applied in one commit. In a table without a key, the digest of the whole row takes the place of the key
(`pgsieve.decoding.changes.digests`).

In: a batch's changes in the files of the change history (the Delta table that has all changes). Out: `TableResult`,
after one commit; None if the table or the changes cannot be divided by keys. In that case `by_files` applies them, with
all keys in the memory of this process. Raises LakeError.

Tasks read the changes, decide which rows come and go, and write the files. This process only commits: it receives the
names of files and numbers of rows, but no rows and no keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.apply.by_files import ManyChanges
from pgsieve.assets.steps.apply.files_task import FilesTask
from pgsieve.assets.steps.apply.key_exchange import TaskResults, exchange_keys
from pgsieve.assets.steps.apply.key_reader import BatchParts, Division, KeyReader
from pgsieve.assets.steps.apply.part_deciders import KeyDecider, KeyExaminer, MultisetDecider, PartDecider
from pgsieve.assets.steps.apply.part_files import FilesPlan, list_key_bounds
from pgsieve.assets.steps.apply.part_writer import PartWriter
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, make_batch_result
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.digests import DIGEST_SCHEMA
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.resources.lake.delta.key_lookup import Bounds, find_stored_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_deletion import RowDeletion
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import divide_groups


@dataclass(frozen=True)
class KeyPartsWriter:
    """Applies a batch, which ends at the LSN `end`, to one replica table, divided by its keys.

    `path` is the path of the replica, and `changes_path` that of its change history.
    """

    lake: Lake
    path: str
    changes_path: str
    definition: Definition
    pending: PendingChanges
    end: int

    def apply(self, stored_changes: ManyChanges) -> TableResult | None:
        """Apply the changes; None if that is not possible part by part.

        It is not possible, for example, if a change gives a row the key of another row.
        """
        if not self._is_divisible:
            return None
        with self.lake.access.translate_errors(self.path):
            return self._write(stored_changes)

    def can_apply(self, stored_changes: ManyChanges) -> bool:
        """Whether `apply` would apply the changes to a table with a key.

        It would not, for example, if a change gives a row the key of another row. The tasks decide the changes, but
        write nothing.
        """
        if not self._is_divisible:
            return False
        with self.lake.access.translate_errors(self.path):
            plan = self._plan(stored_changes)
            if plan is None:
                return False
            results = exchange_keys(
                self._runner,
                self._make_reader(stored_changes, plan),
                plan.row_count,
                lambda reader: (KeyExaminer(reader.batch_parts, stored_changes.empties_replica), None),
            )
        return results is not None and not results.counts["refused"]

    @property
    def _is_divisible(self) -> bool:
        """Whether the batch is large enough, and has something to decide.

        INSERTs into a table without a key need no decision.
        """
        pending = self.pending
        return pending.row_change_count >= self.lake.policy.min_parted_changes and bool(
            self.definition.key or pending.count("update", "delete")
        )

    def _list_bounds(self, stored_changes: ManyChanges) -> list[Mapping[str, Bounds]]:
        """List ranges of keys. Only files that may have a key in one of them are searched.

        Without a key, any file may have a row that changes, unless a TRUNCATE removes all files. In a replica that keeps
        deleted rows, a TRUNCATE ends rows of all files.
        """
        if not self.definition.key:
            return [] if stored_changes.empties_replica else [{}]
        if self.definition.soft_delete_columns and self.pending.truncated_at is not None:
            return [{}]
        with self.lake.access.translate_errors(self.changes_path):
            store = stored_changes.committer.delta_rs.store
            return list_key_bounds(store, stored_changes.groups, self._make_key_schema(stored_changes))

    def _plan(self, stored_changes: ManyChanges) -> FilesPlan | None:
        """Find the replica's files that may have one of the keys, and decide how to remove rows from them.

        None if they can neither be rewritten nor get deletion vectors.
        """
        path, pending, columns, committer = (
            self.path,
            self.pending,
            self.definition.names,
            stored_changes.committer,
        )
        table = committer.delta_rs.open_table(path)
        files = find_stored_files(table, self._list_bounds(stored_changes))
        deletion = RowDeletion(self.lake, committer, path, columns, pending.size_bytes, writes_feed=True)
        # In a replica that keeps deleted rows, an INSERT may replace a deleted row.
        removes_rows = not stored_changes.empties_replica and (
            bool(self.definition.soft_delete_columns) or pending.count("update", "delete") > 0
        )
        return FilesPlan.make(deletion, files, pending.head.version, removes_rows=removes_rows)

    def _write(self, stored_changes: ManyChanges) -> TableResult | None:
        """Let tasks decide the changes and write files, and commit the files; None if the tasks cannot decide them."""
        plan = self._plan(stored_changes)
        if plan is None:
            return None
        results = exchange_keys(
            self._runner,
            self._make_reader(stored_changes, plan),
            plan.row_count,
            lambda reader: self._make_tasks(stored_changes, plan, reader),
        )
        return None if results is None else self._commit(stored_changes, plan, results)

    def _make_tasks(
        self, stored_changes: ManyChanges, plan: FilesPlan, reader: KeyReader
    ) -> tuple[PartDecider, PartWriter]:
        """Make the tasks that decide the changes, and those that write."""
        path, committer, schema = self.path, stored_changes.committer, stored_changes.schema
        batch_parts, store = reader.batch_parts, reader.store
        decider = (KeyDecider if self.definition.key else MultisetDecider)(
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
        return self.lake.policy.choose_runner(self.pending.size_bytes)

    def _make_reader(self, stored_changes: ManyChanges, plan: FilesPlan) -> KeyReader:
        """Make the task that reads the changes and the replica's files."""
        pending, key, schema = self.pending, self.definition.key, stored_changes.schema
        parallelism = self._runner.parallelism
        change_parts = divide_groups(stored_changes.groups, parallelism)
        # Without a key, an UPDATE sends the whole old row, which has the values that the new row lacks.
        batch_parts = BatchParts(
            self._make_key_schema(stored_changes),
            sorted(pending.unsent_columns) if key else (),
            pending.extent,
            len(change_parts),
            len(plan.files),
            self.definition.soft_delete_columns,
            has_moves=not key or pending.key_change_count > 0,
            has_feed=plan.has_feed,
            row_schema=None if key else schema,
        )
        return KeyReader(
            batch_parts,
            stored_changes.committer.make_table_store(self.path),
            self.path,
            change_parts,
            plan.files,
            Division.make(pending.row_change_count, len(plan.files), parallelism),
        )

    def _make_key_schema(self, stored_changes: ManyChanges) -> pa.Schema:
        key, schema = self.definition.key, stored_changes.schema
        return pa.schema([schema.field(name) for name in key]) if key else DIGEST_SCHEMA

    def _commit(
        self, stored_changes: ManyChanges, plan: FilesPlan, results: TaskResults
    ) -> TableResult | None:
        path, pending = self.path, self.pending
        counts, is_emptied = results.counts, stored_changes.empties_replica
        if counts["refused"]:
            return None
        if results.changed_files or counts["changes"] or pending.truncated_at is not None:
            commit = Commit(self.end, overwrite=is_emptied, expected_version=pending.head.version)
            plan.commit(stored_changes.committer, path, stored_changes.schema, results, commit)
        return make_batch_result(self.lake, path, pending, self.end, **pending.adjust_row_counts(counts))
