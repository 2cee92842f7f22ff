"""Assembles complete transactions in commit order.

In: the messages of a session, which may stream transactions or send prepared transactions. Out: the messages that a
session of protocol version 1 would send.

- With streaming, a session sends a transaction in progress in blocks. Other transactions come between the blocks.
- With two_phase, a session sends a prepared transaction before it knows of COMMIT PREPARED or ROLLBACK PREPARED.

`TransactionAssembler` keeps the messages of such a transaction in a spool until the transaction commits. After the
commit it yields Begin, the changes without their transaction ids, and Commit. It leaves out subtransactions that
were rolled back. It passes on all other messages unchanged. So the output has the same transactions in the same
order for all options of a slot.

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

_IS_BOUNDARY = np.zeros(256, np.bool_)
_IS_BOUNDARY[np.frombuffer(b"SEcApbPKr", np.uint8)] = True


class Spool(Protocol):
    """Stores the messages of unfinished transactions, as batches of `SPOOL_SCHEMA`.

    The number of a transaction is the assembler's own. It is not the transaction id.
    """

    def append(self, number: int, messages: pa.RecordBatch) -> None:
        """Store more messages of a transaction."""

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """Return the stored messages of a transaction; nothing if the transaction has none."""

    def drop(self, number: int) -> None:
        """Delete the stored messages of a transaction, if it has any."""


@dataclass(slots=True)
class _SpooledTransaction:
    """A transaction in the spool.

    - `aborted` has the ids of its subtransactions that were rolled back.
    - `relations` maps a relation id to the description of the relation (its Relation and Type messages) that came
      in this transaction, and to the id of the subtransaction in which the description came.
    """

    number: int
    aborted: set[int] = field(default_factory=set)
    relations: dict[int, tuple[int, Description]] = field(default_factory=dict)

    @property
    def valid_descriptions(self) -> dict[int, Description]:
        """The descriptions by relation id, without the descriptions that came in aborted subtransactions."""
        return {i: description for i, (xid, description) in self.relations.items() if xid not in self.aborted}


class TransactionAssembler:
    """Assembles the transactions of one session.

    `parallel` says that the session requested streaming = parallel.
    """

    def __init__(self, spool: Spool, *, parallel: bool = False) -> None:
        self._spool = spool
        self._parallel = parallel
        self._number = 0
        self._streams: dict[int, _SpooledTransaction] = {}
        self._block: int | None = None  # The xid of the open block's transaction.
        self._preparing: tuple[BeginPrepare, _SpooledTransaction] | None = None
        self._prepared: dict[tuple[int, str], tuple[Prepare, _SpooledTransaction]] = {}
        self._relations = RelationDescriptions()

    @property
    def prepared_transactions(self) -> tuple[Prepare, ...]:
        """The prepared transactions that have not ended, in the order of PREPARE."""
        return tuple(prepare for prepare, _ in self._prepared.values())

    def messages_of(self, prepare: Prepare) -> Iterator[pa.RecordBatch]:
        """Return the messages of one of the `prepared_transactions`, as batches of `SPOOL_SCHEMA`."""
        return self._spool.read(self._prepared[prepare.xid, prepare.gid][1].number)

    def restore(self, prepare: Prepare, messages: Iterable[pa.RecordBatch]) -> None:
        """Add a prepared transaction that an earlier session has received.

        `messages` is the result of `messages_of` in the earlier session.
        """
        transaction = self._new_transaction()
        for batch in messages:
            self._spool.append(transaction.number, batch)
        self._keep_prepared(prepare, transaction)

    @property
    def is_in_block(self) -> bool:
        """Whether the session is within a streamed block, or between Begin Prepare and Prepare."""
        return self._block is not None or self._preparing is not None

    def begin_slice(self) -> None:
        """Begin a slice: a part of the session that is read without the earlier parts.

        The descriptions of relations are repeated before their next changes, so that the slice has all of them.
        """
        self._relations.begin_slice()

    def assemble(self, data: pa.Array) -> Iterator[pa.Array]:
        """Add the session's next messages, and yield the messages of all transactions that are now committed."""
        kind = Octets(data).first_bytes()
        first = 0
        for index in map(int, np.flatnonzero(_IS_BOUNDARY[kind])):
            if index > first:
                yield from self._pass_on(data.slice(first, index - first))
            yield from self._handle_boundary(data[index].as_py())
            first = index + 1
        if first < len(data):
            yield from self._pass_on(data.slice(first))

    def _pass_on(self, data: pa.Array) -> Iterator[pa.Array]:
        """Spool messages within a block or before a Prepare; yield all other messages.

        If the description of a relation is missing before the relation's changes, it is inserted.
        """
        if self._block is not None:
            self._spool_block(self._streams[self._block], self._block, data)
        elif self._preparing is not None:
            begin, spooled = self._preparing
            for valid_descriptions in self._relations.insert_missing(data):
                self._append(spooled, np.full(len(valid_descriptions), begin.xid), valid_descriptions)
        else:
            yield from self._relations.insert_missing(data)

    def _spool_block(self, spooled: _SpooledTransaction, top: int, data: pa.Array) -> None:
        """Spool messages of a block, without their transaction ids; `top` is the id of the block's transaction."""
        messages, xids = _strip_xids(data, top)
        by_xid = pc.unique(pa.array(xids))
        for xid in by_xid.to_pylist():
            part = messages if len(by_xid) == 1 else messages.filter(pa.array(xids == xid))
            descriptions = self._relations.read_descriptions(part)
            spooled.relations.update((i, (xid, description)) for i, description in descriptions.items())
        self._append(spooled, xids, messages)

    def _append(self, spooled: _SpooledTransaction, xids: npt.NDArray[np.int64], data: pa.Array) -> None:
        columns = [pa.array(xids, pa.int64()), data.cast(pa.binary())]
        self._spool.append(spooled.number, pa.RecordBatch.from_arrays(columns, schema=SPOOL_SCHEMA))

    def _handle_boundary(self, raw: bytes) -> Iterator[pa.Array]:
        message = decode(raw, parallel=self._parallel)
        if self._block is not None and not isinstance(message, StreamStop):
            _fail(message, "inside a streamed block")
        if self._preparing is not None and not isinstance(message, Prepare):
            _fail(message, "inside a transaction that is being prepared")
        match message:
            case StreamStart():
                self._start(message)
            case StreamStop():
                if self._block is None:
                    _fail(message, "outside a streamed block")
                self._block = None
            case StreamAbort():
                self._abort(message)
            case StreamCommit():
                spooled = self._end_stream(message)
                begin = Begin(message.commit_lsn, message.commit_time, message.xid)
                yield from self._replay(spooled, begin, message.end_lsn)
            case BeginPrepare():
                # pgsieve reads the spooled messages apart from the messages before and after them. So each of
                # these parts needs its own descriptions.
                self._relations.begin_slice()
                self._preparing = message, self._new_transaction()
            case Prepare():
                # The server sends no Begin Prepare for a transaction that changed nothing, but rolled back to a
                # savepoint.
                begun, spooled = self._preparing or (message, self._new_transaction())
                if (begun.xid, begun.gid) != (message.xid, message.gid):
                    _fail(message, "of another transaction than its Begin Prepare")
                self._keep_prepared(message, spooled)
                self._preparing = None
                self._relations.begin_slice()
            case StreamPrepare():
                spooled = self._compact(self._end_stream(message))
                self._keep_prepared(_to_prepare(message), spooled)
                # The server does not send these descriptions again. From version 19 on, it does not even send them
                # again after ROLLBACK PREPARED.
                self._relations.record_replayed(spooled.valid_descriptions)
            case CommitPrepared():
                # The transaction may be unknown here: if it changed nothing, servers before 17 send no Prepare.
                if waiting := self._prepared.pop((message.xid, message.gid), None):
                    begin = Begin(message.commit_lsn, message.commit_time, message.xid)
                    yield from self._replay(waiting[1], begin, message.end_lsn)
                    self._relations.begin_slice()
            case RollbackPrepared():
                self._roll_back(message)
            case _:  # pragma: no branch - assemble passes only the kinds above
                _fail(message, "here")

    def _new_transaction(self) -> _SpooledTransaction:
        self._number += 1
        return _SpooledTransaction(self._number)

    def _start(self, message: StreamStart) -> None:
        if message.first_segment:
            if message.xid in self._streams:
                _fail(message, "of a transaction that is streamed already")
            self._streams[message.xid] = self._new_transaction()
        elif message.xid not in self._streams:
            _fail(message, "of a transaction whose first block was never received")
        self._block = message.xid

    def _end_stream(self, message: StreamCommit | StreamPrepare) -> _SpooledTransaction:
        if message.xid not in self._streams:
            _fail(message, "of a transaction whose first block was never received")
        return self._streams.pop(message.xid)

    def _abort(self, message: StreamAbort) -> None:
        spooled = self._streams.get(message.xid)
        if spooled is None:
            return  # The server has sent no block.
        if message.subxid == message.xid:
            del self._streams[message.xid]
            self._spool.drop(spooled.number)
        else:
            spooled.aborted.add(message.subxid)

    def _keep_prepared(self, prepare: Prepare, spooled: _SpooledTransaction) -> None:
        """Keep a prepared transaction until COMMIT PREPARED or ROLLBACK PREPARED.

        After a restart a server sends prepared transactions again. In that case the new copy replaces the old one.
        """
        replaced_copy = self._prepared.pop((prepare.xid, prepare.gid), None)
        if replaced_copy is not None:
            self._spool.drop(replaced_copy[1].number)
        self._prepared[prepare.xid, prepare.gid] = prepare, spooled

    def _roll_back(self, message: RollbackPrepared) -> None:
        """Drop a prepared transaction.

        Nothing is dropped if the transaction is unknown, or if a later transaction with the same gid is kept.
        """
        prepare, spooled = self._prepared.get((message.xid, message.gid), (None, None))
        if prepare is None or spooled is None:
            return
        if (prepare.end_lsn, prepare.prepare_time) == (message.prepare_end_lsn, message.prepare_time):
            del self._prepared[message.xid, message.gid]
            self._spool.drop(spooled.number)

    def _compact(self, spooled: _SpooledTransaction) -> _SpooledTransaction:
        """Copy a transaction of the spool without its aborted subtransactions, and drop the original."""
        if not spooled.aborted:
            return spooled
        compacted = self._new_transaction()
        compacted.relations = {i: (0, description) for i, description in spooled.valid_descriptions.items()}
        for batch in self._remaining_messages(spooled):
            self._spool.append(compacted.number, batch)
        self._spool.drop(spooled.number)
        return compacted

    def _remaining_messages(self, spooled: _SpooledTransaction) -> Iterator[pa.RecordBatch]:
        aborted = pa.array(sorted(spooled.aborted), pa.int64())
        for batch in self._spool.read(spooled.number):
            remaining = batch.filter(pc.invert(pc.is_in(batch.column("xid"), aborted)))
            if remaining.num_rows:
                yield remaining

    def _replay(self, spooled: _SpooledTransaction, begin: Begin, end_lsn: int) -> Iterator[pa.Array]:
        """Yield the messages of a committed transaction, between Begin and Commit; nothing if it has no messages."""
        has_begun = False
        for batch in self._remaining_messages(spooled):
            if not has_begun:
                yield _array(encode(begin))
                has_begun = True
            yield batch.column("data")
        if has_begun:
            yield _array(encode(Commit(begin.final_lsn, end_lsn, begin.commit_time)))
        self._spool.drop(spooled.number)
        self._relations.record_replayed(spooled.valid_descriptions)


