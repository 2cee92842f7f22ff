"""The initial copy from begin to end: makes the stream's slot ready, copies tables, and drains the slot in between.

A stream is a slot with the subscriptions that read it.

In: the tables to copy
Out: the result of each table

The slot exists before the first snapshot, so no change between the two is lost. Because the slot is drained (read into
the change log, and confirmed) during long copies, it does not retain too much WAL.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pgsieve.assets.steps.initial_sync.copy import InitialCopy
from pgsieve.assets.steps.initial_sync.one_table import CopyResult
from pgsieve.assets.steps.initial_sync.readiness import defer_tables
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.databases import record_database
from pgsieve.assets.steps.records.failures import is_transient
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.reading import SLICE_BYTES
from pgsieve.assets.steps.slot_consumption.ready import prepare_slot
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.validation.uncaptured import find_held_back_tables
from pgsieve.assets.steps.validation.waiting import describe_waiting_reason, make_subscription_catalog
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.slot import SlotInUseError, read_slot_state
from pgsieve.resources.postgres.snapshot import read_table_bytes
from pgsieve.resources.postgres.waits import BRIEF_SECONDS, PATIENT_SECONDS, OpenTransactionsError, limit_wait


def copy_tables(
    subscription: Subscription,
    lake: Lake,
    tables: Collection[Name],
    log: Log,
    *,
    only_needed: bool = False,
    wait_seconds: float = PATIENT_SECONDS,
) -> list[CopyResult]:
    """Copy these tables as `pgsieve.assets.steps.initial_sync.copy` does, after the slot was made ready.

    With `only_needed`, tables that no longer need a copy are left out. The copy waits at most `wait_seconds` for open
    transactions. Tables that have to wait longer are left to a later copy. Raises SubscriptionDisabledError if the
    subscription is disabled, and the errors of `prepare_slot`.
    """
    if not tables:
        return []
    record = SubscriptionRecord(lake, subscription.name)
    record.require_enabled()
    lake.access.check_writable()
    record.record_folders()
    slot_stream = subscription.slot_stream
    slot_stream.source.check_ready()
    with slot_stream.hold_lock(), slot_stream.source.connect() as connection:
        make_subscription_catalog(connection, subscription, read_present_catalog(connection))
        try:
            with limit_wait(slot_stream.source, connection, BRIEF_SECONDS):
                bytes_by_table = read_table_bytes(connection, tables)
            # If the largest table will need Spark, Spark starts now, in the background.
            lake.policy.prepare_runner(max(bytes_by_table.values()) if subscription.copy_data else 0)
            prepare_slot(connection, slot_stream, lake, subscription.name)
        except OpenTransactionsError as error:
            return defer_tables(TableStates(lake, subscription.name), sorted(tables), error, log)
        catalog = make_subscription_catalog(connection, subscription, read_present_catalog(connection))
        refused_results = _list_refused_tables(subscription, lake, catalog, bytes_by_table)
        record_database(connection, record)

    retained_wal = _RetainedWal(subscription, lake, log)
    copy = InitialCopy(subscription, lake, log, wait_seconds)
    for result in refused_results:
        del bytes_by_table[result.schema, result.table]
    return refused_results + copy.copy_tables(bytes_by_table, retained_wal.limit, only_needed=only_needed)


def _list_refused_tables(
    subscription: Subscription, lake: Lake, catalog: Catalog, tables: Collection[Name]
) -> list[CopyResult]:
    """The results of those tables that have to wait, because pgsieve may not add them to the slot's publications."""
    states = TableStates(lake, subscription.name).read_newest()
    problem_by_table = find_held_back_tables(subscription.slot_stream, subscription.name, catalog, states)
    return [
        CopyResult(*name, 0, 0, 0.0, 0, None, (), describe_waiting_reason(error))
        for name, error in problem_by_table.items()
        if name in tables
    ]


@dataclass(frozen=True)
class _RetainedWal:
    """Limits the WAL that a stream's slot retains while tables of a subscription are copied."""

    subscription: Subscription
    lake: Lake
    log: Log

    def limit(self, more_batches: bool) -> None:
        """If the slot retains much WAL, drain the slot. After the last batch, only log how much WAL it retains."""
        slot_stream = self.subscription.slot_stream
        try:
            with slot_stream.source.connect() as connection:
                state = read_slot_state(connection, slot_stream.slot)
            if more_batches and state is not None and state.lag_bytes >= SLICE_BYTES:
                drain_slot(slot_stream, self.lake, [self.subscription], self.log)
                return
        except PgsieveError as error:
            if not (is_transient(error) or isinstance(error, SlotInUseError)):
                raise
            self.log(f"{error.message}; the copy goes on")
            return
        if state is not None and state.lag_bytes >= SLICE_BYTES:
            size_text = f"{state.lag_bytes / 1024**2:,.0f} MiB of WAL"
            self.log(f"the slot {slot_stream.slot} retains {size_text} that came while tables were copied")
