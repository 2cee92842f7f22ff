"""The table `prepared` of a stream: transactions that were prepared, and wait for COMMIT PREPARED or ROLLBACK PREPARED.

A slot stream is a slot with the subscriptions that read it. The slot is confirmed beyond a PREPARE long before the second
phase of the transaction, and after that the server does not send the transaction again. So prepared transactions have
to be durable in the lake.

Each slice (the changes from one position of the slot to another) is committed to the change log, the table of the
slot's messages. Then this table is written, with the end of the slice as its position, and then the slot is confirmed.
If this table is behind the change log, a run died between both commits. In that case the slot still has the
transactions that are missing in this table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.protocol.messages import Prepare, decode, encode
from pgsieve.decoding.protocol.transactions import SPOOL_SCHEMA, TransactionAssembler
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake

_ROW_WITHOUT_MESSAGE = pa.RecordBatch.from_pylist([{"xid": None, "data": None}], SPOOL_SCHEMA)
#: Each row has the Prepare message of a transaction, and one other message of it (`data`). In the first row of each
#: transaction, `data` is NULL. `number` is the number of the row.
PREPARED_SCHEMA = pa.schema(
    {"prepare": pa.binary(), "number": pa.int64(), "xid": pa.int64(), "data": pa.binary()}
)


@dataclass(frozen=True)
class PreparedTransactions:
    """The table `prepared` of one stream. The step `slot_consumption` writes it."""

    lake: Lake
    slot_stream: SlotStream

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.prepared_transactions(self.slot_stream.name)

    def read_position(self) -> int | None:
        """The LSN up to which the table has the prepared transactions; None if there is no table."""
        return self.lake.records.position(self.path)

    def restore(self, assembler: TransactionAssembler) -> tuple[Prepare, ...]:
        """Give the transactions in the table to an assembler, and return them.

        The assembler puts transactions together from messages. It waits for the second phase of these transactions.
        """
        delta_rs = self._require_delta_rs_records()
        with self.lake.access.translate_errors(self.path):
            if not delta_rs.exists(self.path):
                return ()
            rows = (
                delta_rs.read_all_rows(self.path)
                .select(PREPARED_SCHEMA.names)
                .cast(PREPARED_SCHEMA)
                .sort_by("number")
            )
        for prepare in pc.unique(rows["prepare"]):
            is_of_transaction = pc.and_(pc.equal(rows["prepare"], prepare), pc.is_valid(rows["data"]))
            messages = rows.filter(is_of_transaction).select(SPOOL_SCHEMA.names)
            decoded_prepare = decode(prepare.as_py())
            assert isinstance(decoded_prepare, Prepare)
            assembler.restore(decoded_prepare, (batch for batch in messages.to_batches() if len(batch)))
        return assembler.prepared_transactions

    def save(
        self, assembler: TransactionAssembler, position: int, stored_transactions: tuple[Prepare, ...]
    ) -> tuple[Prepare, ...]:
        """Write the assembler's prepared transactions and a position to the table, and return the transactions.

        `stored_transactions` are the transactions that the table has now. If they are the same, only the position is
        written.
        """
        delta_rs, prepared_transactions = self._require_delta_rs_records(), assembler.prepared_transactions
        # Sync the change log to disk first. Otherwise this table could be ahead of it after a power cut.
        self.lake.access.make_durable()
        with self.lake.access.translate_errors(self.path):
            if prepared_transactions == stored_transactions and delta_rs.exists(self.path):
                delta_rs.append(self.path, PREPARED_SCHEMA.empty_table(), position)
            else:
                rows = pa.RecordBatchReader.from_batches(PREPARED_SCHEMA, _make_rows(assembler))
                delta_rs.write(self.path, rows, Commit(position, overwrite=True))
        return prepared_transactions

    def begin(self, position: int) -> None:
        """Begin the table, before anything is read from the slot."""
        self._require_delta_rs_records().write(
            self.path, PREPARED_SCHEMA.empty_table(), Commit(position, overwrite=True)
        )
        # Sync the table to disk before the change log begins. Otherwise there could be a change log without this table
        # after a power cut. In that case `take_slot` raises SlotError.
        self.lake.access.make_durable()

    def _require_delta_rs_records(self) -> DeltaRsRecords:
        return self.lake.require_delta_rs(
            PgsieveError(
                f'source "{self.slot_stream.source.name}": replication slot "{self.slot_stream.slot}" sends prepared transactions, which cannot be'
                " kept in a lake that only Spark reaches",
                hint="drop the slot and copy the tables again without `two_phase`, or use a lake in the file system",
                sqlstate="0A000",
            )
        )


def _make_rows(assembler: TransactionAssembler) -> Iterator[pa.RecordBatch]:
    """The rows of all prepared transactions. Each transaction has one row without a message, then one for each message.

    The first row is needed because a transaction may have no messages.
    """
    row_count = 0
    for prepare in assembler.prepared_transactions:
        for batch in chain([_ROW_WITHOUT_MESSAGE], assembler.read_prepared_messages(prepare)):
            numbers = pa.array(range(row_count, row_count + len(batch)), pa.int64())
            prepare_column = pa.array([encode(prepare)] * len(batch), pa.binary())
            row_count += len(batch)
            yield pa.RecordBatch.from_arrays(
                [prepare_column, numbers, *batch.columns], schema=PREPARED_SCHEMA
            )
