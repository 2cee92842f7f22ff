"""Slot consumption: the feed's slot -> its change log, then confirmed.

A run drains to the WAL position current at its start, in slices bounded in bytes of WAL that end at commit
boundaries. A slice is one Delta commit that holds its end as the position; only then the slot is advanced.
What a slice [start, end) holds are the transactions whose commit record begins in it, which is just what
pg_replication_slot_advance(end) confirms: a run repeated from any point reads the same slices' remainder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql import Observation

from assets.frames.messages import SliceSummary, change_log_rows, drained_messages, slice_summary
from assets.frames.schema import CHANGE_LOG, SLICES
from assets.steps.prepared import prepared_position, record_nothing_prepared, restore_prepared, save_prepared
from assets.steps.subscription import Feed, Subscription
from assets.steps.table_states import INITIALIZE, READY, TableState, set_states, table_states
from assets.steps.validation import refuse_unsound
from decoding.lsn import format_lsn
from decoding.publication import Catalog
from decoding.transactions import TransactionAssembler
from resources.delta import Lake, LakeError
from resources.parquet_files import write_files
from resources.pgoutput import PgoutputOptions
from resources.postgres import SourceError, read_catalog, refusing
from resources.slot import (
    SlotError,
    SlotState,
    advance,
    create_slot,
    current_lsn,
    drop_publications,
    drop_slot,
    ensure_capture,
    has_changes,
    peek_query,
    read_messages,
    slot_state,
    verify_slot,
)
from resources.spool import FileSpool

#: A slice reads at most so many bytes of WAL.
SLICE_BYTES = 512 * 1024 * 1024
#: With nothing to read, the position is recorded and confirmed once the WAL has grown by so much.
IDLE_BYTES = 4 * 1024 * 1024

Log = Callable[[str], None]


@dataclass(frozen=True)
class Drained:
    """What a drain did: positions as LSNs, slices written, the slot's lag in bytes when it ended."""

    from_lsn: int
    to_lsn: int
    slices: int
    lag: int


def durable_position(lake: Lake, feed: Feed) -> int | None:
    """The LSN up to which Delta holds the feed's changes, as its newest commit says; None before the first."""
    return lake.records.position(lake.change_log(feed.name))


def prepare(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake
) -> tuple[Catalog, tuple[str, ...]]:
    """Make the feed's capture publications and slot where they are missing; the catalog and publications.

    What this call created is dropped again when a later part of it fails. Raises SlotError for a slot that
    no longer fits what Delta holds.
    """
    server = feed.with_defined(read_catalog(connection))
    refuse_unsound(feed, server)
    durable = durable_position(lake, feed)
    state = slot_state(connection, feed.slot)
    verify_slot(state, feed.source.name, feed.slot, durable)
    names = feed.slot_publications(server)
    created = [n for n in names if n not in server.publications]
    created_slot = False
    try:
        if not feed.filtered:
            planned = feed.planned_capture(server)
            ensure_capture(connection, feed.source.name, feed.capture, planned, server)
        if state is None:
            start = create_slot(connection, feed.source.name, feed.slot, two_phase=feed.options.two_phase)
            created_slot = True
            _forget_copies(lake, feed)
            if feed.options.two_phase:
                record_nothing_prepared(lake, feed, start)
            record_position(lake, feed, start)
        elif durable is not None:
            if keeps_prepared(feed, state):
                _recover_prepared(feed, lake, state, names, connection.info.server_version, durable)
            advance(connection, feed.source.name, feed.slot, durable)
        elif keeps_prepared(feed, state):
            record_nothing_prepared(lake, feed, state.confirmed_lsn)
    except Exception:
        if created_slot:
            drop_slot(connection, feed.slot)
        if not feed.filtered:
            drop_publications(connection, created)
        raise
    return server, names


def keeps_prepared(feed: Feed, state: SlotState) -> bool:
    """Whether the slot sends transactions at their PREPARE; once it does, it does so for ever."""
    return feed.options.two_phase or state.two_phase


def _recover_prepared(
    feed: Feed, lake: Lake, state: SlotState, publications: Sequence[str], version: int, durable: int
) -> None:
    """Read again what waits, where a run died between the commit of its changes and that of what waits."""
    position = prepared_position(lake, feed)
    if position == durable:
        return
    if position is None and state.two_phase:
        raise SlotError(
            f'source "{feed.source.name}": replication slot "{feed.slot}" sends prepared transactions, but what of them'
            f' was received is not in "{lake.prepared(feed.name)}"',
            hint="copy every table again: drop the slot, remove the source's change log folder and run `pgsieve run`",
            sqlstate="55000",
        )
    query = peek_query(feed.slot, durable, _at_once(feed, publications), version)
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool)
        held = restore_prepared(lake, feed, assembler)
        for messages in read_messages(feed.source.executor_conninfo(), query):
            for _ in assembler.assemble(messages.column("data")):
                pass  # the change log holds these already
        save_prepared(lake, feed, assembler, durable, held)


def _forget_copies(lake: Lake, feed: Feed) -> None:
    """A new slot knows nothing of what committed before it: tables copied earlier are copied again."""
    for name in feed.subscriptions:
        states = table_states(lake, name).values()
        again = [TableState(s.schema, s.table, INITIALIZE) for s in states if s.state == READY]
        set_states(lake, name, again)


