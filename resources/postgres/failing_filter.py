"""Finds the table whose row filter fails at the publisher, and makes a publication of this table without row filters.

For example, the filter `1 / a > 0` fails for a row with a = 0, and the publisher then cannot send any more changes. A
peek is a query that reads the slot and confirms nothing. If one of the publications that a peek requests lists a table
without a filter, pgoutput evaluates no filter of that table (PostgreSQL documentation, Combining Multiple Row Filters).

In: a session, and a peek that fails.
Out: - the name of the table with the failing filter
     - a publication that lists tables without filters

Raises SourceError.
"""

from collections.abc import Collection, Sequence
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog, Publication, Table
from pgsieve.resources.postgres.capture import CREATED_COMMENT, describe_preparation, format_table_clause
from pgsieve.resources.postgres.ddl import execute_ddl
from pgsieve.resources.postgres.source import quote, quote_literal

#: pgoutput logs a message before it evaluates the filter of a row, and one after each successful evaluation, at the level
#: DEBUG3 (pgoutput_row_filter() in src/backend/replication/pgoutput/pgoutput.c). The constants are how the first
#: message ends, and how the second one begins.
_START_MESSAGE_END, _RESULT_MESSAGE_START = '" has row filter', "row filter evaluates to "
#: The SQLSTATEs of data exceptions that a filter can raise, but also the sending of a row, by the conversion to an encoding
#: or by an output function.
_SENDING_SQLSTATES = {"22021", "22P02", "22P03", "22P05"}


def find_failing_table(connection: psycopg.Connection[Any], query: str) -> str | None:
    """The `schema.table` whose row filter fails in a peek; None if this is not certain.

    For an UPDATE, pgoutput evaluates the filter up to twice: for the old and for the new row. Only one message precedes
    both. After a message about a successful evaluation, either the other evaluation or the sending of the row has failed.
    Then only an error that is not among `_SENDING_SQLSTATES` is certain to come from the filter.
    """
    messages: list[str] = []

    def collect_message(diagnostic: psycopg.errors.Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        if message.startswith(_RESULT_MESSAGE_START):
            messages.append(message)
        elif message.endswith(_START_MESSAGE_END):
            messages[:] = [message]

    connection.add_notice_handler(collect_message)
    try:
        with connection.transaction():
            connection.execute("set local client_min_messages = debug3")
            connection.execute(f"select count(*) from ({query}) m")
    except psycopg.Error as error:
        sqlstate = error.sqlstate or ""
        is_certain = sqlstate.startswith("22") and (len(messages) == 1 or sqlstate not in _SENDING_SQLSTATES)
        return (
            messages[0].removeprefix('table "').removesuffix(_START_MESSAGE_END)
            if messages and is_certain
            else None
        )
    finally:
        connection.remove_notice_handler(collect_message)
    return None


def make_unfiltered_statements(
    name: str, tables: Sequence[Table], publications: Sequence[Publication], catalog: Catalog
) -> list[str]:
    """The SQL that makes a publication of these tables. It is like `publications`, but has no row filters.

    Empty if the publication already matches. Without tables, the SQL drops the publication. The publication has the
    same column lists as `publications`, because pgoutput refuses a table that has different column lists in the
    requested publications.
    """
    existing = catalog.publications.get(name)
    drop_statements = [] if existing is None else [f"drop publication {quote(name)}"]
    if not tables:
        return drop_statements
    publishing_publications = [
        p
        for p in publications
        if any(p.contains(catalog.tables[oid]) for t in tables for oid in (t.oid, *t.ancestors))
    ]
    operations = frozenset(operation for p in publishing_publications for operation in p.operations)
    generated_columns = "s" if any(p.generated_columns == "s" for p in publishing_publications) else "n"
    column_lists = {table.oid: _find_column_list(table, publishing_publications) for table in tables}
    if (
        existing is not None
        and {t.oid: t.columns for t in existing.tables} == column_lists
        and (existing.operations, existing.generated_columns) == (operations, generated_columns)
    ):
        return []
    options = f"publish = {quote_literal(', '.join(sorted(operations)))}, publish_via_partition_root = true"
    if generated_columns == "s":
        options += ", publish_generated_columns = stored"
    entry_clauses = ", ".join(_format_entry(table, column_lists[table.oid]) for table in tables)
    return [
        *drop_statements,
        f"create publication {quote(name)} for table {entry_clauses} with ({options})",
        f"comment on publication {quote(name)} is {quote_literal(CREATED_COMMENT)}",
    ]


def _find_column_list(table: Table, publications: Sequence[Publication]) -> frozenset[str] | None:
    """The column list of a table; None if the table is published with all columns.

    It is the same in all publications, because pgoutput refuses to decode a table with different column lists.
    """
    column_lists = [
        entry.columns for p in publications if (entry := p.find_table_entry(table.oid)) is not None
    ]
    return None if not column_lists or None in column_lists else column_lists[0]


def _format_entry(table: Table, columns: frozenset[str] | None) -> str:
    """A table with its column list, as it is written in CREATE PUBLICATION."""
    if columns is None:
        return format_table_clause(table)
    return f"{format_table_clause(table)} ({', '.join(quote(a.name) for a in table.attributes if a.name in columns)})"


def publish_unfiltered(
    connection: psycopg.Connection[Any], source: str, name: str, statements: Collection[str]
) -> None:
    """Run the statements that `make_unfiltered_statements` has returned.

    Raises SourceError if the role lacks the privilege, or an event trigger fails.
    """
    # Flush the commit, whatever the role's setting is, so that a crash of the server does not undo it.
    connection.execute("set synchronous_commit = local")
    execute_ddl(connection, source, describe_preparation(name), [*statements])
