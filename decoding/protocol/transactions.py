"""Assembles whole transactions in commit order: any session's messages in, messages as without streaming out.

With streaming, from protocol version 2 on, a session sends a transaction in progress in blocks, with other
transactions between them. With two_phase it sends a prepared transaction before the server knows whether it
commits. `TransactionAssembler` keeps such a transaction in a spool until its commit, leaves out
subtransactions that were rolled back, and passes it on as in protocol version 1: Begin, changes without a
transaction id, Commit. All other messages pass through unchanged. So the same transactions come out in the
same order with all options of a slot.

It works on arrays of messages: one step in Python is one block of a stream or one prepared transaction, never
one change. Raises ProtocolError for messages in an order in which PostgreSQL does not send them. PostgreSQL
documentation 54.5.1 and 54.9; src/backend/replication/logical/worker.c.
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

SPOOLED = pa.schema([("xid", pa.int64()), ("data", pa.binary())])
"""Messages in a spool: the (sub)transaction of each, and the message as outside a stream."""

_BLOCK = np.frombuffer(b"RYIUDTMO", np.uint8)  # The messages between Stream Start and Stream Stop.
_ORIGIN = ord("O")
_XID = 4  # Bytes of the transaction id, directly after the type byte.

_KINDS = np.zeros(256, np.bool_)
_KINDS[np.frombuffer(b"SEcApbPKr", np.uint8)] = True


class Spool(Protocol):
    """Keeps messages (batches of `SPOOLED`) of unfinished transactions, by the transaction's number."""

    def append(self, number: int, messages: pa.RecordBatch) -> None:
        """Keep more messages of a transaction."""

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """Return a transaction's messages so far; a transaction without messages is no error."""

    def drop(self, number: int) -> None:
        """Drop a transaction's messages, if there are any."""


@dataclass(slots=True)
class _SpooledTransaction:
    """A transaction in the spool: its aborted parts, and its descriptions of relations."""

    number: int
    aborted: set[int] = field(default_factory=set)
    relations: dict[int, tuple[int, Description]] = field(default_factory=dict)

    @property
    def described(self) -> dict[int, Description]:
        """The relations that its messages describe, without those of aborted subtransactions."""
        return {i: description for i, (xid, description) in self.relations.items() if xid not in self.aborted}


