"""Keeps a lake from growing without end: retention, compaction and vacuum of a feed's and a subscription's tables.

In: the Delta tables, and the retention of applied changes. Out: the same tables, smaller. Maintenance never deletes
changes that a subscription of the feed has not applied, nor files of a recent version or of a version in a cut. Each
commit is atomic and independent of the others, so maintenance that was killed can be repeated. It may run at the same
time as a run: of two writers of a table the slower one begins again.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.moments.reading import remove_stale_clones
from pgsieve.assets.steps.operations.clustering import Clusterings, File
from pgsieve.assets.steps.records.catalogs import AlteredSlices, Catalogs, as_published
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.registered_names import RegisteredNames
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    TableStates,
    history_paths,
    newest_version,
)
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher_if_it_answers
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.steps.validation.layouts import ClusteringError, clustering_columns
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import TableMaintenance, maintenance
from pgsieve.resources.postgres.errors import SourceUnreachableError

#: The grace period for readers: the files of a cut stay this long after the cut is deleted.
READ_GRACE = timedelta(hours=1)
#: The retention of old versions of pgsieve's own tables: only a reader that has just opened one needs them.
RECORD_RETENTION = timedelta(hours=2)


@dataclass(frozen=True)
class Retention:
    """How long applied changes are kept: None for ever, zero only until they are applied.

    `versions` is how long old versions of tables, and the cuts that name them, are kept.
    """

    change_log: timedelta | None
    changes: timedelta | None
    versions: timedelta


@dataclass(frozen=True)
class MaintainedTable:
    """The result for one Delta table: the number of rows deleted, and by how many files it became smaller."""

    path: str
    rows: int
    files: int


def maintain_feed(
    feed: Feed, lake: Lake, subscriptions: Iterable[Subscription], retention: Retention, log: Log
) -> list[MaintainedTable]:
    """Maintain a feed's change log and records; `subscriptions` are all subscriptions of the feed."""
    with _maintaining(feed, f"slot {feed.slot}", lake, retention) as maintainer:
        change_log = ChangeLog(lake, feed).path
        applied_lsn = min((ReplicaProgress(s, lake).applied_up_to() for s in subscriptions), default=0)
        upto = maintainer.expired(change_log, applied_lsn, retention.change_log)
        log(
            f"change log of {feed.name}: applied up to {format_lsn(applied_lsn)}, deleted up to {format_lsn(upto)}"
        )
        if upto:
            FeedRecord(lake, feed).note_deleted(upto)
        owners = [feed.name, *(as_published(feed, s).name for s in feed.subscriptions if not feed.filtered)]
        for owner in owners:
            for path in (lake.paths.change_log(owner), lake.paths.slices(owner)):
                maintainer.maintain(path, f"slice <= {upto:d}" if upto else None)
        maintainer.maintain(AlteredSlices(lake, feed).path, f"slice <= {upto:d}" if upto else None)
        # The newest catalog before `upto` also decides later slices, so it stays.
        record = Catalogs(lake, feed).path
        catalogs = [row["lsn"] for row in lake.records.rows(record) if row["lsn"] <= upto]
        maintainer.maintain(record, f"lsn < {max(catalogs):d}" if catalogs else None)
        maintainer.maintain(PreparedTransactions(lake, feed).path)
        feed_record = FeedRecord(lake, feed)
        maintainer.maintain(feed_record.path, superseded_condition(feed_record.counting_versions()))
        return maintainer.results


def maintain_subscription(
    subscription: Subscription,
    lake: Lake,
    retention: Retention,
    log: Log,
    changed_tables: Collection[Name] | None = None,
) -> list[MaintainedTable]:
    """Maintain the change histories, the replicas with their cuts, and the records of a subscription.

    With `changed_tables`, the histories and replicas of other tables are left out, as nothing was written to them. If a replica
    cannot be clustered as its layout says, ClusteringError is raised after all other work.
    """
    with _maintaining(subscription.feed, subscription.name, lake, retention) as maintainer:
        SubscriptionRecord(lake, subscription.name).refuse_other_folders()
        remove_stale_clones(lake)
        states = TableStates(lake, subscription.name).newest()
        states_to_maintain = {
            table: state
            for table, state in states.items()
            if changed_tables is None or table in changed_tables
        }
        tables = _SubscriptionTables(subscription, lake, maintainer)
        applied_lsn = ReplicaProgress(subscription, lake).applied_up_to()
        tables.maintain_histories(states_to_maintain, applied_lsn, retention.changes)
        tables.maintain_records(applied_lsn)
        clustering_errors = tables.compact_replicas(states_to_maintain)
        oldest_time = datetime.now(UTC) - max(retention.versions - READ_GRACE, timedelta())
        if not tables.remove_versions(states_to_maintain, oldest_time, newest_version(states.values())):
            log(
                f"{subscription.name}: a replica is ahead of the newest cut; old versions stay until a run has written the next cut"
            )
        if clustering_errors:
            raise clustering_errors[0]
        return maintainer.results


