"""Applies a batch to the versions of rows (`history: scd2`), after it was applied to the replica.

For each table the lake has a second Delta table, with all former and present versions of its rows. A version of a row
is valid from one of the publisher's commits to another. A slice has the changes from one position of the slot to
another, and a batch has the changes of several consecutive slices. A cut is an LSN, and for each replica the Delta
version that has exactly the changes before this LSN.

In: the changes that were applied to the replica, from its change history (the Delta table with all changes), and the
table of versions. Out: one commit of the table of versions per batch, which ends versions and adds new ones. The versions are
computed on whole columns (`version_outcome`). Tasks compute those of very many changes (`versions_by_parts`), this process
all others.
Raises LakeError, and OvertakenError if another process has committed to the table first.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.batch import AppliedChanges, AppliedChangesByTable, find_lacking_changes
from pgsieve.assets.steps.apply.completion import MissingValues
from pgsieve.assets.steps.apply.damaged_tables import IntactVersions, is_put_back
from pgsieve.assets.steps.apply.files_task import FilesTask
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.row_selection import RowSelection, Validity
from pgsieve.assets.steps.apply.table_result import PendingChanges, find_key_alteration_lsn
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes, read_changes
from pgsieve.assets.steps.apply.version_outcome import VersionOutcome
from pgsieve.assets.steps.apply.versions_by_parts import VersionPartsWriter
from pgsieve.assets.steps.apply.ways import UNSUITED_ERRORS
from pgsieve.assets.steps.history.shared_rows import NewRows, SharedRows
from pgsieve.assets.steps.history.versions import (
    StoredVersions,
    VersionChange,
    VersionTable,
    describe_versions_failure,
    find_present_versions,
)
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.cuts import Cut
from pgsieve.assets.steps.records.failures import TABLE_ERRORS
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.columns import COMMIT_TIME
from pgsieve.decoding.changes.extent import Extent
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.decoding.changes.versions import VALID_TO_LSN, Commits
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError, OvertakenError, retry_after_conflict
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.parquet_columns import ExtendedRows, write_extended_files
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.delta.slices import SparkSlices
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import RowGroup, Store, divide_groups
from pgsieve.resources.parts import Guard
from pgsieve.resources.work import name_jobs

_LOGGER = logging.getLogger(__name__)


class VersionsDuringApply:
    """The versions of rows of a subscription's tables, while batches are applied to its replicas.

    `position_by_table` maps a table to the LSN up to which its versions have all changes. `version_by_table` has the Delta
    versions of the tables of versions, for the next cut. A table whose versions lack earlier changes is in neither.
    """

    def __init__(self, subscription: Subscription, lake: Lake, cut: Cut | None, log: Log) -> None:
        self.position_by_table, self.version_by_table = dict[Name, int](), dict[Name, int]()
        self._subscription, self._lake, self._cut, self._log = subscription, lake, cut, log
        self._intact_versions = IntactVersions(
            lake, cut, self._find_path, cut.scd2 if cut is not None else {}
        )

    def _find_path(self, state: TableState) -> str:
        definition = state.definition
        assert definition is not None
        return self._lake.paths.row_versions(
            self._subscription.name, *state.name, definition.history.generation
        )

    def begin(
        self, states: Mapping[Name, TableState], repaired_tables: Collection[Name] = frozenset()
    ) -> dict[Name, str]:
        """Find the position that the versions of each table have reached. Returns the tables with problems, and the problems.

        The versions have no gap under these conditions:
        - They have reached the LSN of the copy, if the table was copied after the newest cut. Otherwise they have reached
          their position in the cut, or the cut's LSN if the cut has no position for them.
        - Since the cut, the table of versions was not put back to an earlier Delta version, and the replica was not
          repaired.

        Other versions begin anew with the replica's present rows, if the table is ready, and if a cut was made after its
        copy or its replica was repaired. Otherwise the table is left out.
        """
        problem_by_table = dict[Name, str]()
        for name, state in states.items():
            table = (
                VersionTable.from_state(self._subscription, self._lake, state) if state.is_applied else None
            )
            if table is None:
                continue
            try:
                self._begin(table, state, is_repaired=name in repaired_tables)
            except TABLE_ERRORS as error:
                problem_by_table[name] = describe_versions_failure(self._lake, error, name, table.path)
        return problem_by_table

    def _begin(self, table: VersionTable, state: TableState, *, is_repaired: bool) -> None:
        lake, cut, name, path = self._lake, self._cut, state.name, table.path
        # A cut from before the copy says nothing about the present replica and its versions.
        usable_cut = cut if cut is not None and name in cut.tables and state.lsn <= cut.lsn else None
        since_lsn = state.lsn if usable_cut is None else usable_cut.versioned.get(name, usable_cut.lsn)
        version = None if usable_cut is None else usable_cut.scd2.get(name)
        head = lake.records.head(path) if lake.records.exists(path) else TableHead()
        if head.position is None or is_repaired or is_put_back(lake, path, version, since_lsn):
            if state.state != SyncState.READY or (usable_cut is None and not is_repaired):
                return
            replica_position = lake.records.position(lake.paths.replica(table.subscription, *name))
            lsn = max(
                state.lsn,
                replica_position or 0,
                head.position or 0,
                usable_cut.lsn if usable_cut is not None else 0,
            )
            table.begin_and_log(self._log, lsn, table.find_last_commit_time(lsn), skips_reached=False)
            head, version = lake.records.head(path), None
        # Without new changes, keep the Delta version that the newest cut names. Another version would cause another
        # cut.
        is_idle = version is not None and head.position == since_lsn
        self.position_by_table[name] = head.position or 0
        self.version_by_table[name] = version if version is not None and is_idle else head.version
        self._intact_versions.record(state, head.version)

    def follow(
        self,
        states: Mapping[Name, TableState],
        changes: Sequence[TableChanges],
        lagging_tables: Collection[Name],
        applied_changes: AppliedChangesByTable,
    ) -> dict[Name, str]:
        """Apply the batch's changes to the versions of rows. Returns the tables with problems, and the problems.

        Tables in `lagging_tables` are left out, as their replicas lack changes. `applied_changes` has the changes that
        were kept in memory when they were applied to the replicas.
        """
        followed_changes = [
            c for c in changes if c.name in self.position_by_table and c.name not in lagging_tables
        ]

        def follow_table(name: Name) -> tuple[Name, str | None]:
            try:
                with name_jobs(self._subscription.name, f"versions of {quote_qualified(*name)}"):
                    retry_after_conflict(self._follow)(
                        states[name],
                        [c for c in followed_changes if c.name == name],
                        applied_changes.get(name),
                    )
            except TABLE_ERRORS as error:
                return name, describe_versions_failure(self._lake, error, name, self._find_path(states[name]))
            return name, None

        problems = self._lake.map_in_parallel(
            follow_table, list(dict.fromkeys(change.name for change in followed_changes))
        )
        self.position_by_table |= {
            c.name: c.slice_end for c in followed_changes if c.slice_end > states[c.name].lsn
        }
        return {name: problem for name, problem in problems if problem is not None}

    def _follow(
        self, state: TableState, changes: Sequence[TableChanges], applied_changes: AppliedChanges | None
    ) -> None:
        lake = self._lake
        if (lagging_versions := find_lagging_versions(self._subscription, lake, state, changes)) is None:
            return
        table, pending = lagging_versions
        changes_path = lake.paths.change_history(
            self._subscription.name, *state.name, table.definition.history.generation
        )
        VersionsWriter(table, changes_path, pending, state.lsn, applied_changes).apply()
        reach(Failpoint.REPLICA_COMMITTED)
        new_head = lake.records.head(table.path)
        # Another process may have put back the table of versions during this batch. Then the cut keeps the former Delta
        # version. So the next run, which looks for a RESTORE after that version, finds it.
        if self._intact_versions.advance(state, pending.head, new_head):
            self.version_by_table[state.name] = new_head.version


def find_lagging_versions(
    subscription: Subscription, lake: Lake, state: TableState, changes: Sequence[TableChanges]
) -> tuple[VersionTable, PendingChanges] | None:
    """Find the table of versions of a table's rows, and the changes that it lacks; None if it lacks none or is missing."""
    table = VersionTable.from_state(subscription, lake, state) if state.is_applied else None
    if table is None or not lake.records.exists(table.path):
        return None
    head = lake.records.head(table.path)
    slices = find_lacking_changes(changes, state, head)
    return (table, PendingChanges(slices, head)) if slices else None


