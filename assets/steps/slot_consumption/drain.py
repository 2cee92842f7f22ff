"""Drains a feed's slot: its messages are appended to the change log, and then confirmed.

A run drains to the WAL position at its start, in slices of limited size. A slice is one Delta commit, with the slice's
end as its position; the slot is advanced after that commit. The slice [begin, end) has the transactions whose commit
record begins in it. pg_replication_slot_advance(end) confirms exactly these. So a run that died can be repeated from
any point.
"""

from collections.abc import Sequence
from dataclasses import replace

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.slot_consumption.reading import IDLE_BYTES, DrainResult, ReadySlot, drain_to
from pgsieve.assets.steps.slot_consumption.ready import ready_slot
from pgsieve.assets.steps.slot_consumption.sequences import refresh_sequences
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.confirmation import release_wal
from pgsieve.resources.postgres.slot import slot_state
from pgsieve.resources.postgres.wal import flushed_lsn


def drain(
    feed: Feed, lake: Lake, subscriptions: Sequence[Subscription], log: Log, upto: int | None = None
) -> DrainResult:
    """Append the feed's committed transactions to its change log, confirm them, and refresh the published sequences.

    Drains to the server's LSN at its start, or to `upto`.
    """
    source = feed.source
    source.check_ready()
    lake.access.check_writable()
    with feed.hold_lock(), source.connect() as connection:
        former_state = slot_state(connection, feed.slot)
        confirmed_lsn = None if former_state is None else former_state.confirmed_lsn
        feed, catalog, publications = ready_slot(connection, feed, lake)
        warn_of_missing(feed, catalog, log)
        target = flushed_lsn(connection) if upto is None else upto
        slot = ReadySlot(connection, feed, lake, publications, feed.leaves_captured(catalog))
        result = drain_to(slot, target, log, subscriptions)
        refresh_sequences(connection, feed, lake)
        state = slot_state(connection, feed.slot)
        if (
            state is not None
            and state.confirmed_lsn - state.restart_lsn >= IDLE_BYTES
            and state.confirmed_lsn != confirmed_lsn
        ):
            release_wal(connection, source.name, feed.slot, state.confirmed_lsn)
    return replace(result, lag=state.lag if state else 0)


def warn_of_missing(feed: Feed, catalog: Catalog, log: Log) -> None:
    """Log the subscribed publications that do not exist; the others are replicated without them."""
    for subscription, names in feed.subscriptions.items():
        if missing := catalog.missing(names):
            log(f"{subscription}: {missing.message}; the others are replicated without it")