@dataclass(frozen=True)
class _SubscriptionTables:
    """The maintenance of a subscription's Delta tables: histories, records, replicas, cuts."""

    subscription: Subscription
    lake: Lake
    maintainer: "_Maintainer"

    def maintain_histories(
        self, states: Mapping[Name, TableState], applied_lsn: int, retention: timedelta | None
    ) -> None:
        """Delete expired changes from change histories; compact and vacuum these, and the tables of versions of rows."""
        name, maintainer = self.subscription.name, self.maintainer
        paths = list(history_paths(self.lake.paths.changes, name, states))
        expired = {path: maintainer.expired(path, applied_lsn, retention) for path in paths}
        record = SubscriptionRecord(self.lake, name)
        # Without this record, earlier maintenance may have deleted any applied change.
        unknown = applied_lsn if record.state().deleted_up_to is None else 0
        record.note_deleted(max((*expired.values(), unknown)))
        for path, upto in expired.items():
            maintainer.maintain(path, f"slice <= {upto:d}" if upto else None, record=False)
        for path in history_paths(self.lake.paths.versions, name, states):
            maintainer.compact(path)
            maintainer.vacuum(path)

    def maintain_records(self, applied_lsn: int) -> None:
        """Delete superseded rows of the subscription's record tables."""
        lake, name, maintain = self.lake, self.subscription.name, self.maintainer.maintain
        cuts, states = Cuts(lake, name), TableStates(lake, name)
        cut = cuts.last()
        # Rows after the newest cut stay if they have changes: the next cut needs them. Of the rows without changes only
        # the last one is needed, for the position.
        applied_rows = f"slice <= {cut.lsn if cut else 0:d} or (slice < {applied_lsn:d} and inserts is null)"
        maintain(TransformedSlices(lake, name).path, applied_rows)
        of_cuts = {cut.states for cut in cuts.all() if cut.states is not None}
        maintain(states.path, superseded_condition(states.counting_versions(of_cuts)))
        record, sequences = SubscriptionRecord(lake, name), Sequences(lake, name)
        maintain(record.path, superseded_condition({record.newest_version()}))
        maintain(RegisteredNames(lake, name).path)
        maintain(sequences.path, superseded_condition(sequences.counting_versions()))

    def compact_replicas(self, states: Mapping[Name, TableState]) -> list[ClusteringError]:
        """Compact replicas, and cluster those that are due; returns the errors of layouts that do not fit their table."""
        maintainer, clustering_errors = self.maintainer, list[ClusteringError]()
        clusterings = Clusterings(SubscriptionRecord(self.lake, self.subscription.name))
        for table, state in states.items():
            path, columns = self._replica(table), tuple[str, ...]()
            try:
                columns = clustering_columns(
                    self.subscription, table, state.definition.columns if state.definition else ()
                )
            except ClusteringError as error:
                clustering_errors.append(error)
            if (
                columns
                and maintainer.exists(path)
                and clusterings.is_due(table, columns, maintainer.files(path))
            ):
                maintainer.compact(path, cluster_columns=columns)
                clusterings.note(table, columns, maintainer.files(path))
            else:
                maintainer.compact(path)
        clusterings.save()
        return clustering_errors

    def remove_versions(self, states: Mapping[Name, TableState], oldest_time: datetime, version: int) -> bool:
        """Remove the cuts and the replicas' versions from before `oldest_time`; `version` is the version of the newest state.

        Returns False, and removes nothing, if there is no recent cut and a replica is ahead of the newest one.
        """
        if not self._renew_cut(oldest_time, version):
            return False
        # A cut is deleted before its files, so that no reader opens it meanwhile.
        cuts = Cuts(self.lake, self.subscription.name).path
        self.maintainer.maintain(cuts, self.maintainer.expired_cuts(cuts, oldest_time), since=oldest_time)
        for table, state in states.items():
            # A long copy writes files long before its commit; vacuum would take them for old ones.
            if state.state != SyncState.DATA_SYNC:
                self.maintainer.vacuum(self._replica(table))
        # The cut also has to name the versions that this maintenance has made, so that a run can skip these replicas.
        self._renew_cut(oldest_time, version)
        return True

    def _renew_cut(self, oldest_time: datetime, states: int) -> bool:
        """Write the newest cut again with the present versions, if these have the same rows and one differs or it is old.

        Returns False if the newest cut is from before `oldest_time` and a replica has changes that are in no cut yet.
        """
        records, cuts = self.lake.records, Cuts(self.lake, self.subscription.name)
        cut = cuts.last()
        if cut is None:
            return True
        paths = {name: self._replica(name) for name in cut.tables}
        time = datetime.now(UTC)
        is_young = oldest_time <= cut.at <= time  # The age of a later cut is unknown.
        # Versions are read before positions, so that the position shows a commit of a run in between.
        versions = {name: records.version(path) for name, path in paths.items()}
        if any(
            (records.position(path) or 0) > cut.lsn
            or records.is_restored(path, cut.tables[name], cut.entries.get(name))
            # A repair is seen by the next run only while the cut names the version before it.
            or (self.subscription.histories.of(name).is_kept and records.is_repaired(path, cut.tables[name]))
            for name, path in paths.items()
        ):
            return is_young
        if versions != cut.tables or not is_young:
            cuts.append(cuts.new(cut.lsn, versions, states, cut))
        return True

    def _replica(self, table: Name) -> str:
        """The path of a table's replica."""
        return self.lake.paths.replica(self.subscription.name, *table)


