"""Assembles complete transactions in commit order: any session's messages in, messages without streaming out.

With streaming, a session sends a transaction in progress in blocks, with other transactions between the blocks.
With two_phase, it sends a prepared transaction before COMMIT PREPARED or ROLLBACK PREPARED.
`TransactionAssembler` keeps such a transaction in a spool until it commits. Then it yields the transaction as in
protocol version 1: Begin, changes without a transaction id, Commit. Subtransactions that were rolled back are left
out. All other messages are unchanged. So the output has the same transactions in the same order for all options of
a slot.

Python code runs once per block or prepared transaction, never per change. Raises ProtocolError if PostgreSQL
does not send messages in this order.

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
"""Messages in a spool: the (sub)transaction's id, and the message without its transaction id."""

_BLOCK_KINDS = np.frombuffer(b"RYIUDTMO", np.uint8)  # The messages between Stream Start and Stream Stop.
_ORIGIN = ord("O")
_XID_BYTES = 4  # Bytes of the transaction id, directly after the type byte.

_IS_BOUNDARY = np.zeros(256, np.bool_)
_IS_BOUNDARY[np.frombuffer(b"SEcApbPKr", np.uint8)] = True


class Spool(Protocol):
    """Stores messages (batches of `SPOOL_SCHEMA`) of unfinished transactions by a transaction's number."""

    def append(self, number: int, messages: pa.RecordBatch) -> None:
        """Store more messages of a transaction."""

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """Return the stored messages of a transaction; there may be none."""

    def drop(self, number: int) -> None:
        """Delete the messages of a transaction; there may be none."""


@dataclass(slots=True)
class _SpooledTransaction:
    """A transaction in the spool: its aborted subtransactions, and its descriptions with their xids."""

    number: int
    aborted: set[int] = field(default_factory=set)
    relations: dict[int, tuple[int, Description]] = field(default_factory=dict)

    @property
    def valid_descriptions(self) -> dict[int, Description]:
        """The descriptions of relations by id, without those from aborted subtransactions."""
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
        """The messages (batches of `SPOOL_SCHEMA`) of a transaction in `prepared_transactions`."""
        return self._spool.read(self._prepared[prepare.xid, prepare.gid][1].number)

    def restore(self, prepare: Prepare, messages: Iterable[pa.RecordBatch]) -> None:
        """Add a prepared transaction of an earlier session, with that session's result of `messages_of`."""
        transaction = self._new_transaction()
        for batch in messages:
            self._spool.append(transaction.number, batch)
        self._keep_prepared(prepare, transaction)

    @property
    def is_in_block(self) -> bool:
        """Whether a streamed block, or a transaction between Begin Prepare and Prepare, is open."""
        return self._block is not None or self._preparing is not None

    def begin_slice(self) -> None:
        """Describe relations again: readers of the next slice (part of the session) do not read earlier slices."""
        self._relations.begin_slice()

    def assemble(self, data: pa.Array) -> Iterator[pa.Array]:
        """Add the session's next messages (binary), and yield the messages of committed transactions."""
        kind = Octets(data).kinds()
        first = 0
        for index in map(int, np.flatnonzero(_IS_BOUNDARY[kind])):
            if index > first:
                yield from self._pass_on(data.slice(first, index - first))
            yield from self._handle_boundary(data[index].as_py())
            first = index + 1
        if first < len(data):
            yield from self._pass_on(data.slice(first))

    def _pass_on(self, data: pa.Array) -> Iterator[pa.Array]:
        """Spool messages of a block or of a transaction to prepare, yield others with their descriptions."""
        if self._block is not None:
            self._spool_block(self._streams[self._block], self._block, data)
        elif self._preparing is not None:
            begin, spooled = self._preparing
            for valid_descriptions in self._relations.insert_missing(data):
                self._append(spooled, np.full(len(valid_descriptions), begin.xid), valid_descriptions)
        else:
            yield from self._relations.insert_missing(data)

    def _spool_block(self, spooled: _SpooledTransaction, top: int, data: pa.Array) -> None:
        """Spool messages of a block without their transaction ids."""
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
                # The spooled messages and the messages after them are read separately.
                self._relations.begin_slice()
                self._preparing = message, self._new_transaction()
            case Prepare():
                # A transaction that changed nothing, only rolled back to a savepoint, has no Begin Prepare.
                begun, spooled = self._preparing or (message, self._new_transaction())
                if (begun.xid, begun.gid) != (message.xid, message.gid):
                    _fail(message, "of another transaction than its Begin Prepare")
                self._keep_prepared(message, spooled)
                self._preparing = None
                self._relations.begin_slice()
            case StreamPrepare():
                spooled = self._compact(self._end_stream(message))
                self._keep_prepared(_to_prepare(message), spooled)
                # The server does not repeat these descriptions; from 19 on, not even after a rollback.
                self._relations.record_replayed(spooled.valid_descriptions)
            case CommitPrepared():
                # For a transaction that changed nothing, servers before 17 send no Prepare.
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
        """Keep a prepared transaction.

        It replaces an earlier copy, which a server sends again after a restart.
        """
        before = self._prepared.pop((prepare.xid, prepare.gid), None)
        if before is not None:
            self._spool.drop(before[1].number)
        self._prepared[prepare.xid, prepare.gid] = prepare, spooled

    def _roll_back(self, message: RollbackPrepared) -> None:
        """Drop a prepared transaction, unless it is unknown."""
        prepare, spooled = self._prepared.get((message.xid, message.gid), (None, None))
        if prepare is None or spooled is None:
            return
        if (prepare.end_lsn, prepare.prepare_time) == (message.prepare_end_lsn, message.prepare_time):
            del self._prepared[message.xid, message.gid]
            self._spool.drop(spooled.number)

    def _compact(self, spooled: _SpooledTransaction) -> _SpooledTransaction:
        """Replace a transaction in the spool by one without its aborted subtransactions."""
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
        """Yield a committed transaction, unless it has no messages."""
        begun = False
        for batch in self._remaining_messages(spooled):
            if not begun:
                yield _array(encode(begin))
                begun = True
            yield batch.column("data")
        if begun:
            yield _array(encode(Commit(begin.final_lsn, end_lsn, begin.commit_time)))
        self._spool.drop(spooled.number)
        self._relations.record_replayed(spooled.valid_descriptions)


def _array(message: bytes) -> pa.Array:
    return pa.array([message], pa.binary())


def _to_prepare(message: StreamPrepare) -> Prepare:
    return Prepare(message.prepare_lsn, message.end_lsn, message.prepare_time, message.xid, message.gid)


def _strip_xids(data: pa.Array, top: int) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return a block's messages without their transaction ids, and the transaction ids.

    An Origin message has no id; its id in the result is `top`, the streamed transaction.
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
