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

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.by_files import FilesTask, ManyChanges
from pgsieve.assets.steps.apply.key_part_tasks import (
    RESULT_SCHEMA,
    BatchParts,
    KeyDecider,
    KeyReader,
    MultisetDecider,
    PartWriter,
    ReplicaFile,
)
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, make_batch_result
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.digests import DIGEST_SCHEMA
from pgsieve.decoding.changes.keys import is_orderable
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.resources.lake.delta.deletion_vectors import (
    MarkedFile,
    parse_vector_file,
)
from pgsieve.resources.lake.delta.key_lookup import Bounds, find_stored_files
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_deletion import RowDeletion
from pgsieve.resources.lake.stores.store import Store, divide_groups
from pgsieve.resources.parts import Receivers

#: A part has about this many changes. Larger arrays would not stay in a core's cache, and each would need new memory.
_PART_CHANGES = 125_000
#: If the replica's files have more rows per change, `by_files` applies the batch. It looks the keys up in each file, and
#: this takes less time per row than to divide the rows by keys.
_MAX_ROWS_PER_CHANGE = 16
#: The same without a key. `by_files` digests only the rows that may be wanted, but a division by digests digests all.
_MAX_KEYLESS_ROWS_PER_CHANGE = 8


@dataclass(frozen=True)
class KeyPartsWriter:
    """Applies a batch, which ends at the LSN `end`, to one replica table by parts of its keys.

    `path` is the path of the replica, and `changes_path` that of its change history.
    """

    lake: Lake
    path: str
    changes_path: str
    definition: Definition
    pending: PendingChanges
    end: int

    def apply(self, stored_changes: ManyChanges) -> TableResult | None:
        """Apply the changes; None if they cannot be applied by parts of the keys.

        For example, a change gives a row the key of another row, or an UPDATE that changes the key does not find its
        row. Or in a table without a key, a change does not find its row.
        """
        if not self._is_divisible:
            return None
        with self.lake.access.translate_errors(self.path):
            return self._write(stored_changes)

    @property
    def _is_divisible(self) -> bool:
        """Whether the batch is large enough, and each key can be decided from its own changes alone.

        If an UPDATE changes the key, its two keys may be in different parts, and a part does not know the values that
        the row has under its former key. In a replica that keeps deleted rows, a TRUNCATE ends rows of all keys.
        INSERTs into a table without a key need no decision.
        """
        pending, definition = self.pending, self.definition
        return (
            _count_changes(pending) >= self.lake.policy.min_parted_changes
            and bool(definition.key or pending.count("update", "delete"))
            and not (definition.soft_delete_columns and pending.truncated_at is not None)
            and not (pending.key_change_count and pending.unsent_columns)
        )

    def _list_bounds(self, stored_changes: ManyChanges, key_schema: pa.Schema) -> list[Mapping[str, Bounds]]:
        """List bounds of the keys, so that only files with a key within some of them are searched.

        Without a key, any file may have the rows, unless a TRUNCATE removes all files.
        """
        if not self.definition.key:
            return [] if stored_changes.empties_replica else [{}]
        with self.lake.access.translate_errors(self.changes_path):
            change_files = dict.fromkeys(group.file for group in stored_changes.groups)
            bounds = [
                _read_bounds(stored_changes.committer.delta_rs.store, file, key_schema)
                for file in change_files
            ]
        return [file_bounds for file_bounds in bounds if file_bounds is not None]

    def _plan(self, stored_changes: ManyChanges, key_schema: pa.Schema) -> "_FilesPlan | None":
        """Find the replica's files that may have one of the keys, and decide how to remove rows from them.

        None if the files have too many rows, or if they can neither be rewritten nor get deletion vectors.
        """
        path, pending, columns, committer = (
            self.path,
            self.pending,
            self.definition.names,
            stored_changes.committer,
        )
        table = committer.delta_rs.open_table(path)
        max_rows_per_change = _MAX_ROWS_PER_CHANGE if self.definition.key else _MAX_KEYLESS_ROWS_PER_CHANGE
        files = find_stored_files(table, self._list_bounds(stored_changes, key_schema))
        if sum(file.row_count or 0 for file in files) > max_rows_per_change * _count_changes(pending):
            return None
        deletion = RowDeletion(self.lake, committer, path, columns, pending.size_bytes)
        # In a replica that keeps deleted rows, an INSERT may replace a deleted row.
        removes_rows = not stored_changes.empties_replica and (
            bool(self.definition.soft_delete_columns) or pending.count("update", "delete") > 0
        )
        is_cheap_to_rewrite = (
            not removes_rows or sum(file.size_bytes for file in files) <= deletion.max_rewritten_bytes
        )
        if not files or (is_cheap_to_rewrite and committer.can_rewrite_files(path, columns)):
            return _FilesPlan([ReplicaFile(file.name, file.log_path, file.size_bytes) for file in files])
        # Deletion vectors have to be enabled by a property of the table. INSERTs alone must not enable them.
        if not deletion.can_mark_rows or not (removes_rows or committer.delta_rs.has_deletion_vectors(path)):
            return None
        add_action_by_name = committer.find_markable_files(
            path, {file.name for file in files}, pending.head.version
        )
        vectors = (
            []
            if add_action_by_name is None
            else [add_action_by_name[file.name].get("deletionVector") for file in files]
        )
        if add_action_by_name is None or any(
            vector and parse_vector_file(vector) is None for vector in vectors
        ):
            return None
        return _FilesPlan(
            [ReplicaFile(f.name, f.log_path, f.size_bytes, v) for f, v in zip(files, vectors, strict=True)],
            add_action_by_name,
        )

    def _write(self, stored_changes: ManyChanges) -> TableResult | None:
        """Let tasks decide the changes and write files, and commit the files; None if a part refuses them."""
        path, pending, committer, schema = (
            self.path,
            self.pending,
            stored_changes.committer,
            stored_changes.schema,
        )
        key, is_emptied = self.definition.key, stored_changes.empties_replica
        key_schema = pa.schema([schema.field(name) for name in key]) if key else DIGEST_SCHEMA
        plan = self._plan(stored_changes, key_schema)
        if plan is None:
            return None
        runner, store, files = (
            self.lake.policy.choose_runner(pending.size_bytes),
            committer.make_table_store(path),
            plan.files,
        )
        change_parts = divide_groups(stored_changes.groups, runner.parallelism)
        key_part_count = max(runner.parallelism, -(-_count_changes(pending) // _PART_CHANGES))
        file_part_count = min(len(files), 2 * runner.parallelism)
        # The old row of an UPDATE without a key has all values, so the new row lacks none.
        batch_parts = BatchParts(
            key_schema,
            sorted(pending.unsent_columns) if key else (),
            pending.extent,
            len(change_parts),
            len(files),
            self.definition.soft_delete_columns,
            has_moves=not key or pending.key_change_count > 0,
            row_schema=None if key else schema,
        )
        decider = (KeyDecider if key else MultisetDecider)(batch_parts, is_emptied)
        selection = RowSelection(pending.extent, Stamp(stored_changes.stamp_column))
        replica_schema, target_file_bytes = (
            committer.delta_rs.arrow_schema(path),
            committer.find_target_file_bytes(path, {}),
        )
        files_task = FilesTask(store, path, schema, replica_schema, target_file_bytes, (), (), (), selection)
        rows = runner.exchange(
            KeyReader(batch_parts, store, path, change_parts, files, file_part_count, key_part_count),
            len(change_parts) + file_part_count,
            [
                Receivers(key_part_count, decider),
                Receivers(
                    batch_parts.writer_count,
                    PartWriter(
                        batch_parts, files_task, change_parts, files, plan.add_action_by_name is not None
                    ),
                ),
            ],
            RESULT_SCHEMA,
        )
        return self._commit(stored_changes, plan, rows)

    def _commit(self, stored_changes: ManyChanges, plan: "_FilesPlan", rows: pa.Table) -> TableResult | None:
        path, pending, base_version = self.path, self.pending, self.pending.head.version
        results = [json.loads(text) for text in rows["result"].to_pylist() if text is not None]
        counts = sum((Counter(result["counts"]) for result in results if "counts" in result), Counter[str]())
        if counts["refused"]:
            return None
        new_files = rows.filter(pc.is_valid(rows["path"])).select(FILE_SCHEMA.names)
        changed_files = [
            (plan.files[result["file"]], result.get("vector")) for result in results if "file" in result
        ]
        if plan.add_action_by_name is not None and changed_files:
            marked_files = [
                MarkedFile(plan.add_action_by_name[file.name], None, vector) for file, vector in changed_files
            ]
            stored_changes.committer.commit_marked_files(
                lambda: new_files, path, marked_files, self.end, base_version
            )
        elif counts["changes"] or pending.truncated_at is not None:
            bytes_by_removed_path = {file.log_path: file.size_bytes for file, _ in changed_files}
            commit = Commit(self.end, overwrite=stored_changes.empties_replica, expected_version=base_version)
            stored_changes.committer.commit(
                lambda: new_files, path, stored_changes.schema, commit, bytes_by_removed_path
            )
        return make_batch_result(self.lake, path, pending, self.end, **pending.adjust_row_counts(counts))


@dataclass(frozen=True)
class _FilesPlan:
    """The replica's files that may have keys of the batch.

    If rows are marked in deletion vectors, `add_action_by_name` maps the name of each file to its `add` action in the
    Delta log. It is None if the files are rewritten instead.
    """

    files: Sequence[ReplicaFile]
    add_action_by_name: Mapping[str, Action] | None = None


def _count_changes(pending: PendingChanges) -> int:
    return pending.count("insert", "update", "delete")


def _read_bounds(store: Store, file: str, key_schema: pa.Schema) -> dict[str, Bounds] | None:
    """Map each key column to its lowest and highest value in a file of the change history; None if it has no keys."""
    # Statistics are found by a path such as `new.id`. If a column's name has a dot, its path may be that of another one.
    type_by_column = {
        key.name: key.type for key in key_schema if "." not in key.name and is_orderable(key.type)
    }
    stored_bounds = store.read_row_group_bounds(
        file,
        {f"{side}.{name}": column_type for side in SIDES for name, column_type in type_by_column.items()},
    )
    bounds = dict[str, Bounds]()
    for name, column_type in type_by_column.items():
        all_bounds = [bound for side in SIDES for bound in stored_bounds.get(f"{side}.{name}", [None])]
        if not all_bounds:
            return None
        known_bounds = [bound for bound in all_bounds if bound is not None]
        if len(known_bounds) == len(all_bounds):
            extremes = pc.min_max(pa.array([value for bound in known_bounds for value in bound], column_type))
            bounds[name] = extremes["min"], extremes["max"]
    return bounds
