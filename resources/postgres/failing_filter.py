"""Row filters that fail at the publisher: finds the table with the filter, and makes a publication without it.

In: a session, and the peek that fails. Out: the table's name; a publication that lists tables without filters.
If one of the requested publications lists a table without a filter, pgoutput evaluates no filter of that table
(PostgreSQL documentation, Combining Multiple Row Filters). Raises SourceError.
"""

from collections.abc import Collection, Sequence
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog, Publication, Table
from pgsieve.resources.postgres.capture import CREATED_COMMENT, preparation_of, table_clause
from pgsieve.resources.postgres.ddl import execute_ddl
from pgsieve.resources.postgres.source import literal, quote

#: Parts of pgoutput's messages at DEBUG3 before and after it evaluates a filter (pgoutput_row_filter() in
#: src/backend/replication/pgoutput/pgoutput.c).
_BEFORE, _AFTER = '" has row filter', "row filter evaluates to "
#: Data exceptions that the server may also raise when it sends a row: errors of encodings and output functions.
_SENDING_SQLSTATES = {"22021", "22P02", "22P03", "22P05"}


def failing_table(connection: psycopg.Connection[Any], query: str) -> str | None:
    """The `schema.table` whose row filter fails in a peek; None if that is not certain.

    After a successful evaluation for one row of a change, the error may come from the evaluation for the
    other row, or from sending the row. Sending raises only the `_SENDING_SQLSTATES`.
    """
    messages: list[str] = []

    def collect(diagnostic: psycopg.errors.Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        if message.startswith(_AFTER):
            messages.append(message)
        elif message.endswith(_BEFORE):
            messages[:] = [message]

    connection.add_notice_handler(collect)
    try:
        with connection.transaction():
            connection.execute("set local client_min_messages = debug3")
            connection.execute(f"select count(*) from ({query}) m")
    except psycopg.Error as error:
        state = error.sqlstate or ""
        is_certain = state.startswith("22") and (len(messages) == 1 or state not in _SENDING_SQLSTATES)
        return messages[0].removeprefix('table "').removesuffix(_BEFORE) if messages and is_certain else None
    finally:
        connection.remove_notice_handler(collect)
    return None


def unfiltered_statements(
    name: str, tables: Sequence[Table], publications: Sequence[Publication], catalog: Catalog
) -> list[str]:
    """The SQL that makes a publication of these tables like `publications`, but without row filters.

    Empty if the publication already matches. Its column lists are those of `publications`, as pgoutput refuses a table
    with different lists.
    """
    existing = catalog.publications.get(name)
    drop_statements = [] if existing is None else [f"drop publication {quote(name)}"]
    if not tables:
        return drop_statements
    publishing = [
        p
        for p in publications
        if any(p.contains(catalog.tables[oid]) for t in tables for oid in (t.oid, *t.ancestors))
    ]
    operations = frozenset(operation for p in publishing for operation in p.operations)
    generated_columns = "s" if any(p.generated_columns == "s" for p in publishing) else "n"
    lists = {table.oid: _column_list(table, publishing) for table in tables}
    if (
        existing is not None
        and {t.oid: t.columns for t in existing.tables} == lists
        and (existing.operations, existing.generated_columns) == (operations, generated_columns)
    ):
        return []
    options = f"publish = {literal(', '.join(sorted(operations)))}, publish_via_partition_root = true"
    if generated_columns == "s":
        options += ", publish_generated_columns = stored"
    entries = ", ".join(_entry(table, lists[table.oid]) for table in tables)
    return [
        *drop_statements,
        f"create publication {quote(name)} for table {entries} with ({options})",
        f"comment on publication {quote(name)} is {literal(CREATED_COMMENT)}",
    ]


def _column_list(table: Table, publications: Sequence[Publication]) -> frozenset[str] | None:
    """The column list of a table, which is the same in all publications: otherwise pgoutput refuses to decode."""
    lists = [entry.columns for p in publications if (entry := p.table_entry(table.oid)) is not None]
    return None if not lists or None in lists else lists[0]


def _entry(table: Table, columns: frozenset[str] | None) -> str:
    if columns is None:
        return table_clause(table)
    return (
        f"{table_clause(table)} ({', '.join(quote(a.name) for a in table.attributes if a.name in columns)})"
    )


def publish_unfiltered(
    connection: psycopg.Connection[Any], source: str, name: str, statements: Collection[str]
) -> None:
    """Run the statements of `unfiltered_statements`.

    Raises SourceError if the role lacks the right, or an event trigger fails.
    """
    # Flush the commit: pgoutput uses the publication only for changes after it.
    connection.execute("set synchronous_commit = local")
    execute_ddl(connection, source, preparation_of(name), [*statements])
