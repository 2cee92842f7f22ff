"""Drives an output plugin with pgoutput's messages: calls the plugin's callbacks and collects their output.

In: the bytes of the messages of one session in order, of any protocol version. The caller read them from a slot, or from
the change log (the lake's table of a slot's messages).
Out: the output of the callbacks that `pgsieve.decoding.plugins.interface` lists. The driver calls them like this:

- The callback for a change gets the change's relations as they were last described.
- If the plugin streams, it gets a streamed transaction in blocks (Stream Start to Stream Stop). Otherwise
  the driver buffers the transaction until its end, and leaves out the changes of aborted subtransactions.
- If the plugin has two-phase callbacks and filter_prepare returns false, the plugin gets a prepared transaction at
  PREPARE. Otherwise it gets the transaction at COMMIT PREPARED like any other transaction, and at ROLLBACK PREPARED
  the driver drops the transaction.
- If filter_by_origin returns true for a transaction, the driver drops the transaction.

pgoutput's messages contain less than the WAL. So the driver calls filter_by_origin once per transaction instead of
once per change. It does not call this callback for messages outside transactions. When the driver calls it for
a streamed transaction, the origin of the transaction is not known yet.

The driver raises:

- ProtocolError if the messages are in an order in which no server sends them
- MissingCallbackError if the plugin lacks a required callback
- the plugin's own errors
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
class _OpenTransaction:
    """A transaction that the plugin is getting. A streamed transaction has one object for all of its blocks.

    - `start_callback` is the name of the callback that begins the transaction, such as "begin". The driver calls it
      only at the first message after a possible Origin message, because the plugin has to know the origin.
    - `is_ignored` says that filter_by_origin returned true. It is None until the driver has called filter_by_origin.
    """

    txn: Transaction
    start_callback: str
    is_started: bool = False
    is_ignored: bool | None = None

    @property
    def callback_prefix(self) -> str:
        """The prefix of the names of the callbacks for changes: "stream_" if the transaction is streamed."""
        return "stream_" if self.start_callback == "stream_start" else ""


class PluginDriver:
    """Calls one plugin for the messages of one session: `with PluginDriver(...) as driver: driver.pass_message(...)`.

    - `options` has the names and values of the plugin's options.
    - `parallel` says that the messages were requested with streaming = parallel.
    - `server_version`: the plugin writes what a server of this version would write.
    - `type_names` maps oids of types to their SQL names. It is empty if the caller has no catalog.
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
        #: The transaction or block that the next messages belong to. `_open_transaction` is set if the plugin gets the changes
        #: as they arrive, and `_open_buffer` if the driver buffers them. At most one of the two is set.
        self._open_transaction: _OpenTransaction | None = None
        self._open_buffer: BufferedTransaction | None = None
        #: Streamed and prepared transactions that have not ended, by xid: those that the plugin gets in blocks, those
        #: that are buffered, and those that filter_by_origin has dropped.
        self._stream_by_xid: dict[int, _OpenTransaction] = {}
        self._buffer_by_xid: dict[int, BufferedTransaction] = {}
        self._ignored_xids: set[int] = set()

    @property
    def output_type(self) -> OutputType:
        """Whether the plugin writes text or bytes."""
        return self._plugin.output_type

    @property
    def streaming(self) -> bool:
        """Whether the plugin gets transactions while they are in progress."""
        return self._plugin.streaming

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plugin.shutdown()

    def pass_message(self, data: bytes) -> Iterator[Output]:
        """Pass the session's next message to the plugin, and yield the plugin's output."""
        message = self._decoder.decode(data)
        self._order.check(message)
        match message:
            case Relation() | Type():
                self._relations.add(message, self._order.block_xid)
            case Begin():
                txn = Transaction(message.xid, message.final_lsn, commit_time=message.commit_time)
                self._open_transaction = _OpenTransaction(txn, "begin")
            case BeginPrepare():
                self._begin_prepare(message)
            case StreamStart():
                self._stream_start(message.xid)
            case Origin():
                transaction = self._open_buffer or self._find_open_transaction().txn
                transaction.origin, transaction.origin_lsn = message.name, message.commit_lsn
            case LogicalMessage(transactional=False):
                yield from self._plugin.call("message", None, message)
            case Insert() | Update() | Delete() | Truncate() | LogicalMessage():
                relations = self._find_relations(message)
                if self._open_buffer is not None:
                    self._open_buffer.add(message, data, relations)
                else:
                    yield from self._pass_change(self._find_open_transaction(), message, relations)
            case Commit():
                open_txn = self._find_open_transaction()
                open_txn.txn.end_lsn = message.end_lsn
                yield from self._end_transaction(open_txn, "commit", message.commit_lsn)
            case Prepare():
                if self._open_transaction is None and self._open_buffer is None:
                    # PostgreSQL 18 sends no Begin Prepare for some transactions that changed nothing. The driver calls
                    # begin_prepare all the same, because the prepare callback may need what begin_prepare sets up.
                    self._begin_prepare(message)
                if self._open_buffer is not None:
                    self._open_buffer = None
                else:
                    yield from self._prepare(self._find_open_transaction(), message)
            case StreamStop() if self._open_buffer is not None:
                self._open_buffer = None
            case StreamStop():
                yield from self._end_transaction(self._find_open_transaction(), "stream_stop")
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

    def _find_open_transaction(self) -> _OpenTransaction:
        assert self._open_transaction is not None  # MessageOrder checked that a transaction is open.
        return self._open_transaction

    def _find_relations(self, message: BufferedChange) -> tuple[PublishedRelation, ...]:
        block_xid = self._order.block_xid
        match message:
            case LogicalMessage():
                return ()
            case Truncate():
                return tuple(
                    [self._relations.get(relation_id, block_xid) for relation_id in message.relation_ids]
                )
            case _:
                relation = self._relations.get(message.relation_id, block_xid)
                relation.check_row_widths(message)
                return (relation,)

    # transactions

    def _begin_if_needed(self, open_txn: _OpenTransaction) -> list[Output]:
        if open_txn.is_ignored is None:
            open_txn.is_ignored = self._plugin.is_origin_filtered(open_txn.txn.origin)
        if open_txn.is_ignored or open_txn.is_started:
            return []
        open_txn.is_started = True
        return self._plugin.call(open_txn.start_callback, open_txn.txn)

    def _pass_change(
        self, open_txn: _OpenTransaction, message: BufferedChange, relations: tuple[PublishedRelation, ...]
    ) -> Iterator[Output]:
        yield from self._begin_if_needed(open_txn)
        if open_txn.is_ignored:
            return
        match message:
            case LogicalMessage():
                yield from self._plugin.call(open_txn.callback_prefix + "message", open_txn.txn, message)
            case Truncate():
                yield from self._plugin.call(
                    open_txn.callback_prefix + "truncate", open_txn.txn, relations, message
                )
            case _:
                yield from self._plugin.call(
                    open_txn.callback_prefix + "change", open_txn.txn, relations[0], message
                )

    def _end_transaction(self, open_txn: _OpenTransaction, name: str, *lsn: int) -> Iterator[Output]:
        """Call the last callback of a transaction or block, even if no change came before it."""
        self._open_transaction = None
        yield from self._begin_if_needed(open_txn)
        if not open_txn.is_ignored:
            yield from self._plugin.call(name, open_txn.txn, *lsn)

    def _replay(
        self, buffered_transaction: BufferedTransaction, open_txn: _OpenTransaction
    ) -> Iterator[Output]:
        """Pass the changes of a buffered transaction to the plugin, as the changes of `open_txn`."""
        open_txn.txn.origin, open_txn.txn.origin_lsn = (
            buffered_transaction.origin,
            buffered_transaction.origin_lsn,
        )
        for message, relations in buffered_transaction.decode_changes():
            yield from self._pass_change(open_txn, message, relations)

    def _replay_committed(
        self, buffered_transaction: BufferedTransaction, txn: Transaction
    ) -> Iterator[Output]:
        """Pass a buffered transaction to the plugin as if it had never been streamed or prepared."""
        open_txn = _OpenTransaction(txn, "begin")
        yield from self._replay(buffered_transaction, open_txn)
        yield from self._end_transaction(open_txn, "commit", txn.final_lsn)

    # two-phase commit

    def _begin_prepare(self, message: BeginPrepare | Prepare) -> None:
        if self._plugin.can_decode_prepare(message.xid, message.gid):
            self._open_transaction = _OpenTransaction(_make_prepared_transaction(message), "begin_prepare")
        else:
            self._buffer_by_xid[message.xid] = self._open_buffer = BufferedTransaction(is_streamed=False)

    def _prepare(self, open_txn: _OpenTransaction, message: Prepare | StreamPrepare) -> Iterator[Output]:
        yield from self._end_transaction(open_txn, "prepare", message.prepare_lsn)
        if open_txn.is_ignored:
            self._ignored_xids.add(message.xid)

    def _commit_prepared(self, message: CommitPrepared) -> Iterator[Output]:
        xid, gid = message.xid, message.gid
        if xid in self._ignored_xids:
            self._ignored_xids.remove(xid)
        elif buffered_transaction := self._buffer_by_xid.pop(xid, None):
            yield from self._replay_committed(
                buffered_transaction, _set_commit(Transaction(xid, gid=gid), message)
            )
        elif stream := self._stream_by_xid.pop(xid, None):
            _set_commit(stream.txn, message)
            yield from self._call_after_blocks(stream, "stream_commit", stream.txn, message.commit_lsn)
        elif self._plugin.can_decode_prepare(xid, gid):
            txn = _set_commit(Transaction(xid, gid=gid), message)
            yield from self._plugin.call("commit_prepared", txn, message.commit_lsn)
        else:
            raise OutputPluginError(
                f"transaction {xid} was prepared before the first message, and committed at"
                f" {format_lsn(message.commit_lsn)}: its changes are missing",
                hint="use a plugin that decodes transactions when they are prepared",
                sqlstate="55000",
            )

    def _rollback_prepared(self, message: RollbackPrepared) -> Iterator[Output]:
        xid, gid = message.xid, message.gid
        if xid in self._ignored_xids:
            self._ignored_xids.remove(xid)
        elif stream := self._stream_by_xid.pop(xid, None):
            stream.txn.abort_time = message.rollback_time
            yield from self._call_after_blocks(stream, "stream_abort", stream.txn, message.rollback_end_lsn)
        elif self._buffer_by_xid.pop(xid, None) is None and self._plugin.can_decode_prepare(xid, gid):
            txn = Transaction(xid, end_lsn=message.rollback_end_lsn, gid=gid)
            txn.prepare_time, txn.commit_time = message.prepare_time, message.rollback_time
            yield from self._plugin.call(
                "rollback_prepared", txn, message.prepare_end_lsn, message.prepare_time
            )

    # streamed transactions

    def _stream_start(self, xid: int) -> None:
        if self._plugin.streaming:
            self._open_transaction = self._stream_by_xid.setdefault(
                xid, _OpenTransaction(Transaction(xid), "stream_start")
            )
            self._open_transaction.is_started = False
        else:
            self._open_buffer = self._buffer_by_xid.setdefault(xid, BufferedTransaction(is_streamed=True))

    def _call_after_blocks(
        self, stream: _OpenTransaction, name: str, txn: Transaction, lsn: int
    ) -> Iterator[Output]:
        """Call a callback that comes after the blocks of a streamed transaction, such as stream_commit."""
        if not stream.is_ignored:
            yield from self._plugin.call(name, txn, lsn)

    def _stream_commit(self, message: StreamCommit) -> Iterator[Output]:
        xid = message.xid
        self._relations.end_stream(xid, committed=True)
        if buffered_transaction := self._buffer_by_xid.pop(xid, None):
            yield from self._replay_committed(buffered_transaction, _set_commit(Transaction(xid), message))
        else:
            stream = self._stream_by_xid.pop(xid)
            _set_commit(stream.txn, message)
            yield from self._call_after_blocks(stream, "stream_commit", stream.txn, message.commit_lsn)

    def _stream_abort(self, message: StreamAbort) -> Iterator[Output]:
        xid, subxid = message.xid, message.subxid
        is_toplevel = xid == subxid
        if is_toplevel:
            self._relations.end_stream(xid, committed=False)
        if buffered_transaction := self._buffer_by_xid.get(xid):
            buffered_transaction.abort(subxid)
            if is_toplevel:
                del self._buffer_by_xid[xid]
            return
        stream = self._stream_by_xid.get(xid)
        if stream is None:
            return
        if is_toplevel:
            del self._stream_by_xid[xid]
        txn = stream.txn if is_toplevel else Transaction(subxid, toptxn=stream.txn)
        txn.abort_time = message.abort.time if message.abort else 0
        abort_lsn = message.abort.lsn if message.abort else 0
        yield from self._call_after_blocks(stream, "stream_abort", txn, abort_lsn)

    def _stream_prepare(self, message: StreamPrepare) -> Iterator[Output]:
        xid = message.xid
        self._relations.end_stream(xid, committed=True)
        if not self._plugin.can_decode_prepare(xid, message.gid):
            return  # The transaction stays as it is until COMMIT PREPARED or ROLLBACK PREPARED.
        txn = _make_prepared_transaction(message)
        if buffered_transaction := self._buffer_by_xid.pop(xid, None):
            open_txn = _OpenTransaction(txn, "begin_prepare")
            yield from self._replay(buffered_transaction, open_txn)
            yield from self._prepare(open_txn, message)
            return
        stream = self._stream_by_xid.pop(xid)
        if stream.is_ignored:
            self._ignored_xids.add(xid)
        txn.output_plugin_private = stream.txn.output_plugin_private
        yield from self._call_after_blocks(stream, "stream_prepare", txn, message.prepare_lsn)