class TransactionAssembler:
    """Assembles the transactions of one session; `parallel`: the session asked for streaming = parallel."""

    def __init__(self, spool: Spool, *, parallel: bool = False) -> None:
        self._spool = spool
        self._parallel = parallel
        self._number = 0
        self._streams: dict[int, _SpooledTransaction] = {}
        self._block: int | None = None  # The transaction of the open block.
        self._preparing: tuple[BeginPrepare, _SpooledTransaction] | None = None
        self._prepared: dict[tuple[int, str], tuple[Prepare, _SpooledTransaction]] = {}
        self._relations = RelationDescriptions()

    @property
    def prepared(self) -> tuple[Prepare, ...]:
        """The transactions that wait for COMMIT PREPARED or ROLLBACK PREPARED, in the order of PREPARE."""
        return tuple(prepare for prepare, _ in self._prepared.values())

    def messages_of(self, prepare: Prepare) -> Iterator[pa.RecordBatch]:
        """The messages (`SPOOLED`) of a transaction in `prepared`."""
        return self._spool.read(self._prepared[prepare.xid, prepare.gid][1].number)

    def restore(self, prepare: Prepare, messages: Iterable[pa.RecordBatch]) -> None:
        """Keep a prepared transaction of an earlier session.

        `messages` is that session's result of `messages_of`.
        """
        spooled = self._new()
        for batch in messages:
            self._spool.append(spooled.number, batch)
        self._wait(prepare, spooled)

    @property
    def in_block(self) -> bool:
        """Whether a streamed block, or a transaction that is being prepared, has not ended yet."""
        return self._block is not None or self._preparing is not None

    def begin_slice(self) -> None:
        """Describe relations again, because later messages are read without the earlier ones."""
        self._relations.begin_slice()

    def assemble(self, data: pa.Array) -> Iterator[pa.Array]:
        """Take the session's next messages (binary), and yield the messages of committed transactions."""
        kind = Octets(data).kinds()
        first = 0
        for at in map(int, np.flatnonzero(_KINDS[kind])):
            if at > first:
                yield from self._pass_on(data.slice(first, at - first))
            yield from self._end_or_begin(data[at].as_py())
            first = at + 1
        if first < len(data):
            yield from self._pass_on(data.slice(first))

    def _pass_on(self, data: pa.Array) -> Iterator[pa.Array]:
        """Keep or pass on messages between two messages that begin or end a block or a transaction."""
        if self._block is not None:
            self._keep_block(self._streams[self._block], self._block, data)
        elif self._preparing is not None:
            begin, spooled = self._preparing
            for described in self._relations.described(data):
                self._append(spooled, np.full(len(described), begin.xid), described)
        else:
            yield from self._relations.described(data)

    def _keep_block(self, spooled: _SpooledTransaction, top: int, data: pa.Array) -> None:
        """Keep a part of a block, without the transaction ids in its messages."""
        messages, xids = _without_xids(data, top)
        by_xid = pc.unique(pa.array(xids))
        for xid in by_xid.to_pylist():
            part = messages if len(by_xid) == 1 else messages.filter(pa.array(xids == xid))
            noted = self._relations.note(part)
            spooled.relations.update((i, (xid, description)) for i, description in noted.items())
        self._append(spooled, xids, messages)

    def _append(self, spooled: _SpooledTransaction, xids: npt.NDArray[np.int64], data: pa.Array) -> None:
        columns = [pa.array(xids, pa.int64()), data.cast(pa.binary())]
        self._spool.append(spooled.number, pa.RecordBatch.from_arrays(columns, schema=SPOOLED))

    def _end_or_begin(self, raw: bytes) -> Iterator[pa.Array]:
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
                # The kept messages need their own descriptions, and so do later messages.
                self._relations.begin_slice()
                self._preparing = message, self._new()
            case Prepare():
                # A transaction that only rolled back to a savepoint, and changed nothing, comes without Begin
                # Prepare.
                begun, spooled = self._preparing or (message, self._new())
                if (begun.xid, begun.gid) != (message.xid, message.gid):
                    _fail(message, "of another transaction than its Begin Prepare")
                self._wait(message, spooled)
                self._preparing = None
                self._relations.begin_slice()
            case StreamPrepare():
                spooled = self._compact(self._end_stream(message))
                self._wait(_prepare_of(message), spooled)
                # From here on, servers regard its descriptions as sent; from 19 on, even if it does not
                # commit.
                self._relations.replayed(spooled.described)
            case CommitPrepared():
                # For a transaction that changed nothing, servers before 17 send no Prepare.
                if waiting := self._prepared.pop((message.xid, message.gid), None):
                    begin = Begin(message.commit_lsn, message.commit_time, message.xid)
                    yield from self._replay(waiting[1], begin, message.end_lsn)
                    self._relations.begin_slice()
            case RollbackPrepared():
                self._roll_back(message)
            case _:  # pragma: no branch - assemble chooses the kinds above only
                _fail(message, "here")

    def _new(self) -> _SpooledTransaction:
        self._number += 1
        return _SpooledTransaction(self._number)

    def _start(self, message: StreamStart) -> None:
        if message.first_segment:
            if message.xid in self._streams:
                _fail(message, "of a transaction that is streamed already")
            self._streams[message.xid] = self._new()
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
            return  # Nothing of it was sent.
        if message.subxid == message.xid:
            del self._streams[message.xid]
            self._spool.drop(spooled.number)
        else:
            spooled.aborted.add(message.subxid)

    def _wait(self, prepare: Prepare, spooled: _SpooledTransaction) -> None:
        """Keep a prepared transaction; if it is sent again after a restart, it replaces the former one."""
        before = self._prepared.pop((prepare.xid, prepare.gid), None)
        if before is not None:
            self._spool.drop(before[1].number)
        self._prepared[prepare.xid, prepare.gid] = prepare, spooled

    def _roll_back(self, message: RollbackPrepared) -> None:
        """Drop a prepared transaction; one that was never received is no error."""
        prepare, spooled = self._prepared.get((message.xid, message.gid), (None, None))
        if prepare is None or spooled is None:
            return
        if (prepare.end_lsn, prepare.prepare_time) == (message.prepare_end_lsn, message.prepare_time):
            del self._prepared[message.xid, message.gid]
            self._spool.drop(spooled.number)

    def _compact(self, spooled: _SpooledTransaction) -> _SpooledTransaction:
        """Drop aborted subtransactions from the spool, so that it has exactly the prepared changes."""
        if not spooled.aborted:
            return spooled
        compacted = self._new()
        compacted.relations = {i: (0, description) for i, description in spooled.described.items()}
        for batch in self._surviving(spooled):
            self._spool.append(compacted.number, batch)
        self._spool.drop(spooled.number)
        return compacted

    def _surviving(self, spooled: _SpooledTransaction) -> Iterator[pa.RecordBatch]:
        aborted = pa.array(sorted(spooled.aborted), pa.int64())
        for batch in self._spool.read(spooled.number):
            remaining = batch.filter(pc.invert(pc.is_in(batch.column("xid"), aborted)))
            if remaining.num_rows:
                yield remaining

    def _replay(self, spooled: _SpooledTransaction, begin: Begin, end_lsn: int) -> Iterator[pa.Array]:
        """Pass on a committed transaction, unless it has no messages."""
        begun = False
        for batch in self._surviving(spooled):
            if not begun:
                yield _array(encode(begin))
                begun = True
            yield batch.column("data")
        if begun:
            yield _array(encode(Commit(begin.final_lsn, end_lsn, begin.commit_time)))
        self._spool.drop(spooled.number)
        self._relations.replayed(spooled.described)


