"""Drives an output plugin with a slot's pgoutput messages: bytes in, the plugin's output out.

The messages are those of one session in their order, of any protocol version, from a slot or from the change
log. The driver makes of them the calls that `pgsieve.decoding.plugins.interface` lists:

- Insert, Update, Delete, Truncate and Message are passed with the last description of their relations.
- A streamed transaction is passed as blocks if the plugin streams. Otherwise the driver buffers it until its
  end, and leaves out the changes of aborted subtransactions.
- A prepared transaction is passed at PREPARE if the plugin decodes it then and filter_prepare does not refuse
  it. Otherwise it is passed at COMMIT PREPARED like any other, and not at all after ROLLBACK PREPARED.
- A transaction whose origin filter_by_origin refuses is left out.

pgoutput's messages contain less than the WAL. So filter_by_origin is called once per transaction instead of
once per change, and not for messages outside transactions. A streamed transaction has no origin yet.

Raises ProtocolError for messages in an order in which no server sends them, OutputPluginError for a callback
that the plugin lacks, and the plugin's own errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self, assert_never

from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.plugins.buffered_transaction import BufferedChange, BufferedTransaction
from pgsieve.decoding.plugins.interface import (
    Output,
    OutputPluginError,
    OutputPluginInit,
    OutputType,
    OutputTypeError,
    Transaction,
)
from pgsieve.decoding.plugins.loaded_plugin import LoadedPlugin
from pgsieve.decoding.protocol.message_order import MessageOrder
from pgsieve.decoding.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Decoder,
    Delete,
    Insert,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from pgsieve.decoding.protocol.relations import PublishedRelation, RelationCache
from pgsieve.decoding.server_versions import NEWEST_SERVER


@dataclass(slots=True)
class _Open:
    """A transaction for which the plugin is called; a streamed transaction includes all its blocks.

    The callback `start` is called at the first message after the Origin. `ignored` is None until
    filter_by_origin has decided.
    """

    txn: Transaction
    start: str
    started: bool = False
    ignored: bool | None = None

    @property
    def prefix(self) -> str:
        """The prefix of the callbacks' names for changes."""
        return "stream_" if self.start == "stream_start" else ""