def superseded_condition(counting: Collection[int]) -> str | None:
    """An SQL condition for the superseded rows of a record table; `counting` are the versions of the rows that count.

    None if no version counts. Rows are only added with later versions, so a superseded row stays superseded. All rows of
    a version that counts stay. So do rows from before the column `version` existed.
    """
    versions = sorted(version for version in counting if version >= 0)
    if not versions:
        return None
    return (
        f"version < {versions[-1]:d} and version not in ({', '.join(str(version) for version in versions)})"
    )


class _Maintainer:
    """Maintains Delta tables, and collects the results. Tables that do not exist are left out."""

    def __init__(self, lake: Lake, retention: Retention) -> None:
        self._lake = lake
        self._hours = math.ceil(retention.versions / timedelta(hours=1))
        self._record_hours = math.ceil(min(retention.versions, RECORD_RETENTION) / timedelta(hours=1))
        self._now = datetime.now(UTC)
        self.results: list[MaintainedTable] = []

    def expired(self, path: str, applied_lsn: int, retention: timedelta | None) -> int:
        """The end of the last slice of a table that is applied and older than `retention`; 0 if there is none."""
        if retention is None or not self._lake.records.exists(path):
            return 0
        if retention:
            return min(applied_lsn, maintenance(self._lake, path).last_slice_before(self._now - retention))
        # The end of a slice, not the applied position: without a slice nothing is deleted, so no subscription counts as behind.
        return max((end for end in self._lake.records.slices(path, 0) if end <= applied_lsn), default=0)

    def expired_cuts(self, path: str, since: datetime) -> str | None:
        """An SQL condition for the cuts from before `since`, and for cuts with a lower LSN, whatever their time is.

        Clocks of several writers may disagree.
        """
        if not self._lake.records.exists(path):
            return None
        return f"at < {{since}} or lsn < {maintenance(self._lake, path).last_before(since):d}"

    def exists(self, path: str) -> bool:
        """Whether there is such a table."""
        return self._lake.records.exists(path)

    def files(self, path: str) -> list[File]:
        """The files of a table."""
        with self._lake.access.translate_errors(path):
            return maintenance(self._lake, path).files()

    def maintain(
        self,
        path: str,
        condition: str | None = None,
        *,
        since: datetime | None = None,
        record: bool = True,
    ) -> None:
        """Delete the rows that meet a condition (see `TableMaintenance`), then compact and vacuum the table."""
        if self._lake.records.exists(path):
            self._lake.access.make_durable()
            rows = self._retry(path, lambda table: table.delete(condition, since)) if condition else 0
            self.compact(path, rows)
            self.vacuum(path, record=record)

    def compact(self, path: str, rows: int = 0, cluster_columns: Sequence[str] = ()) -> None:
        """Compact a table, and cluster it by `cluster_columns`, if any; `rows` is the number of rows deleted before."""
        if self._lake.records.exists(path):
            files = self._retry(path, lambda table: table.compact(cluster_columns))
            self.results.append(MaintainedTable(path, rows, files))

    def vacuum(self, path: str, *, record: bool = False) -> None:
        """Remove the files of old versions; `record` says that it is one of pgsieve's own tables, with a shorter retention."""
        if self._lake.records.exists(path):
            # After a power cut the table could be back at a version that needs the removed files.
            self._lake.access.make_durable()
            hours = self._record_hours if record else self._hours
            self._retry(path, lambda table: table.vacuum(hours))

    def _retry(self, path: str, work: Callable[[TableMaintenance], int]) -> int:
        def attempt() -> int:
            with self._lake.access.translate_errors(path):
                return work(maintenance(self._lake, path))

        return retry_after_conflict(attempt)()


@contextmanager
def _maintaining(feed: Feed, activity: str, lake: Lake, retention: Retention) -> Iterator[_Maintainer]:
    """A maintainer for the block, under a lock, so that two processes do not do the same work.

    If the source does not answer, there is no lock. Raises the errors of `refuse_other_publisher`.
    """
    with ExitStack() as stack:
        with suppress(SourceUnreachableError):
            stack.enter_context(feed.source.hold_lock(f"maintenance of {activity}"))
            refuse_other_publisher_if_it_answers(feed, lake)
        yield _Maintainer(lake, retention)
