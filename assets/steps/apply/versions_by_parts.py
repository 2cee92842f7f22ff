"""Applies very many changes to the versions of rows (`history: scd2`) of one table, divided by their keys.

A task decides a part: it computes from the changes of these keys which versions end and which begin. A batch is the
changes that are applied in one commit.

In: a batch's changes in the files of the change history (the Delta table that has all changes), and the table of versions.
Out: one commit of the table of versions. Raises one of `UNSUITED_ERRORS` if the changes cannot be divided by keys; then
`row_versions` applies them, with all keys in the memory of this process. Raises LakeError, and OvertakenError if another
process has committed to the table first.

Tasks read the changes, decide, and write the files. This process only commits: it receives the names of files, but no
rows and no keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.apply.files_task import FilesTask
from pgsieve.assets.steps.apply.key_exchange import exchange_keys
from pgsieve.assets.steps.apply.key_reader import BatchParts, Division, KeyReader
from pgsieve.assets.steps.apply.part_files import FilesPlan, list_key_bounds
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.apply.table_result import PendingChanges
from pgsieve.assets.steps.apply.version_part_tasks import VersionDecider, VersionPartWriter, VersionReader
from pgsieve.assets.steps.history.versions import StoredVersions, VersionTable
from pgsieve.decoding.changes.extent import Extent
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.decoding.changes.versions import VALID_TO_LSN
from pgsieve.resources.lake.delta.key_lookup import Bounds, find_stored_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.stores.store import RowGroup, divide_groups


@dataclass(frozen=True)
class VersionPartsWriter:
    """Applies a batch to the table of versions of one table.

    `changes_path` is the path of the change history, and `groups` are its row groups with the changes. `since_lsn` is the LSN
    from which changes are applied.
    """

    table: VersionTable
    changes_path: str
    groups: Sequence[RowGroup]
    pending: PendingChanges
    since_lsn: int

    def apply(self) -> None:
        """Write the versions in one commit. It says up to which LSN the table then has all changes.

        Raises one of `UNSUITED_ERRORS` if the changes cannot be applied part by part.
        """
        table = self.table
        with table.lake.access.translate_errors(table.path):
            self._write(table.stored_versions)

    def _list_bounds(self, key_schema: pa.Schema) -> Sequence[Mapping[str, Bounds]]:
        """List ranges of keys. Only files that may have a key in one of them are searched.

        A TRUNCATE ends the versions of all keys. INSERTs end none.
        """
        if self.pending.truncated_at is not None:
            return [{}]
        if not self.pending.count("update", "delete"):
            return []
        with self.table.lake.access.translate_errors(self.changes_path):
            return list_key_bounds(self.table.lake.store, self.groups, key_schema)

    def _plan(self, versions: StoredVersions, key_schema: pa.Schema) -> FilesPlan:
        """Find the files that may have a present version of one of the keys, and decide how to remove versions from them."""
        pending, delta_table = self.pending, versions.committer.delta_rs.open_table(versions.path)
        files = find_stored_files(delta_table, self._list_bounds(key_schema), VALID_TO_LSN)
        deletion = versions.make_deletion(pending.size_bytes)
        return FilesPlan.make(deletion, files, pending.head.version, removes_rows=True)

    def _write(self, versions: StoredVersions) -> None:
        """Let tasks decide the changes and write files, and commit the files."""
        table, pending, path = self.table, self.pending, self.table.path
        lake, store, committer = table.lake, table.lake.store, versions.committer
        key_schema = pa.schema([table.columns.field(name) for name in table.definition.key])
        plan = self._plan(versions, key_schema)
        runner, files = lake.policy.choose_runner(pending.size_bytes), plan.files
        change_parts = divide_groups(self.groups, runner.parallelism)
        extent = Extent(pending.slice_ends, self.since_lsn, pending.truncated_at)
        batch_parts = BatchParts(
            key_schema,
            sorted(pending.unsent_columns),
            extent,
            len(change_parts),
            len(files),
            has_moves=pending.key_change_count > 0,
        )
        selection = RowSelection(extent, Stamp(table.definition.metadata_column(APPLIED_AT)))
        target_file_bytes = committer.find_target_file_bytes(path, {})
        files_task = FilesTask(
            store,
            path,
            table.columns,
            versions.stored_schema,
            target_file_bytes,
            (),
            (),
            (),
            selection,
            versions.encodings,
        )
        reader = VersionReader(
            batch_parts,
            store,
            path,
            change_parts,
            files,
            Division.make(pending.row_change_count, len(files), runner.parallelism),
        )

        def make_tasks(reader: KeyReader) -> tuple[VersionDecider, VersionPartWriter]:
            decider = VersionDecider(reader.batch_parts, empties_replica=False)
            return decider, VersionPartWriter(
                reader.batch_parts, files_task, change_parts, files, plan.marks_rows
            )

        results = exchange_keys(runner, reader, plan.row_count, make_tasks)
        commit = Commit(pending.slice_ends[-1], expected_version=pending.head.version)
        plan.commit(committer, path, table.schema, results, commit)
