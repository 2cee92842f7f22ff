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

import adbc_driver_manager
import psycopg
import pyarrow as pa
from pyspark.sql import Observation

from assets.frames.messages import SliceSummary, change_log_rows, drained_messages, slice_summary
from assets.frames.schema import CHANGE_LOG, SLICES
from assets.steps.catalogs import (
    as_published,
    decided_by_server,
    is_altered,
    is_recorded,
    read_digested,
    record_altered,
    record_catalog,
    unread_subscriptions,
)
from assets.steps.feed_slot import begin_slot, durable_position, forget_copies, record_position, verified_slot
from assets.steps.prepared import prepared_position, record_nothing_prepared, restore_prepared, save_prepared
from assets.steps.subscription import Feed, Subscription
from assets.steps.table_states import READY, table_states
from assets.steps.validation import refuse_unsound
from decoding.lsn import format_lsn
from decoding.publication import Catalog
from decoding.transactions import TransactionAssembler
from resources.delta import Lake
from resources.failpoints import Failpoint, reach
from resources.lake_errors import LakeError
from resources.parquet_files import write_files
from resources.pgoutput import PgoutputOptions
from resources.postgres import SourceError, refusing
from resources.slot import (
    SlotState,
    advance,
    current_lsn,
    drop_publications,
    ensure_capture,
    has_changes,
    inserted_lsn,
    peek_query,
    read_messages,
    release_wal,
    slot_state,
    truncated_relations,
)
from resources.spool import FileSpool

#: A slice reads at most so many bytes of WAL.
SLICE_BYTES = 512 * 1024 * 1024
#: With nothing to read, the position is recorded and confirmed once the WAL has grown by so much.
IDLE_BYTES = 4 * 1024 * 1024

#: undefined_object: a publication that does not exist.
_UNDEFINED = "42704"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Drained:
    """What a drain did: positions as LSNs, slices written, the slot's lag in bytes when it ended."""

    from_lsn: int
    to_lsn: int
    slices: int
    lag: int


def prepare(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake
) -> tuple[Catalog, tuple[str, ...]]:
    """Make the feed's capture publications and slot where they are missing; the catalog and publications.

    What this call created is dropped again when a later part of it fails. Raises SlotError for a slot that
    no longer fits what Delta holds.
    """
    digest, catalog = read_digested(connection, feed)
    server = refuse_unsound(connection, feed, catalog)
    state = verified_slot(connection, feed, lake)
    durable = durable_position(lake, feed)
    names = feed.slot_publications(server)
    created = [n for n in names if n not in server.publications]
    try:
        if not feed.filtered:
            planned = feed.planned_capture(server)
            ensure_capture(connection, feed.source.name, feed.capture, planned, server)
            reach(Failpoint.CAPTURE_CREATED)
        captured = inserted_lsn(connection)
        if state is None:
            begin_slot(connection, feed, lake)
        elif durable is not None:
            if keeps_prepared(feed, state):
                _recover_prepared(feed, lake, names, connection.info.server_version, durable)
            advance(connection, feed.source.name, feed.slot, durable)
        else:  # Whoever made the slot did not come to it.
            if keeps_prepared(feed, state):
                record_nothing_prepared(lake, feed, state.confirmed_lsn)
            record_position(lake, feed, state.confirmed_lsn)
        if not is_recorded(lake, feed, digest):
            if durable is not None and connection.info.server_version < 180000:
                _drain_before_created(connection, feed, lake, names)
            # Of a subscription that was taken out of pgsieve.yaml meanwhile changes are missing.
            forget_copies(lake, unread_subscriptions(lake, feed))
            record_catalog(lake, feed, captured, digest, catalog)
            reach(Failpoint.CATALOG_RECORDED)
    except Exception:
        if not feed.filtered:
            drop_publications(connection, created)
        raise
    return server, names


def warn_of_missing(feed: Feed, catalog: Catalog, log: Log) -> None:
    """Say which subscribed publications do not exist, where the others are replicated without them."""
    for subscription, names in feed.subscriptions.items():
        if missing := catalog.missing(names):
            log(f"{subscription}: {missing.message}; the others are replicated without it")


def keeps_prepared(feed: Feed, state: SlotState) -> bool:
    """Whether the slot sends transactions at their PREPARE; once it does, it does so for ever."""
    return feed.options.two_phase or state.two_phase


def _recover_prepared(
    feed: Feed, lake: Lake, publications: Sequence[str], version: int, durable: int
) -> None:
    """Read again what waits, where a run died between the commit of its changes and that of what waits."""
    if prepared_position(lake, feed) == durable:
        return
    query = peek_query(feed.slot, durable, _at_once(feed, publications), version)
    with FileSpool() as spool:
        assembler = TransactionAssembler(spool)
        held = restore_prepared(lake, feed, assembler)
        for messages in read_messages(feed.source.executor_conninfo(), query):
            for _ in assembler.assemble(messages.column("data")):
                pass  # the change log holds these already
        save_prepared(lake, feed, assembler, durable, held)


def drain(
    feed: Feed, lake: Lake, subscriptions: Sequence[Subscription], log: Log, upto: int | None = None
) -> Drained:
    """Append the feed's committed transactions to its change log, and confirm them.

    Drains to the LSN current at its start, or to `upto`.
    """
    source = feed.source
    source.check_ready()
    lake.check_writable()
    with source.connect() as connection:
        catalog, publications = prepare(connection, feed, lake)
        warn_of_missing(feed, catalog, log)
        target = current_lsn(connection) if upto is None else upto
        leaves = feed.leaves_captured(catalog)
        drained = _drain_to(connection, feed, lake, publications, target, log, subscriptions, leaves=leaves)
        if drained.to_lsn - drained.from_lsn >= IDLE_BYTES:
            release_wal(connection, source.name, feed.slot)
        state = slot_state(connection, feed.slot)
    return replace(drained, lag=state.lag if state else 0)


