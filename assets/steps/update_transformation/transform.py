"""UPDATE transformation: turns the slot's messages in the change log into changes, and filters them as pgoutput does.

A slice is the changes from one position of the slot to another. It is transformed once for each subscription, as a
whole or in windows (parts). The changes of each table are one Delta commit, whose position (an LSN) is the end of the slice
or of the window. After these commits a row for each table is written to `_transformed`, which the next step (`apply`)
reads. A slice may be repeated after a crash. Delta then leaves out commits that exist already: it knows them by the position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pgsieve.assets.steps.history.copied_rows import CHANGES_PROPERTIES
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.failures import (
    TABLE_ERRORS,
    describe_error,
    describe_error_fully,
    is_damage,
)
from pgsieve.assets.steps.records.own_versions import list_subscription_records, refuse_put_back_tables
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TableChanges, TransformedSlices
from pgsieve.assets.steps.subscription import Definition, Subscription, arrow_types
from pgsieve.assets.steps.update_transformation.changes import (
    COUNTED_COLUMNS,
    SentChanges,
    TableSlice,
    count_stored_changes,
)
from pgsieve.assets.steps.update_transformation.first_failure import FailureSearch
from pgsieve.assets.steps.update_transformation.relation_versions import make_readings
from pgsieve.assets.steps.update_transformation.schema_changes import SchemaChanges
from pgsieve.assets.steps.update_transformation.skip import Skip, is_partly_transformed
from pgsieve.assets.steps.update_transformation.slice_contents import find_slices, read_slice_contents
from pgsieve.assets.steps.update_transformation.windows import SliceReader, TableWork, WindowWork, next_window
from pgsieve.assets.steps.validation.waiting import (
    describe_waiting_reason,
    find_table_problems,
    hold_back_tables,
    make_subscription_catalog,
)
from pgsieve.decoding.changes.columns import ROW_OPERATIONS, changes_schema
from pgsieve.decoding.changes.tally import ChangeCounts, Tally
from pgsieve.decoding.errors import UnsupportedFilterError, UnsupportedTypeError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.added_columns import add_missing_columns
from pgsieve.resources.lake.committers import FileCommitter, LargeCommitter, SparkCommitter
from pgsieve.resources.lake.delta.errors import OvertakenError, retry_after_conflict
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.table_rows import open_slices
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.wal import read_current_lsn
from pgsieve.resources.work import name_jobs


def transform(subscription: Subscription, lake: Lake, log: Log) -> list[TableChanges]:
    """Transform the slices that are not transformed yet, in order. Before that, adapt the replicas to schema changes.

    With `disable_on_error`, an error disables the subscription, and nothing of the transaction with the error or of
    later transactions is written. Nothing is written at all if a table cannot be replicated as it is published. Raises
    SubscriptionDisabledError if the subscription is disabled already.
    """
    results: list[TableChanges] = []
    lake.access.begin_writing()
    with subscription.slot_stream.source.hold_lock(subscription.name):
        # If another process has transformed a slice or copied a table meanwhile, `run` goes on with the slices that remain.
        retry_after_conflict(Transformation(subscription, lake, log).run)(results)
    return results


@dataclass(frozen=True)
class Transformation:
    """Transforms the slices of a subscription that are not transformed yet."""

    subscription: Subscription
    lake: Lake
    log: Log

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def run(self, results: list[TableChanges]) -> None:
        """Transform the slices that exist now, and add their changes to `results`."""
        subscription, lake = self.subscription, self.lake
        transformed_slices = TransformedSlices(lake, subscription.name)
        skip_lsn = SubscriptionRecord(lake, subscription.name).require_enabled().skip_lsn
        # The version of `_transformed` is read before any table state. A process that changes a state also commits to
        # `_transformed`. So the commits of this process fail if a state has changed since it was read.
        head = lake.records.head(transformed_slices.path)
        begin_lsn, base_version = head.position or 0, head.version
        cut = Cuts(lake, subscription.name).read_last()
        refuse_put_back_tables(lake, list_subscription_records(lake, subscription.name), [cut])
        self._set_aside_lagging_tables(begin_lsn)
        with subscription.slot_stream.source.connect() as connection:
            server_catalog = read_present_catalog(connection)
            full_catalog = make_subscription_catalog(connection, subscription, server_catalog)
            lsn = read_current_lsn(connection)
        if hold_back_tables(subscription, lake, find_table_problems(subscription, full_catalog)):
            return
        if SchemaChanges(subscription, lake, lsn, begin_lsn, self.log).follow(full_catalog):
            # The definitions have changed, so begin again with the new ones.
            self.run(results)
            return
        for end, slice_subscription, catalog in find_slices(lake, subscription, full_catalog, begin_lsn):
            if slice_subscription is None:
                transformed_slices.append(end, [], base_version)
                begin_lsn, base_version = end, base_version + 1
            while slice_subscription is not None and begin_lsn < end:
                window = next_window(skip_lsn, begin_lsn, end)
                slice_reader = SliceReader(slice_subscription, lake, catalog)
                work = slice_reader.read_work(window)
                search = FailureSearch(slice_subscription, lake, work)
                failure = search.find_first() if subscription.disable_on_error else None
                if failure is not None:
                    commit_lsn, problem = failure
                    self._disable_before(commit_lsn, problem)
                    if commit_lsn <= begin_lsn or is_partly_transformed(self._states, begin_lsn):
                        return
                    window = replace(window, end=commit_lsn)
                    work = slice_reader.read_work(window)
                if slice_subscription is not subscription or window.skipped_lsn is not None:
                    self._note_altered_replicas(end, is_skipping=window.skipped_lsn is not None)
                try:
                    changes = _SliceTransformation(
                        slice_reader, _Progress(begin_lsn, cut), base_version
                    ).transform_window(work)
                except TABLE_ERRORS as error:
                    if not subscription.disable_on_error:
                        raise
                    self._disable_subscription(describe_error(lake, error))
                    return
                transformed_slices.append(window.end, changes, base_version)
                reach(Failpoint.SLICE_TRANSFORMED)
                self.log(f"transformed everything up to {format_lsn(window.end)} for {subscription.name}")
                results += changes
                has_changes = any(table_changes.has_changes for table_changes in changes)
                skip_lsn = Skip(subscription, lake).clear(skip_lsn, window, self.log, has_changes=has_changes)
                if failure is not None:
                    return
                begin_lsn, base_version = window.end, base_version + 1

    def _disable_before(self, commit_lsn: int, problem: str) -> None:
        """Disable the subscription, because a transaction cannot be applied. Say how to leave it out."""
        name = self.subscription.name
        problem += f"; `pgsieve skip {name} {format_lsn(commit_lsn)}` leaves this transaction out"
        self._disable_subscription(problem)
        self.log(f"{name} is disabled: {problem}")

    def _disable_subscription(self, problem: str) -> None:
        SubscriptionRecord(self.lake, self.subscription.name).disable(problem)

    def _note_altered_replicas(self, end: int, *, is_skipping: bool) -> None:
        """Record that replicas may have other rows than a new copy would have.

        There are two reasons. A transaction of the slice was skipped. Or publications were altered within the slice. In
        that case the publisher has filtered the slice, and pgsieve does not know which changes it has left out.
        """
        contents = read_slice_contents(self.lake, self.subscription.slot_stream, end)
        truncated_relations = {oid for _, truncate in contents.truncates for oid in truncate.relation_ids}
        changed_relations = contents.changed_oids | truncated_relations

        def is_altered(state: TableState) -> bool:
            layout = state.definition.layout if state.definition else None
            return is_skipping or layout is None or layout.is_partitioned or layout.oid in changed_relations

        self._states.note_altered(is_altered)

    def _set_aside_lagging_tables(self, transformed_lsn: int) -> None:
        """Set tables aside, so that nothing more is applied to them, if the change log has lost their next changes."""
        name, states = self.subscription.name, self._states
        deleted_lsn = SlotStreamRecord(self.lake, self.subscription.slot_stream).read_deleted_lsn()
        if transformed_lsn >= deleted_lsn:
            return
        problem = f"its changes are transformed only up to {format_lsn(transformed_lsn)}, and changes up to {format_lsn(deleted_lsn)} are deleted from the change log: the subscription was restored from a backup, or missing in the configuration meanwhile"
        lagging_states = [
            state.with_problem(name, problem)
            for state in states.read_newest().values()
            if state.is_applied and state.lsn < deleted_lsn
        ]
        states.append(lagging_states)
        for state in lagging_states:
            self.log(f"{name}: {quote_qualified(*state.name)} is set aside: {state.reason}")


@dataclass(frozen=True)
class _Progress:
    """The LSN up to which slices are transformed, and the newest cut.

    A cut records the Delta version of each replica, and the position of each change history (a table of changes), at
    one LSN.
    """

    transformed_lsn: int
    cut: Cut | None


@dataclass(frozen=True)
class _SliceTransformation:
    """Transforms a slice, or a window of it. `base_version` is the present version of `_transformed`."""

    reader: SliceReader
    progress: _Progress
    base_version: int

    def transform_window(self, work: WindowWork) -> list[TableChanges]:
        """Transform a window table by table. A table that fails is set aside, or its state says that it has to be copied."""
        if not work.state_by_table:
            return []
        name, lake, contents = self.reader.subscription.name, self.reader.lake, work.contents
        state_by_failed_table: dict[Name, TableState] = {}

        def transform_table(table: Name, table_work: TableWork) -> TableChanges:
            activity = f"UPDATE transformation of {quote_qualified(*table)}, slice {format_lsn(contents.end)}"
            with name_jobs(name, activity):
                try:
                    return self._transform_table(table_work)
                except TABLE_ERRORS as error:
                    state_by_failed_table[table], problem = self._make_state_after_failure(
                        error, work, table, table_work
                    )
                    return TableChanges(contents.end, *table, problem=problem)

        changes = work.map_tables(transform_table)
        if (
            state_by_failed_table
            and lake.records.version(transformed_path := TransformedSlices(lake, name).path)
            != self.base_version
        ):
            raise OvertakenError(transformed_path)  # Another process may be the cause of the failures.
        TableStates(lake, name).append(state_by_failed_table.values())
        return changes

    def _make_state_after_failure(
        self, error: Exception, work: WindowWork, name: Name, table_work: TableWork
    ) -> tuple[TableState, str]:
        """Make the state of a table after its transformation has failed, and describe the reason.

        If the error disables the subscription, or if the lake itself has failed, the error is raised.
        """
        subscription, lake = self.reader.subscription, self.reader.lake
        state, commit_lsn = table_work.state, None
        if isinstance(error, SchemaChangedError):
            return replace(state, state=SyncState.INITIALIZE, reason=error.message), error.message
        if isinstance(error, UnsupportedFilterError | UnsupportedTypeError):
            if subscription.disable_on_error:
                raise error
            problem = describe_waiting_reason(error)
            return replace(state, state=SyncState.INITIALIZE, reason=problem), problem
        # If the lake itself has failed, and not only this table, the call raises `error`.
        describe_error(lake, error)
        if not is_damage(error):
            if subscription.disable_on_error:
                raise error
            commit_lsn = FailureSearch(subscription, lake, work).find_failing_commit(table_work)
        problem = describe_error_fully(lake, error, name, commit_lsn)
        return state.with_problem(subscription.name, problem), problem

    def _transform_table(self, table: TableWork) -> TableChanges:
        """Transform the changes of one table."""
        subscription, lake = self.reader.subscription, self.reader.lake
        contents, state, definition = table.contents, table.state, table.state.definition
        assert definition is not None
        copy_order: OrderKey = (state.lsn, -1)
        truncates = [order for order in table.truncates if order > copy_order]
        readings = make_readings(subscription, table.relation_versions, copy_order, definition)
        result = TableChanges(
            slice_end=contents.end,
            schema=state.schema,
            table=state.table,
            size=contents.size,
            truncate_count=len(truncates),
            last_truncate=max((order[:2] for order in truncates), default=None),
            partition_names=tuple(
                sorted(
                    {
                        partition
                        for version in table.relation_versions
                        if version.is_after(copy_order)
                        for partition in version.partitions
                    }
                )
            ),
        )
        if not readings and not truncates:
            return result
        path = lake.paths.change_history(
            subscription.name, state.schema, state.table, definition.history.generation
        )
        schema = (
            readings[0].transformation.schema
            if readings
            else changes_schema(arrow_types(subscription, state.name, definition))
        )
        with lake.consistent_read():
            position = lake.records.position(path) or 0
            committer = lake.policy.choose_large_committer(path, schema)
        if self.progress.cut is not None:
            self.progress.cut.refuse_earlier_history(path, state, position)
        # If the history begins with the copied rows, its position is at least that of the copy (`state.lsn`).
        if max(self.progress.transformed_lsn, state.lsn) < position < contents.end:
            raise SchemaChangedError(
                f"a run ended amid a slice, and wrote its changes only up to {format_lsn(position)}"
            )
        changes = SentChanges(
            table.messages, readings, truncates, TableSlice(contents.end, definition.key, schema)
        )
        if position >= contents.end:
            # A run has written the changes, and died before it recorded them. Only their counts are made again.
            counts = changes.count_without_writing(lake.policy.choose_runner(result.size))
            tally = _count_written_changes(lake, path, contents.end, definition.key)
            return _add_counts(result, replace(counts, sent=tally))
        return _write_changes(lake, committer, path, result, changes, definition, position)


def _write_changes(
    lake: Lake,
    committer: LargeCommitter,
    path: str,
    result: TableChanges,
    changes: SentChanges,
    definition: Definition,
    position: int,
) -> TableChanges:
    """Write the changes of a table. If the change history lacks columns, first add them."""
    match committer:
        case FileCommitter():
            return _write_files(lake, committer, path, result, changes, position)
        case SparkCommitter():
            schema = changes.table_slice.schema
            if not add_missing_columns(lake, path, schema):
                return _write_by_spark(lake, path, result, changes, definition, position)
            committer = lake.policy.choose_large_committer(path, schema)
            return _write_changes(lake, committer, path, result, changes, definition, position)


def _write_files(
    lake: Lake,
    committer: FileCommitter,
    path: str,
    result: TableChanges,
    changes: SentChanges,
    position: int,
) -> TableChanges:
    """Let the runner write the changes of a table into files, and commit the files."""
    counts = ChangeCounts()

    def write_files() -> pa.Table:
        nonlocal counts
        written_changes = changes.write_files(lake.policy.choose_runner(result.size), path, lake.store)
        counts = written_changes.counts
        return written_changes.files

    commit = Commit(result.slice_end, expected_position=position, properties=CHANGES_PROPERTIES)
    committer.commit(write_files, path, changes.table_slice.schema, commit)
    reach(Failpoint.CHANGES_WRITTEN)
    return _add_counts(result, counts)


def _write_by_spark(
    lake: Lake, path: str, result: TableChanges, changes: SentChanges, definition: Definition, position: int
) -> TableChanges:
    """Let Spark write the changes of a table, and count them while it writes."""
    noted_rows = changes.make_rows(lake, definition.columns, lake.policy.choose_runner(result.size))
    commit = Commit(result.slice_end, expected_position=position, properties=CHANGES_PROPERTIES)
    counts = noted_rows.write(lambda rows: lake.write(rows, path, commit, byte_count=result.size))
    reach(Failpoint.CHANGES_WRITTEN)
    return _add_counts(result, ChangeCounts.sum(noted_rows.notes() if counts is None else counts))


def _count_written_changes(lake: Lake, path: str, end: int, key: Sequence[str]) -> Tally:
    """Count the changes of a slice that a run had written before it died."""
    with lake.access.translate_errors(path):
        return count_stored_changes(open_slices(lake, path, [end], COUNTED_COLUMNS), key)


def _add_counts(result: TableChanges, counts: ChangeCounts) -> TableChanges:
    """Add the counts of the changes to a result.

    `size` becomes the size of the sent changes, if the counts include it and it is smaller. It may be much smaller,
    because a row filter may let only few changes pass.
    """
    sent_counts = counts.sent
    return replace(
        result,
        size=min(result.size, sent_counts.get("bytes", result.size)),
        sent_as=counts.sent_as,
        sent_counts={operation: sent_counts.get(operation, 0) for operation in ROW_OPERATIONS},
        key_change_count=sent_counts["key_changes"],
        unsent_columns=tuple(sent_counts["unchanged"]),
    )
