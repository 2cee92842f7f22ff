"""Assembles complete transactions in commit order.

In: the messages of a session, which may stream transactions or send prepared transactions. Out: the messages that a
session of protocol version 1 would send.

- With streaming, a session sends a transaction in progress in blocks. Other transactions come between the blocks.
- With two_phase, a session sends a prepared transaction before it knows of COMMIT PREPARED or ROLLBACK PREPARED.

`TransactionAssembler` keeps the messages of such a transaction in a spool (for example in temporary files) until the
transaction commits. After the commit it yields Begin, the changes without their transaction ids, and Commit. It leaves
out subtransactions that were rolled back. It passes on all other messages unchanged, and inserts descriptions of
relations where they are missing. So the output has the same transactions in the same order for all options of a slot.

Python code runs once per block or prepared transaction, never per change. Raises ProtocolError for messages in an
order in which PostgreSQL does not send them.

PostgreSQL documentation, Logical Streaming Replication Parameters, Logical Replication Message Formats;
src/backend/replication/logical/worker.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION
from pgsieve.decoding.binary.octets import Octets
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.descriptions import Description, RelationDescriptions
from pgsieve.decoding.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    decode,
    encode,
)

SPOOL_SCHEMA = pa.schema([("xid", pa.int64()), ("data", pa.binary())])
"""Messages in a spool. `xid` is the id of the transaction or subtransaction, and `data` the message without this id."""

_BLOCK_KINDS = np.frombuffer(b"RYIUDTMO", np.uint8)  # The messages between Stream Start and Stream Stop.
_ORIGIN = ord("O")
_XID_BYTES = 4  # Bytes of the transaction id, directly after the type byte.

# For each type byte: whether such a message begins or ends a streamed or prepared transaction, or a streamed block.
_IS_BOUNDARY = np.zeros(256, np.bool_)
_IS_BOUNDARY[np.frombuffer(b"SEcApbPKr", np.uint8)] = True


class Spool(Protocol):
    """Stores the messages of unfinished transactions, as batches of `SPOOL_SCHEMA`.

    `spool_id` is a number that the assembler gives to a transaction. It is not the transaction id.
    """

    def append(self, spool_id: int, messages: pa.RecordBatch) -> None:
        """Store more messages of a transaction."""

    def read(self, spool_id: int) -> Iterator[pa.RecordBatch]:
        """Return the stored messages of a transaction; nothing if the transaction has none."""

    def drop(self, spool_id: int) -> None:
        """Delete the stored messages of a transaction, if it has any."""


@dataclass(slots=True)
class _SpooledTransaction:
    """A transaction in the spool.

    - `aborted_xids` has the ids of its subtransactions that were rolled back.
    - `xid_and_description_by_relation` has the descriptions of relations (their Relation and Type messages) that came in
      this transaction. It maps a relation id to the id of the subtransaction in which the description came, and to the
      description.
    """

    spool_id: int
    aborted_xids: set[int] = field(default_factory=set)
    xid_and_description_by_relation: dict[int, tuple[int, Description]] = field(default_factory=dict)

    @property
    def valid_descriptions(self) -> dict[int, Description]:
        """The descriptions by relation id, without the descriptions that came in aborted subtransactions."""
        return {
            relation_id: description
            for relation_id, (xid, description) in self.xid_and_description_by_relation.items()
            if xid not in self.aborted_xids
        }


class TransactionAssembler:
    """Assembles the transactions of one session.

    `parallel` says that the session requested streaming = parallel.
    """

    def __init__(self, spool: Spool, *, parallel: bool = False) -> None:
        self._spool = spool
        self._parallel = parallel
        self._last_spool_id = 0
        self._transaction_by_stream_xid: dict[int, _SpooledTransaction] = {}
        self._block_xid: int | None = None  # The xid of the open block's transaction.
        self._transaction_in_preparation: tuple[BeginPrepare, _SpooledTransaction] | None = None
        self._prepared_by_xid_and_gid: dict[tuple[int, str], tuple[Prepare, _SpooledTransaction]] = {}
        self._descriptions = RelationDescriptions()

    @property
    def prepared_transactions(self) -> tuple[Prepare, ...]:
        """The prepared transactions that have not ended, in the order of PREPARE."""
        return tuple(prepare for prepare, _ in self._prepared_by_xid_and_gid.values())

    def read_prepared_messages(self, prepare: Prepare) -> Iterator[pa.RecordBatch]:
        """Return the messages of one of the `prepared_transactions`, as batches of `SPOOL_SCHEMA`."""
        return self._spool.read(self._prepared_by_xid_and_gid[prepare.xid, prepare.gid][1].spool_id)

    def restore(self, prepare: Prepare, messages: Iterable[pa.RecordBatch]) -> None:
        """Add a prepared transaction that an earlier session has received.

        `messages` is the result of `read_prepared_messages` in the earlier session.
        """
        transaction = self._make_transaction()
        for batch in messages:
            self._spool.append(transaction.spool_id, batch)
        self._keep_prepared(prepare, transaction)

    @property
    def is_in_block(self) -> bool:
        """Whether the session is within a streamed block, or between Begin Prepare and Prepare."""
        return self._block_xid is not None or self._transaction_in_preparation is not None

    def begin_slice(self) -> None:
        """Begin a slice: a part of the session that is read without the earlier parts.

        Each relation is described again before its next change, so that the slice has all descriptions that it needs.
        """
        self._descriptions.begin_slice()

    def assemble(self, data: pa.Array) -> Iterator[pa.Array]:
        """Add the session's next messages, and yield the messages of all transactions that are now committed."""
        kind = Octets(data).first_bytes()
        part_start = 0
        for index in map(int, np.flatnonzero(_IS_BOUNDARY[kind])):
            if index > part_start:
                yield from self._spool_or_yield(data.slice(part_start, index - part_start))
            yield from self._handle_boundary(data[index].as_py())
            part_start = index + 1
        if part_start < len(data):
            yield from self._spool_or_yield(data.slice(part_start))

    def _spool_or_yield(self, data: pa.Array) -> Iterator[pa.Array]:
        """Spool messages of a block, and messages between Begin Prepare and Prepare; yield all other messages.

        Outside of blocks, the description of a relation is inserted before the relation's changes if it is missing there.
        """
        if self._block_xid is not None:
            self._spool_block(self._transaction_by_stream_xid[self._block_xid], self._block_xid, data)
        elif self._transaction_in_preparation is not None:
            begin, transaction = self._transaction_in_preparation
            for described_messages in self._descriptions.insert_missing_descriptions(data):
                self._append(transaction, np.full(len(described_messages), begin.xid), described_messages)
        else:
            yield from self._descriptions.insert_missing_descriptions(data)

    def _spool_block(self, transaction: _SpooledTransaction, top_xid: int, data: pa.Array) -> None:
        """Spool messages of a block, without their transaction ids; `top_xid` is the id of the block's transaction."""
        messages, xids = _strip_xids(data, top_xid)
        distinct_xids = pc.unique(pa.array(xids))
        for xid in distinct_xids.to_pylist():
            part = messages if len(distinct_xids) == 1 else messages.filter(pa.array(xids == xid))
            descriptions = self._descriptions.read_descriptions(part)
            transaction.xid_and_description_by_relation.update(
                (relation_id, (xid, description)) for relation_id, description in descriptions.items()
            )
        self._append(transaction, xids, messages)

    def _append(self, transaction: _SpooledTransaction, xids: npt.NDArray[np.int64], data: pa.Array) -> None:
        columns = [pa.array(xids, pa.int64()), data.cast(pa.binary())]
        self._spool.append(transaction.spool_id, pa.RecordBatch.from_arrays(columns, schema=SPOOL_SCHEMA))

    def _handle_boundary(self, message_bytes: bytes) -> Iterator[pa.Array]:
        message = decode(message_bytes, parallel=self._parallel)
        if self._block_xid is not None and not isinstance(message, StreamStop):
            _fail(message, "inside a streamed block")
        if self._transaction_in_preparation is not None and not isinstance(message, Prepare):
            _fail(message, "inside a transaction that is being prepared")
        match message:
            case StreamStart():
                self._start_block(message)
            case StreamStop():
                if self._block_xid is None:
                    _fail(message, "outside a streamed block")
                self._block_xid = None
            case StreamAbort():
                self._abort(message)
            case StreamCommit():
                transaction = self._end_stream(message)
                begin = Begin(message.commit_lsn, message.commit_time, message.xid)
                yield from self._replay(transaction, begin, message.end_lsn)
            case BeginPrepare():
                # The messages of this transaction are spooled, and read apart from those before and after. So each of
                # the three parts needs its own descriptions of relations.
                self._descriptions.begin_slice()
                self._transaction_in_preparation = message, self._make_transaction()
            case Prepare():
                # The server sends no Begin Prepare for some transactions that changed nothing, for example one that
                # rolled back to a savepoint.
                begin_message, transaction = self._transaction_in_preparation or (
                    message,
                    self._make_transaction(),
                )
                if (begin_message.xid, begin_message.gid) != (message.xid, message.gid):
                    _fail(message, "of another transaction than its Begin Prepare")
                self._keep_prepared(message, transaction)
                self._transaction_in_preparation = None
                self._descriptions.begin_slice()
            case StreamPrepare():
                transaction = self._compact(self._end_stream(message))
                self._keep_prepared(_to_prepare(message), transaction)
                # The server does not repeat the descriptions of relations that this transaction has; from version 19 on,
                # not even after ROLLBACK PREPARED.
                self._descriptions.record_replayed_descriptions(transaction.valid_descriptions)
            case CommitPrepared():
                # The transaction may be unknown here: if it changed nothing, servers before 17 send no Prepare.
                if prepared := self._prepared_by_xid_and_gid.pop((message.xid, message.gid), None):
                    begin = Begin(message.commit_lsn, message.commit_time, message.xid)
                    yield from self._replay(prepared[1], begin, message.end_lsn)
                    self._descriptions.begin_slice()
            case RollbackPrepared():
                self._roll_back(message)
            case _:  # pragma: no branch - assemble passes only the kinds above
                _fail(message, "here")

    def _make_transaction(self) -> _SpooledTransaction:
        self._last_spool_id += 1
        return _SpooledTransaction(self._last_spool_id)

    def _start_block(self, message: StreamStart) -> None:
        if message.first_segment:
            if message.xid in self._transaction_by_stream_xid:
                _fail(message, "of a transaction that is streamed already")
            self._transaction_by_stream_xid[message.xid] = self._make_transaction()
        elif message.xid not in self._transaction_by_stream_xid:
            _fail(message, "of a transaction whose first block was never received")
        self._block_xid = message.xid

    def _end_stream(self, message: StreamCommit | StreamPrepare) -> _SpooledTransaction:
        if message.xid not in self._transaction_by_stream_xid:
            _fail(message, "of a transaction whose first block was never received")
        return self._transaction_by_stream_xid.pop(message.xid)

    def _abort(self, message: StreamAbort) -> None:
        transaction = self._transaction_by_stream_xid.get(message.xid)
        if transaction is None:
            return  # The server has sent no block.
        if message.subxid == message.xid:
            del self._transaction_by_stream_xid[message.xid]
            self._spool.drop(transaction.spool_id)
        else:
            transaction.aborted_xids.add(message.subxid)

    def _keep_prepared(self, prepare: Prepare, transaction: _SpooledTransaction) -> None:
        """Keep a prepared transaction until COMMIT PREPARED or ROLLBACK PREPARED.

        After a restart a server sends prepared transactions again. In that case the new copy replaces the old one.
        """
        replaced_copy = self._prepared_by_xid_and_gid.pop((prepare.xid, prepare.gid), None)
        if replaced_copy is not None:
            self._spool.drop(replaced_copy[1].spool_id)
        self._prepared_by_xid_and_gid[prepare.xid, prepare.gid] = prepare, transaction

    def _roll_back(self, message: RollbackPrepared) -> None:
        """Drop a prepared transaction.

        Nothing is dropped if the transaction is unknown, or if a later transaction with the same gid is kept.
        """
        prepare, transaction = self._prepared_by_xid_and_gid.get((message.xid, message.gid), (None, None))
        if prepare is None or transaction is None:
            return
        if (prepare.end_lsn, prepare.prepare_time) == (message.prepare_end_lsn, message.prepare_time):
            del self._prepared_by_xid_and_gid[message.xid, message.gid]
            self._spool.drop(transaction.spool_id)

    def _compact(self, transaction: _SpooledTransaction) -> _SpooledTransaction:
        """Copy a transaction of the spool without its aborted subtransactions, and drop the original."""
        if not transaction.aborted_xids:
            return transaction
        compacted_transaction = self._make_transaction()
        compacted_transaction.xid_and_description_by_relation = {
            relation_id: (0, description)
            for relation_id, description in transaction.valid_descriptions.items()
        }
        for batch in self._read_remaining_messages(transaction):
            self._spool.append(compacted_transaction.spool_id, batch)
        self._spool.drop(transaction.spool_id)
        return compacted_transaction

    def _read_remaining_messages(self, transaction: _SpooledTransaction) -> Iterator[pa.RecordBatch]:
        aborted_xids = pa.array(sorted(transaction.aborted_xids), pa.int64())
        for batch in self._spool.read(transaction.spool_id):
            remaining_messages = batch.filter(pc.invert(pc.is_in(batch.column("xid"), aborted_xids)))
            if remaining_messages.num_rows:
                yield remaining_messages

    def _replay(self, transaction: _SpooledTransaction, begin: Begin, end_lsn: int) -> Iterator[pa.Array]:
        """Yield the messages of a committed transaction, between Begin and Commit; nothing if it has no messages."""
        has_begun = False
        for batch in self._read_remaining_messages(transaction):
            if not has_begun:
                yield _to_array(encode(begin))
                has_begun = True
            yield batch.column("data")
        if has_begun:
            yield _to_array(encode(Commit(begin.final_lsn, end_lsn, begin.commit_time)))
        self._spool.drop(transaction.spool_id)
        self._descriptions.record_replayed_descriptions(transaction.valid_descriptions)


