"""Slot consumption: the feed's slot -> its change log, then confirmed.

A run drains to the WAL position current at its start, in slices bounded in bytes of WAL that end at commit
boundaries. A slice is one Delta commit that holds its end as the position; only then the slot is advanced.
What a slice [start, end) holds are the transactions whose commit record begins in it, which is just what
pg_replication_slot_advance(end) confirms: a run repeated from any point reads the same slices' remainder.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import psycopg
import pyarrow as pa
from pyspark.sql import Observation

from pgsieve.assets.steps.records.catalogs import (
    as_published,
    decided_by_server,
    is_altered,
    is_recorded,
    read_digested,
    record_altered,
    record_catalog,
    unread_subscriptions,
)
from pgsieve.assets.steps.records.columns import CHANGE_LOG
from pgsieve.assets.steps.records.failures import passes, reason
from pgsieve.assets.steps.records.feed import durable_position, record_position
from pgsieve.assets.steps.records.prepared import (
    prepared_position,
    record_nothing_prepared,
    restore_prepared,
    save_prepared,
)
from pgsieve.assets.steps.records.slices import SliceSummary, record_summary, slice_summary
from pgsieve.assets.steps.records.table_states import SyncState, table_states
from pgsieve.assets.steps.slot_consumption.backlog import Stride, TransactionsInOrder
from pgsieve.assets.steps.slot_consumption.messages import change_log_rows, drained_messages
from pgsieve.assets.steps.slot_consumption.slot import begin_slot, forget_copies, verified_slot
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.steps.validation import sound_part
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.errors import LakeError, OverrunError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.parquet_files import write_files
from pgsieve.resources.lake.records import Standing
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.slot import (
    SlotState,
    advance,
    current_lsn,
    drop_publications,
    ensure_capture,
    has_changes,
    inserted_lsn,
    peek_query,
    read_messages,
    refusing_slot,
    release_wal,
    slot_state,
    truncated_relations,
)
from pgsieve.resources.postgres.source import SourceError, SourceUnreachableError
from pgsieve.resources.spool import FileSpool

#: A slice reads at most so many bytes of WAL.
SLICE_BYTES = 512 * 1024 * 1024
#: With nothing to read, the position is recorded and confirmed once the WAL has grown by so much.
IDLE_BYTES = 4 * 1024 * 1024

#: So often at most a drain goes on from where another process has read the slot meanwhile.
_OVERRUNS = 6

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
) -> tuple[Feed, Catalog, tuple[str, ...]]:
    """Make the feed's capture publications and slot where they are missing; its sound part, the catalog and publications.

    What this call created is dropped again when a later part of it fails. Raises SlotError for a slot that
    no longer fits what Delta holds.
    """
    digest, catalog = read_digested(connection, feed)
    sound, server = sound_part(connection, feed, catalog)
    if sound != feed:
        digest, catalog = read_digested(connection, sound)
    state = verified_slot(connection, feed, lake)
    durable = durable_position(lake, feed)
    names = sound.slot_publications(server)
    created = [n for n in names if n not in server.publications]
    try:
        if not feed.filtered:
            planned = sound.planned_capture(server)
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
        if not is_recorded(lake, sound, digest):
            if durable is not None and connection.info.server_version < 180000:
                _drain_before_created(connection, feed, lake, names)
            # Of a subscription that was taken out of pgsieve.yaml meanwhile changes are missing.
            forget_copies(lake, unread_subscriptions(lake, sound))
            record_catalog(lake, sound, captured, digest, catalog)
            reach(Failpoint.CATALOG_RECORDED)
    except Exception:
        if not feed.filtered:
            drop_publications(connection, created)
        raise
    return sound, server, names


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
    with feed.exclusively(), source.connect() as connection:
        feed, catalog, publications = prepare(connection, feed, lake)
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
    """Append and confirm what commits before `target`; `recording`: record the position even when nothing was read.

    A TRUNCATE of every leaf in one of `leaves` may have been a TRUNCATE of the root; only the publisher can tell.
    """
    source, version = feed.source, connection.info.server_version
    state = slot_state(connection, feed.slot)
    if state is None:
        raise SourceError(f'source "{source.name}": replication slot "{feed.slot}" is gone', sqlstate="42704")
    durable = durable_position(lake, feed)
    begin = position = durable if durable is not None else state.confirmed_lsn
    conninfo, options = source.executor_conninfo(), _at_once(feed, publications)
    # After the target was read: whatever was altered before it is found.
    altered = is_altered(connection, lake, feed, position)
    prepared = keeps_prepared(feed, state)
    stride, confirmed = Stride(SLICE_BYTES), position
    slices = overruns = 0
    while position < target:
        standing = lake.records.standing(lake.change_log(feed.name))
        if (reached := standing.position or position) > position:
            # Another process reads the slot, too: this one goes on from there.
            if prepared:
                _recover_prepared(feed, lake, publications, version, reached)
            advance(connection, source.name, feed.slot, reached)
            position = begin = confirmed = reached
            continue
        single = altered or prepared or lake.local is None
        ends = stride.ends(position, target, single=single)
        try:
            asking = altered or _truncates_root(connection, feed, leaves, ends[-1], options)
            own = published_feeds(lake, feed) if asking else ()
            if own:
                ends = [max(ends[0], _published_up_to(lake, own))]
            base = _alone(lake, feed, own, standing, ends[0]) if own else None
            for each in own:
                _append_as_published(lake, feed, each, version, position, ends[0])
            reading = (
                _append_slices(
                    lake, feed, conninfo, options, version, ends, position, base, prepared=prepared
                )
                if publications
                else ((end, False) for end in ends)
            )
            for end, holds in reading:
                if holds:
                    slices += 1
                elif (
                    own
                    or recording
                    or end < target
                    or end - begin >= IDLE_BYTES
                    or _copied_after(lake, subscriptions, begin)
                ):
                    record_position(lake, feed, end, position, base)
                else:
                    break
                log(f"change log of {feed.name} holds everything before {format_lsn(end)}")
                position = begin = end
            # Once for all that was read: this, too, decodes from restart_lsn.
            if confirmed < position:
                advance(connection, source.name, feed.slot, position)
                reach(Failpoint.SLOT_CONFIRMED)
            if position < ends[-1]:
                break
            stride.succeeded()
        except OverrunError:
            overruns += 1
            if overruns == _OVERRUNS:
                raise
            time.sleep(random.uniform(0, 2**overruns / 10))  # noqa: S311 - no secret
            # What was appended before would be read once more.
            advance(connection, source.name, feed.slot, position)
        except PgsieveError as fault:
            of_the_server = passes(fault) and not isinstance(fault, SourceUnreachableError | LakeError)
            if not of_the_server or not stride.failed(ends[-1] - position):
                raise
            log(f"{fault.message}; it is read again in smaller parts, from {format_lsn(position)}")
            # What was appended before the fault would be read once more.
            advance(connection, source.name, feed.slot, position)
        confirmed = position
    return Drained(durable if durable is not None else begin, position, slices, lag=0)


def _truncates_root(
    connection: psycopg.Connection[tuple[object, ...]],
    feed: Feed,
    leaves: Sequence[frozenset[int]],
    end: int,
    options: PgoutputOptions,
) -> bool:
    """Whether a TRUNCATE before `end` names all of some `leaves`: it may have named their root, as the publisher knows."""
    if not leaves:
        return False
    query = peek_query(feed.slot, end, options, connection.info.server_version)
    truncated = truncated_relations(connection, feed.source.name, feed.slot, query)
    return any(tree <= named for named in truncated for tree in leaves)


def _published_up_to(lake: Lake, own: Sequence[Feed]) -> int:
    """Where the slices end that a run which died has read as they were published: a slice has to hold all of them."""
    return max(durable_position(lake, each) or 0 for each in own)


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


def _alone(lake: Lake, feed: Feed, own: Sequence[Feed], standing: Standing, end: int) -> int:
    """The version of the change log to which a slice is appended that `own` have as published.

    What they have of a slice that is not in the change log, which died or is still to come, must not be followed by it:
    a commit without rows makes its version another one. Raises OverrunError where another process was faster.
    """
    path, position = lake.change_log(feed.name), standing.position or 0
    reached = max(durable_position(lake, each) or 0 for each in own)
    if reached <= position:
        return standing.version
    if reached > end:
        raise OverrunError(path)
    lake.records.append(path, CHANGE_LOG.empty_table(), base=standing.version)
    return standing.version + 1


def _append_as_published(lake: Lake, feed: Feed, own: Feed, version: int, begin: int, end: int) -> None:
    """Append what the publisher decided for one subscription; the slot has to be where the slice begins."""
    (subscription,) = own.subscriptions
    options = _at_once(feed, own.subscriptions[subscription])
    try:
        conninfo = feed.source.executor_conninfo()
        after = durable_position(lake, own) or 0
        for _, holds in _append_slices(lake, own, conninfo, options, version, [end], after, prepared=False):
            if not holds:
                record_position(lake, own, end, after)
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


def _append_slices(
    lake: Lake,
    feed: Feed,
    conninfo: Conninfo,
    options: PgoutputOptions,
    version: int,
    ends: Sequence[int],
    after: int,
    base: int | None = None,
    *,
    prepared: bool,
) -> Iterator[tuple[int, bool]]:
    """Append what the slot holds up to each of the ends, a slice in one commit; each end, and whether that held something.

    All of it is read at once. Only where that is one slice prepared transactions may wait, and the lake be at a URI.
    Raises OverrunError where another process has appended something after `after`, or anything to the version `base`.
    """
    source, slot = feed.source, feed.slot
    query = peek_query(slot, ends[-1], options, version)
    if lake.local is None:
        (end,) = ends
        yield end, _append_by_executor(lake, feed, conninfo, options, version, end, after, base)
        return
    with refusing_slot(source.name, slot, "read"), FileSpool() as spool:
        assembler, relations = TransactionAssembler(spool), RelationDescriptions()
        held = restore_prepared(lake, feed, assembler) if prepared else ()
        received = (batch.column("data") for batch in read_messages(conninfo, query))
        first = next((messages for messages in received if len(messages)), None)
        if first is None:
            yield from ((end, False) for end in ends)
            return
        arrived = chain.from_iterable(map(assembler.assemble, chain([first], received)))
        transactions = TransactionsInOrder(arrived)
        for end in ends:
            relations.begin_slice()
            before = transactions.before(None if end == ends[-1] else end)
            messages = chain.from_iterable(map(relations.described, before))
            begun = list(islice(messages, 1))
            holds = prepared or bool(begun)  # What waits for its second phase is no row yet.
            if holds:
                append_slice(lake, feed, chain(begun, messages), end, after, base)
            if prepared:
                save_prepared(lake, feed, assembler, end, held)
            yield end, holds
            after = end


def _append_by_executor(
    lake: Lake,
    feed: Feed,
    conninfo: Conninfo,
    options: PgoutputOptions,
    version: int,
    end: int,
    after: int,
    base: int | None,
) -> bool:
    """Append what the slot holds up to `end`, read by an executor; False where that is nothing."""
    source, slot = feed.source, feed.slot
    with source.connect() as connection:
        begun = peek_query(slot, end, options, version, limit=1)
        if not has_changes(connection, source.name, slot, begun):
            return False
    drained = drained_messages(lake.spark, conninfo, peek_query(slot, end, options, version), end)
    # After the session: which kind of observation it is depends on the kind of session.
    summary = Observation()
    path = lake.change_log(feed.name)
    observed = drained.observe(summary, *slice_summary())
    lake.write(observed, path, position=end, options=_FILE_OPTIONS, base=base, after=after)
    if summary.get:  # Else it is made of the slice, where it is read.
        record_summary(lake, feed, end, summary.get)
    return True


def append_slice(
    lake: Lake, feed: Feed, messages: Iterable[pa.Array], end: int, after: int, base: int | None = None
) -> None:
    """Append transactions in commit order (arrays of messages) to a local lake in one commit.

    Raises what the messages raise, OverrunError where the change log's position is not `after` or its version not
    `base`, else LakeError.
    """
    assert lake.local is not None
    passed, path = SliceSummary(), lake.change_log(feed.name)
    rows = passed.of(change_log_rows(messages, end))
    try:
        with lake.refusing(path):
            # Not as one stream through delta-rs, which needs more memory than one process should for its slices.
            written = [file for batch in write_files(path, CHANGE_LOG, rows) for file in batch.to_pylist()]
            reach(Failpoint.SLICE_WRITTEN)
            lake.local.commit(path, CHANGE_LOG, written, end, base=base, after=after)
            reach(Failpoint.SLICE_COMMITTED)
    except LakeError:
        if passed.failure:
            raise passed.failure from None
        raise
    record_summary(lake, feed, end, passed.get())


#: Several row groups a file, so that decoding a slice is shared among the cores.
_FILE_OPTIONS = {"parquet.block.size": str(32 * 1024 * 1024), "maxRecordsPerFile": "1000000"}


def _copied_after(lake: Lake, subscriptions: Sequence[Subscription], position: int) -> bool:
    """Whether a table was copied at a later LSN: a cut needs the position to reach it."""
    for subscription in subscriptions:
        try:
            states = table_states(lake, subscription.name).values()
        except LakeError as error:
            reason(lake, error)  # Raises where it is not that subscription's own.
        else:
            if any(state.state == SyncState.READY and state.lsn > position for state in states):
                return True
    return False
