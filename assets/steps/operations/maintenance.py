"""Maintenance: keeps a lake from growing for ever, by deleting old changes, compacting tables, and deleting old files.

In: the Delta tables of a slot stream (a slot with its subscriptions) or of a subscription, and how long applied changes are
    retained
Out: the same tables, smaller

A slice is the changes from one position of the slot to another. The change history of a table has its changes, slice by
slice.

A cut is an LSN, and for each replica the Delta version that equals the publisher's table at this LSN. Maintenance never
deletes changes that a subscription of the stream has not applied. It never deletes files of a recent version of a table,
or of a version that is in a cut.
Each commit is atomic and does not depend on the others. So if maintenance was killed, it can be repeated. It may run at
the same time as a run: if both write a table, the slower of the two begins again.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.moments.reading import remove_stale_clones
from pgsieve.assets.steps.operations.clustering import Clusterings, FileTimeAndSize
from pgsieve.assets.steps.records.catalogs import AlteredSlices, Catalogs, make_publisher_slot_stream
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.registered_names import RegisteredNames
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    TableStates,
    find_newest_version,
    list_history_paths,
)
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher_if_it_answers
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.validation.layouts import ClusteringError, find_clustering_columns
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import TableMaintenance, make_table_maintenance
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.work import name_jobs

#: After a cut was deleted, its files stay for this time, so that readers can finish.
READ_GRACE = timedelta(hours=1)
#: How long old versions of pgsieve's own tables are retained. Only a reader that has just opened such a table needs
#: them.
RECORD_RETENTION = timedelta(hours=2)


@dataclass(frozen=True)
class Retention:
    """How long changes are retained after they were applied. None means for ever, and zero means no time.

    `versions` is how long old versions of tables, and the cuts that name them, are retained.
    """

    change_log: timedelta | None
    changes: timedelta | None
    versions: timedelta


@dataclass(frozen=True)
class MaintainedTable:
    """The result for one Delta table: how many rows were deleted, and how many files fewer it has."""

    path: str
    rows: int
    files: int


def maintain_slot_stream(
    slot_stream: SlotStream, lake: Lake, subscriptions: Iterable[Subscription], retention: Retention, log: Log
) -> list[MaintainedTable]:
    """Maintain the change log (the slot's messages) and the record tables (pgsieve's own) of a stream.

    `subscriptions` are all subscriptions of the stream.
    """
    with _open_maintainer(slot_stream, f"slot {slot_stream.slot}", lake, retention) as maintainer:
        change_log = ChangeLog(lake, slot_stream).path
        applied_lsn = min(
            (ReplicaProgress(subscription, lake).find_applied_lsn() for subscription in subscriptions),
            default=0,
        )
        deleted_lsn = maintainer.find_expired_end(change_log, applied_lsn, retention.change_log)
        log(
            f"change log of {slot_stream.name}: applied up to {format_lsn(applied_lsn)}, deleted up to {format_lsn(deleted_lsn)}"
        )
        if deleted_lsn:
            SlotStreamRecord(lake, slot_stream).record_deleted_lsn(deleted_lsn)
        stream_names = [
            slot_stream.name,
            *(
                make_publisher_slot_stream(slot_stream, subscription).name
                for subscription in slot_stream.subscriptions
                if not slot_stream.filtered
            ),
        ]
        for stream_name in stream_names:
            for path in (lake.paths.change_log(stream_name), lake.paths.slices(stream_name)):
                maintainer.maintain(path, f"slice <= {deleted_lsn:d}" if deleted_lsn else None)
        maintainer.maintain(
            AlteredSlices(lake, slot_stream).path, f"slice <= {deleted_lsn:d}" if deleted_lsn else None
        )
        # A catalog (the publisher's definitions, recorded at an LSN) is valid up to the next one. So the newest one
        # up to `deleted_lsn` stays, for later slices.
        catalogs_path = Catalogs(lake, slot_stream).path
        catalog_lsns = [row["lsn"] for row in lake.records.rows(catalogs_path) if row["lsn"] <= deleted_lsn]
        maintainer.maintain(catalogs_path, f"lsn < {max(catalog_lsns):d}" if catalog_lsns else None)
        maintainer.maintain(PreparedTransactions(lake, slot_stream).path)
        slot_stream_record = SlotStreamRecord(lake, slot_stream)
        maintainer.maintain(
            slot_stream_record.path, make_superseded_condition(slot_stream_record.find_counting_versions())
        )
        return maintainer.results


def maintain_subscription(
    subscription: Subscription,
    lake: Lake,
    retention: Retention,
    log: Log,
    changed_tables: Collection[Name] | None = None,
) -> list[MaintainedTable]:
    """Maintain the change histories, the replicas with their cuts, and the record tables of a subscription.

    With `changed_tables`, the histories and replicas of other tables are left out, because nothing was written to them.
    If a replica cannot be clustered as its layout says, ClusteringError is raised after all other work.
    """
    with _open_maintainer(subscription.slot_stream, subscription.name, lake, retention) as maintainer:
        # Raises an error if the user has changed `folders` in the layout since the replicas were made.
        SubscriptionRecord(lake, subscription.name).require_same_folders()
        remove_stale_clones(lake)
        states = TableStates(lake, subscription.name).read_newest()
        states_to_maintain = {
            table: state
            for table, state in states.items()
            if changed_tables is None or table in changed_tables
        }
        tables = _SubscriptionTables(subscription, lake, maintainer)
        applied_lsn = ReplicaProgress(subscription, lake).find_applied_lsn()
        tables.maintain_histories(states_to_maintain, applied_lsn, retention.changes)
        tables.maintain_records(applied_lsn)
        clustering_errors = tables.compact_replicas(states_to_maintain)
        oldest_time = datetime.now(UTC) - max(retention.versions - READ_GRACE, timedelta())
        if not tables.remove_versions(states_to_maintain, oldest_time, find_newest_version(states.values())):
            log(
                f"{subscription.name}: a replica is ahead of the newest cut; old versions stay until a run has written the next cut"
            )
        if clustering_errors:
            raise clustering_errors[0]
        return maintainer.results


@dataclass(frozen=True)
class _SubscriptionTables:
    """Maintains the Delta tables of a subscription: histories, record tables, replicas and cuts."""

    subscription: Subscription
    lake: Lake
    maintainer: "_Maintainer"

    def maintain_histories(
        self, states: Mapping[Name, TableState], applied_lsn: int, retention: timedelta | None
    ) -> None:
        """Delete expired changes from change histories.

        Also compact and vacuum them, and the tables of versions of rows (`history: scd2`).
        """
        name, maintainer = self.subscription.name, self.maintainer
        paths = list(list_history_paths(self.lake.paths.change_history, name, states))
        end_by_path = {path: maintainer.find_expired_end(path, applied_lsn, retention) for path in paths}
        record = SubscriptionRecord(self.lake, name)
        # If no LSN is recorded, an earlier maintenance may have deleted all changes that were applied.
        possibly_deleted_lsn = applied_lsn if record.read_state().deleted_up_to is None else 0
        record.record_deleted_lsn(max((*end_by_path.values(), possibly_deleted_lsn)))
        for path, end in end_by_path.items():
            maintainer.maintain(path, f"slice <= {end:d}" if end else None, is_record=False)
        for path in list_history_paths(self.lake.paths.row_versions, name, states):
            maintainer.compact(path)
            maintainer.vacuum(path)

    def maintain_records(self, applied_lsn: int) -> None:
        """Maintain the subscription's record tables: delete the rows that are no longer needed, and compact the tables."""
        lake, name, maintain = self.lake, self.subscription.name, self.maintainer.maintain
        cuts, states = Cuts(lake, name), TableStates(lake, name)
        cut = cuts.read_last()
        # A row records what a slice has changed in a table. Rows with changes after the newest cut stay, because the
        # next cut needs them. The rows without changes are deleted except that of `applied_lsn`: it shows that all
        # slices up to there are applied.
        condition = f"slice <= {cut.lsn if cut else 0:d} or (slice < {applied_lsn:d} and inserts is null)"
        maintain(TransformedSlices(lake, name).path, condition)
        cut_versions = {cut.states for cut in cuts.read_all() if cut.states is not None}
        maintain(states.path, make_superseded_condition(states.find_counting_versions(cut_versions)))
        record, sequences = SubscriptionRecord(lake, name), Sequences(lake, name)
        maintain(record.path, make_superseded_condition({record.newest_version()}))
        maintain(RegisteredNames(lake, name).path)
        maintain(sequences.path, make_superseded_condition(sequences.find_counting_versions()))

    def compact_replicas(self, states: Mapping[Name, TableState]) -> list[ClusteringError]:
        """Compact replicas, and cluster those that are due.

        Returns the errors of layouts that do not fit their table.
        """
        maintainer, clustering_errors = self.maintainer, list[ClusteringError]()
        clusterings = Clusterings(SubscriptionRecord(self.lake, self.subscription.name))
        for table, state in states.items():
            path, columns = self._find_replica_path(table), tuple[str, ...]()
            try:
                columns = find_clustering_columns(
                    self.subscription, table, state.definition.columns if state.definition else ()
                )
            except ClusteringError as error:
                clustering_errors.append(error)
            if (
                columns
                and maintainer.exists(path)
                and clusterings.is_due(table, columns, maintainer.list_files(path))
            ):
                maintainer.compact(path, cluster_columns=columns)
                clusterings.note(table, columns, maintainer.list_files(path))
            else:
                maintainer.compact(path)
        clusterings.save()
        return clustering_errors

    def remove_versions(
        self, states: Mapping[Name, TableState], oldest_time: datetime, states_version: int
    ) -> bool:
        """Remove the cuts, and the versions of replicas, from before `oldest_time`.

        `states_version` is the version of the newest table state. Returns False if the newest cut is old and cannot be
        renewed (`_renew_cut`). In that case nothing is removed.
        """
        if not self._renew_cut(oldest_time, states_version):
            return False
        # A cut is deleted before its files are. Otherwise a reader could open the cut in between.
        cuts_path = Cuts(self.lake, self.subscription.name).path
        self.maintainer.maintain(
            cuts_path, self.maintainer.make_expired_cuts_condition(cuts_path, oldest_time), since=oldest_time
        )
        for table, state in states.items():
            # A long copy writes files long before it commits them. Vacuum would take these for old files, and delete them.
            if state.state != SyncState.DATA_SYNC:
                self.maintainer.vacuum(self._find_replica_path(table))
        # Maintenance has made new versions. If the cut names them, a run knows that it can skip these replicas.
        self._renew_cut(oldest_time, states_version)
        return True

    def _renew_cut(self, oldest_time: datetime, states_version: int) -> bool:
        """Write the newest cut again, with the present versions of the replicas, if these have the same rows as before.

        This is needed if a version has changed, or if the cut is old: from before `oldest_time`, or from the future.
        `states_version` is the version of the newest table state. Returns False if the newest cut is old, and one of
        these is true of a replica:
        - It has changes that are in no cut yet.
        - It was restored.
        - It has a history, and was repaired.
        """
        records, cuts = self.lake.records, Cuts(self.lake, self.subscription.name)
        cut = cuts.read_last()
        if cut is None:
            return True
        path_by_table = {name: self._find_replica_path(name) for name in cut.tables}
        time = datetime.now(UTC)
        # If the time of the cut is in the future, its age is not known.
        is_recent = oldest_time <= cut.at <= time
        # Versions are read before positions (the LSNs up to which the replicas have all changes). If a run commits in
        # between, the position shows it.
        version_by_table = {name: records.version(path) for name, path in path_by_table.items()}
        if any(
            (records.position(path) or 0) > cut.lsn
            or records.is_restored(path, cut.tables[name], cut.entries.get(name))
            # The next run has to notice a repair (`check --repair`). It can do so only while the cut names a version
            # from before the repair.
            or (
                self.subscription.histories.find_choice(name).is_kept
                and records.is_repaired(path, cut.tables[name])
            )
            for name, path in path_by_table.items()
        ):
            return is_recent
        if version_by_table != cut.tables or not is_recent:
            new_cut = cuts.make_cut(cut.lsn, version_by_table, states_version, cut)
            is_any_repaired = any(
                records.is_repaired(path_by_table[name], version)
                for name, version in cut.tables.items()
                if version != version_by_table[name]
            )
            cuts.append(new_cut if is_any_repaired else replace(new_cut, rows_at=cut.rows_time))
        return True

    def _find_replica_path(self, table: Name) -> str:
        """The path of a table's replica."""
        return self.lake.paths.replica(self.subscription.name, *table)


