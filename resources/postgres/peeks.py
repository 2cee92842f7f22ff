"""Reads the messages of a replication slot by SQL, without confirming anything. Such a query is called a peek.

In: a connection or a `Conninfo` of the publisher, and the slot with the options of pgoutput.
Out: the query of a peek; its messages as Arrow batches, or facts about them, such as the relations that they change.

Raises `SourceError` if the server cannot decode the messages, and `SlotInUseError` if another process reads the slot.

Source: pg_logical_slot_peek_binary_changes() (PostgreSQL documentation, Replication Management Functions).
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa

from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.protocol.messages import Begin, Delete, Insert, Relation, Truncate, Update, decode
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.postgres.errors import (
    SourceError,
    SourcePermissionError,
    SourceUnreachableError,
    TransientError,
)
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.sessions import Conninfo, execute
from pgsieve.resources.postgres.slot import SlotError, translate_slot_errors
from pgsieve.resources.postgres.source import fetch_batches, quote_literal

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Cursor


#: The driver makes Arrow batches of about 4 MiB. They are small because a writer has several of them in memory.
_ADBC_OPTIONS = {"adbc.postgresql.batch_size_hint_bytes": str(4 * 1024 * 1024)}


def peek_query(
    slot: str, end_lsn: int, options: PgoutputOptions, server_version: int, max_messages: int | None = None
) -> str:
    """The query that peeks: it reads a slot up to `end_lsn` without confirming anything.

    The query delivers the transactions whose commit record begins before `end_lsn`, each of them as a whole.
    pg_replication_slot_advance(slot, end_lsn) confirms exactly these transactions. With `max_messages` the peek ends at the
    first commit after this many messages.
    """
    arguments = ", ".join(
        quote_literal(text) for option in options.make_arguments(server_version).items() for text in option
    )
    return (
        f"select data from pg_logical_slot_peek_binary_changes({_SQL_ASCII_CASE} {quote_literal(slot)} end,"
        f" {_build_end_lsn_sql(end_lsn)}, {max_messages or 'null'}, {arguments})"
    )


def _build_end_lsn_sql(end_lsn: int) -> str:
    """The SQL of the position where a peek must end, so that it delivers no record that begins at `end_lsn` or later.

    The server reads records until one ends at `end_lsn` or later. WAL is divided into pages, each with a header. If
    `end_lsn` lies within a header, the last record before it ends where the page begins, so before `end_lsn`. The server
    would then read one record more, and a later peek would deliver this record again. So in this case the peek ends where
    the page begins.
    """
    page_lsn = end_lsn - end_lsn % _MIN_PAGE_BYTES
    end_lsn_literal = quote_literal(format_lsn(end_lsn))
    if not page_lsn < end_lsn <= page_lsn + _LONG_HEADER_BYTES:
        return end_lsn_literal
    return (
        f"case when {page_lsn} % current_setting('wal_block_size')::bigint = 0 and {end_lsn - page_lsn} <= case when"
        f" {page_lsn} % pg_size_bytes(current_setting('wal_segment_size')) = 0 then {_LONG_HEADER_BYTES} else {_SHORT_HEADER_BYTES} end"
        f" then {quote_literal(format_lsn(page_lsn))} else {end_lsn_literal} end::pg_lsn"
    )


#: The least size of a WAL page, and the sizes of the headers: of a segment's first page, and of other pages
#: (XLogPageHeaderData in src/include/access/xlog_internal.h).
_MIN_PAGE_BYTES, _LONG_HEADER_BYTES, _SHORT_HEADER_BYTES = 1024, 40, 24


def exclude_relations(query: str, relations: Iterable[int]) -> str:
    """The query of a peek without the row changes of some relations.

    The peek must not stream transactions in progress, because a streamed message has its relation in another place.
    """
    oids = ", ".join(rf"'\x{oid:08x}'::bytea" for oid in sorted(relations))
    row_change_tags = ", ".join(str(message.tag) for message in (Insert, Update, Delete))
    return f"select data from ({query}) m where get_byte(data, 0) not in ({row_change_tags}) or substring(data from 2 for 4) not in ({oids})"


#: The beginning of a CASE expression. If the database's encoding is SQL_ASCII, the expression gives the session this
#: encoding, too. Then pgoutput sends all bytes unaltered (pq_sendcountedtext() in src/backend/libpq/pqformat.c). Otherwise
#: bytes that are not UTF-8 would end the query with an error, even bytes of a table that pgsieve does not need.
_SQL_ASCII_CASE = (
    "case when current_setting('server_encoding') <> 'SQL_ASCII'"
    " or set_config('client_encoding', 'SQL_ASCII', true) is not null then"
)


def read_type_names(connection: psycopg.Connection[Any]) -> dict[int, str]:
    """Maps the oid of each type that is not built in to its qualified name, as pg_recvlogical prints it."""
    with connection.transaction():
        connection.execute("set local search_path to ''")
        rows = connection.execute(
            "select oid::bigint, format_type(oid, null) from pg_type where oid >= 10000"
        )
        return dict(rows.fetchall())


def has_changes(connection: psycopg.Connection[Any], source_name: str, slot: str, query: str) -> bool:
    """True if a peek delivers any message. A peek with `max_messages=1` decodes no further than the first commit.

    Raises SlotInUseError or SourceError if the server refuses to read the slot.
    """
    return fetch_first_message(connection, source_name, slot, query) is not None


def fetch_first_message(
    connection: psycopg.Connection[Any], source_name: str, slot: str, query: str
) -> bytes | None:
    """The first message of a peek; None if the peek delivers none. Raises the same errors as `has_changes`."""
    with translate_slot_errors(source_name, slot, "read"):
        row = connection.execute(f"select data from ({query}) m limit 1").fetchone()
    return None if row is None else bytes(row[0])


def is_decoding_error(error: SourceError) -> bool:
    """True if a change in the slot may be the cause of an error; False if the slot cannot be accessed at all."""
    return not isinstance(error, TransientError | SourceUnreachableError | SourcePermissionError | SlotError)


def find_decoding_error(
    connection: psycopg.Connection[Any], source_name: str, slot: str, query: str
) -> SourceError | None:
    """The server's error if it cannot decode what a peek would deliver; None if it can.

    The server only counts the messages, and does not send them. Errors about the access to the slot are raised.
    """
    try:
        with translate_slot_errors(source_name, slot, "read"):
            connection.execute(f"select count(*) from ({query}) m")
    except SourceError as error:
        if not is_decoding_error(error):
            raise
        return error
    return None


def find_truncated_relations(
    connection: psycopg.Connection[Any], source_name: str, slot: str, query: str
) -> list[frozenset[int]]:
    """For each TRUNCATE that a peek delivers, the oids of its relations. Raises the same errors as `has_changes`."""
    with translate_slot_errors(source_name, slot, "read"):
        truncates = f"select data from ({query}) m where get_byte(data, 0) = {Truncate.tag}"
        rows = connection.execute(truncates).fetchall()
    messages = (decode(bytes(data)) for (data,) in rows)
    return [frozenset(m.relation_ids) for m in messages if isinstance(m, Truncate)]


def find_transactions_and_relations(
    connection: psycopg.Connection[Any], source_name: str, slot: str, query: str
) -> tuple[set[int], set[int]]:
    """The xids of the transactions that a peek delivers, and the oids of the relations that it describes.

    Raises the same errors as `has_changes`.
    """
    with translate_slot_errors(source_name, slot, "read"):
        messages_query = (
            f"select data from ({query}) m where get_byte(data, 0) in ({Begin.tag}, {Relation.tag})"
        )
        rows = connection.execute(messages_query).fetchall()
    messages = [decode(bytes(data)) for (data,) in rows]
    xids = {m.xid for m in messages if isinstance(m, Begin)}
    return xids, {m.relation_id for m in messages if isinstance(m, Relation)}


def find_changed_relations(
    connection: psycopg.Connection[Any], source_name: str, slot: str, query: str
) -> set[int]:
    """The oids of the relations that a peek's messages truncate, or in which they insert, update or delete rows.

    Raises the same errors as `has_changes`.
    """
    tag, row_changes = "get_byte(data, 0)", bytes([Insert.tag, Update.tag, Delete.tag])
    with translate_slot_errors(source_name, slot, "read"):
        rows = connection.execute(
            f"select distinct case {tag} when {Truncate.tag} then data else substring(data for 5) end"
            f" from ({query}) m where {tag} in ({', '.join(map(str, row_changes))}, {Truncate.tag})"
        ).fetchall()
    relations: set[int] = set()
    for (data,) in rows:
        message = decode(bytes(data)) if data[0] == Truncate.tag else None
        relations |= (
            set(message.relation_ids) if isinstance(message, Truncate) else {int.from_bytes(data[1:5])}
        )
    return relations


def read_messages(conninfo: Conninfo, query: str) -> Iterator[pa.RecordBatch]:
    """Peek in a new session, and yield the messages in Arrow batches (column `data`). Spark's executors call this, too."""
    with conninfo.connect_adbc() as connection, connection.cursor() as cursor:
        yield from fetch_message_batches(cursor, query)


def fetch_message_batches(cursor: "Cursor", query: str) -> Iterator[pa.RecordBatch]:
    """Peek in an existing session, and yield the messages in Arrow batches (column `data`)."""
    cursor.adbc_statement.set_options(**_ADBC_OPTIONS)
    execute(cursor, query)
    for batch in fetch_batches(cursor):
        reach(Failpoint.BATCH_RECEIVED)
        yield batch