@dataclass(frozen=True)
class VersionsWriter:
    """Writes the changes of a batch, from the change history at `changes_path`, to the table of versions of one table.

    `copy_lsn` is the LSN of the table's copy. `applied_changes` are changes that were kept in memory when they were
    applied to the replica. They are used only if they are those of the same slices.
    """

    table: VersionTable
    changes_path: str
    pending: PendingChanges
    copy_lsn: int
    applied_changes: AppliedChanges | None = None

    def apply(self) -> None:
        """Write the versions in one commit; its position is the end of the last slice. Commits before it prepare the table."""
        table, pending, end, lake = self.table, self.pending, self.pending.slice_ends[-1], self.table.lake
        if pending.since_lsn < find_key_alteration_lsn(table.definition):
            # Several rows from before the key was altered may have the same value of the present key. Their versions could
            # not be told apart, so all versions begin anew at the replica's position. After a crash the replica may be
            # ahead of `end`.
            replica_position = lake.records.position(lake.paths.replica(table.subscription, *table.name)) or 0
            lsn = max(end, replica_position)
            table.begin_anew(lsn, table.find_last_commit_time(lsn))
            return
        replace(self, pending=self._prepare_table()).apply_to_prepared_table()

    def _prepare_table(self) -> PendingChanges:
        """Add the replica's new columns to the table, and deletion vectors if versions that end are marked in them.

        Returns the changes with the head that the table has then, for which they are computed.
        """
        table, pending = self.table, self.pending
        commit_count = table.add_new_columns() + self._enable_marking()
        if not commit_count:
            return pending
        head = table.lake.records.head(table.path)
        if head != TableHead(pending.head.version + commit_count, pending.head.position):
            raise OvertakenError(table.path)
        return replace(pending, head=head)

    def _enable_marking(self) -> bool:
        """Enable deletion vectors if versions may end and are then marked. Returns True if this was a commit."""
        pending = self.pending
        if pending.truncated_at is None and not pending.count("update", "delete"):
            return False
        try:
            return self._stored_versions.make_deletion(pending.size_bytes).enable_marking()
        except UnmarkableError:
            return False  # If versions end, the commit says why.

    def apply_to_prepared_table(self) -> None:
        """Do the same to a table that needs no commit before it."""
        table, pending = self.table, self.pending
        groups = self._find_groups()
        # Changes that the driver has decided for the replica are in memory, so tasks need not read them.
        if self._same_changes is None and pending.row_change_count >= table.lake.policy.min_parted_changes:
            try:
                VersionPartsWriter(table, self.changes_path, groups, pending, self.since_lsn).apply()
            except UNSUITED_ERRORS as error:
                _LOGGER.debug('Delta table "%s": the driver decides the changes (%s)', table.path, error)
            else:
                return
        self._apply_by_driver(groups)

    def _apply_by_driver(self, groups: Sequence[RowGroup]) -> None:
        """Decide all changes in this process, and let the runner write the versions."""
        pending = self.pending
        outcome, matches = self._compute_outcome(groups)
        ending_matches, ending_commits = self._find_ended_versions(outcome, matches)
        change = VersionChange.plan_ends(
            self._stored_versions, ending_matches, ending_commits, outcome.commits, pending.size_bytes
        )
        if (shared_rows := self._shared_rows) is not None and outcome.truncate_commit is None:
            change = replace(change, replica_rows=shared_rows.select_removed_rows(self.table.columns))

        def write_new_versions() -> list[pa.Table]:
            return list(self._write_new_versions(outcome, matches, groups))

        change.commit(self._stored_versions, write_new_versions, pending.slice_ends[-1], pending.head.version)

    @cached_property
    def _stored_versions(self) -> StoredVersions:
        return self.table.stored_versions

    def _find_groups(self) -> Sequence[RowGroup]:
        """Find the row groups of the change history that have the changes."""
        if self._same_changes is not None:
            return self._same_changes.groups
        lake, path = self.table.lake, self.changes_path
        with lake.access.translate_errors(path):
            slices = lake.find_slices(path, self.pending.slice_ends, must_exist=True)
            if isinstance(slices, SparkSlices):
                raise LakeError(f'Delta table "{path}": only Spark reads it', sqlstate="55000")
            return slices.row_groups

    def _compute_outcome(self, groups: Sequence[RowGroup]) -> tuple[VersionOutcome, Sequence[FileMatches]]:
        """Find out which versions end and begin; also returns where the table has present versions of the keys."""
        lake, files = self.table.lake, list(dict.fromkeys(group.file for group in groups))
        with lake.access.translate_errors(self.changes_path):
            keyed_changes = self._get_keyed_changes(files)
            commit_tables = [read_commits(lake.store, file) for file in files]
        matches = self._find_present_versions(keyed_changes)
        has_version = keyed_changes.mask_present_keys(match.key_indices for match in matches)
        commits = Commits.from_changes(pa.concat_tables(commit_tables))
        return VersionOutcome.compute(keyed_changes, commits, has_version), matches

    def _get_keyed_changes(self, files: Sequence[str]) -> KeyedChanges:
        """Get the changes by key. They are read if memory does not have the changes of the same slices."""
        table, pending = self.table, self.pending
        if self._same_changes is not None:
            return self._same_changes.keyed_changes
        key_schema = pa.schema([table.columns.field(name) for name in table.definition.key])
        unsent_columns = sorted(pending.unsent_columns)
        change_tables = read_changes(table.lake.store, files, key_schema, unsent_columns)
        return make_keyed_changes(
            change_tables, key_schema, unsent_columns, Extent(pending.slice_ends, self.since_lsn)
        )

    @property
    def _same_changes(self) -> AppliedChanges | None:
        """The changes that were kept in memory for the replica; None if they are of other slices, or from another LSN on."""
        applied_changes = self.applied_changes
        if applied_changes is None or (applied_changes.slice_ends, applied_changes.since_lsn) != (
            self.pending.slice_ends,
            self.since_lsn,
        ):
            return None
        return applied_changes

    @property
    def _shared_rows(self) -> SharedRows | None:
        """The rows that the replica's apply has kept in memory; None if it did not apply the same changes."""
        return None if self._same_changes is None else self._same_changes.shared_rows

    @property
    def since_lsn(self) -> int:
        """The LSN from which changes are applied. The copy, or an earlier batch, had the changes before this LSN."""
        return max(self.copy_lsn, self.pending.since_lsn)

    def _find_present_versions(self, keyed_changes: KeyedChanges) -> Sequence[FileMatches]:
        """Find the present versions of the keys, by file."""
        path, committer = self.table.path, self._stored_versions.committer
        is_expected, is_relevant = keyed_changes.lookup_masks
        # Without moves (UPDATEs that change the key), look up only the keys that must have a row before the changes.
        # The first change of any other key is an INSERT, so that key had no row. With moves, all keys are looked up.
        # Suppose an UPDATE changes key 1 to 2, but no row has key 1 (PostgreSQL's conflict update_missing). Then the
        # UPDATE has no effect, and a row may have had key 2 all along.
        key_masks = (is_expected, is_relevant) if keyed_changes.changes.is_move.any() else (is_expected,)
        matches = committer.find_key_matches(path, keyed_changes.keys, key_masks, None, VALID_TO_LSN)
        return find_present_versions(committer, path, matches)

    def _find_ended_versions(
        self, outcome: VersionOutcome, matches: Sequence[FileMatches]
    ) -> tuple[list[FileMatches], list[Numbers]]:
        """Find the present versions that end, file by file; and for each of them the number of the commit that ends it."""
        ends = outcome.versions.former_end_commits
        if outcome.truncate_commit is None:
            is_ended = ends != NONE
            ending_matches = [match.select_keys(is_ended) for match in matches]
            ending_matches = [match for match in ending_matches if len(match.row_numbers)]
            return ending_matches, [ends[match.key_indices] for match in ending_matches]
        match_by_file = {match.name: match for match in matches}
        ending_commits = list[Numbers]()
        present_versions = find_present_versions(self._stored_versions.committer, self.table.path)
        for match in present_versions:
            # Versions of keys without a change end with the first TRUNCATE.
            file_ending_commits = np.full(len(match.row_numbers), outcome.truncate_commit, np.int64)
            if (match_of_keys := match_by_file.get(match.name)) is not None:
                file_ending_commits[np.searchsorted(match.row_numbers, match_of_keys.row_numbers)] = ends[
                    match_of_keys.key_indices
                ]
            ending_commits.append(file_ending_commits)
        return present_versions, ending_commits

    def _write_new_versions(
        self, outcome: VersionOutcome, matches: Sequence[FileMatches], groups: Sequence[RowGroup]
    ) -> Iterator[pa.Table]:
        """Write the versions that begin with the batch. The versions that the batch also ends get files of their own."""
        table, lake = self.table, self.table.lake
        target_file_bytes = self._stored_versions.committer.find_target_file_bytes(table.path, {})
        stamp = Stamp(table.definition.metadata_column(APPLIED_AT))
        runner = lake.policy.choose_runner(self.pending.size_bytes)
        for are_present in (True, False):
            rows, validity = outcome.select_new_versions(are_present=are_present)
            if not len(rows):
                continue
            shared_parts = (
                None
                if self._shared_rows is None
                else self._shared_rows.select_new_rows(rows.places, table.columns)
            )
            if shared_parts is not None:
                yield self._write_shared_rows(validity, shared_parts, target_file_bytes)
                continue
            sources = lake.store, table.path, groups, self.pending.slice_ends, matches
            missing_values = (
                MissingValues(*sources, table.columns, rows).reduce() if rows.sent_places else None
            )
            change_parts = divide_groups(groups, runner.parallelism)
            extent = Extent(self.pending.slice_ends, self.since_lsn)
            selection = RowSelection(
                extent, stamp, rows.places, missing_values=missing_values, added_columns=validity
            )
            task = FilesTask(
                lake.store,
                table.path,
                table.columns,
                table.schema,
                target_file_bytes,
                (),
                (),
                change_parts,
                selection,
                self._stored_versions.encodings,
            )
            yield runner.run(task, len(change_parts))

    def _write_shared_rows(
        self, validity: Validity, shared_parts: Sequence[NewRows], target_file_bytes: int
    ) -> pa.Table:
        """Write the rows of the replica's new files as versions; returns a row (`FILE_SCHEMA`) for each file."""
        table, encodings = self.table, self._stored_versions.encodings

        def write_versions(_: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            # One thread writes all rows as one part. Each part begins a file, and few large files take less time than many.
            sources = [
                ExtendedRows(part.files, guard(validity.add_to(keys, places) for places, keys in part.keys))
                for part in shared_parts
            ]
            return write_extended_files(
                table.path, table.schema, sources, table.lake.store, target_file_bytes, encodings
            )

        return CALLING_THREAD.run(write_versions, 1)


def read_commits(store: Store, file: str) -> pa.Table:
    """Read the LSN and the time of the commit of each change in a file of the change history.

    If no row group has changes of several commits, its statistics say all, and the table has one row for each row group.
    """
    types = {"commit_lsn": pa.int64(), "commit_time": COMMIT_TIME}
    bounds, schema = store.read_row_group_bounds(file, types), pa.schema(types)
    single_values = {
        name: [least for least, greatest in filter(None, bounds[name]) if least == greatest] for name in types
    }
    group_count = len(bounds["commit_lsn"])
    if all(len(single_values[name]) == len(bounds[name]) == group_count for name in types):
        return pa.table(single_values, schema)
    return store.read_columns(file, schema.names).select(schema.names).cast(schema)