class PluginDriver:
    """Calls one plugin for the messages of one session: `with PluginDriver(...) as driver: driver.feed(...)`.

    `options` are the plugin's, by name. `parallel`: the messages were requested with streaming = parallel.
    `server_version` is the version whose plugin is imitated. `type_names` are SQL names of types by oid, if
    the catalog is available.
    """

    def __init__(
        self,
        init: OutputPluginInit,
        options: Sequence[tuple[str, str | None]] = (),
        *,
        parallel: bool = False,
        server_version: int = NEWEST_SERVER,
        type_names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._plugin = LoadedPlugin(init, options, server_version)
        self._decoder = Decoder(parallel=parallel)
        self._order = MessageOrder()
        self._relations = RelationCache(type_names)
        #: The transaction or block to which the next messages belong; at most one of the two is set.
        self._open: _Open | None = None
        self._buffering: BufferedTransaction | None = None
        #: Transactions that have begun and not ended, including prepared ones.
        self._streams: dict[int, _Open] = {}
        self._buffered: dict[int, BufferedTransaction] = {}
        self._ignored: set[int] = set()

    @property
    def output_type(self) -> OutputType:
        """Whether the plugin writes text or bytes."""
        return self._plugin.output_type

    @property
    def streaming(self) -> bool:
        """Whether the plugin is called for transactions in progress."""
        return self._plugin.streaming

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plugin.shutdown()

    def feed(self, data: bytes) -> Iterator[Output]:
        """Take the session's next message; yield the plugin's output as it is written."""
        message = self._decoder.decode(data)
        self._order.check(message)
        match message:
            case Relation() | Type():
                self._relations.add(message, self._order.block)
            case Begin():
                txn = Transaction(message.xid, message.final_lsn, commit_time=message.commit_time)
                self._open = _Open(txn, "begin")
            case BeginPrepare():
                self._begin_prepare(message)
            case StreamStart():
                self._stream_start(message.xid)
            case Origin():
                transaction = self._buffering or self._current().txn
                transaction.origin, transaction.origin_lsn = message.name, message.commit_lsn
            case LogicalMessage(transactional=False):
                yield from self._plugin.call("message", None, message)
            case Insert() | Update() | Delete() | Truncate() | LogicalMessage():
                relations = self._relations_of(message)
                if self._buffering is not None:
                    self._buffering.add(message, data, relations)
                else:
                    yield from self._change(self._current(), message, relations)
            case Commit():
                begun = self._current()
                begun.txn.end_lsn = message.end_lsn
                yield from self._end(begun, "commit", message.commit_lsn)
            case Prepare():
                if self._open is None and self._buffering is None:
                    # PostgreSQL 18 sends no Begin Prepare for an empty transaction, but the plugin's
                    # callbacks need the state that begin_prepare sets.
                    self._begin_prepare(message)
                if self._buffering is not None:
                    self._buffering = None
                else:
                    yield from self._prepare(self._current(), message)
            case StreamStop() if self._buffering is not None:
                self._buffering = None
            case StreamStop():
                yield from self._end(self._current(), "stream_stop")
            case StreamCommit():
                yield from self._stream_commit(message)
            case StreamAbort():
                yield from self._stream_abort(message)
            case StreamPrepare():
                yield from self._stream_prepare(message)
            case CommitPrepared():
                yield from self._commit_prepared(message)
            case RollbackPrepared():
                yield from self._rollback_prepared(message)
            case _:
                assert_never(message)

    def _current(self) -> _Open:
        assert self._open is not None  # MessageOrder allows messages of a transaction only within one.
        return self._open

    def _relations_of(self, message: BufferedChange) -> tuple[PublishedRelation, ...]:
        block = self._order.block
        match message:
            case LogicalMessage():
                return ()
            case Truncate():
                return tuple([self._relations.get(each, block) for each in message.relation_ids])
            case _:
                relation = self._relations.get(message.relation_id, block)
                relation.check(message)
                return (relation,)

    # transactions

    def _start(self, begun: _Open) -> list[Output]:
        if begun.ignored is None:
            begun.ignored = self._plugin.refuses_origin(begun.txn.origin)
        if begun.ignored or begun.started:
            return []
        begun.started = True
        return self._plugin.call(begun.start, begun.txn)

    def _change(
        self, begun: _Open, message: BufferedChange, relations: tuple[PublishedRelation, ...]
    ) -> Iterator[Output]:
        yield from self._start(begun)
        if begun.ignored:
            return
        match message:
            case LogicalMessage():
                yield from self._plugin.call(begun.prefix + "message", begun.txn, message)
            case Truncate():
                yield from self._plugin.call(begun.prefix + "truncate", begun.txn, relations, message)
            case _:
                yield from self._plugin.call(begun.prefix + "change", begun.txn, relations[0], message)

    def _end(self, begun: _Open, name: str, *lsn: int) -> Iterator[Output]:
        """Call the last callback of a transaction or block, even of an empty one."""
        self._open = None
        yield from self._start(begun)
        if not begun.ignored:
            yield from self._plugin.call(name, begun.txn, *lsn)

    def _replay(self, transaction: BufferedTransaction, begun: _Open) -> Iterator[Output]:
        """Pass the changes of a buffered transaction."""
        begun.txn.origin, begun.txn.origin_lsn = transaction.origin, transaction.origin_lsn
        for message, relations in transaction.changes():
            yield from self._change(begun, message, relations)

    def _replay_committed(self, transaction: BufferedTransaction, txn: Transaction) -> Iterator[Output]:
        """Pass a buffered transaction as if it had not been streamed or prepared."""
        begun = _Open(txn, "begin")
        yield from self._replay(transaction, begun)
        yield from self._end(begun, "commit", txn.final_lsn)

    # two-phase commit

    def _begin_prepare(self, message: BeginPrepare | Prepare) -> None:
        if self._plugin.decodes_prepare(message.xid, message.gid):
            self._open = _Open(_prepared(message), "begin_prepare")
        else:
            self._buffered[message.xid] = self._buffering = BufferedTransaction(streamed=False)

    def _prepare(self, begun: _Open, message: Prepare | StreamPrepare) -> Iterator[Output]:
        yield from self._end(begun, "prepare", message.prepare_lsn)
        if begun.ignored:
            self._ignored.add(message.xid)

    def _commit_prepared(self, message: CommitPrepared) -> Iterator[Output]:
        xid, gid = message.xid, message.gid
        if xid in self._ignored:
            self._ignored.remove(xid)
        elif transaction := self._buffered.pop(xid, None):
            yield from self._replay_committed(transaction, _committed(Transaction(xid, gid=gid), message))
        elif streamed := self._streams.pop(xid, None):
            _committed(streamed.txn, message)
            yield from self._end_stream(streamed, "stream_commit", streamed.txn, message.commit_lsn)
        elif self._plugin.decodes_prepare(xid, gid):
            txn = _committed(Transaction(xid, gid=gid), message)
            yield from self._plugin.call("commit_prepared", txn, message.commit_lsn)
        else:
            raise OutputPluginError(
                f"transaction {xid} was prepared before the first message that was read, and committed at"
                f" {format_lsn(message.commit_lsn)}: its changes are missing",
                hint="use a plugin that decodes transactions when they are prepared",
                sqlstate="55000",
            )

    def _rollback_prepared(self, message: RollbackPrepared) -> Iterator[Output]:
        xid, gid = message.xid, message.gid
        if xid in self._ignored:
            self._ignored.remove(xid)
        elif streamed := self._streams.pop(xid, None):
            streamed.txn.abort_time = message.rollback_time
            yield from self._end_stream(streamed, "stream_abort", streamed.txn, message.rollback_end_lsn)
        elif self._buffered.pop(xid, None) is None and self._plugin.decodes_prepare(xid, gid):
            txn = Transaction(xid, end_lsn=message.rollback_end_lsn, gid=gid)
            txn.prepare_time, txn.commit_time = message.prepare_time, message.rollback_time
            yield from self._plugin.call(
                "rollback_prepared", txn, message.prepare_end_lsn, message.prepare_time
            )

    # streamed transactions

    def _stream_start(self, xid: int) -> None:
        if self._plugin.streaming:
            self._open = self._streams.setdefault(xid, _Open(Transaction(xid), "stream_start"))
            self._open.started = False
        else:
            self._buffering = self._buffered.setdefault(xid, BufferedTransaction(streamed=True))

    def _end_stream(self, streamed: _Open, name: str, txn: Transaction, lsn: int) -> Iterator[Output]:
        """Call a callback between blocks, or after the last block."""
        if not streamed.ignored:
            yield from self._plugin.call(name, txn, lsn)

    def _stream_commit(self, message: StreamCommit) -> Iterator[Output]:
        xid = message.xid
        self._relations.end_stream(xid, committed=True)
        if transaction := self._buffered.pop(xid, None):
            yield from self._replay_committed(transaction, _committed(Transaction(xid), message))
        else:
            streamed = self._streams.pop(xid)
            _committed(streamed.txn, message)
            yield from self._end_stream(streamed, "stream_commit", streamed.txn, message.commit_lsn)

    def _stream_abort(self, message: StreamAbort) -> Iterator[Output]:
        xid, subxid = message.xid, message.subxid
        whole = xid == subxid
        if whole:
            self._relations.end_stream(xid, committed=False)
        if transaction := self._buffered.get(xid):
            transaction.abort(subxid)
            if whole:
                del self._buffered[xid]
            return
        streamed = self._streams.get(xid)
        if streamed is None:
            return
        if whole:
            del self._streams[xid]
        txn = streamed.txn if whole else Transaction(subxid, toptxn=streamed.txn)
        txn.abort_time = message.abort.time if message.abort else 0
        abort_lsn = message.abort.lsn if message.abort else 0
        yield from self._end_stream(streamed, "stream_abort", txn, abort_lsn)

    def _stream_prepare(self, message: StreamPrepare) -> Iterator[Output]:
        xid = message.xid
        self._relations.end_stream(xid, committed=True)
        if not self._plugin.decodes_prepare(xid, message.gid):
            return  # until COMMIT PREPARED or ROLLBACK PREPARED
        txn = _prepared(message)
        if transaction := self._buffered.pop(xid, None):
            begun = _Open(txn, "begin_prepare")
            yield from self._replay(transaction, begun)
            yield from self._prepare(begun, message)
            return
        streamed = self._streams.pop(xid)
        if streamed.ignored:
            self._ignored.add(xid)
        txn.output_plugin_private = streamed.txn.output_plugin_private
        yield from self._end_stream(streamed, "stream_prepare", txn, message.prepare_lsn)


def _prepared(message: BeginPrepare | Prepare | StreamPrepare) -> Transaction:
    txn = Transaction(message.xid, message.prepare_lsn, message.end_lsn, gid=message.gid)
    txn.prepare_time = message.prepare_time
    return txn


def _committed(txn: Transaction, message: StreamCommit | CommitPrepared) -> Transaction:
    txn.final_lsn, txn.end_lsn, txn.commit_time = message.commit_lsn, message.end_lsn, message.commit_time
    return txn


def binary_changes(driver: PluginDriver, messages: Iterable[bytes]) -> Iterator[bytes]:
    """The plugin's output for these messages, as pg_logical_slot_get_binary_changes returns it."""
    for data in messages:
        for output in driver.feed(data):
            yield output.data


def text_changes(driver: PluginDriver, messages: Iterable[bytes]) -> Iterator[str]:
    """The same as text, as pg_logical_slot_get_changes returns it; refuses a plugin with binary output."""
    if driver.output_type is not OutputType.TEXT:
        raise OutputTypeError(
            "the output plugin produces binary output, but textual data is expected",
            hint="choose an option that makes the plugin write text, or read its output as bytes",
            sqlstate="0A000",
        )
    for data in binary_changes(driver, messages):
        yield _text(data)


def _text(data: bytes) -> str:
    with suppress(UnicodeDecodeError):  # That error would contain the values.
        return str(data, "utf-8")
    raise OutputTypeError("the output plugin wrote text that is not UTF-8", sqlstate="22021")