def _array(message: bytes) -> pa.Array:
    return pa.array([message], pa.binary())


def _to_prepare(message: StreamPrepare) -> Prepare:
    return Prepare(message.prepare_lsn, message.end_lsn, message.prepare_time, message.xid, message.gid)


def _strip_xids(data: pa.Array, top: int) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the messages of a block without their transaction ids, and these ids.

    An Origin message has no transaction id. The result has `top` for it, the id of the streamed transaction.
    """
    octets = Octets(data)
    head = octets.words(octets.starts)
    kind = (head >> 56).astype(np.uint8)
    has_xid = kind != _ORIGIN
    sizes = octets.ends - octets.starts
    if not np.isin(kind, _BLOCK_KINDS).all() or (sizes[has_xid] <= _XID_BYTES).any():
        raise ProtocolError("a message does not belong in a streamed block", sqlstate=PROTOCOL_VIOLATION)
    xids = np.where(has_xid, head >> 24 & 0xFFFFFFFF, top).astype(np.int64)
    if not xids.all():
        raise ProtocolError(
            "a message in a streamed block has no transaction id", sqlstate=PROTOCOL_VIOLATION
        )
    is_kept = np.ones(octets.buffer.size, np.bool_)
    with_xid = octets.starts[has_xid]
    for byte in range(1, 1 + _XID_BYTES):
        is_kept[with_xid + byte] = False
    offsets = np.zeros(len(data) + 1, np.int32)
    np.cumsum(sizes - _XID_BYTES * has_xid, out=offsets[1:])
    remaining = np.frombuffer(octets.buffer, np.uint8)[is_kept]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(remaining)]
    return pa.Array.from_buffers(pa.binary(), len(data), buffers, 0), xids


def _fail(message: object, place: str) -> NoReturn:
    raise ProtocolError(f"unexpected {type(message).__name__} message {place}", sqlstate=PROTOCOL_VIOLATION)
