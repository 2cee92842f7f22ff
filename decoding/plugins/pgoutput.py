"""The output plugin `pgoutput`: converts messages to another version of pgoutput's protocol, or to other options.

For example, it turns messages of version 4 with streamed and prepared transactions into messages of version 1, for a
reader that supports only version 1. The options have the server's meaning: proto_version (required), streaming
(off, on, parallel), two_phase, messages (off by default), origin (any, none). Values keep their format, text or
binary. The plugin has no option for publications, because the server has already applied them.

As on the server, the plugin writes no transaction without changes, except a prepared transaction. It describes a
relation before the relation's first change, again after its description has changed, and again within each streamed
transaction.

With streaming = parallel, a Stream Abort has an LSN and a time. If the input has no such LSN and time, they are 0.
Raises OutputPluginOptionError, with pgoutput's messages and codes (src/backend/replication/pgoutput/pgoutput.c).

PostgreSQL documentation, Logical Streaming Replication Parameters.
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
    """The plugin's state: its options, and the descriptions of relations that it wrote last.

    The field `output_plugin_private` of a transaction says whether the transaction's Begin or Stream Start was written.
    The field is None before the plugin gets the transaction.
    """

    def __init__(self) -> None:
        self._sends_messages = self._is_local_only = self._is_parallel = False
        self._descriptions: dict[int, _Description] = {}
        self._stream_descriptions: dict[int, dict[int, _Description]] = {}

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
                    hint=f"options: {', '.join(_OPTIONS)}; the server applies publications when the slot is read",
                    sqlstate="XX000",
                )
            if name in values:
                raise OutputPluginOptionError("conflicting or redundant options", sqlstate="42601")
            values[name] = value
        protocol = _parse_protocol(values.get("proto_version"))
        streaming = (values.get("streaming", "off") or "on").lower()
        self._is_parallel = streaming == "parallel"
        ctx.streaming = self._is_parallel or _parse_boolean("streaming", streaming)
        if ctx.streaming:
            _require_protocol(protocol, _STREAM_PROTOCOL, "streaming")
        if self._is_parallel:
            _require_protocol(protocol, _PARALLEL_PROTOCOL, "parallel streaming")
        ctx.two_phase = "two_phase" in values and _parse_boolean("two_phase", values["two_phase"])
        if ctx.two_phase:
            _require_protocol(protocol, _TWO_PHASE_PROTOCOL, "two-phase commit")
        self._sends_messages = "messages" in values and _parse_boolean("messages", values["messages"])
        origin = (values.get("origin", "any") or "").lower()
        if origin not in ("any", "none"):
            raise OutputPluginOptionError(f'unrecognized origin value: "{origin}"', sqlstate="22023")
        self._is_local_only = origin == "none"

    def filter_by_origin(self, ctx: DecodingContext, origin: str | None) -> bool:
        """With origin = none, drop transactions that have an origin."""
        del ctx
        return self._is_local_only and origin is not None

    # transactions

    @staticmethod
    def begin(ctx: DecodingContext, txn: Transaction) -> None:
        """Write nothing: the Begin message waits for the first change."""
        del ctx
        txn.output_plugin_private = False

    @staticmethod
    def _write_deferred_begin(ctx: DecodingContext, txn: Transaction) -> None:
        if txn.output_plugin_private is False:
            txn.output_plugin_private = True
            _write_first_message(ctx, txn, Begin(txn.final_lsn, txn.commit_time, txn.xid))

    @staticmethod
    def commit(ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Write Commit if Begin was written."""
        if txn.output_plugin_private:
            _write(ctx, Commit(commit_lsn, txn.end_lsn, txn.commit_time))

    @staticmethod
    def begin_prepare(ctx: DecodingContext, txn: Transaction) -> None:
        """Write Begin Prepare, even for an empty transaction."""
        _write_first_message(ctx, txn, BeginPrepare(*_list_prepare_fields(txn)))

    @staticmethod
    def prepare(ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """Write Prepare."""
        del prepare_lsn
        _write(ctx, Prepare(*_list_prepare_fields(txn)))

    @staticmethod
    def commit_prepared(ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Write Commit Prepared."""
        _write(ctx, CommitPrepared(commit_lsn, txn.end_lsn, txn.commit_time, txn.xid, txn.gid))

    @staticmethod
    def rollback_prepared(
        ctx: DecodingContext, txn: Transaction, prepare_end_lsn: int, prepare_time: int
    ) -> None:
        """Write Rollback Prepared."""
        message = RollbackPrepared(
            prepare_end_lsn, txn.end_lsn, prepare_time, txn.commit_time, txn.xid, txn.gid
        )
        _write(ctx, message)

    # changes

    def change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """Write Insert, Update or Delete."""
        self._write_deferred_begin(ctx, txn)
        self._describe(ctx, self._descriptions, relation, None)
        _write(ctx, replace(change, xid=None))

    def truncate(
        self, ctx: DecodingContext, txn: Transaction, relations: Sequence[PublishedRelation], change: Truncate
    ) -> None:
        """Write Truncate."""
        self._write_deferred_begin(ctx, txn)
        for relation in relations:
            self._describe(ctx, self._descriptions, relation, None)
        _write(ctx, replace(change, xid=None))

    def message(self, ctx: DecodingContext, txn: Transaction | None, message: LogicalMessage) -> None:
        """Write Message if messages are requested."""
        if self._sends_messages:
            if txn is not None:
                self._write_deferred_begin(ctx, txn)
            _write(ctx, replace(message, xid=None))

    def stream_change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """Write Insert, Update or Delete with its subtransaction's xid."""
        self._describe(ctx, self._stream_descriptions.setdefault(txn.xid, {}), relation, change.xid)
        _write(ctx, change)

    def stream_truncate(
        self, ctx: DecodingContext, txn: Transaction, relations: Sequence[PublishedRelation], change: Truncate
    ) -> None:
        """Write Truncate with its subtransaction's xid."""
        for relation in relations:
            self._describe(ctx, self._stream_descriptions.setdefault(txn.xid, {}), relation, change.xid)
        _write(ctx, change)

    def stream_message(self, ctx: DecodingContext, txn: Transaction, message: LogicalMessage) -> None:
        """Write Message with the xid that it came with, if messages are requested."""
        del txn
        if self._sends_messages:
            _write(ctx, message)

    @staticmethod
    def _describe(
        ctx: DecodingContext,
        descriptions: dict[int, _Description],
        relation: PublishedRelation,
        xid: int | None,
    ) -> None:
        """Write the Type and Relation messages of a relation, unless the plugin has already written the same ones."""
        message, types = relation.message, relation.type_messages
        last_description = descriptions.get(message.relation_id)
        if last_description is not None and last_description[0] is message:
            return
        descriptions[message.relation_id] = (message, types)
        if last_description is not None and _make_description_messages(
            *last_description, xid
        ) == _make_description_messages(message, types, xid):
            return
        for description in _make_description_messages(message, types, xid):
            _write(ctx, description, last=False)

    # streams

    @staticmethod
    def stream_start(ctx: DecodingContext, txn: Transaction) -> None:
        """Write Stream Start; in the first block of a transaction also the origin."""
        is_first = txn.output_plugin_private is None
        txn.output_plugin_private = True
        message = StreamStart(txn.xid, first_segment=is_first)
        if is_first:
            _write_first_message(ctx, txn, message)
        else:
            _write(ctx, message)

    @staticmethod
    def stream_stop(ctx: DecodingContext, txn: Transaction) -> None:
        """Write Stream Stop."""
        del txn
        _write(ctx, StreamStop())

    def stream_abort(self, ctx: DecodingContext, txn: Transaction, abort_lsn: int) -> None:
        """Write Stream Abort, with LSN and time if streaming = parallel."""
        if txn.toptxn is None:
            self._stream_descriptions.pop(txn.xid, None)
        abort = AbortInfo(abort_lsn, txn.abort_time) if self._is_parallel else None
        _write(ctx, StreamAbort((txn.toptxn or txn).xid, txn.xid, abort))

    def stream_commit(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Write Stream Commit. From now on all transactions use the descriptions of relations that came in this one."""
        self._descriptions |= self._stream_descriptions.pop(txn.xid, {})
        _write(ctx, StreamCommit(txn.xid, commit_lsn, txn.end_lsn, txn.commit_time))

    def stream_prepare(self, ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """Write Stream Prepare."""
        del prepare_lsn
        self._stream_descriptions.pop(txn.xid, None)
        _write(ctx, StreamPrepare(*_list_prepare_fields(txn)))


def _make_description_messages(
    message: Relation, types: tuple[Type, ...], xid: int | None
) -> tuple[Type | Relation, ...]:
    return (*(replace(type_message, xid=xid) for type_message in types), replace(message, xid=xid))


def _write_first_message(
    ctx: DecodingContext, txn: Transaction, message: Begin | BeginPrepare | StreamStart
) -> None:
    """Write the first message of a transaction, then the origin if it has one."""
    _write(ctx, message, last=txn.origin is None)
    if txn.origin is not None:
        _write(ctx, Origin(txn.origin_lsn, txn.origin))


def _write(ctx: DecodingContext, message: Message, *, last: bool = True) -> None:
    """Write a message; `last` is false if the same callback then writes another message."""
    ctx.prepare_write(last=last)
    ctx.out += encode(message)
    ctx.write(last=last)


def _list_prepare_fields(txn: Transaction) -> tuple[int, int, int, int, str]:
    return txn.final_lsn, txn.end_lsn, txn.prepare_time, txn.xid, txn.gid


def _parse_protocol(value: str | None) -> int:
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


def _require_protocol(protocol: int, minimum: int, feature: str) -> None:
    if protocol < minimum:
        raise OutputPluginOptionError(
            f"requested proto_version={protocol} does not support {feature}, need {minimum} or higher",
            sqlstate="22023",
        )


def _parse_boolean(name: str, value: str | None) -> bool:
    try:
        return parse_bool(name, value)
    except OutputPluginOptionError:
        raise OutputPluginOptionError(f"{name} requires a Boolean value", sqlstate="42601") from None


def init() -> OutputPluginCallbacks:
    """Return the plugin's callbacks."""
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
