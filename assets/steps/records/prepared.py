"""Prepared transactions between two readings of a slot: those that wait for their second phase.

The slot is confirmed past a PREPARE long before its COMMIT PREPARED comes, so what was prepared has to be as
durable as the change log: a table that is written after each slice, with the slice's end as its position, and
before the slot is confirmed. Where it is behind the change log, a run died between the two commits, and the slot
still holds what is missing.
"""

from collections.abc import Iterator
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.records.columns import PREPARED
from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.protocol.messages import Prepare, decode, encode
from pgsieve.decoding.protocol.transactions import SPOOLED, TransactionAssembler
from pgsieve.resources.lake.delta_rs import LocalRecords
from pgsieve.resources.lake.lake import Lake

_NOTHING = pa.RecordBatch.from_pylist([{"xid": None, "data": None}], SPOOLED)


def prepared_position(lake: Lake, feed: Feed) -> int | None:
    """The LSN up to which the waiting transactions are known; None before the first."""
    return lake.records.position(lake.prepared(feed.name))


def restore_prepared(lake: Lake, feed: Feed, assembler: TransactionAssembler) -> tuple[Prepare, ...]:
    """Let the transactions wait that waited when the table was written; returns them."""
    local, path = _local(lake, feed), lake.prepared(feed.name)
    if not local.exists(path):
        return ()
    rows = local.table(path).select(PREPARED.names).cast(PREPARED).sort_by("number")
    for prepare in pc.unique(rows["prepare"]):
        of_this = pc.and_(pc.equal(rows["prepare"], prepare), pc.is_valid(rows["data"]))
        messages = rows.filter(of_this).select(SPOOLED.names)
        decoded = decode(prepare.as_py())
        assert isinstance(decoded, Prepare)
        assembler.restore(decoded, (b for b in messages.to_batches() if len(b)))
    return assembler.prepared


def save_prepared(
    lake: Lake, feed: Feed, assembler: TransactionAssembler, position: int, held: tuple[Prepare, ...]
) -> tuple[Prepare, ...]:
    """Make the table hold the transactions that wait at `position`; returns them. `held` are those it holds."""
    local, path, waiting = _local(lake, feed), lake.prepared(feed.name), assembler.prepared
    with lake.refusing(path):
        if waiting == held and local.exists(path):
            local.append(path, PREPARED.empty_table(), position)
        else:
            rows = pa.RecordBatchReader.from_batches(PREPARED, _rows(assembler))
            local.write(path, rows, position, overwrite=True)
    return waiting


def record_nothing_prepared(lake: Lake, feed: Feed, position: int) -> None:
    """Begin the table for a slot from which nothing has been received."""
    _local(lake, feed).write(lake.prepared(feed.name), PREPARED.empty_table(), position, overwrite=True)


def _rows(assembler: TransactionAssembler) -> Iterator[pa.RecordBatch]:
    """The messages of each transaction, after a row without one: some transactions are empty."""
    count = 0
    for prepare in assembler.prepared:
        for batch in chain([_NOTHING], assembler.messages_of(prepare)):
            numbers = pa.array(range(count, count + len(batch)), pa.int64())
            repeated = pa.array([encode(prepare)] * len(batch), pa.binary())
            count += len(batch)
            yield pa.RecordBatch.from_arrays([repeated, numbers, *batch.columns], schema=PREPARED)


def _local(lake: Lake, feed: Feed) -> LocalRecords:
    if lake.local is None:
        raise PgsieveError(
            f'source "{feed.source.name}": replication slot "{feed.slot}" sends prepared transactions, which cannot be'
            " kept in a lake at a URI",
            hint="drop the slot and copy the tables again without `two_phase`, or use a lake in the file system",
            sqlstate="0A000",
        )
    return lake.local
