"""Slices of the change log: what the slot holds between two positions -> one Delta commit per slice.

In: positions, and how the slot is read. Out: the commits, which hold the slices' ends as positions, and the summaries in
`slices`. Raises SourceError, what the messages raise, OverrunError where another process was faster, else LakeError.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import pyarrow as pa
from pyspark.sql import Observation

from pgsieve.assets.steps.records.change_log import CHANGE_LOG, ChangeLog
from pgsieve.assets.steps.records.prepared import Prepared
from pgsieve.assets.steps.records.slices import Slices, SliceSummary, slice_summary
from pgsieve.assets.steps.slot_consumption.backlog import transactions_from
from pgsieve.assets.steps.slot_consumption.messages import change_log_rows, drained_messages
from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.resources.ahead import ahead
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.slot import (
    has_changes,
    peek_query,
    read_messages,
    refusing_slot,
)
from pgsieve.resources.spool import FileSpool

#: Several row groups a file, so that decoding a slice is shared among the cores.
_FILE_OPTIONS = {"parquet.block.size": str(32 * 1024 * 1024), "maxRecordsPerFile": "1000000"}


def append_slice(
    lake: Lake, feed: Feed, messages: Iterable[pa.Array], end: int, after: int, base: int | None = None
) -> None:
    """Append transactions in commit order (arrays of messages) to a local lake in one commit.

    Raises what the messages raise, OverrunError where the change log's position is not `after` or its version not
    `base`, else LakeError.
    """
    assert lake.local is not None
    passed, path = SliceSummary(), ChangeLog(lake, feed).path
    try:
        with lake.refusing(path):
            # Not as one stream through delta-rs, which needs more memory than one process should for its slices.
            with ahead(passed.of(change_log_rows(messages, end))) as rows:
                written = [
                    file
                    for batch in write_files(path, CHANGE_LOG, rows, store=lake.store)
                    for file in batch.to_pylist()
                ]
            reach(Failpoint.SLICE_WRITTEN)
            lake.local.commit(path, CHANGE_LOG, written, end, base=base, after=after)
            reach(Failpoint.SLICE_COMMITTED)
    except LakeError:
        if passed.failure:
            raise passed.failure from None
        raise
    Slices(lake, feed).append(end, passed.get())


def append_slices(
    lake: Lake,
    feed: Feed,
    conninfo: Conninfo,
    options: PgoutputOptions,
    version: int,
    begin: int,
    ends: Sequence[int],
    after: int,
    base: int | None = None,
    *,
    prepared: bool,
) -> Iterator[tuple[int, bool]]:
    """Append what the slot holds from `begin` up to each of the ends, a slice in one commit; each end, and whether that held something.

    All of it is read at once. Only where that is one slice prepared transactions may wait, and the lake be at a URI.
    Raises OverrunError where another process has appended something after `after`, or anything to the version `base`.
    """
    source, slot = feed.source, feed.slot
    query = peek_query(slot, ends[-1], options, version)
    if lake.local is None:
        (end,) = ends
        yield end, _append_by_executor(lake, feed, conninfo, options, version, begin, end, after, base)
        return
    with refusing_slot(source.name, slot, "read"), FileSpool() as spool:
        assembler, relations = TransactionAssembler(spool), RelationDescriptions()
        waiting = Prepared(lake, feed).restore(assembler) if prepared else ()
        received = (batch.column("data") for batch in read_messages(conninfo, query))
        first = next((messages for messages in received if len(messages)), None)
        if first is None:
            yield from ((end, False) for end in ends)
            return
        arrived = chain.from_iterable(map(assembler.assemble, chain([first], received)))
        transactions = transactions_from(begin, arrived, relations)
        for end in ends:
            relations.begin_slice()
            before = transactions.before(None if end == ends[-1] else end)
            messages = chain.from_iterable(map(relations.described, before))
            begun = list(islice(messages, 1))
            holds = prepared or bool(begun)  # What waits for its second phase is no row yet.
            if holds:
                append_slice(lake, feed, chain(begun, messages), end, after, base)
            if prepared:
                Prepared(lake, feed).save(assembler, end, waiting)
            yield end, holds
            after = end


def _append_by_executor(
    lake: Lake,
    feed: Feed,
    conninfo: Conninfo,
    options: PgoutputOptions,
    version: int,
    begin: int,
    end: int,
    after: int,
    base: int | None,
) -> bool:
    """Append what the slot holds from `begin` up to `end`, read by an executor; False where that is nothing."""
    source, slot = feed.source, feed.slot
    with source.connect() as connection:
        first = peek_query(slot, end, options, version, limit=1)
        if not has_changes(connection, source.name, slot, first):
            return False
    drained = drained_messages(lake.spark, conninfo, peek_query(slot, end, options, version), begin, end)
    # After the session: which kind of observation it is depends on the kind of session.
    summary = Observation()
    path = ChangeLog(lake, feed).path
    observed = drained.observe(summary, *slice_summary())
    lake.write(observed, path, position=end, options=_FILE_OPTIONS, base=base, after=after)
    # Else it is made of the slice, where it is read: Spark 4.0 observes an array as an object of Java's.
    if isinstance(summary.get.get("relations"), list):
        Slices(lake, feed).append(end, summary.get)
    return True


def at_once(feed: Feed, publications: Sequence[str]) -> PgoutputOptions:
    """How to peek: a peek sends nothing before it has decoded everything, so streaming would only repeat."""
    return replace(feed.options, publications=tuple(publications), streaming="off")
