"""The output plugin `pgoutput`: writes pgoutput's messages in another version or with other options.

For example, a recording of version 4 with streamed and prepared transactions becomes one of version 1, for a
reader that knows version 1 only. Options, with the server's meaning (PostgreSQL documentation 54.5.1):
proto_version, which is required; streaming (off, on, parallel), two_phase, messages (off), origin (any,
none). Values keep their format. The server has already applied the publications to the messages.

As on the server, a transaction without changes is not written. A relation is described before its first
change, when its description has changed, and again within a streamed transaction. With streaming = parallel,
an abort that was read without this option has LSN and time 0. Raises OutputPluginOptionError, with pgoutput's
messages and codes (src/backend/replication/pgoutput/pgoutput.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pgsieve.decoding.plugins.interface import (
    Change,
    DecodingContext,
    OutputPluginCallbacks,
    OutputPluginOptionError,
    OutputPluginOptions,
    OutputType,
    Transaction,
)
from pgsieve.decoding.plugins.options import parse_bool
from pgsieve.decoding.protocol.messages import (
    AbortInfo,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Message,
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
    encode,
)
from pgsieve.decoding.protocol.relations import PublishedRelation

_OPTIONS = ("proto_version", "streaming", "two_phase", "messages", "origin")
_NEWEST_PROTOCOL = 4
_STREAM_PROTOCOL = 2
_TWO_PHASE_PROTOCOL = 3
_PARALLEL_PROTOCOL = 4

_Description = tuple[Relation, tuple[Type, ...]]


class Pgoutput:
    """The plugin's state: its options, and the descriptions of relations that it has written."""

    def __init__(self) -> None:
        self._messages = self._local_only = self._parallel = False
        self._described: dict[int, _Description] = {}
        self._described_in: dict[int, dict[int, _Description]] = {}

    # startup and filters

    def startup(self, ctx: DecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Read the options."""
        del is_init
        options.output_type = OutputType.BINARY
        values: dict[str, str | None] = {}
        for name, value in ctx.output_plugin_options:
            if name not in _OPTIONS:
                raise OutputPluginOptionError(
                    f"unrecognized pgoutput option: {name}",
                    hint=f"options: {', '.join(_OPTIONS)}; publications are those that the slot is read with",
                    sqlstate="XX000",
                )
            if name in values:
                raise OutputPluginOptionError("conflicting or redundant options", sqlstate="42601")
            values[name] = value
        protocol = _protocol(values.get("proto_version"))
        streaming = (values.get("streaming", "off") or "on").lower()
        self._parallel = streaming == "parallel"
        ctx.streaming = self._parallel or _boolean("streaming", streaming)
        if ctx.streaming:
            _require(protocol, _STREAM_PROTOCOL, "streaming")
        if self._parallel:
            _require(protocol, _PARALLEL_PROTOCOL, "parallel streaming")
        ctx.two_phase = "two_phase" in values and _boolean("two_phase", values["two_phase"])
        if ctx.two_phase:
            _require(protocol, _TWO_PHASE_PROTOCOL, "two-phase commit")
        self._messages = "messages" in values and _boolean("messages", values["messages"])
        origin = (values.get("origin", "any") or "").lower()
        if origin not in ("any", "none"):
            raise OutputPluginOptionError(f'unrecognized origin value: "{origin}"', sqlstate="22023")
        self._local_only = origin == "none"

    def filter_by_origin(self, ctx: DecodingContext, origin: str | None) -> bool:
        """With origin = none, leave out transactions that have an origin."""
        del ctx
        return self._local_only and origin is not None

    # transactions

    @staticmethod
    def begin(ctx: DecodingContext, txn: Transaction) -> None:
        """Put off Begin until the first change."""
        del ctx
        txn.output_plugin_private = False

    @staticmethod
    def _begun(ctx: DecodingContext, txn: Transaction) -> None:
        if txn.output_plugin_private is False:
            txn.output_plugin_private = True
            _begin(ctx, txn, Begin(txn.final_lsn, txn.commit_time, txn.xid))

    @staticmethod
    def commit(ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Commit, if Begin was written."""
        if txn.output_plugin_private:
            _write(ctx, Commit(commit_lsn, txn.end_lsn, txn.commit_time))

    @staticmethod
    def begin_prepare(ctx: DecodingContext, txn: Transaction) -> None:
        """Begin Prepare, even of an empty transaction."""
        _begin(ctx, txn, BeginPrepare(*_prepared(txn)))

    @staticmethod
    def prepare(ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """Prepare."""
        del prepare_lsn
        _write(ctx, Prepare(*_prepared(txn)))

    @staticmethod
    def commit_prepared(ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Commit Prepared."""
        _write(ctx, CommitPrepared(commit_lsn, txn.end_lsn, txn.commit_time, txn.xid, txn.gid))

    @staticmethod
    def rollback_prepared(
        ctx: DecodingContext, txn: Transaction, prepare_end_lsn: int, prepare_time: int
    ) -> None:
        """Rollback Prepared."""
        message = RollbackPrepared(
            prepare_end_lsn, txn.end_lsn, prepare_time, txn.commit_time, txn.xid, txn.gid
        )
        _write(ctx, message)

    # changes, in a stream and outside of one

    def change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """Insert, Update or Delete."""
        self._begun(ctx, txn)
        self._describe(ctx, self._described, relation, None)
        _write(ctx, replace(change, xid=None))

    def truncate(
        self, ctx: DecodingContext, txn: Transaction, relations: Sequence[PublishedRelation], change: Truncate
    ) -> None:
        """Truncate."""
        self._begun(ctx, txn)
        for relation in relations:
            self._describe(ctx, self._described, relation, None)
        _write(ctx, replace(change, xid=None))

    def message(self, ctx: DecodingContext, txn: Transaction | None, message: LogicalMessage) -> None:
        """Message, if messages are requested."""
        if self._messages:
            if txn is not None:
                self._begun(ctx, txn)
            _write(ctx, replace(message, xid=None))

    def stream_change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """Insert, Update or Delete with its subtransaction's id."""
        self._describe(ctx, self._described_in.setdefault(txn.xid, {}), relation, change.xid)
        _write(ctx, change)

    def stream_truncate(
        self, ctx: DecodingContext, txn: Transaction, relations: Sequence[PublishedRelation], change: Truncate
    ) -> None:
        """Truncate with its subtransaction's id."""
        for relation in relations:
            self._describe(ctx, self._described_in.setdefault(txn.xid, {}), relation, change.xid)
        _write(ctx, change)

    def stream_message(self, ctx: DecodingContext, txn: Transaction, message: LogicalMessage) -> None:
        """Message with the transaction's id."""
        del txn
        if self._messages:
            _write(ctx, message)

    @staticmethod
    def _describe(
        ctx: DecodingContext,
        described: dict[int, _Description],
        relation: PublishedRelation,
        xid: int | None,
    ) -> None:
        """Write Type and Relation messages, unless the same ones were written last."""
        message, types = relation.message, relation.types
        former = described.get(message.relation_id)
        if former is not None and former[0] is message:
            return
        described[message.relation_id] = (message, types)
        if former is not None and _as_sent(*former, xid) == _as_sent(message, types, xid):
            return
        for description in _as_sent(message, types, xid):
            _write(ctx, description, last=False)

    # streams

    @staticmethod
    def stream_start(ctx: DecodingContext, txn: Transaction) -> None:
        """Stream Start, with the origin in the first block."""
        first = txn.output_plugin_private is None
        txn.output_plugin_private = True
        start = StreamStart(txn.xid, first_segment=first)
        if first:
            _begin(ctx, txn, start)
        else:
            _write(ctx, start)

    @staticmethod
    def stream_stop(ctx: DecodingContext, txn: Transaction) -> None:
        """Stream Stop."""
        del txn
        _write(ctx, StreamStop())

    def stream_abort(self, ctx: DecodingContext, txn: Transaction, abort_lsn: int) -> None:
        """Stream Abort, with LSN and time if streaming = parallel."""
        if txn.toptxn is None:
            self._described_in.pop(txn.xid, None)
        abort = AbortInfo(abort_lsn, txn.abort_time) if self._parallel else None
        _write(ctx, StreamAbort((txn.toptxn or txn).xid, txn.xid, abort))

    def stream_commit(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Stream Commit; the stream's descriptions of relations stay valid."""
        self._described |= self._described_in.pop(txn.xid, {})
        _write(ctx, StreamCommit(txn.xid, commit_lsn, txn.end_lsn, txn.commit_time))

    def stream_prepare(self, ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """Stream Prepare."""
        del prepare_lsn
        self._described_in.pop(txn.xid, None)
        _write(ctx, StreamPrepare(*_prepared(txn)))


def _as_sent(message: Relation, types: tuple[Type, ...], xid: int | None) -> tuple[Type | Relation, ...]:
    return (*(replace(each, xid=xid) for each in types), replace(message, xid=xid))


def _begin(ctx: DecodingContext, txn: Transaction, message: Begin | BeginPrepare | StreamStart) -> None:
    """Write the first message of a transaction, and then its origin, if there is one."""
    _write(ctx, message, last=txn.origin is None)
    if txn.origin is not None:
        _write(ctx, Origin(txn.origin_lsn, txn.origin))


def _write(ctx: DecodingContext, message: Message, *, last: bool = True) -> None:
    ctx.prepare_write(last=last)
    ctx.out += encode(message)
    ctx.write(last=last)


def _prepared(txn: Transaction) -> tuple[int, int, int, int, str]:
    return txn.final_lsn, txn.end_lsn, txn.prepare_time, txn.xid, txn.gid


def _protocol(value: str | None) -> int:
    try:
        protocol = int(value or "0")
    except ValueError:
        raise OutputPluginOptionError("invalid proto_version", sqlstate="22023") from None
    if not 1 <= protocol <= _NEWEST_PROTOCOL:
        bound = "1 or higher" if protocol < 1 else f"{_NEWEST_PROTOCOL} or lower"
        raise OutputPluginOptionError(
            f"client sent proto_version={protocol} but we only support protocol {bound}", sqlstate="0A000"
        )
    return protocol


def _require(protocol: int, least: int, feature: str) -> None:
    if protocol < least:
        raise OutputPluginOptionError(
            f"requested proto_version={protocol} does not support {feature}, need {least} or higher",
            sqlstate="22023",
        )


def _boolean(name: str, value: str | None) -> bool:
    try:
        return parse_bool(name, value)
    except OutputPluginOptionError:
        raise OutputPluginOptionError(f"{name} requires a Boolean value", sqlstate="42601") from None


def init() -> OutputPluginCallbacks:
    """The plugin's callbacks."""
    plugin = Pgoutput()
    return OutputPluginCallbacks(
        startup=plugin.startup,
        begin=plugin.begin,
        change=plugin.change,
        truncate=plugin.truncate,
        commit=plugin.commit,
        message=plugin.message,
        filter_by_origin=plugin.filter_by_origin,
        begin_prepare=plugin.begin_prepare,
        prepare=plugin.prepare,
        commit_prepared=plugin.commit_prepared,
        rollback_prepared=plugin.rollback_prepared,
        stream_start=plugin.stream_start,
        stream_stop=plugin.stream_stop,
        stream_abort=plugin.stream_abort,
        stream_prepare=plugin.stream_prepare,
        stream_commit=plugin.stream_commit,
        stream_change=plugin.stream_change,
        stream_message=plugin.stream_message,
        stream_truncate=plugin.stream_truncate,
    )
