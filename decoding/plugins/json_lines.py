r"""The output plugin `json`: writes a line with one JSON object for each callback. Values are exact.

=====================  ==============================================================================
`action`               the callback: begin, insert, update, delete, truncate, message, commit,
                       begin_prepare, prepare, commit_prepared, rollback_prepared, stream_start,
                       stream_stop, stream_abort, stream_prepare, stream_commit
`xid`                  the transaction; in a stream_abort of a subtransaction also its `subxid`
`lsn`, `end_lsn`       the position of the commit, prepare or message, and the position after it
`time`                 the time of the commit or prepare, ISO, in UTC; in a rollback_prepared the time
                       of the rollback
`gid`, `origin`        the gid and the origin of the transaction, if it has them
`schema`, `table`      the relation; a truncate has `tables` instead, a list of such pairs, and
                       `cascade` and `restart_identity`
`old`, `new`           the old and the new row, by column; `old` has the columns of the replica
                       identity, or all columns if `old_is_full` is true
`unchanged`            the columns whose TOASTed value was not sent; these are not in `new`
`transactional`,       the properties of a message; `content_hex` replaces `content` if the content
`prefix`, `content`    is not UTF-8
=====================  ==============================================================================

Integers and booleans are JSON's numbers and booleans, and NULL is null. Any other value is a string with PostgreSQL's
text, because many readers of JSON round numbers.

With the option stream-changes (default off), the plugin also writes transactions in progress. The objects of such a
transaction come in blocks between stream_start and stream_stop. A change in a block has the `xid` of its
subtransaction.

Raises OutputPluginOptionError for an option other than stream-changes. Raises OutputTypeError for values in binary
format, and for values and names that are not UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.plugins.interface import (
    Change,
    DecodingContext,
    OutputPluginCallbacks,
    OutputPluginOptions,
    OutputType,
    OutputTypeError,
    Transaction,
)
from pgsieve.decoding.plugins.options import parse_bool, unknown_option_error
from pgsieve.decoding.protocol.messages import (
    Delete,
    Insert,
    LogicalMessage,
    Null,
    OldRow,
    RelationColumn,
    Text,
    Truncate,
    TupleData,
    Unchanged,
    Update,
)
from pgsieve.decoding.protocol.relations import PublishedRelation
from pgsieve.decoding.values.output_datetimes import format_timestamptz

_STREAM_CHANGES = "stream-changes"
_BOOL = 16
_INTEGERS = frozenset({20, 21, 23, 26})
_ACTIONS: Mapping[type[Change], str] = {Insert: "insert", Update: "update", Delete: "delete"}


def _startup(ctx: DecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
    del is_init
    is_streaming = False
    for name, value in ctx.output_plugin_options:
        if name != _STREAM_CHANGES:
            raise unknown_option_error(name, value, (_STREAM_CHANGES,))
        is_streaming = parse_bool(name, value)
    ctx.streaming = ctx.streaming and is_streaming
    options.output_type = OutputType.TEXT


def _write(ctx: DecodingContext, action: str, fields: Mapping[str, Any]) -> None:
    """Write one JSON object; fields with the value None are left out."""
    present_fields = {name: value for name, value in fields.items() if value is not None}
    ctx.prepare_write(last=True)
    text = json.dumps({"action": action, **present_fields}, ensure_ascii=False, separators=(",", ":"))
    with suppress(UnicodeEncodeError):  # This error would contain the values of the row.
        ctx.out += text.encode()
        ctx.write(last=True)
        return
    raise OutputTypeError(
        "the name of a table or column, a prefix, an origin or a gid is not UTF-8",
        hint="use the output plugin test_decoding or pgoutput, which write the bytes of such names",
        sqlstate="22021",
    )


def _begin(ctx: DecodingContext, txn: Transaction) -> None:
    time = format_timestamptz(txn.commit_time)
    lsn = format_lsn(txn.final_lsn)
    _write(ctx, "begin", {"xid": txn.xid, "lsn": lsn, "time": time, "origin": txn.origin})


def _begin_prepare(ctx: DecodingContext, txn: Transaction) -> None:
    _write(ctx, "begin_prepare", {**_make_prepare_fields(txn), "origin": txn.origin})


def _prepare(ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
    del prepare_lsn
    _write(ctx, "prepare", _make_prepare_fields(txn))


def _stream_prepare(ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
    del prepare_lsn
    _write(ctx, "stream_prepare", _make_prepare_fields(txn))


def _make_prepare_fields(txn: Transaction) -> dict[str, Any]:
    time = format_timestamptz(txn.prepare_time)
    return {"xid": txn.xid, "gid": txn.gid, **_make_lsn_fields(txn), "time": time}


def _commit(ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
    del commit_lsn
    _write(ctx, "commit", _make_commit_fields(txn))


def _commit_prepared(ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
    del commit_lsn
    _write(ctx, "commit_prepared", {**_make_commit_fields(txn), "gid": txn.gid})


def _stream_commit(ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
    del commit_lsn
    _write(ctx, "stream_commit", _make_commit_fields(txn))


def _make_commit_fields(txn: Transaction) -> dict[str, Any]:
    return {"xid": txn.xid, **_make_lsn_fields(txn), "time": format_timestamptz(txn.commit_time)}


def _make_lsn_fields(txn: Transaction) -> dict[str, str]:
    return {"lsn": format_lsn(txn.final_lsn), "end_lsn": format_lsn(txn.end_lsn)}


def _rollback_prepared(
    ctx: DecodingContext, txn: Transaction, prepare_end_lsn: int, prepare_time: int
) -> None:
    del prepare_end_lsn, prepare_time
    time = format_timestamptz(txn.commit_time)
    end_lsn = format_lsn(txn.end_lsn)
    _write(ctx, "rollback_prepared", {"xid": txn.xid, "gid": txn.gid, "end_lsn": end_lsn, "time": time})


def _stream_start(ctx: DecodingContext, txn: Transaction) -> None:
    _write(ctx, "stream_start", {"xid": txn.xid})


def _stream_stop(ctx: DecodingContext, txn: Transaction) -> None:
    _write(ctx, "stream_stop", {"xid": txn.xid})


def _stream_abort(ctx: DecodingContext, txn: Transaction, abort_lsn: int) -> None:
    del abort_lsn
    fields = {"xid": txn.xid} if txn.toptxn is None else {"xid": txn.toptxn.xid, "subxid": txn.xid}
    _write(ctx, "stream_abort", fields)


def _change(ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change) -> None:
    old = None if isinstance(change, Insert) else change.old
    new = None if isinstance(change, Delete) else change.new
    columns = relation.message.columns
    unchanged_columns = [
        c.name for c, value in zip(columns, new or (), strict=False) if isinstance(value, Unchanged)
    ]
    is_full = isinstance(old, OldRow)
    fields = {
        "xid": change.xid or txn.xid,
        "schema": relation.namespace,
        "table": relation.message.name,
        "old_is_full": True if is_full else None,
        "old": None if old is None else _convert_row(relation, old.columns, keys_only=not is_full),
        "new": None if new is None else _convert_row(relation, new),
        "unchanged": unchanged_columns or None,
    }
    _write(ctx, _ACTIONS[type(change)], fields)


def _truncate(
    ctx: DecodingContext, txn: Transaction, relations: Sequence[PublishedRelation], change: Truncate
) -> None:
    fields = {
        "xid": change.xid or txn.xid,
        "tables": [[relation.namespace, relation.message.name] for relation in relations],
        "cascade": change.cascade,
        "restart_identity": change.restart_identity,
    }
    _write(ctx, "truncate", fields)


def _message(ctx: DecodingContext, txn: Transaction | None, message: LogicalMessage) -> None:
    content, content_hex = None, None
    try:
        content = message.content.decode()
    except UnicodeDecodeError:
        content_hex = message.content.hex()
    fields = {
        "xid": txn.xid if txn else None,
        "lsn": format_lsn(message.lsn),
        "transactional": message.transactional,
        "prefix": message.prefix,
        "content": content,
        "content_hex": content_hex,
    }
    _write(ctx, "message", fields)


def _convert_row(
    relation: PublishedRelation, values: TupleData, *, keys_only: bool = False
) -> dict[str, Any]:
    """Return the values of a row by column; with `keys_only` only those of the columns in the replica identity."""
    row: dict[str, str | int | bool | None] = {}
    for column, value in zip(relation.message.columns, values, strict=True):
        if isinstance(value, Null):
            if column.is_key or not keys_only:
                row[column.name] = None
        elif isinstance(value, Text):
            row[column.name] = _convert_value(relation, column, value.content)
        elif not isinstance(value, Unchanged):
            raise OutputTypeError(
                f'column "{column.name}" of relation "{relation.message.name}" is in binary format',
                hint="read the slot without the option binary",
                sqlstate="0A000",
            )
    return row


def _convert_value(relation: PublishedRelation, column: RelationColumn, content: bytes) -> str | int | bool:
    with suppress(ValueError):  # The message of this error would contain the value.
        if column.type_oid in _INTEGERS:
            return int(content)
        return content == b"t" if column.type_oid == _BOOL else str(content, "utf-8")
    raise OutputTypeError(
        f'a value of column "{column.name}" of relation "{relation.message.name}" is not its type\'s text in UTF-8',
        hint="set client_encoding to UTF8 on the replication connection",
        sqlstate="22021",
    )


def init() -> OutputPluginCallbacks:
    """Return the callbacks of the plugin, which has no state."""
    return OutputPluginCallbacks(
        startup=_startup,
        begin=_begin,
        change=_change,
        truncate=_truncate,
        commit=_commit,
        message=_message,
        begin_prepare=_begin_prepare,
        prepare=_prepare,
        commit_prepared=_commit_prepared,
        rollback_prepared=_rollback_prepared,
        stream_start=_stream_start,
        stream_stop=_stream_stop,
        stream_abort=_stream_abort,
        stream_prepare=_stream_prepare,
        stream_commit=_stream_commit,
        stream_change=_change,
        stream_message=_message,
        stream_truncate=_truncate,
    )
