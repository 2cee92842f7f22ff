"""The versions of rows follow a batch: transformed changes -> versions that end, and versions that begin.

In: the change history, whose changes the replica has already, and the table of versions. Out: one commit of that
table, once per slice. The versions are computed by columns (`pgsieve.decoding.changes.net_change.row_versions`).
Raises LakeError, and OverrunError where another process was faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.applied import Pending
from pgsieve.assets.steps.apply.batch import lacking_changes
from pgsieve.assets.steps.apply.by_files import ChosenRows, RowsTask, Validity, may_be_of_other_key
from pgsieve.assets.steps.apply.completion import NetRows, completions
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges, keyed_changes, stored_changes
from pgsieve.assets.steps.history.versions import VersionChange, VersionTable, present_rows
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.cuts import Cut
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, explained
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState
from pgsieve.assets.steps.records.transformed import TableChanges
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.decoding.changes.net_change import NONE, Numbers, RowVersions, row_versions, with_deletes
from pgsieve.decoding.changes.versions import CURRENT, TO_LSN, Commits
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError, again_after_conflict
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import RowGroup, parted
from pgsieve.resources.work import called


def kept_versions(
    subscription: Subscription, lake: Lake, states: Mapping[Name, TableState], cut: Cut | None, log: Log
) -> tuple[dict[Name, int], dict[Name, str]]:
    """The positions of the versions of rows, by table; and the problems of tables with unreadable versions.

    Versions go on from where they are if they have no gap: they reach the position that the newest cut records, or
    began at that cut, or with a later copy. Other versions begin anew at the newest cut.
    """
    kept, failed = dict[Name, int](), dict[Name, str]()
    for name, state in states.items():
        table = VersionTable.kept(subscription, lake, state) if state.applies else None
        if table is None:
            continue
        try:
            position = lake.records.position(table.path) if lake.records.exists(table.path) else None
        except TABLE_ERRORS as error:
            failed[name] = explained(lake, error, name)
            continue
        held = cut if cut is not None and name in cut.tables and state.lsn <= cut.lsn else None
        since = state.lsn if held is None else held.versioned.get(name, held.lsn)
        if position is not None and position >= since:
            kept[name] = position
        elif held is not None and state.state == SyncState.READY and _begin(table, held, log):
            kept[name] = held.lsn
    return kept, failed


def _begin(table: VersionTable, cut: Cut, log: Log) -> bool:
    """Begin versions anew with the rows of a cut; whether that was possible."""
    shown, lake = quote_qualified(*table.name), table.lake
    try:
        table.begin_anew(cut.lsn, datetime.now(UTC), version=cut.tables[table.name])
    except TABLE_ERRORS as error:
        log(f"the versions of {shown} do not begin: {explained(lake, error, table.name)}")
        return False
    log(f"the versions of {shown} begin at {format_lsn(cut.lsn)} with the present rows of its replica")
    return True


def lacking_versions(
    subscription: Subscription, lake: Lake, state: TableState, changes: Sequence[TableChanges]
) -> tuple[VersionTable, Pending] | None:
    """The versions of a table and the changes that they lack; None if they lack none, or are not kept."""
    table = VersionTable.kept(subscription, lake, state) if state.applies else None
    if table is None or not lake.records.exists(table.path):
        return None
    head = lake.records.head(table.path)
    slices = lacking_changes(changes, state, head)
    return (table, Pending(slices, head)) if slices else None


def follow_versions(
    subscription: Subscription,
    lake: Lake,
    states: Mapping[Name, TableState],
    changes: Sequence[TableChanges],
) -> dict[Name, str]:
    """Bring the versions of tables up to changes that their replicas have; returns the problems by table."""

    def follow(name: Name) -> tuple[Name, str | None]:
        own = [change for change in changes if change.name == name]

        def attempt() -> None:
            if (lacking := lacking_versions(subscription, lake, states[name], own)) is not None:
                table, pending = lacking
                log = lake.paths.changes(subscription.name, *name, table.definition.history.generation)
                VersionsWriter(table, log, pending, states[name].lsn).apply()
                reach(Failpoint.REPLICA_COMMITTED)

        try:
            with called(subscription.name, f"versions of {name[0]}.{name[1]}"):
                again_after_conflict(attempt)()
        except TABLE_ERRORS as error:
            return name, explained(lake, error, name)
        return name, None

    names = list(dict.fromkeys(change.name for change in changes))
    return {name: problem for name, problem in lake.in_parallel(follow, names) if problem is not None}


@dataclass(frozen=True)
class _Became:
    """The outcome of changes for versions; a TRUNCATE counts as a DELETE of each key.

    `commit_of` and `places` are the commit and the place of each change. `matches` are the present versions of the
    keys. `truncated` is the number of the first TRUNCATE's commit, if there is one.
    """

    versions: RowVersions
    commit_of: Numbers
    places: Numbers
    commits: Commits
    matches: Sequence[FileMatches]
    truncated: int | None


@dataclass(frozen=True)
class VersionsWriter:
    """Writes the changes of a batch to the versions of one table; `log` has them, `copied` is the LSN of the copy."""

    table: VersionTable
    log: str
    pending: Pending
    copied: int

    def apply(self) -> None:
        """Write them in one commit; its position is the end of the last slice."""
        table, pending, end, lake = self.table, self.pending, self.pending.ends[-1], self.table.lake
        if may_be_of_other_key(table.definition, pending):
            # Rows may have been equal in the present key at that time. After a crash the replica may be ahead.
            reached = lake.records.position(lake.paths.replica(table.subscription, *table.name)) or 0
            table.begin_anew(max(end, reached), datetime.now(UTC))
            return
        committer = table.stored.committer()
        stored = lake.stored_slices(self.log, pending.ends, every=True)
        if stored is None:
            raise LakeError(f'Delta table "{self.log}": only Spark reads it', sqlstate="55000")
        table.follow_columns()
        became = self._became(stored.groups)
        ending, until = self._ending(became)
        change = VersionChange.of(table.stored, ending, until, became.commits, pending.size)

        def new() -> list[pa.Table]:
            return list(self._written(became, stored.groups))

        change.commit(table.stored, new, end, pending.head.version, committer)

    def _became(self, groups: Sequence[RowGroup]) -> _Became:
        table, pending, lake = self.table, self.pending, self.table.lake
        keys = pa.schema([table.columns.field(name) for name in table.definition.key])
        files, unsent = dict.fromkeys(group.file for group in groups), sorted(pending.unchanged)
        with lake.access.refusing(self.log):
            stored = stored_changes(lake.store, files, keys, unsent)
            keyed = keyed_changes(stored, keys, unsent, pending.ends, self.since)
            times = [lake.store.columns(file, ["commit_lsn", "commit_time"]) for file in files]
        assert keyed is not None
        commits = Commits.of(pa.concat_tables(times))
        matches = self._matches(keyed)
        present = np.zeros(keyed.keys.num_rows + 1, np.bool_)
        for match in matches:
            present[match.keys] = True
        changes, number = with_deletes(keyed.changes, keyed.truncates, keyed.keys.num_rows)
        lsns = np.concatenate([keyed.commit_lsns, np.asarray(keyed.truncated, np.int64)])[number]
        places = np.concatenate([keyed.places, np.full(len(keyed.truncated), NONE)])[number]
        commit_of = commits.numbers(lsns)
        truncated = int(commits.numbers(np.array(keyed.truncated[:1]))[0]) if keyed.truncated else None
        versions = row_versions(changes, commit_of, present)
        return _Became(versions, commit_of, places, commits, matches, truncated)

    @property
    def since(self) -> int:
        """The LSN from which changes count: earlier ones are in the copy."""
        return max(self.copied, self.pending.since)

    def _matches(self, keyed: KeyedChanges) -> Sequence[FileMatches]:
        """The present versions of the keys, file by file."""
        table, path, lake = self.table, self.table.path, self.table.lake
        current = pa.repeat(pa.scalar(True), keyed.keys.num_rows)
        keys = keyed.keys.append_column(CURRENT, current)
        expected, matters = keyed.lookups
        # No INSERT meets a row; only after a lost move may a key have one that is not expected.
        among = (expected, matters) if keyed.changes.moves.any() else (expected,)
        with lake.access.refusing(path):
            matches = table.stored.committer().local.matches(path, keys, among, None, TO_LSN)
        assert matches is not None
        return matches

    def _ending(self, became: _Became) -> tuple[list[FileMatches], list[Numbers]]:
        """The present versions that end, file by file, and the numbers of their last commits."""
        ends = became.versions.ends
        if became.truncated is None:
            matches = [match.of_keys(ends != NONE) for match in became.matches]
            matches = [match for match in matches if len(match.rows)]
            return matches, [ends[match.keys] for match in matches]
        of_keys = {match.name: match for match in became.matches}
        every, until = list[FileMatches](), list[Numbers]()
        with self.table.lake.access.refusing(self.table.path):
            every += present_rows(self.table.stored.committer().local, self.table.path)
        for match in every:
            # Keys without a change end with the first TRUNCATE.
            ended = np.full(len(match.rows), became.truncated, np.int64)
            if (found := of_keys.get(match.name)) is not None:
                ended[np.searchsorted(match.rows, found.rows)] = ends[found.keys]
            until.append(ended)
        return every, until

    def _written(self, became: _Became, groups: Sequence[RowGroup]) -> Iterator[pa.Table]:
        """Let the runner write the versions that begin; those that end within the batch get files of their own."""
        table, versions = self.table, became.versions
        lake, size = table.lake, table.stored.committer().file_bytes(table.path, {})
        stamp = Stamp(table.definition.metadata_column(APPLIED_AT))
        runner, is_present = lake.policy.runner(self.pending.size), versions.until == NONE
        for chosen in (is_present, ~is_present):
            at = np.flatnonzero(chosen)
            at = at[np.argsort(became.places[versions.last[at]])]
            if not len(at):
                continue
            places = became.places[versions.last[at]]
            sent = {
                name: np.where(of[at] == NONE, NONE, became.places[of[at]])
                for name, of in versions.sent.items()
            }
            rows = NetRows(places, sent, versions.base[at])
            validity = Validity(
                places, became.commit_of[versions.last[at]], versions.until[at], became.commits
            )
            read = lake.store, table.path, groups, self.pending.ends, became.matches
            for kept, completed in completions(*read, rows, table.columns):
                parts = parted(groups, runner.number)
                of_changes = ChosenRows(
                    self.pending.ends, self.since, stamp, kept, completed, validity=validity
                )
                task = RowsTask(
                    lake.store, table.path, table.columns, table.schema, size, (), (), parts, of_changes
                )
                yield runner.written(task, len(parts))