def _to_array(message: bytes) -> pa.Array:
    return pa.array([message], pa.binary())


def _to_prepare(message: StreamPrepare) -> Prepare:
    return Prepare(message.prepare_lsn, message.end_lsn, message.prepare_time, message.xid, message.gid)


def _strip_xids(data: pa.Array, top_xid: int) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the messages of a block without their transaction ids, and these ids.

    An Origin message has no transaction id. The result has `top_xid` for it, the id of the streamed transaction.
    """
    octets = Octets(data)
    first_integers = octets.read_integers(octets.starts)
    kind = (first_integers >> 56).astype(np.uint8)
    has_xid = kind != _ORIGIN
    sizes = octets.ends - octets.starts
    if not np.isin(kind, _BLOCK_KINDS).all() or (sizes[has_xid] <= _XID_BYTES).any():
        raise ProtocolError("a message does not belong in a streamed block", sqlstate=PROTOCOL_VIOLATION)
    xids = np.where(has_xid, first_integers >> 24 & 0xFFFFFFFF, top_xid).astype(np.int64)
    if not xids.all():
        raise ProtocolError(
            "a message in a streamed block has no transaction id", sqlstate=PROTOCOL_VIOLATION
        )
    is_kept = np.ones(octets.buffer.size, np.bool_)
    xid_message_starts = octets.starts[has_xid]
    for byte in range(1, 1 + _XID_BYTES):
        is_kept[xid_message_starts + byte] = False
    offsets = np.zeros(len(data) + 1, np.int32)
    np.cumsum(sizes - _XID_BYTES * has_xid, out=offsets[1:])
    remaining_octets = np.frombuffer(octets.buffer, np.uint8)[is_kept]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(remaining_octets)]
    return pa.Array.from_buffers(pa.binary(), len(data), buffers, 0), xids


def _fail(message: object, place: str) -> NoReturn:
    raise ProtocolError(f"unexpected {type(message).__name__} message {place}", sqlstate=PROTOCOL_VIOLATION)