def record_position(lake: Lake, feed: Feed, position: int) -> None:
    """Record a position with no changes before it, in a commit of its own."""
    lake.records.append(lake.change_log(feed.name), CHANGE_LOG.empty_table(), position)


def drain(
    feed: Feed, lake: Lake, subscriptions: Sequence[Subscription], log: Log, upto: int | None = None
) -> Drained:
    """Append the feed's committed transactions to its change log, and confirm them.

    Drains to the LSN current at its start, or to `upto`.
    """
    source = feed.source
    version = source.check_ready()
    lake.check_writable()
    with source.connect() as connection:
        _, publications = prepare(connection, feed, lake)
        state = slot_state(connection, feed.slot)
        if state is None:
            raise SourceError(
                f'source "{source.name}": replication slot "{feed.slot}" is gone', sqlstate="42704"
            )
        durable = durable_position(lake, feed)
        begin = position = durable if durable is not None else state.confirmed_lsn
        target = current_lsn(connection) if upto is None else upto
        conninfo, options = source.executor_conninfo(), _at_once(feed, publications)
        prepared = keeps_prepared(feed, state)
        slices = 0
        while position < target:
            end = min(position + SLICE_BYTES, target)
            if publications and _append_slice(lake, feed, conninfo, options, version, end, prepared=prepared):
                slices += 1
            elif end < target or end - begin >= IDLE_BYTES or _copied_after(lake, subscriptions, begin):
                record_position(lake, feed, end)
            else:
                break
            advance(connection, source.name, feed.slot, end)
            log(f"change log of {feed.name} holds everything before {format_lsn(end)}")
            position = begin = end
        state = slot_state(connection, feed.slot)
        lag = state.lag if state else 0
    start = durable if durable is not None else begin
    return Drained(from_lsn=start, to_lsn=position, slices=slices, lag=lag)


def _at_once(feed: Feed, publications: Sequence[str]) -> PgoutputOptions:
    """How to peek: a peek sends nothing before it has decoded everything, so streaming would only repeat."""
    return replace(feed.options, publications=tuple(publications), streaming="off")


def _append_slice(
    lake: Lake, feed: Feed, conninfo: str, options: PgoutputOptions, version: int, end: int, *, prepared: bool
) -> bool:
    """Append what the slot holds up to `end` in one commit; False where that is nothing."""
    source, slot = feed.source, feed.slot
    query = peek_query(slot, end, options, version)
    begun = peek_query(slot, end, options, version, limit=1)
    if lake.local is None:
        with source.connect() as connection:
            if not has_changes(connection, source.name, slot, begun):
                return False
        drained = drained_messages(lake.spark, conninfo, query, end)
        # After the session: which kind of observation it is depends on the kind of session.
        summary = Observation()
        path = lake.change_log(feed.name)
        lake.write(drained.observe(summary, *slice_summary()), path, position=end, options=_FILE_OPTIONS)
        record_summary(lake, feed, end, summary.get)
        return True
    messages = (batch.column("data") for batch in read_messages(conninfo, query))
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool)
        held = restore_prepared(lake, feed, assembler) if prepared else ()
        try:
            first = next(messages, None)
            if first is None or not len(first):
                return False
            append_slice(
                lake, feed, chain.from_iterable(map(assembler.assemble, chain([first], messages))), end
            )
        except (OSError, pa.ArrowException) as error:
            # The reader tells no SQLSTATE: what stops it stops the first message, too.
            with source.connect() as connection:
                has_changes(connection, source.name, slot, begun)
            with refusing(source.name, f'read the replication slot "{slot}"'):
                raise error from None
        if prepared:
            save_prepared(lake, feed, assembler, end, held)
    return True


def append_slice(lake: Lake, feed: Feed, messages: Iterable[pa.Array], end: int) -> None:
    """Append transactions in commit order (arrays of messages) to a local lake in one commit.

    Raises what the messages raise, else LakeError.
    """
    assert lake.local is not None
    passed, path = SliceSummary(), lake.change_log(feed.name)
    rows = passed.of(change_log_rows(messages, end))
    try:
        with lake.refusing(path):
            # Not as one stream through delta-rs, which needs more memory than one process should for its slices.
            written = [file for batch in write_files(path, CHANGE_LOG, rows) for file in batch.to_pylist()]
            lake.local.commit(path, CHANGE_LOG, written, end)
    except LakeError:
        if passed.failure:
            raise passed.failure from None
        raise
    record_summary(lake, feed, end, passed.get())


def record_summary(lake: Lake, feed: Feed, end: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what a slice holds besides row changes; returns it as its row in `slices`."""
    row = {
        "slice": end,
        "bytes": summary["bytes"],
        "relations": list(summary["relations"]),
        "messages": [
            {"commit_lsn": m["commit_lsn"], "ordinal": m["ordinal"], "data": bytes(m["data"])}
            for m in summary["messages"]
        ],
    }
    lake.records.append(lake.slices(feed.name), pa.Table.from_pylist([row], SLICES), end)
    return row


#: Several row groups a file, so that decoding a slice is shared among the cores.
_FILE_OPTIONS = {"parquet.block.size": str(32 * 1024 * 1024), "maxRecordsPerFile": "1000000"}


def _copied_after(lake: Lake, subscriptions: Sequence[Subscription], position: int) -> bool:
    """Whether a table was copied at a later LSN: a cut needs the position to reach it."""
    return any(
        state.state == READY and state.lsn > position
        for subscription in subscriptions
        for state in table_states(lake, subscription.name).values()
    )