def _make_prepared_transaction(message: BeginPrepare | Prepare | StreamPrepare) -> Transaction:
    txn = Transaction(message.xid, message.prepare_lsn, message.end_lsn, gid=message.gid)
    txn.prepare_time = message.prepare_time
    return txn


def _set_commit(txn: Transaction, message: StreamCommit | CommitPrepared) -> Transaction:
    txn.final_lsn, txn.end_lsn, txn.commit_time = message.commit_lsn, message.end_lsn, message.commit_time
    return txn


def read_binary_changes(driver: PluginDriver, messages: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the plugin's output for these messages, as pg_logical_slot_get_binary_changes does."""
    for data in messages:
        for output in driver.pass_message(data):
            yield output.data


def read_text_changes(driver: PluginDriver, messages: Iterable[bytes]) -> Iterator[str]:
    """Yield the plugin's output for these messages as text, as pg_logical_slot_get_changes does.

    Raises OutputTypeError if the plugin writes binary output, or text that is not UTF-8.
    """
    if driver.output_type is not OutputType.TEXT:
        raise OutputTypeError(
            "the output plugin produces binary output, but textual data is expected",
            hint="choose an option that makes the plugin write text, or read its output as bytes",
            sqlstate="0A000",
        )
    for data in read_binary_changes(driver, messages):
        yield _decode_text(data)


def _decode_text(data: bytes) -> str:
    with suppress(UnicodeDecodeError):  # The message of this error would contain values of rows.
        return str(data, "utf-8")
    raise OutputTypeError("the output plugin wrote text that is not UTF-8", sqlstate="22021")
