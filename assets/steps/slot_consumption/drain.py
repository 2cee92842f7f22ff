"""Drains a stream's slot: appends its messages to the change log (the lake's table of them), and confirms them.

A slot stream is a slot with the subscriptions that read it. A run drains the slot slice by slice (a slice has a
limited size), up to the end that the WAL has when the drain begins. The slice [begin, end) has the transactions whose
commit record begins in it. It is one Delta commit, which records the end of the slice as the log's position. After
that commit, the slot is advanced: pg_replication_slot_advance(end) confirms exactly these transactions. So a run that
died at any point can be repeated.
"""

from collections.abc import Sequence
from dataclasses import replace

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.slot_consumption.reading import IDLE_BYTES, DrainResult, ReadySlot, read_slot_to
from pgsieve.assets.steps.slot_consumption.ready import hold_back_tables_removed_meanwhile, prepare_slot
from pgsieve.assets.steps.slot_consumption.sequences import refresh_sequences
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.confirmation import release_wal
from pgsieve.resources.postgres.slot import read_slot_state
from pgsieve.resources.postgres.wal import read_flushed_lsn


def drain_slot(
    slot_stream: SlotStream,
    lake: Lake,
    subscriptions: Sequence[Subscription],
    log: Log,
    target_lsn: int | None = None,
) -> DrainResult:
    """Append the committed transactions of a stream to its change log, confirm them, and record the published sequences.

    The slot is read up to `target_lsn`. Without it, the slot is read up to the LSN that the server has at the beginning.
    """
    source = slot_stream.source
    source.check_ready()
    lake.access.check_writable()
    with slot_stream.hold_lock(), source.connect() as connection:
        former_state = read_slot_state(connection, slot_stream.slot)
        confirmed_lsn = None if former_state is None else former_state.confirmed_lsn
        slot_stream, catalog, publications = prepare_slot(connection, slot_stream, lake)
        log_missing_publications(slot_stream, catalog, log)
        end_lsn = read_flushed_lsn(connection) if target_lsn is None else target_lsn
        slot = ReadySlot(connection, slot_stream, lake, publications, slot_stream.captured_leaf_sets(catalog))
        result = read_slot_to(slot, end_lsn, log, subscriptions)
        hold_back_tables_removed_meanwhile(connection, slot_stream, lake)
        refresh_sequences(connection, slot_stream, lake)
        state = read_slot_state(connection, slot_stream.slot)
        if (
            state is not None
            and state.confirmed_lsn - state.restart_lsn >= IDLE_BYTES
            and state.confirmed_lsn != confirmed_lsn
        ):
            release_wal(connection, source.name, slot_stream.slot, state.confirmed_lsn)
    return replace(result, lag=state.lag_bytes if state else 0)


def log_missing_publications(slot_stream: SlotStream, catalog: Catalog, log: Log) -> None:
    """Log which subscribed publications do not exist. The others are replicated without them."""
    for subscription, names in slot_stream.subscriptions.items():
        if error := catalog.make_missing_publication_error(names):
            log(f"{subscription}: {error.message}; the others are replicated without it")
