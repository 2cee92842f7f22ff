"""Plans and commits the files of a table to which parallel tasks apply a batch, each task for a part of the keys.

A batch is the changes that one commit applies.

In: the files of the table, and the results of the tasks that write (`part_writer`, `version_part_tasks`). Out: a plan,
which says which files the tasks search, and one commit with the files that they wrote. Raises LakeError, UnmarkableError,
and OvertakenError if another process has committed to the table first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.key_exchange import TaskResults
from pgsieve.assets.steps.apply.key_reader import ReplicaFile
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.keys import is_orderable
from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile, parse_vector_file
from pgsieve.resources.lake.delta.key_lookup import Bounds, StoredFile
from pgsieve.resources.lake.delta.log import Action, UnmarkableError
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.row_deletion import RowDeletion
from pgsieve.resources.lake.stores.store import RowGroup, Store


@dataclass(frozen=True)
class FilesPlan:
    """The files of a table that may have keys of the batch.

    - `row_count`: the number of rows in all files
    - `marks_rows`: whether removed rows are marked in deletion vectors; otherwise their files are rewritten
    - `has_feed`: whether the tasks write what the batch adds and removes into the table's change data feed
    - `add_action_by_name`: maps the name of each file to its `add` action in the Delta log. Empty unless `marks_rows` or
      `has_feed`: only then this process writes the log's entry itself, without delta-rs.
    """

    files: Sequence[ReplicaFile]
    row_count: int
    add_action_by_name: Mapping[str, Action] = field(default_factory=dict)
    marks_rows: bool = False
    has_feed: bool = False

    @classmethod
    def make(
        cls, deletion: RowDeletion, files: Sequence[StoredFile], version: int, *, removes_rows: bool
    ) -> "FilesPlan":
        """Decide how to remove rows from these files of a table, which has this Delta version.

        `removes_rows` says whether the batch may remove rows. Raises UnmarkableError if the files can neither be rewritten
        nor get deletion vectors.
        """
        committer, path = deletion.committer, deletion.path
        row_count, names = sum(file.row_count or 0 for file in files), {file.name for file in files}
        has_feed = removes_rows and deletion.writes_feed and committer.has_change_feed(path)
        is_cheap_to_rewrite = (
            not removes_rows or sum(file.size_bytes for file in files) <= deletion.max_rewritten_bytes
        )
        if not files or (
            is_cheap_to_rewrite
            and committer.can_rewrite_files(path, deletion.columns, writes_feed=deletion.writes_feed)
        ):
            replica_files = [ReplicaFile(file.name, file.log_path, file.size_bytes) for file in files]
            add_action_by_name = (
                committer.find_markable_files(path, names, version, removes_files=True) if has_feed else {}
            )
            return cls(replica_files, row_count, add_action_by_name, has_feed=has_feed)
        # Deletion vectors have to be enabled by a property of the table. INSERTs alone must not enable them.
        if not deletion.can_mark_rows or not (removes_rows or committer.delta_rs.has_deletion_vectors(path)):
            raise UnmarkableError("files can neither be rewritten nor get deletion vectors")
        add_action_by_name = committer.find_markable_files(path, names, version)
        vectors = [add_action_by_name[file.name].get("deletionVector") for file in files]
        if any(vector and parse_vector_file(vector) is None for vector in vectors):
            raise UnmarkableError("deletion vectors are not in files of the table's folder")
        return cls(
            [ReplicaFile(f.name, f.log_path, f.size_bytes, v) for f, v in zip(files, vectors, strict=True)],
            row_count,
            add_action_by_name,
            marks_rows=True,
            has_feed=has_feed,
        )

    def commit(
        self, committer: FileCommitter, path: str, schema: pa.Schema, results: TaskResults, commit: Commit
    ) -> None:
        """Commit what the tasks have written to the table at `path`, whose new rows have the columns of `schema`."""
        changed_files = [(self.files[index], vector) for index, vector in results.changed_files]
        if self.has_feed or (self.marks_rows and changed_files):
            assert commit.expected_version is not None
            committer.commit_marked_files(
                lambda: results.new_files,
                path,
                [
                    MarkedFile(action, None, vector) if self.marks_rows else MarkedFile.removed(action)
                    for action, vector in (
                        (self.add_action_by_name[file.name], vector) for file, vector in changed_files
                    )
                ],
                commit.position,
                commit.expected_version,
            )
            return
        bytes_by_removed_path = {file.log_path: file.size_bytes for file, _ in changed_files}
        committer.commit(lambda: results.new_files, path, schema, commit, bytes_by_removed_path)


def list_key_bounds(
    store: Store, groups: Sequence[RowGroup], key_schema: pa.Schema
) -> list[Mapping[str, Bounds]]:
    """List the bounds of the keys in each file that has one of these row groups.

    The files are of a change history (the Delta table with all changes of a table). `key_schema` has the names and types
    of the key's columns. Files without keys are left out.
    """
    bounds = [_read_bounds(store, file, key_schema) for file in dict.fromkeys(group.file for group in groups)]
    return [file_bounds for file_bounds in bounds if file_bounds is not None]


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
