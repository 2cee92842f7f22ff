"""Finds the base of each table at an LSN: a Delta version of its replica, and slices of its change history.

A slice is the changes from one position of the slot to another. The change history is a Delta table that has the changes
of a replica's table. The position of a version is the LSN up to which the version has all changes. A cut names a version
of each replica; together these versions equal the publisher at one LSN.

In: the records of a subscription
Out: a `TableBase` for each table that the subscription had at the LSN

The version has the transactions that committed before its position, and the change history has later transactions. The
history has all of them, unless retention has deleted a part of it, or the table was copied again in between. Raises
MomentError with the reason if the records do not prove that the history is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltalake.exceptions import DeltaError

from pgsieve.assets.steps.moments.moment import Moment, MomentError
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.copied_rows import IS_CHANGE, IS_SNAPSHOT
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.clones import list_files
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.records import APPLICATION_ID
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import join_path


@dataclass(frozen=True)
class TableBase:
    """A version of a replica, and the slices of its change history with later changes.

    - `path`, `version`: a version of the replica, which has all transactions that committed before `since_lsn`
    - `state`: the state of the table at that time. Its definition describes this version and these slices.
    - `history_path`, `slice_ends`: the path of the change history, and the ends of the slices
    """

    path: str
    version: int
    state: TableState
    since_lsn: int
    history_path: str
    slice_ends: Sequence[int] = ()

    @property
    def name(self) -> Name:
        """The schema and the name of the table."""
        return self.state.name

    @property
    def definition(self) -> Definition:
        """The definition of the version."""
        assert self.state.definition is not None
        return self.state.definition


def find_bases(moment: Moment, only_table: Name | None = None) -> list[TableBase]:
    """Find the bases of a subscription's tables at a moment.

    With `only_table`, only this table is searched, so other tables cause no error. The result is empty if an earlier cut
    shows that the subscription did not have this table then.
    """
    lake, subscription, lsn = moment.lake, moment.subscription, moment.lsn
    cuts = Cuts(lake, subscription).read_all()
    states = TableStates(lake, subscription).read_all()
    reached_lsn = max(
        TransformedSlices(lake, subscription).read_position(), moment.complete_lsn, *(cut.lsn for cut in cuts)
    )
    if not states or not reached_lsn:
        raise MomentError(
            f'the lake has no data of a subscription "{subscription}"',
            hint="`pgsieve run` copies its tables",
            sqlstate="42704",
        )
    if lsn > reached_lsn:
        raise MomentError(
            f'subscription "{subscription}": LSN {format_lsn(lsn)} has not been read yet: pgsieve has read up to {format_lsn(reached_lsn)}',
            hint=f"`pgsieve run {subscription}` applies later changes; if it finds none, name LSN {format_lsn(reached_lsn)}, which has the same rows",
            sqlstate="22023",
        )
    cuts_before = [cut for cut in cuts if cut.lsn <= lsn]
    search = _BaseSearch(moment, cuts_before, next((cut for cut in cuts if cut.lsn > lsn), None))
    bases = [
        base
        for name, states_of_table in states.items()
        if only_table in {None, name} and (base := search.find_base(name, states_of_table)) is not None
    ]
    # If only one table is wanted, and an earlier cut lacks it, the subscription did not have it then. That is no error.
    if not bases and (only_table is None or not cuts_before):
        oldest_cut_clause = f"; the oldest cut that is kept is of {format_lsn(cuts[0].lsn)}" if cuts else ""
        raise MomentError(
            f'subscription "{subscription}": no table was copied by {format_lsn(lsn)}, or no cut of that time is kept{oldest_cut_clause}',
            hint="how long cuts are kept is `retention.versions` in pgsieve.yaml",
            sqlstate="22023",
        )
    return bases


@dataclass(frozen=True)
class _BaseSearch:
    """Finds the base of each table.

    `cuts_before` are the cuts at or before the moment, the oldest first, and `cut_after` is the first cut after it.
    """

    moment: Moment
    cuts_before: Sequence[Cut]
    cut_after: Cut | None

    @property
    def _lake(self) -> Lake:
        return self.moment.lake

    def find_base(self, name: Name, states: Sequence[TableState]) -> TableBase | None:
        """The base of a table; None if the subscription did not have the table at that moment.

        `states` has the recorded states of the table.
        """
        newest_cut = self.cuts_before[-1] if self.cuts_before else None
        is_in_newest_cut = newest_cut is not None and name in newest_cut.tables
        ready_state = next(
            (
                state
                for state in reversed(states)
                if state.state == SyncState.READY and state.lsn <= self.moment.lsn
            ),
            None,
        )
        if ready_state is None:
            if not is_in_newest_cut:
                return None
            raise self._make_unreadable_error(
                name,
                "the record of its columns at that time is gone: `pgsieve maintain` of an earlier version deleted it",
            )
        if (
            newest_cut is not None
            and not is_in_newest_cut
            and ready_state.lsn <= newest_cut.lsn
            and (self.moment.is_of_newest_cut or _has_left(states, ready_state, newest_cut))
        ):
            return None
        # The newest cut may lack a table that the subscription has: one that is set aside, or is to be copied again.
        cut = self._find_cut_with_table(name, ready_state.lsn)
        path = self._lake.paths.replica(self.moment.subscription, *name)
        if cut is not None and cut.lsn == self.moment.lsn:
            version = cut.tables[name]
            state = self._find_fitting_state(
                name, states, ready_state, self._lake.read_columns_of_version(path, version)
            )
            return TableBase(path, version, state, cut.lsn, self._find_history_path(name, state))
        return self._find_base_after_cut(name, path, states, ready_state, cut)

    def _find_cut_with_table(self, name: Name, min_lsn: int = 0) -> Cut | None:
        """The newest cut with a table at or before the moment; None if there is none at or after `min_lsn`."""
        return next(
            (cut for cut in reversed(self.cuts_before) if cut.lsn >= min_lsn and name in cut.tables), None
        )

    def _find_base_after_cut(
        self,
        name: Name,
        path: str,
        states: Sequence[TableState],
        ready_state: TableState,
        cut: Cut | None,
    ) -> TableBase:
        """The base of a table that may have changed between a cut before the moment and the moment.

        `cut` is the newest such cut with the table; None if the table was copied after it, or if there is none.
        """
        delta_rs = self._require_delta_rs(name)
        cut_version = None if cut is None else cut.tables[name]
        version, position = self._find_newest_version(name, delta_rs, path, ready_state.lsn, cut_version)
        if not ready_state.lsn <= position <= self.moment.lsn:
            raise self._make_unreadable_error(name, "its replica's version of that time is gone")
        if cut_version != version:
            self._refuse_missing_files(name, delta_rs, path, version)
        state = self._find_fitting_state(
            name, states, ready_state, self._lake.read_columns_of_version(path, version)
        )
        since_lsn = position if cut is None else max(position, cut.lsn)
        base = TableBase(path, version, state, since_lsn, self._find_history_path(name, state))
        return self._add_slices(base, states) if since_lsn < self.moment.lsn else base

    def _add_slices(self, base: TableBase, states: Sequence[TableState]) -> TableBase:
        """Add the slices of the change history to a base. Raises MomentError if some of them may be missing."""
        name, lake = base.name, self._lake
        slice_ends = self._find_slice_ends(name, base)
        deleted_up_to = SubscriptionRecord(lake, self.moment.subscription).read_state().deleted_up_to
        if deleted_up_to is None:
            raise self._make_unreadable_error(
                name,
                "it is not recorded which changes are deleted; `pgsieve maintain` records it from now on",
            )
        if base.since_lsn < deleted_up_to:
            raise self._make_unreadable_error(
                name,
                f"its changes up to {format_lsn(deleted_up_to)} are deleted, as `retention.changes` says",
            )
        self._refuse_gap(name, base.state, states, slice_ends)
        earlier_ends = [end for end in slice_ends if end < self.moment.lsn]
        needed_ends = [*earlier_ends, *slice_ends[len(earlier_ends) :][:1]]
        return TableBase(base.path, base.version, base.state, base.since_lsn, base.history_path, needed_ends)

    def _find_slice_ends(self, name: Name, base: TableBase) -> list[int]:
        """The ends of the slices with changes after the base. Slices that have only copied rows are left out."""
        records = self._lake.records
        slice_ends = records.slices(base.history_path, base.since_lsn)
        copied_slices = {
            row["slice"]
            for row in records.rows(base.history_path, f"{IS_SNAPSHOT} and slice > {base.since_lsn:d}")
        }
        if not copied_slices:
            return list(slice_ends)
        delta_rs = self._require_delta_rs(name)
        with self._lake.access.translate_errors(base.history_path):
            return [
                end
                for end in slice_ends
                if end not in copied_slices
                or delta_rs.find_column_bound(
                    "min", base.history_path, "slice", f"slice = {end:d} and {IS_CHANGE}"
                )
                is not None
            ]

    def _refuse_gap(
        self, name: Name, ready_state: TableState, states: Sequence[TableState], slice_ends: Sequence[int]
    ) -> None:
        """Raise MomentError if changes may be missing in the history, because the table was not replicated for a while.

        If the state of the table stayed ready, the history is complete. Otherwise it is complete only up to its last
        slice.
        """
        max_state_version = None if self.cut_after is None else self.cut_after.states
        states_until_cut = [
            state for state in states if max_state_version is None or state.version <= max_state_version
        ]
        if (
            states_until_cut
            and states_until_cut[-1].is_applied
            and states_until_cut[-1].lsn == ready_state.lsn
        ):
            return
        next_copy_lsn = min(
            (
                state.lsn
                for state in states
                if state.lsn > self.moment.lsn and state.version > ready_state.version
            ),
            default=None,
        )
        history_end = max(
            (end for end in slice_ends if next_copy_lsn is None or end <= next_copy_lsn), default=0
        )
        if history_end < self.moment.lsn:
            gap_description = (
                "it has not been copied since"
                if next_copy_lsn is None
                else f"it was copied at {format_lsn(next_copy_lsn)}"
            )
            raise self._make_unreadable_error(
                name,
                f"{_describe_interruption(states, ready_state)}; {gap_description}: its changes in between are lost",
            )

    def _find_newest_version(
        self, name: Name, delta_rs: DeltaRsRecords, path: str, copy_lsn: int, cut_version: int | None
    ) -> tuple[int, int]:
        """The newest version whose position is at or before the LSN, and the position that `_read_position` returns for it.

        Versions in which another writer may have changed rows since the cut or, without a cut, since the copy, are left out.
        """
        if not self._lake.records.exists(path):
            raise self._make_unreadable_error(name, "its replica is gone")
        newest_version = self._lake.records.version(path)
        high_version = (
            newest_version
            if self.cut_after is None
            else min(self.cut_after.tables.get(name, newest_version), newest_version)
        )
        position_by_version = dict[int, int]()

        def find_last_version(low_version: int, lsn: int) -> int:
            """The last version whose position is at or before an LSN, by bisection from `low_version`."""
            low, high = low_version, high_version
            while low < high:
                middle = (low + high + 1) // 2
                if self._read_position(delta_rs, path, middle, position_by_version) <= lsn:
                    low = middle
                else:
                    high = middle - 1
            return low

        version = find_last_version(cut_version or 0, self.moment.lsn)
        since_version = find_last_version(0, copy_lsn - 1) if cut_version is None else cut_version
        if since_version < version:
            with self._lake.access.translate_errors(path):
                version = delta_rs.find_own_version(path, since_version, version)
        return version, self._read_position(delta_rs, path, version, position_by_version)

    @staticmethod
    def _read_position(
        delta_rs: DeltaRsRecords, path: str, version: int, position_by_version: dict[int, int]
    ) -> int:
        """The position of a version; -1 if it has none, or if its log entry was deleted."""
        if version not in position_by_version:
            try:
                position = delta_rs.open_version(path, version).transaction_version(APPLICATION_ID)
            except DeltaError:
                position = None
            position_by_version[version] = -1 if position is None else position
        return position_by_version[version]

    def _refuse_missing_files(self, name: Name, delta_rs: DeltaRsRecords, path: str, version: int) -> None:
        """Raise MomentError if files of the version were deleted.

        Vacuum keeps only the files of recent versions, and of versions that are in cuts.
        """
        with self._lake.access.translate_errors(path):
            files = list_files(delta_rs.open_version(path, version))
        if not all(self._lake.store.has_file(join_path(path, file)) for file in files):
            raise self._make_unreadable_error(
                name, f"files of version {version} of its replica are deleted, as `retention.versions` says"
            )

    def _find_fitting_state(
        self, name: Name, states: Sequence[TableState], ready_state: TableState, columns: Sequence[str]
    ) -> TableState:
        """The state whose definition has the columns of a version.

        `columns` are the columns of the version. They may include columns that a user has added.
        """
        max_state_version = None if self.cut_after is None else self.cut_after.states
        candidates = [
            (state, set(state.definition.names))
            for state in reversed(states)
            if state.state == SyncState.READY
            and state.lsn == ready_state.lsn
            and state.definition is not None
            and (max_state_version is None or state.version <= max_state_version)
        ]
        states_with_equal_columns = [state for state, names in candidates if names == set(columns)]
        states_with_fewer_columns = [state for state, names in candidates if names < set(columns)]
        if not (states_with_equal_columns or states_with_fewer_columns):
            raise self._make_unreadable_error(name, "the record of its columns at that time is gone")
        return [*states_with_equal_columns, *states_with_fewer_columns][0]

    def _find_history_path(self, name: Name, state: TableState) -> str:
        assert state.definition is not None
        return self._lake.paths.change_history(
            self.moment.subscription, *name, state.definition.history.generation
        )

    def _require_delta_rs(self, name: Name) -> DeltaRsRecords:
        reason = "only Spark reaches the lake, and pgsieve cannot read a moment between two cuts there"
        return self._lake.require_delta_rs(self._make_unreadable_error(name, reason, "0A000"))

    def _make_unreadable_error(self, name: Name, reason: str, sqlstate: str = "55000") -> MomentError:
        """The error that a table cannot be read as of the moment, with the reason."""
        cuts = [
            format_lsn(cut.lsn)
            for cut in (self._find_cut_with_table(name), self.cut_after)
            if cut is not None and name in cut.tables
        ]
        return MomentError(
            f'subscription "{self.moment.subscription}": table "{quote_qualified(*name)}" cannot be read as of'
            f" {format_lsn(self.moment.lsn)}: {reason}",
            hint=f"it can be read at the nearest cuts: {', '.join(cuts)}" if cuts else "choose a later LSN",
            sqlstate=sqlstate,
        )


def _has_left(states: Sequence[TableState], ready_state: TableState, cut: Cut) -> bool:
    """Whether a table that was ready had left the publications when a cut was made. `states` are its recorded states."""
    return any(
        state.state == SyncState.REMOVED and state.version > ready_state.version and cut.has_state(state)
        for state in states
    )


def _describe_interruption(states: Sequence[TableState], ready_state: TableState) -> str:
    """Why a table's changes were not applied for a while after it was ready. `states` has the oldest first."""
    later_states = [
        state
        for state in states
        if state.version > ready_state.version
        and (state.state != SyncState.READY or state.lsn != ready_state.lsn)
    ]
    reason = next((f" ({state.reason})" for state in later_states if state.reason), "")
    if any(state.state == SyncState.SET_ASIDE for state in later_states):
        return f"it was set aside{reason}"
    if any(state.state == SyncState.REMOVED for state in later_states):
        return "it left the publications"
    return f"it had to be copied again{reason}"