def _drain_to(
    connection: psycopg.Connection[tuple[object, ...]],
    feed: Feed,
    lake: Lake,
    publications: Sequence[str],
    target: int,
    log: Log,
    subscriptions: Sequence[Subscription] = (),
    *,
    leaves: Sequence[frozenset[int]] = (),
    recording: bool = False,
) -> Drained:
    """Append and confirm what commits before `target`; `recording` its position also where that is nothing.

    Who truncates all of one of `leaves` may have named their root: the publisher knows.
    """
    source, version = feed.source, connection.info.server_version
    state = slot_state(connection, feed.slot)
    if state is None:
        raise SourceError(f'source "{source.name}": replication slot "{feed.slot}" is gone', sqlstate="42704")
    durable = durable_position(lake, feed)
    begin = position = durable if durable is not None else state.confirmed_lsn
    conninfo, options = source.executor_conninfo(), _at_once(feed, publications)
    # After the target was read: whatever was altered before it is found.
    asking = is_altered(connection, lake, feed, position)
    if leaves and not asking:
        query = peek_query(feed.slot, target, options, version)
        truncated = truncated_relations(connection, source.name, feed.slot, query)
        asking = any(tree <= named for named in truncated for tree in leaves)
    own = published_feeds(lake, feed) if asking else ()
    prepared = keeps_prepared(feed, state)
    slices = 0
    while position < target:
        end = min(position + SLICE_BYTES, target)
        for each in own:
            _append_as_published(lake, feed, each, version, position, end)
        if publications and _append_slice(lake, feed, conninfo, options, version, end, prepared=prepared):
            slices += 1
        elif (
            own
            or recording
            or end < target
            or end - begin >= IDLE_BYTES
            or _copied_after(lake, subscriptions, begin)
        ):
            record_position(lake, feed, end)
        else:
            break
        advance(connection, source.name, feed.slot, end)
        reach(Failpoint.SLOT_CONFIRMED)
        log(f"change log of {feed.name} holds everything before {format_lsn(end)}")
        position = begin = end
    return Drained(durable if durable is not None else begin, position, slices, lag=0)


def _drain_before_created(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake, publications: Sequence[str]
) -> None:
    """Read what was written before some of the capture publications were there without those.

    Before 18 pgoutput refuses to decode such changes: a missing publication is an error then, not a warning
    (LoadPublications() in src/backend/replication/pgoutput/pgoutput.c).
    """
    target, version = current_lsn(connection), connection.info.server_version
    there = list(publications)
    while there:
        query = peek_query(feed.slot, target, _at_once(feed, there), version, limit=1)
        try:
            has_changes(connection, feed.source.name, feed.slot, query)
            break
        except SourceError as error:
            refused = error.__cause__
            said = refused.diag.message_primary or "" if isinstance(refused, psycopg.Error) else ""
            missing = [name for name in there if f'"{name}"' in said]
            if error.sqlstate != _UNDEFINED or not missing:
                raise
            there = [name for name in there if name not in missing]
    if len(there) < len(publications):
        _drain_to(connection, feed, lake, there, target, _unsaid, recording=True)


def _unsaid(_: str) -> None:
    """The drain that follows says it."""


def published_feeds(lake: Lake, feed: Feed) -> tuple[Feed, ...]:
    """What to read besides where something was altered: for each subscription what the publisher sends to it.

    Nothing while a prepared transaction waits, which was received as it was captured.
    """
    if lake.local and lake.local.exists(path := lake.prepared(feed.name)) and lake.local.count(path):
        return ()
    return tuple(as_published(feed, name) for name in feed.subscriptions if decided_by_server(feed, name))


def _append_as_published(lake: Lake, feed: Feed, own: Feed, version: int, begin: int, end: int) -> None:
    """Append what the publisher decided for one subscription; the slot has to be where the slice begins."""
    (subscription,) = own.subscriptions
    options = _at_once(feed, own.subscriptions[subscription])
    try:
        conninfo = feed.source.executor_conninfo()
        if not _append_slice(lake, own, conninfo, options, version, end, prepared=False):
            record_position(lake, own, end)
            record_summary(lake, own, end, {"bytes": 0, "relations": (), "messages": ()})
    except SourceError as error:
        if error.sqlstate != _UNDEFINED:
            raise
        # Before 18 the publisher cannot decode what was written before a publication was there, now or ever.
        return
    record_altered(lake, feed, subscription, begin, end)
    reach(Failpoint.ALTERATION_RECORDED)


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
        if summary.get:  # Else it is made of the slice, where it is read.
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
        except (OSError, pa.ArrowException, adbc_driver_manager.Error) as error:
            # The reader tells no SQLSTATE; what stops it stops the same query again.
            with source.connect() as connection:
                has_changes(connection, source.name, slot, query)
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
            reach(Failpoint.SLICE_WRITTEN)
            lake.local.commit(path, CHANGE_LOG, written, end)
            reach(Failpoint.SLICE_COMMITTED)
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
    reach(Failpoint.SLICE_SUMMARIZED)
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
