"""The output plugin `test_decoding`: a line of text for each callback, with the server's wording.

Its options are booleans: include-xids (on by default), include-timestamp, force-binary, skip-empty-xacts,
only-local, include-rewrites, stream-changes (off by default). Raises OutputPluginOptionError for other
options and for values that are no booleans, and OutputTypeError for values in binary format, which only a
server can print. Source: contrib/test_decoding/test_decoding.c.

For the same WAL, the text equals that of the server's plugin line by line. It differs because pgoutput sends
only published changes, while the server's plugin ignores publications:

- A transaction without a published change is missing; the server prints BEGIN and COMMIT for it, unless
  skip-empty-xacts is on. Messages are missing if the slot was read without `messages`.
- Changes that are not published are missing: of tables outside the publications, such as materialized views,
  and of operations, rows and columns that are left out, such as generated columns. Updates and deletes of
  tables without a replica identity are missing, as they fail when they are published. A TRUNCATE lists
  partitions, but not the partitioned tables that the server lists too.
- Changes of a partition that is published as its root have the root's name and columns.
- Rewrites of tables by DDL, which include-rewrites shows, are missing.
- Names of types that are not built in may differ if only Type messages give them
  (`pgsieve.decoding.protocol.relations`).
- Single changes, messages that are not transactional, and streamed transactions have no origin, so only-local
  leaves out whole transactions only.
- With stream-changes, the blocks of a (sub)transaction that had aborted when it was read may differ: the
  server stops when it notices the abort, which depends on the plugin's catalog lookups.
- Times are in UTC; the server prints them in TimeZone.

The driver's `server_version` chooses the server's version. Before PostgreSQL 17, skip-empty-xacts does not
count messages as changes, so neither BEGIN nor the opening of a block is printed for them. Names that are key
words are in quotes, and each version has more key words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgsieve.decoding.plugins.interface import (
    Change,
    DecodingContext,
    OutputPluginCallbacks,
    OutputPluginOptions,
    OutputType,
    OutputTypeError,
    Transaction,
)
from pgsieve.decoding.plugins.options import parse_bool, unknown_option
from pgsieve.decoding.protocol.messages import (
    Binary,
    Delete,
    Insert,
    LogicalMessage,
    Null,
    Text,
    Truncate,
    TupleData,
)
from pgsieve.decoding.protocol.relations import PublishedRelation
from pgsieve.decoding.server_versions import NEWEST_SERVER
from pgsieve.decoding.values.output_datetimes import timestamptz_text
from pgsieve.decoding.values.quoting import quote_identifier, quote_literal, quote_qualified

_OPTIONS = (
    "include-xids",
    "include-timestamp",
    "force-binary",
    "skip-empty-xacts",
    "only-local",
    "include-rewrites",
    "stream-changes",
)
#: Without a value these options keep their setting; the others are turned on.
_NEED_A_VALUE = ("force-binary", "include-rewrites", "stream-changes")
_MESSAGES_BEGIN_SINCE = 170000

_BOOL = 16
_BITS = frozenset({1560, 1562})
_NUMBERS = frozenset({20, 21, 23, 26, 700, 701, 1700})


@dataclass(slots=True)
class _Wrote:
    """Whether output was written for a transaction, and for its current block."""

    xact: bool = False
    stream: bool = False


@dataclass(slots=True)
class _Prefixes:
    """The texts before a relation's values: the table, and ` name[type]:` for each column.

    They come from the relation's last description.
    """

    relation: PublishedRelation
    table: bytes
    columns: list[bytes]


class TestDecoding:
    """The plugin's state: its options."""

    def __init__(self) -> None:
        self._on = dict.fromkeys(_OPTIONS, False) | {"include-xids": True}
        self._server_version = NEWEST_SERVER
        self._prefixes: dict[int, _Prefixes] = {}

    # startup and filters

    def startup(self, ctx: DecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Read the options."""
        del is_init
        for name, value in ctx.output_plugin_options:
            if name not in self._on:
                raise unknown_option(name, value, _OPTIONS)
            if value is not None or name not in _NEED_A_VALUE:
                self._on[name] = parse_bool(name, value)
        options.output_type = OutputType.BINARY if self._on["force-binary"] else OutputType.TEXT
        options.receive_rewrites = self._on["include-rewrites"]
        ctx.streaming = ctx.streaming and self._on["stream-changes"]
        self._server_version = ctx.server_version

    def filter_by_origin(self, ctx: DecodingContext, origin: str | None) -> bool:
        """With only-local, leave out transactions that have an origin."""
        del ctx
        return self._on["only-local"] and origin is not None

    @staticmethod
    def filter_prepare(ctx: DecodingContext, xid: int, gid: str) -> bool:
        """Put off transactions with `_nodecode` in their gid until COMMIT PREPARED."""
        del ctx, xid
        return "_nodecode" in gid

    # transactions

    def begin(self, ctx: DecodingContext, txn: Transaction) -> None:
        """BEGIN, also of a prepared transaction.

        With skip-empty-xacts it is put off until the first change.
        """
        txn.output_plugin_private = _Wrote()
        if not self._on["skip-empty-xacts"]:
            self._write(ctx, self._begin_line(txn))

    def _begin_line(self, txn: Transaction) -> str:
        return "BEGIN" + self._xid(" {}", txn)

    def commit(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """COMMIT."""
        del commit_lsn
        if not self._skips(txn):
            self._write(ctx, "COMMIT" + self._xid(" {}", txn) + self._at(txn.commit_time))

    def prepare(self, ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """PREPARE TRANSACTION."""
        del prepare_lsn
        if not self._skips(txn):
            self._write(ctx, self._two_phase("PREPARE TRANSACTION", txn, txn.prepare_time))

    def commit_prepared(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """COMMIT PREPARED."""
        del commit_lsn
        self._write(ctx, self._two_phase("COMMIT PREPARED", txn, txn.commit_time))

    def rollback_prepared(
        self, ctx: DecodingContext, txn: Transaction, prepare_end_lsn: int, prepare_time: int
    ) -> None:
        """ROLLBACK PREPARED, with the time of the rollback."""
        del prepare_end_lsn, prepare_time
        self._write(ctx, self._two_phase("ROLLBACK PREPARED", txn, txn.commit_time))

    def _two_phase(self, command: str, txn: Transaction, time: int) -> str:
        return f"{command} {quote_literal(txn.gid)}{self._xid(', txid {}', txn)}{self._at(time)}"

    # changes

    def change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """The table, the operation, and its old and new rows."""
        self._begun(ctx, txn)
        prefixes = self._prefixes_of(relation)
        ctx.prepare_write(last=True)
        out = ctx.out
        out += prefixes.table
        if isinstance(change, Insert):
            out += b" INSERT:"
            _print_tuple(out, prefixes, change.new)
        elif isinstance(change, Delete):
            out += b" DELETE:"
            _print_tuple(out, prefixes, change.old.columns, skip_nulls=True)
        else:
            out += b" UPDATE:"
            if change.old is not None:
                out += b" old-key:"
                _print_tuple(out, prefixes, change.old.columns, skip_nulls=True)
                out += b" new-tuple:"
            _print_tuple(out, prefixes, change.new)
        ctx.write(last=True)

    def truncate(
        self,
        ctx: DecodingContext,
        txn: Transaction,
        relations: Sequence[PublishedRelation],
        change: Truncate,
    ) -> None:
        """The tables and the options of a TRUNCATE."""
        self._begun(ctx, txn)
        flags = " restart_seqs" * change.restart_identity + " cascade" * change.cascade
        tables = ", ".join(map(self._qualified, relations))
        self._write(ctx, f"table {tables}: TRUNCATE:{flags or ' (no-flags)'}")

    def message(self, ctx: DecodingContext, txn: Transaction | None, message: LogicalMessage) -> None:
        """A message with its content."""
        if txn is not None and self._server_version >= _MESSAGES_BEGIN_SINCE:
            self._begun(ctx, txn)
        self._write(ctx, f"message: {_described(message)} content:", message.content)

    def _begun(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Write the BEGIN that skip-empty-xacts put off."""
        wrote: _Wrote = txn.output_plugin_private
        if self._on["skip-empty-xacts"] and not wrote.xact:
            self._write(ctx, self._begin_line(txn), last=False)
        wrote.xact = True

    # streams

    def stream_start(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Open a block; with skip-empty-xacts this is put off until the first change."""
        if txn.output_plugin_private is None:
            txn.output_plugin_private = _Wrote()
        txn.output_plugin_private.stream = False
        if not self._on["skip-empty-xacts"]:
            self._write(ctx, self._stream_line("opening a streamed block for transaction", txn))

    def stream_stop(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Close the block."""
        if not self._on["skip-empty-xacts"] or txn.output_plugin_private.stream:
            self._write(ctx, self._stream_line("closing a streamed block for transaction", txn))

    def stream_abort(self, ctx: DecodingContext, txn: Transaction, abort_lsn: int) -> None:
        """A streamed transaction, or one of its subtransactions, was aborted."""
        del abort_lsn
        if not self._skips(txn.toptxn or txn):
            self._write(ctx, self._stream_line("aborting streamed (sub)transaction", txn))

    def stream_prepare(self, ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """PREPARE TRANSACTION of a streamed transaction."""
        del prepare_lsn
        if not self._skips(txn):
            gid = quote_literal(txn.gid)
            named = f"TXN {gid}, txid {txn.xid}" if self._on["include-xids"] else gid
            self._write(ctx, f"preparing streamed transaction {named}{self._at(txn.prepare_time)}")

    def stream_commit(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """COMMIT of a streamed transaction."""
        del commit_lsn
        if not self._skips(txn):
            line = self._stream_line("committing streamed transaction", txn)
            self._write(ctx, line + self._at(txn.commit_time))

    def stream_change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """A line for a change, without its values, because the change may still be aborted."""
        del relation, change
        self._streamed(ctx, txn)
        self._write(ctx, self._for_transaction("streaming change for", txn))

    def stream_truncate(
        self,
        ctx: DecodingContext,
        txn: Transaction,
        relations: Sequence[PublishedRelation],
        change: Truncate,
    ) -> None:
        """A line for a TRUNCATE."""
        del relations, change
        self._streamed(ctx, txn)
        self._write(ctx, self._for_transaction("streaming truncate for", txn))

    def stream_message(self, ctx: DecodingContext, txn: Transaction, message: LogicalMessage) -> None:
        """A transactional message without its content."""
        if self._server_version >= _MESSAGES_BEGIN_SINCE:
            self._streamed(ctx, txn)
        self._write(ctx, f"streaming message: {_described(message)}")

    def _streamed(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Write the opening of a block that skip-empty-xacts put off."""
        wrote: _Wrote = txn.output_plugin_private
        if self._on["skip-empty-xacts"] and not wrote.stream:
            line = self._stream_line("opening a streamed block for transaction", txn)
            self._write(ctx, line, last=False)
        wrote.xact = wrote.stream = True

    # text

    def _skips(self, txn: Transaction) -> bool:
        return self._on["skip-empty-xacts"] and not txn.output_plugin_private.xact

    def _xid(self, form: str, txn: Transaction) -> str:
        return form.format(txn.xid) if self._on["include-xids"] else ""

    def _stream_line(self, what: str, txn: Transaction) -> str:
        return what + self._xid(" TXN {}", txn)

    def _for_transaction(self, what: str, txn: Transaction) -> str:
        return f"{what} {self._xid('TXN {}', txn) or 'transaction'}"

    def _at(self, time: int) -> str:
        return f" (at {timestamptz_text(time)})" if self._on["include-timestamp"] else ""

    def _prefixes_of(self, relation: PublishedRelation) -> _Prefixes:
        prefixes = self._prefixes.get(relation.message.relation_id)
        if prefixes is None or prefixes.relation is not relation:
            version = self._server_version
            columns = [
                f" {quote_identifier(column.name, version)}[{type_name}]:".encode()
                for column, type_name in zip(relation.message.columns, relation.type_names, strict=True)
            ]
            prefixes = _Prefixes(relation, f"table {self._qualified(relation)}:".encode(), columns)
            self._prefixes[relation.message.relation_id] = prefixes
        return prefixes

    def _qualified(self, relation: PublishedRelation) -> str:
        return quote_qualified(relation.namespace, relation.message.name, self._server_version)

    @staticmethod
    def _write(ctx: DecodingContext, line: str, content: bytes = b"", *, last: bool = True) -> None:
        ctx.prepare_write(last=last)
        ctx.out += line.encode() + content
        ctx.write(last=last)


def _described(message: LogicalMessage) -> str:
    return f"transactional: {message.transactional:d} prefix: {message.prefix}, sz: {len(message.content)}"


def _print_tuple(out: bytearray, prefixes: _Prefixes, values: TupleData, *, skip_nulls: bool = False) -> None:
    columns = prefixes.relation.message.columns
    for prefix, column, value in zip(prefixes.columns, columns, values, strict=True):
        match value:
            case Text(content):
                out += prefix + _literal(column.type_oid, content)
            case Null():
                if not skip_nulls:
                    out += prefix + b"null"
            case Binary():
                raise OutputTypeError(
                    f'column "{column.name}" of relation "{prefixes.relation.message.name}" is in binary format',
                    hint="read the slot without the option binary",
                    sqlstate="0A000",
                )
            case _:
                out += prefix + b"unchanged-toast-datum"


def _literal(type_oid: int, content: bytes) -> bytes:
    """A value as an SQL literal of the form that the server's plugin prints for its type."""
    if type_oid in _NUMBERS:
        return content
    if type_oid == _BOOL:
        return b"true" if content == b"t" else b"false"
    quoted = content.replace(b"'", b"''")
    return b"B'" + content + b"'" if type_oid in _BITS else b"'" + quoted + b"'"


def init() -> OutputPluginCallbacks:
    """The plugin's callbacks."""
    plugin = TestDecoding()
    return OutputPluginCallbacks(
        startup=plugin.startup,
        begin=plugin.begin,
        change=plugin.change,
        truncate=plugin.truncate,
        commit=plugin.commit,
        message=plugin.message,
        filter_by_origin=plugin.filter_by_origin,
        filter_prepare=plugin.filter_prepare,
        begin_prepare=plugin.begin,
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
