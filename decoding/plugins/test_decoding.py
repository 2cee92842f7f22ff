"""The output plugin `test_decoding`: writes a line of text for each callback, with the server's wording.

Its options are booleans: include-xids (on by default), include-timestamp, force-binary, skip-empty-xacts,
only-local, include-rewrites, stream-changes (all off by default). Raises OutputPluginOptionError for other
options and for values that are not booleans. Raises OutputTypeError for values in binary format, because only a
server can print these. Source: contrib/test_decoding/test_decoding.c.

For the same WAL, the lines equal those of the server's plugin, with the exceptions below. Most exceptions have one
reason: this plugin gets its changes from pgoutput, which sends only what the publications publish. The server's plugin
ignores publications.

- A transaction without a published change is missing. The server prints BEGIN and COMMIT for it, unless
  skip-empty-xacts is on.
- Messages of pg_logical_emit_message() are missing if the slot was read without pgoutput's option `messages`.
- Tables, operations, rows and columns that are not published are missing, such as materialized views and
  generated columns. Also missing are updates and deletes of tables without a replica identity: the server refuses them
  while they are published.
- A TRUNCATE lists partitions, but not the partitioned tables above them. The server lists both.
- If a partition is published as its root, its changes have the root's name and columns.
- Rewrites of tables by DDL are missing. The server prints these with include-rewrites.
- Names of types that are not built in can differ if they come from Type messages
  (`pgsieve.decoding.protocol.relations` says how).
- The origin is not known for single changes, messages that are not transactional, and streamed transactions. So
  only-local drops only whole transactions that are not streamed.
- With stream-changes, a transaction or subtransaction may have aborted before the server decoded it. Then its blocks
  can differ. A server notices such an abort when its plugin looks up the catalog, and then stops decoding the
  transaction. pgoutput and the server's test_decoding look up the catalog at different changes.
- Times are in UTC. The server prints them in the time zone of TimeZone.

The text is that of a server of the version `server_version`, which the caller chooses (`PluginDriver`). Before
PostgreSQL 17, messages do not count as changes for skip-empty-xacts. So before a transaction's messages, neither BEGIN
nor the opening of a block is printed, unless a change came first. Names that are key words are in quotes, and each version
has more key words.
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
from pgsieve.decoding.plugins.options import parse_bool, unknown_option_error
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
from pgsieve.decoding.values.output_datetimes import format_timestamptz
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
#: If an option comes without a value, the server turns it on; but these options keep their setting.
_OPTIONS_THAT_NEED_A_VALUE = ("force-binary", "include-rewrites", "stream-changes")
_VERSION_WHERE_MESSAGES_COUNT = 170000

_BOOL = 16
_BIT_STRINGS = frozenset({1560, 1562})
_NUMBERS = frozenset({20, 21, 23, 26, 700, 701, 1700})


@dataclass(slots=True)
class _OutputState:
    """Whether the plugin has written output for a transaction, and for its current streamed block."""

    has_transaction_output: bool = False
    has_block_output: bool = False


@dataclass(slots=True)
class _Prefixes:
    """The texts that precede the values of a relation: `table name:`, and ` name[type]:` for each column."""

    relation: PublishedRelation
    table_prefix: bytes
    column_prefixes: list[bytes]


class TestDecoding:
    """The plugin's state: its options, and the prefixes of each relation by its id."""

    def __init__(self) -> None:
        self._settings = dict.fromkeys(_OPTIONS, False) | {"include-xids": True}
        self._server_version = NEWEST_SERVER
        self._prefixes: dict[int, _Prefixes] = {}

    # startup and filters

    def startup(self, ctx: DecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Read the options."""
        del is_init
        for name, value in ctx.output_plugin_options:
            if name not in self._settings:
                raise unknown_option_error(name, value, _OPTIONS)
            if value is not None or name not in _OPTIONS_THAT_NEED_A_VALUE:
                self._settings[name] = parse_bool(name, value)
        options.output_type = OutputType.BINARY if self._settings["force-binary"] else OutputType.TEXT
        options.receive_rewrites = self._settings["include-rewrites"]
        ctx.streaming = ctx.streaming and self._settings["stream-changes"]
        self._server_version = ctx.server_version

    def filter_by_origin(self, ctx: DecodingContext, origin: str | None) -> bool:
        """With only-local, drop transactions that have an origin."""
        del ctx
        return self._settings["only-local"] and origin is not None

    @staticmethod
    def filter_prepare(ctx: DecodingContext, xid: int, gid: str) -> bool:
        """Decode a transaction with `_nodecode` in its gid only at COMMIT PREPARED."""
        del ctx, xid
        return "_nodecode" in gid

    # transactions

    def begin(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Write BEGIN, also for a prepared transaction; with skip-empty-xacts BEGIN waits for the first change."""
        txn.output_plugin_private = _OutputState()
        if not self._settings["skip-empty-xacts"]:
            self._write(ctx, self._format_begin(txn))

    def _format_begin(self, txn: Transaction) -> str:
        return "BEGIN" + self._format_xid(" {}", txn)

    def commit(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Write COMMIT."""
        del commit_lsn
        if not self._is_skipped(txn):
            self._write(ctx, "COMMIT" + self._format_xid(" {}", txn) + self._format_time(txn.commit_time))

    def prepare(self, ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """Write PREPARE TRANSACTION."""
        del prepare_lsn
        if not self._is_skipped(txn):
            self._write(ctx, self._format_two_phase("PREPARE TRANSACTION", txn, txn.prepare_time))

    def commit_prepared(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Write COMMIT PREPARED."""
        del commit_lsn
        self._write(ctx, self._format_two_phase("COMMIT PREPARED", txn, txn.commit_time))

    def rollback_prepared(
        self, ctx: DecodingContext, txn: Transaction, prepare_end_lsn: int, prepare_time: int
    ) -> None:
        """Write ROLLBACK PREPARED, with the time of the rollback."""
        del prepare_end_lsn, prepare_time
        self._write(ctx, self._format_two_phase("ROLLBACK PREPARED", txn, txn.commit_time))

    def _format_two_phase(self, command: str, txn: Transaction, time: int) -> str:
        return (
            f"{command} {quote_literal(txn.gid)}{self._format_xid(', txid {}', txn)}{self._format_time(time)}"
        )

    # changes

    def change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """Write the table, the operation, and the old and new rows."""
        self._write_deferred_begin(ctx, txn)
        prefixes = self._find_prefixes(relation)
        ctx.prepare_write(last=True)
        output_bytes = ctx.out
        output_bytes += prefixes.table_prefix
        if isinstance(change, Insert):
            output_bytes += b" INSERT:"
            _print_tuple(output_bytes, prefixes, change.new)
        elif isinstance(change, Delete):
            output_bytes += b" DELETE:"
            _print_tuple(output_bytes, prefixes, change.old.columns, skip_nulls=True)
        else:
            output_bytes += b" UPDATE:"
            if change.old is not None:
                output_bytes += b" old-key:"
                _print_tuple(output_bytes, prefixes, change.old.columns, skip_nulls=True)
                output_bytes += b" new-tuple:"
            _print_tuple(output_bytes, prefixes, change.new)
        ctx.write(last=True)

    def truncate(
        self,
        ctx: DecodingContext,
        txn: Transaction,
        relations: Sequence[PublishedRelation],
        change: Truncate,
    ) -> None:
        """Write the tables and the options of a TRUNCATE."""
        self._write_deferred_begin(ctx, txn)
        flags = " restart_seqs" * change.restart_identity + " cascade" * change.cascade
        tables = ", ".join(map(self._quote_relation, relations))
        self._write(ctx, f"table {tables}: TRUNCATE:{flags or ' (no-flags)'}")

    def message(self, ctx: DecodingContext, txn: Transaction | None, message: LogicalMessage) -> None:
        """Write a message with its content."""
        if txn is not None and self._server_version >= _VERSION_WHERE_MESSAGES_COUNT:
            self._write_deferred_begin(ctx, txn)
        self._write(ctx, f"message: {_format_message_properties(message)} content:", message.content)

    def _write_deferred_begin(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Write BEGIN before the first change of a transaction, if skip-empty-xacts has deferred it."""
        output_state: _OutputState = txn.output_plugin_private
        if self._settings["skip-empty-xacts"] and not output_state.has_transaction_output:
            self._write(ctx, self._format_begin(txn), last=False)
        output_state.has_transaction_output = True

    # streams

    def stream_start(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Write the opening of a block; with skip-empty-xacts it waits for the first change."""
        if txn.output_plugin_private is None:
            txn.output_plugin_private = _OutputState()
        txn.output_plugin_private.has_block_output = False
        if not self._settings["skip-empty-xacts"]:
            self._write(ctx, self._format_stream_line("opening a streamed block for transaction", txn))

    def stream_stop(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Write the closing of a block, unless it is empty and skip-empty-xacts is on."""
        if not self._settings["skip-empty-xacts"] or txn.output_plugin_private.has_block_output:
            self._write(ctx, self._format_stream_line("closing a streamed block for transaction", txn))

    def stream_abort(self, ctx: DecodingContext, txn: Transaction, abort_lsn: int) -> None:
        """Write the abort of a streamed transaction or of one of its subtransactions."""
        del abort_lsn
        if not self._is_skipped(txn.toptxn or txn):
            self._write(ctx, self._format_stream_line("aborting streamed (sub)transaction", txn))

    def stream_prepare(self, ctx: DecodingContext, txn: Transaction, prepare_lsn: int) -> None:
        """Write the PREPARE TRANSACTION of a streamed transaction."""
        del prepare_lsn
        if not self._is_skipped(txn):
            gid = quote_literal(txn.gid)
            transaction = f"TXN {gid}, txid {txn.xid}" if self._settings["include-xids"] else gid
            self._write(
                ctx, f"preparing streamed transaction {transaction}{self._format_time(txn.prepare_time)}"
            )

    def stream_commit(self, ctx: DecodingContext, txn: Transaction, commit_lsn: int) -> None:
        """Write the COMMIT of a streamed transaction."""
        del commit_lsn
        if not self._is_skipped(txn):
            line = self._format_stream_line("committing streamed transaction", txn)
            self._write(ctx, line + self._format_time(txn.commit_time))

    def stream_change(
        self, ctx: DecodingContext, txn: Transaction, relation: PublishedRelation, change: Change
    ) -> None:
        """Write a line for a change without its values, because the transaction can still abort."""
        del relation, change
        self._write_deferred_block(ctx, txn)
        self._write(ctx, self._format_for_transaction("streaming change for", txn))

    def stream_truncate(
        self,
        ctx: DecodingContext,
        txn: Transaction,
        relations: Sequence[PublishedRelation],
        change: Truncate,
    ) -> None:
        """Write a line for a TRUNCATE."""
        del relations, change
        self._write_deferred_block(ctx, txn)
        self._write(ctx, self._format_for_transaction("streaming truncate for", txn))

    def stream_message(self, ctx: DecodingContext, txn: Transaction, message: LogicalMessage) -> None:
        """Write a transactional message without its content."""
        if self._server_version >= _VERSION_WHERE_MESSAGES_COUNT:
            self._write_deferred_block(ctx, txn)
        self._write(ctx, f"streaming message: {_format_message_properties(message)}")

    def _write_deferred_block(self, ctx: DecodingContext, txn: Transaction) -> None:
        """Write the opening of a block before its first change, if skip-empty-xacts has deferred it."""
        output_state: _OutputState = txn.output_plugin_private
        if self._settings["skip-empty-xacts"] and not output_state.has_block_output:
            line = self._format_stream_line("opening a streamed block for transaction", txn)
            self._write(ctx, line, last=False)
        output_state.has_transaction_output = output_state.has_block_output = True

    # text

    def _is_skipped(self, txn: Transaction) -> bool:
        return self._settings["skip-empty-xacts"] and not txn.output_plugin_private.has_transaction_output

    def _format_xid(self, template: str, txn: Transaction) -> str:
        return template.format(txn.xid) if self._settings["include-xids"] else ""

    def _format_stream_line(self, text: str, txn: Transaction) -> str:
        return text + self._format_xid(" TXN {}", txn)

    def _format_for_transaction(self, text: str, txn: Transaction) -> str:
        return f"{text} {self._format_xid('TXN {}', txn) or 'transaction'}"

    def _format_time(self, time: int) -> str:
        return f" (at {format_timestamptz(time)})" if self._settings["include-timestamp"] else ""

    def _find_prefixes(self, relation: PublishedRelation) -> _Prefixes:
        prefixes = self._prefixes.get(relation.message.relation_id)
        if prefixes is None or prefixes.relation is not relation:
            version = self._server_version
            column_prefixes = [
                _encode(f" {quote_identifier(column.name, version)}[{type_name}]:")
                for column, type_name in zip(relation.message.columns, relation.type_names, strict=True)
            ]
            table_prefix = _encode(f"table {self._quote_relation(relation)}:")
            prefixes = _Prefixes(relation, table_prefix, column_prefixes)
            self._prefixes[relation.message.relation_id] = prefixes
        return prefixes

    def _quote_relation(self, relation: PublishedRelation) -> str:
        return quote_qualified(relation.namespace, relation.message.name, self._server_version)

    @staticmethod
    def _write(ctx: DecodingContext, line: str, content: bytes = b"", *, last: bool = True) -> None:
        ctx.prepare_write(last=last)
        ctx.out += _encode(line) + content
        ctx.write(last=last)


def _encode(text: str) -> bytes:
    """Encode text. A name that is not UTF-8 becomes the bytes that the server sent (`Cursor.cstr`)."""
    return text.encode("utf-8", "surrogateescape")


def _format_message_properties(message: LogicalMessage) -> str:
    return f"transactional: {message.transactional:d} prefix: {message.prefix}, sz: {len(message.content)}"


def _print_tuple(
    output_bytes: bytearray, prefixes: _Prefixes, values: TupleData, *, skip_nulls: bool = False
) -> None:
    columns = prefixes.relation.message.columns
    for prefix, column, value in zip(prefixes.column_prefixes, columns, values, strict=True):
        match value:
            case Text(content):
                output_bytes += prefix + _format_literal(column.type_oid, content)
            case Null():
                if not skip_nulls:
                    output_bytes += prefix + b"null"
            case Binary():
                raise OutputTypeError(
                    f'column "{column.name}" of relation "{prefixes.relation.message.name}" is in binary format',
                    hint="read the slot without the option binary",
                    sqlstate="0A000",
                )
            case _:
                output_bytes += prefix + b"unchanged-toast-datum"


def _format_literal(type_oid: int, content: bytes) -> bytes:
    """Return a value as the SQL literal that the server's plugin prints for its type."""
    if type_oid in _NUMBERS:
        return content
    if type_oid == _BOOL:
        return b"true" if content == b"t" else b"false"
    escaped_content = content.replace(b"'", b"''")
    return b"B'" + content + b"'" if type_oid in _BIT_STRINGS else b"'" + escaped_content + b"'"


def init() -> OutputPluginCallbacks:
    """Return the plugin's callbacks."""
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