def _array(message: bytes) -> pa.Array:
    return pa.array([message], pa.binary())


def _prepare_of(message: StreamPrepare) -> Prepare:
    return Prepare(message.prepare_lsn, message.end_lsn, message.prepare_time, message.xid, message.gid)


def _without_xids(data: pa.Array, top: int) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Remove the transaction ids from a block's messages.

    An Origin has none, because it concerns the whole stream.
    """
    octets = Octets(data)
    head = octets.words(octets.starts)
    kind = (head >> 56).astype(np.uint8)
    has_xid = kind != _ORIGIN
    sizes = octets.ends - octets.starts
    if not np.isin(kind, _BLOCK).all() or (sizes[has_xid] <= _XID).any():
        raise ProtocolError("a message does not belong in a streamed block", sqlstate=PROTOCOL_VIOLATION)
    xids = np.where(has_xid, head >> 24 & 0xFFFFFFFF, top).astype(np.int64)
    if not xids.all():
        raise ProtocolError(
            "a message in a streamed block has no transaction id", sqlstate=PROTOCOL_VIOLATION
        )
    kept = np.ones(octets.buffer.size, np.bool_)
    with_xid = octets.starts[has_xid]
    for byte in range(1, 1 + _XID):
        kept[with_xid + byte] = False
    offsets = np.zeros(len(data) + 1, np.int32)
    np.cumsum(sizes - _XID * has_xid, out=offsets[1:])
    remaining = np.frombuffer(octets.buffer, np.uint8)[kept]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(remaining)]
    return pa.Array.from_buffers(pa.binary(), len(data), buffers, 0), xids


def _fail(message: object, where: str) -> NoReturn:
    raise ProtocolError(f"unexpected {type(message).__name__} message {where}", sqlstate=PROTOCOL_VIOLATION)
