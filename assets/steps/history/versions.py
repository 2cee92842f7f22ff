"""Writes the versions of a table's rows (`scd2`) to a Delta table of their own, and begins them anew after a copy.

A version of a row is valid from one of the publisher's commits to another. A present version has not ended yet.

In: a copied table and its replica
Out: one Delta commit with the replica's position (the LSN up to which it has all changes). It ends all present versions,
and begins a version for each row of the replica.

This module also has `VersionChange`, which ends some versions. `pgsieve.assets.steps.apply.row_versions` uses it for the
changes that follow the copy. Raises LakeError and OvertakenError.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import starmap

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.history.commit_times import find_last_commit_time
from pgsieve.assets.steps.history.ends_in_memory import EndsInMemory, mask_keys_in_memory
from pgsieve.assets.steps.history.shared_rows import NumberedRows
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.failures import CURED_BY_COPY, describe_error_fully
from pgsieve.assets.steps.records.table_states import Name, TableState
from pgsieve.assets.steps.subscription import Definition, Subscription, arrow_types
from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.decoding.changes.versions import (
    IS_CURRENT,
    VALID_FROM_LSN,
    VALID_TO_LSN,
    VALIDITY_SCHEMA,
    Commits,
    CurrentVersions,
    end_versions,
    lsn_before,
    version_encodings,
    versions_schema,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.resources.lake.added_columns import add_missing_columns
from pgsieve.resources.lake.committers import FileCommitter, SparkCommitter
from pgsieve.resources.lake.delta.errors import LakeError, retry_after_conflict
from pgsieve.resources.lake.delta.feed_property import FEED_PROPERTY
from pgsieve.resources.lake.delta.key_lookup import FileMatches, Flag
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.file_rows import read_rows
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_deletion import DeletedRows, RowDeletion
from pgsieve.resources.lake.stores.store import Store, join_path
from pgsieve.resources.lake.table_rows import open_rows
from pgsieve.resources.parts import Guard

#: If a table of versions has at most this many bytes, the files with versions that end are rewritten. In a larger table
#: this would write too many other rows again. So there the versions that end are marked as deleted in their files (by
#: deletion vectors), and written into new files with their ends.
_MAX_REWRITTEN_BYTES = 1024 * 1024
#: While a file is rewritten, up to this many bytes of its ended versions stay in memory. They are written after the file's
#: other versions.
_MAX_ENDED_BYTES_IN_MEMORY = 64 * 1024 * 1024
#: The hint for a table of versions that cannot be read or written. pgsieve does not delete the table, because its
#: versions may be in no other table.
_MOVE_HINT = "move its folder elsewhere: a copy of the table begins a new one"


def find_versions_problem(lake: Lake, definition: Definition, replica_path: str) -> tuple[str, str] | None:
    """Say why no versions of a table's rows can be kept, and what to do; None if they can be kept.

    `replica_path` is the path of the table's replica.
    """
    if not definition.key:
        return (
            "it has no key, so it is unknown which rows are versions of the same row",
            "give it a primary key or a replica identity",
        )
    if definition.deleted_column:
        return (
            "its deleted rows are kept (`deletes: soft`)",
            "say `deletes: hard` for it in the layout: a version ends where its row is deleted",
        )
    validity_names = {name.lower() for name in VALIDITY_SCHEMA.names}
    if conflicting_names := [name for name in definition.names if name.lower() in validity_names]:
        return (
            f"it has a column {quote_identifier(conflicting_names[0])} of its own",
            "rename the column, or publish a column list without it",
        )
    if lake.policy.is_written_by_spark(replica_path):
        return (
            "only Spark writes its replica",
            "leave `scd2` out for it; the change history has all versions of its rows",
        )
    return None


@dataclass(frozen=True)
class StoredVersions:
    """A Delta table of versions to write to.

    `schema` has the columns of new versions, and `key` the names of the columns of the replica's key.
    """

    lake: Lake
    path: str
    schema: pa.Schema
    key: Sequence[str]

    @cached_property
    def committer(self) -> FileCommitter:
        """The object that commits files to the table; raises LakeError if another writer has altered the table."""
        match self.lake.policy.choose_large_committer(self.path, self.schema):
            case FileCommitter() as committer:
                return committer
            case SparkCommitter():
                raise _make_altered_table_error(self.path)

    @property
    def encodings(self) -> Mapping[str, str]:
        """The Parquet encodings of the columns of new files."""
        return version_encodings(self.schema, self.key)

    @property
    def stored_schema(self) -> pa.Schema:
        """The columns of the table, some of which may be former columns of the replica."""
        exists = self.lake.records.exists(self.path)
        return self.committer.read_table_schema(self.path) if exists else self.schema

    def make_deletion(self, change_bytes: int) -> RowDeletion:
        """Make the object that decides how versions are removed from their files.

        `change_bytes` is the size in bytes of the changes that end the versions.
        """
        lake, path = self.lake, self.path
        with lake.access.translate_errors(path):
            columns = lake.columns(path) if lake.records.exists(path) else self.schema.names
        return RowDeletion(lake, self.committer, path, columns, change_bytes, _MAX_REWRITTEN_BYTES)


@dataclass(frozen=True)
class VersionTable:
    """The versions of the rows of the publisher's table `name`. `columns` are the columns of its replica."""

    lake: Lake
    subscription: str
    name: Name
    definition: Definition
    columns: pa.Schema

    @classmethod
    def from_state(cls, subscription: Subscription, lake: Lake, state: TableState) -> "VersionTable | None":
        """The versions of the rows of the table with this state; None if no versions are kept for the table."""
        definition = state.definition
        if definition is None or not subscription.histories.find_choice(state.name).scd2:
            return None
        replica_path = lake.paths.replica(subscription.name, *state.name)
        if find_versions_problem(lake, definition, replica_path) is not None:
            return None
        columns = pa.schema(arrow_types(subscription, state.name, definition))
        return cls(lake, subscription.name, state.name, definition, columns)

    @property
    def path(self) -> str:
        """The path of the Delta table of versions.

        If for example a column gets another type, a new Delta table is begun, and `generation` grows by one.
        """
        generation = self.definition.history.generation
        return self.lake.paths.row_versions(self.subscription, *self.name, generation)

    @property
    def schema(self) -> pa.Schema:
        """The columns of present versions. The Delta table may also have former columns of the replica."""
        return versions_schema(zip(self.columns.names, self.columns.types, strict=True))

    @property
    def stored_versions(self) -> "StoredVersions":
        """The table for writing."""
        return StoredVersions(self.lake, self.path, self.schema, self.definition.key)

    def add_new_columns(self) -> bool:
        """Add the replica's new columns, which are NULL in the versions so far. Returns True if this was a commit."""
        return add_missing_columns(self.lake, self.path, self.schema)

    @property
    def label(self) -> str:
        """What messages call these versions."""
        return f"the versions of {quote_qualified(*self.name)}"

    def find_last_commit_time(self, lsn: int) -> datetime:
        """Find the time of the last commit before an LSN: the time at which versions begin anew there."""
        return find_last_commit_time(self.lake, self.subscription, self.name, self.definition, lsn)

    def begin_and_log(self, log: Log, lsn: int, time: datetime | None, *, skips_reached: bool) -> None:
        """Call `begin_anew`, and log if it wrote something. `describe_versions_failure` explains the errors that it raises."""
        had_table = self.lake.records.exists(self.path)
        if self.begin_anew(lsn, time, skips_reached=skips_reached):
            predicate = "are ended, and begin anew" if had_table else "begin"
            log(f"{self.label} {predicate} at {format_lsn(lsn)} with the present rows of its replica")

    def begin_anew(self, lsn: int, time: datetime | None, *, skips_reached: bool = True) -> bool:
        """End all present versions just before an LSN, and begin a version for each row of the replica.

        The replica has exactly the changes before this LSN. With `skips_reached`, nothing is done if the table of
        versions already has this position or a later one. Returns True if versions were written.
        """
        self._end_former_generation(lsn, time)
        self.add_new_columns()
        return bool(retry_after_conflict(self._begin_anew)(lsn, time, skips_reached))

    def _begin_anew(self, lsn: int, time: datetime | None, skips_reached: bool) -> bool:
        lake, head = self.lake, self.lake.records.head(self.path)
        has_reached_lsn = (head.position or 0) >= lsn
        if has_reached_lsn and skips_reached:
            return False
        path, schema, store, stored_versions = self.path, self.schema, lake.store, self.stored_versions
        replica_path = lake.paths.replica(self.subscription, *self.name)
        rows = open_rows(lake, replica_path, self.columns, CurrentVersions(lsn, time, schema).to_versions)
        change = VersionChange.plan_all_ends(stored_versions, lsn, time)
        file_bytes, encodings = (
            stored_versions.committer.find_target_file_bytes(path, {}),
            stored_versions.encodings,
        )

        def write_part(versions: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
            return write_files(path, schema, versions, store, file_bytes, encodings)

        change.commit(
            stored_versions,
            lambda: [rows.compute(write_part, FILE_SCHEMA)],
            None if has_reached_lsn else lsn,
            head.version,
        )
        return True

    def _end_former_generation(self, lsn: int, time: datetime | None) -> None:
        """End the present versions in the table of the previous generation."""
        generation = self.definition.history.generation
        if not generation:
            return
        path = self.lake.paths.row_versions(self.subscription, *self.name, generation - 1)
        if not self.lake.records.exists(path):
            return

        def end_present_versions() -> None:
            head, schema = self.lake.records.head(path), self.lake.schema(path)
            former_versions = StoredVersions(self.lake, path, schema, ())
            change = VersionChange.plan_all_ends(former_versions, lsn, time)
            if change.ended_rows.matches:
                change.commit(former_versions, list, None, head.version)

        retry_after_conflict(end_present_versions)()


def describe_versions_failure(lake: Lake, error: Exception, name: Name, path: str) -> str:
    """Say why a table's versions at `path` cannot be kept, and what to do.

    A copy of the table does not replace a table of versions: the user has to move it away first. Raises the errors that
    `describe_error_fully` raises.
    """
    problem = describe_error_fully(lake, error, name)
    is_about_versions = isinstance(error, CURED_BY_COPY) and error.message.startswith(f'Delta table "{path}"')
    return f"{problem}; {_MOVE_HINT}" if is_about_versions else problem


def _make_altered_table_error(path: str, *, has_feed: bool = False) -> LakeError:
    """Make the error for a table that pgsieve cannot write; `has_feed` says whether it has a change data feed."""
    return LakeError(
        f'Delta table "{path}": another writer has altered it, so pgsieve cannot write it any more',
        hint=f"set its property {FEED_PROPERTY} to false" if has_feed else _MOVE_HINT,
        sqlstate="55000",
    )


def find_present_versions(
    committer: FileCommitter, path: str, candidates: Sequence[FileMatches] | None = None
) -> list[FileMatches]:
    """Find the present versions among `candidates`, file by file.

    If `candidates` is None, find all present versions of the table, in the order of its files. Their keys are not
    known, so all `key_indices` are 0.
    """
    return committer.find_flagged_rows(
        path, Flag(IS_CURRENT, is_set=True, null_column=VALID_TO_LSN), candidates
    )


#: The versions in a file that end, and for each of them the number of the commit that ends it.
_Ends = tuple[FileMatches, Numbers]


@dataclass(frozen=True)
class FileWithEnds:
    """A file with versions that end.

    - `row_numbers`: the numbers of these versions in the file, ascending
    - `ending_commits`: for each of these versions, the number of the commit that ends it
    - `is_replaced`: True if the file is rewritten, so that its other versions are written again too
    """

    name: str
    row_numbers: Numbers
    ending_commits: Numbers
    is_replaced: bool


@dataclass(frozen=True)
class EndingTask:
    """Writes versions that end into new files. If a file is rewritten, its other versions go into further files.

    The task is sent to executors. When a written file has `file_bytes` bytes, the next one begins. `encodings` are the
    Parquet encodings of columns (`write_files`).
    """

    store: Store
    folder: str
    schema: pa.Schema
    file_bytes: int
    encodings: Mapping[str, str]
    commits: Commits
    files: Sequence[FileWithEnds]

    def __call__(self, file_number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Read the file with this number once, and write its rows; yields a row (`FILE_SCHEMA`) per written file."""
        file = self.files[file_number]
        if file.is_replaced:
            yield from self._rewrite(file, guard)
            return
        batches = read_rows(self.store, join_path(self.folder, file.name), self.schema, file.row_numbers)
        yield from self._write(
            guard(end_versions(rows, file.ending_commits[numbers], self.commits) for numbers, rows in batches)
        )

    def _rewrite(self, file: FileWithEnds, guard: Guard) -> Iterator[pa.RecordBatch]:
        ended_batches, written_files = list[pa.RecordBatch](), list[pa.RecordBatch]()

        def read_other_versions() -> Iterator[pa.RecordBatch]:
            first_row = ended_bytes = 0
            for batch in guard(self.store.read_batches(join_path(self.folder, file.name), self.schema)):
                begin_index, end_index = np.searchsorted(
                    file.row_numbers, (first_row, first_row + batch.num_rows)
                )
                ending_rows, first_row = (
                    file.row_numbers[begin_index:end_index] - first_row,
                    first_row + batch.num_rows,
                )
                if len(ending_rows):
                    ended_batches.append(
                        end_versions(
                            batch.take(pa.array(ending_rows)),
                            file.ending_commits[begin_index:end_index],
                            self.commits,
                        )
                    )
                    ended_bytes += ended_batches[-1].nbytes
                if ended_bytes > _MAX_ENDED_BYTES_IN_MEMORY:
                    written_files.extend(self._write(ended_batches))
                    ended_batches.clear()
                    ended_bytes = 0
                if len(ending_rows) < batch.num_rows:
                    is_kept = np.ones(batch.num_rows, np.bool_)
                    is_kept[ending_rows] = False
                    yield batch.filter(pa.array(is_kept))

        yield from self._write(read_other_versions())
        yield from written_files
        yield from self._write(ended_batches)

    def _write(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return write_files(self.folder, self.schema, rows, self.store, self.file_bytes, self.encodings)


@dataclass(frozen=True)
class VersionChange:
    """Present versions that end, by file.

    - `ended_rows`: the versions
    - `ending_commits`: for each of them, the number in `commits` of the commit that ends it
    - `replica_rows`: rows that were just removed from the replica, each with the number of its key. A version that ends
      has the same number in `key_indices`. If its row is among `replica_rows`, it need not be read from its file.
    """

    ended_rows: DeletedRows
    ending_commits: Sequence[Numbers]
    commits: Commits
    replica_rows: Sequence[NumberedRows] = ()

    @classmethod
    def plan_ends(
        cls,
        table: StoredVersions,
        matches: Sequence[FileMatches],
        ending_commits: Sequence[Numbers],
        commits: Commits,
        change_bytes: int,
    ) -> "VersionChange":
        """The change that ends the versions `matches`; raises LakeError if the table's files cannot be changed.

        `change_bytes` is the size in bytes of the changes that end the versions.
        """
        deletion = table.make_deletion(change_bytes)
        try:
            deleted_rows = deletion.decide(matches)
        except UnmarkableError as error:
            if not table.committer.can_rewrite_files(table.path, deletion.columns):
                raise _make_altered_table_error(
                    table.path, has_feed=table.committer.has_change_feed(table.path)
                ) from error
            deleted_rows = DeletedRows(matches)
        return cls(deleted_rows, ending_commits, commits)

    @classmethod
    def plan_all_ends(cls, table: StoredVersions, lsn: int, time: datetime | None) -> "VersionChange":
        """The change that ends all present versions before an LSN."""
        lake, matches = table.lake, list[FileMatches]()
        if lake.records.exists(table.path):
            matches = find_present_versions(table.committer, table.path)
        ending_commits = [np.zeros_like(match.row_numbers) for match in matches]
        change_bytes = sum(match.size_bytes for match in matches)
        return cls.plan_ends(
            table, matches, ending_commits, Commits.single_commit(lsn_before(lsn), time), change_bytes
        )

    def commit(
        self,
        table: StoredVersions,
        write_new_versions: Callable[[], Sequence[pa.Table]],
        position: int | None,
        expected_version: int,
    ) -> None:
        """End the versions, and add the files that `write_new_versions` writes, in one commit."""
        lake, path, committer = table.lake, table.path, table.committer

        def write_all_files() -> pa.Table:
            # Only the table of versions has the values of former columns of the replica. If there are such columns, the
            # rows have to be read.
            has_all_columns = self.ended_rows.are_marked and set(schema.names) == set(table.schema.names)
            ends_in_memory, ends_in_files = self._divide_by_memory(
                self.replica_rows if has_all_columns else ()
            )
            file_bytes, encodings = committer.find_target_file_bytes(path, {}), table.encodings
            files = list(starmap(self._make_file_with_ends, ends_in_files))
            ending_task = EndingTask(lake.store, path, schema, file_bytes, encodings, self.commits, files)
            runner = lake.policy.choose_runner(sum(match.size_bytes for match, _ in ends_in_files))
            file_tables = [runner.run(ending_task, len(files))] if files else []
            if ends_in_memory:
                single_commit_files = committer.delta_rs.find_single_value_files(path, VALID_FROM_LSN)
                rows = self.replica_rows
                ends = EndsInMemory.from_matches(
                    lake.store, path, schema, rows, ends_in_memory, single_commit_files, self.commits
                )

                def write_ends(_: int, guard: Guard) -> Iterator[pa.RecordBatch]:
                    return write_files(path, schema, guard(ends()), lake.store, file_bytes, encodings)

                file_tables.append(CALLING_THREAD.run(write_ends, 1))
            return pa.concat_tables([FILE_SCHEMA.empty_table(), *file_tables, *write_new_versions()])

        schema = table.stored_schema
        if not self.ended_rows.are_marked:
            removed_size_by_path = {match.log_path: match.size_bytes for match in self.ended_rows.matches}
            committer.commit(
                write_all_files,
                path,
                table.schema,
                Commit(position, expected_version=expected_version),
                removed_size_by_path,
            )
            return
        try:
            marked_files = committer.prepare_marked_files(path, self.ended_rows.matches, expected_version)
        except UnmarkableError as error:
            raise _make_altered_table_error(path) from error
        committer.commit_marked_files(write_all_files, path, marked_files, position, expected_version)

    def _divide_by_memory(self, rows: Sequence[NumberedRows]) -> tuple[list[_Ends], list[_Ends]]:
        """Divide the files into two lists: those for which `rows` has the rows of all ended versions, and the others."""
        ends = list(zip(self.ended_rows.matches, self.ending_commits, strict=True))
        if not rows:
            return [], ends
        has_row = mask_keys_in_memory(rows, self.ended_rows.matches)
        ends_in_memory, ends_in_files = list[_Ends](), list[_Ends]()
        for match, ending_commits in ends:
            is_in_memory = bool(has_row[match.key_indices].all())
            (ends_in_memory if is_in_memory else ends_in_files).append((match, ending_commits))
        return ends_in_memory, ends_in_files

    def _make_file_with_ends(self, match: FileMatches, ending_commits: Numbers) -> FileWithEnds:
        return FileWithEnds(match.name, match.row_numbers, ending_commits, not self.ended_rows.are_marked)
