"""The feed's table `prepared`: prepared transactions that wait for their COMMIT PREPARED or ROLLBACK PREPARED.

The slot is confirmed past a PREPARE long before the second phase, so these transactions have to be durable. The table
is written after each slice, with the slice's end as its position, and before the slot is confirmed. If it is behind
the change log, a run died between the two commits, and the slot still has the missing transactions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.protocol.messages import Prepare, decode, encode
from pgsieve.decoding.protocol.transactions import SPOOL_SCHEMA, TransactionAssembler
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake

_NOTHING = pa.RecordBatch.from_pylist([{"xid": None, "data": None}], SPOOL_SCHEMA)
#: The messages of prepared transactions, each with the Prepare message of its transaction.
PREPARED = pa.schema({"prepare": pa.binary(), "number": pa.int64(), "xid": pa.int64(), "data": pa.binary()})


@dataclass(frozen=True)
class PreparedTransactions:
    """The table `prepared` of one feed, written by slot consumption."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.prepared(self.feed.name)

    def position(self) -> int | None:
        """The LSN up to which the table has the waiting transactions; None if there is no table."""
        return self.lake.records.position(self.path)

    def restore(self, assembler: TransactionAssembler) -> tuple[Prepare, ...]:
        """Give the waiting transactions in the table to the assembler; returns them."""
        delta_rs = self._local()
        with self.lake.access.translate_errors(self.path):
            if not delta_rs.exists(self.path):
                return ()
            rows = delta_rs.table(self.path).select(PREPARED.names).cast(PREPARED).sort_by("number")
        for prepare in pc.unique(rows["prepare"]):
            of_this = pc.and_(pc.equal(rows["prepare"], prepare), pc.is_valid(rows["data"]))
            messages = rows.filter(of_this).select(SPOOL_SCHEMA.names)
            decoded = decode(prepare.as_py())
            assert isinstance(decoded, Prepare)
            assembler.restore(decoded, (b for b in messages.to_batches() if len(b)))
        return assembler.prepared_transactions

    def save(
        self, assembler: TransactionAssembler, position: int, former_transactions: tuple[Prepare, ...]
    ) -> tuple[Prepare, ...]:
        """Write the assembler's waiting transactions to the table, with a position; returns them.

        `former_transactions` are the transactions that the table has now.
        """
        delta_rs, waiting = self._local(), assembler.prepared_transactions
        # The change log is made durable first: after a power cut this table must not be ahead of it.
        self.lake.access.make_durable()
        with self.lake.access.translate_errors(self.path):
            if waiting == former_transactions and delta_rs.exists(self.path):
                delta_rs.append(self.path, PREPARED.empty_table(), position)
            else:
                rows = pa.RecordBatchReader.from_batches(PREPARED, _rows(assembler))
                delta_rs.write(self.path, rows, Commit(position, overwrite=True))
        return waiting

    def begin(self, position: int) -> None:
        """Begin the table for a slot of which nothing was read yet."""
        self._local().write(self.path, PREPARED.empty_table(), Commit(position, overwrite=True))
        # The table is durable before the change log begins.
        self.lake.access.make_durable()

    def _local(self) -> LocalRecords:
        return self.lake.local_or(
            PgsieveError(
                f'source "{self.feed.source.name}": replication slot "{self.feed.slot}" sends prepared transactions, which cannot be'
                " kept in a lake at a URI",
                hint="drop the slot and copy the tables again without `two_phase`, or use a lake in the file system",
                sqlstate="0A000",
            )
        )


def _rows(assembler: TransactionAssembler) -> Iterator[pa.RecordBatch]:
    """The rows of each transaction: one without a message, as a transaction may be empty, then one per message."""
    count = 0
    for prepare in assembler.prepared_transactions:
        for batch in chain([_NOTHING], assembler.messages_of(prepare)):
            numbers = pa.array(range(count, count + len(batch)), pa.int64())
            prepare_column = pa.array([encode(prepare)] * len(batch), pa.binary())
            count += len(batch)
            yield pa.RecordBatch.from_arrays([prepare_column, numbers, *batch.columns], schema=PREPARED)