def make_superseded_condition(current_versions: Collection[int]) -> str | None:
    """Make an SQL condition for the rows of a record table that newer rows have superseded.

    `current_versions` are the Delta versions of the rows that are not superseded. All rows of these versions stay, and so
    do rows without a version, which were written before the column `version` existed. Without `current_versions`
    the result is None. A superseded row stays superseded, because each row that is added has a later version.
    """
    versions = sorted(version for version in current_versions if version >= 0)
    if not versions:
        return None
    return (
        f"version < {versions[-1]:d} and version not in ({', '.join(str(version) for version in versions)})"
    )


class _Maintainer:
    """Maintains Delta tables of `owner`, a slot or a subscription, and collects the results.

    Tables that do not exist are left out.
    """

    def __init__(self, owner: str, lake: Lake, retention: Retention) -> None:
        self._owner, self._lake = owner, lake
        self._retention_hours = math.ceil(retention.versions / timedelta(hours=1))
        self._record_retention_hours = math.ceil(
            min(retention.versions, RECORD_RETENTION) / timedelta(hours=1)
        )
        self._start_time = datetime.now(UTC)
        self.results: list[MaintainedTable] = []

    def find_expired_end(self, path: str, applied_lsn: int, retention: timedelta | None) -> int:
        """Find the LSN up to which the slices of a table are applied and older than `retention`; 0 if there are none."""
        if retention is None or not self._lake.records.exists(path):
            return 0
        if retention:
            return min(
                applied_lsn,
                make_table_maintenance(self._lake, path).find_last_slice_before(self._start_time - retention),
            )
        # All applied slices have expired, so the result is the end of the last of them. It is not `applied_lsn`,
        # which may be higher. The caller records the result, and a subscription that was restored from a backup has
        # to be copied again if it has not reached the recorded LSN.
        return max((end for end in self._lake.records.slices(path, 0) if end <= applied_lsn), default=0)

    def make_expired_cuts_condition(self, path: str, since: datetime) -> str | None:
        """Make an SQL condition, for `TableMaintenance.delete`, for the cuts from before `since`.

        It also includes all cuts with a lower LSN than one of these, because the clocks of several writers may differ.
        """
        if not self._lake.records.exists(path):
            return None
        return f"at < {{since}} or lsn < {make_table_maintenance(self._lake, path).find_last_lsn_before(since):d}"

    def exists(self, path: str) -> bool:
        """True if there is such a table."""
        return self._lake.records.exists(path)

    def list_files(self, path: str) -> list[FileTimeAndSize]:
        """List the files of a table, with their times and sizes."""
        with self._lake.access.translate_errors(path):
            return make_table_maintenance(self._lake, path).list_file_times_and_sizes()

    def maintain(
        self,
        path: str,
        condition: str | None = None,
        *,
        since: datetime | None = None,
        is_record: bool = True,
    ) -> None:
        """Delete the rows that meet a condition (see `TableMaintenance`), and then compact and vacuum the table."""
        if self._lake.records.exists(path):
            self._lake.access.make_durable()
            deleted_count = (
                self._retry(path, lambda table: table.delete(condition, since)) if condition else 0
            )
            self.compact(path, deleted_count)
            self.vacuum(path, is_record=is_record)

    def compact(self, path: str, deleted_count: int = 0, cluster_columns: Sequence[str] = ()) -> None:
        """Compact a table. If there are `cluster_columns`, cluster it by these columns.

        `deleted_count` is the number of rows that were deleted before, for the result.
        """
        if self._lake.records.exists(path):
            removed_file_count = self._retry(path, lambda table: table.compact(cluster_columns))
            self.results.append(MaintainedTable(path, deleted_count, removed_file_count))

    def vacuum(self, path: str, *, is_record: bool = False) -> None:
        """Delete the files of old versions. `is_record` says that the table is pgsieve's own: it has a shorter retention."""
        if self._lake.records.exists(path):
            # Without this, the table could go back after a power cut to a version that needs the deleted files.
            self._lake.access.make_durable()
            hours = self._record_retention_hours if is_record else self._retention_hours
            self._retry(path, lambda table: table.vacuum(hours))

    def _retry(self, path: str, maintain: Callable[[TableMaintenance], int]) -> int:
        def attempt() -> int:
            # In Spark's UI the table is named by its path in the lake.
            table_name = path.removeprefix(self._lake.uri).strip("/")
            with (
                self._lake.access.translate_errors(path),
                name_jobs(self._owner, f"maintenance of {table_name}"),
            ):
                return maintain(make_table_maintenance(self._lake, path))

        return retry_after_conflict(attempt)()


@contextmanager
def _open_maintainer(
    slot_stream: SlotStream, owner: str, lake: Lake, retention: Retention
) -> Iterator[_Maintainer]:
    """Yield a maintainer of the tables of `owner`, a slot or a subscription.

    During the `with` block, a lock keeps other processes from doing the same work.

    If the source does not answer, there is no lock. Raises the errors of `refuse_other_publisher`.
    """
    with ExitStack() as stack:
        with suppress(SourceUnreachableError):
            stack.enter_context(slot_stream.source.hold_lock(f"maintenance of {owner}"))
            refuse_other_publisher_if_it_answers(slot_stream, lake)
        with name_jobs(owner, "maintenance"):
            yield _Maintainer(owner, lake, retention)
