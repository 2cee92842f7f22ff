"""Row filters that fail at the publisher: which table's filter fails, and a publication that reads past its changes.

In: a session, and the peek that fails. Out: the table's name; a publication that lists tables without a
filter. If one of the publications of a slot has a table without a filter, no filter of that table is
evaluated (section 29.4.3). Raises SourceError.
"""

from collections.abc import Collection, Sequence
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog, Publication, Table
from pgsieve.resources.postgres.capture import CREATED, as_listed, preparing
from pgsieve.resources.postgres.ddl import execute_ddl
from pgsieve.resources.postgres.source import literal, quote

#: pgoutput's messages at DEBUG3 before and after it evaluates a filter (pgoutput_row_filter() in
#: src/backend/replication/pgoutput/pgoutput.c).
_BEFORE, _AFTER = '" has row filter', "row filter evaluates to "
#: Errors of data that sending a row can raise too: of its encoding, and of output functions.
_OF_SENDING = {"22021", "22P02", "22P03", "22P05"}


def failing_table(connection: psycopg.Connection[Any], query: str) -> str | None:
    """The `schema.table` whose row filter fails in a peek; None where that is not certain.

    After one evaluation for a change, the failure may come from the filter on its other row, or from sending
    the row. The latter has other SQLSTATEs.
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
        is_certain = state.startswith("22") and (len(messages) == 1 or state not in _OF_SENDING)
        return messages[0].removeprefix('table "').removesuffix(_BEFORE) if messages and is_certain else None
    finally:
        connection.remove_notice_handler(collect)
    return None


def unfiltered_statements(
    name: str, tables: Sequence[Table], publications: Sequence[Publication], catalog: Catalog
) -> list[str]:
    """The SQL that makes a publication send of exactly these tables what others do, but without filters.

    Empty where it already does. pgoutput refuses a table for which the publications have other column lists.
    """
    existing = catalog.publications.get(name)
    dropped = [] if existing is None else [f"drop publication {quote(name)}"]
    if not tables:
        return dropped
    having = [
        p
        for p in publications
        if any(p.contains(catalog.tables[oid]) for t in tables for oid in (t.oid, *t.ancestors))
    ]
    operations = frozenset(operation for p in having for operation in p.operations)
    generated = "s" if any(p.generated_columns == "s" for p in having) else "n"
    lists = {table.oid: _column_list(table, having) for table in tables}
    if (
        existing is not None
        and {t.oid: t.columns for t in existing.tables} == lists
        and (existing.operations, existing.generated_columns) == (operations, generated)
    ):
        return []
    options = f"publish = {literal(', '.join(sorted(operations)))}, publish_via_partition_root = true"
    if generated == "s":
        options += ", publish_generated_columns = stored"
    entries = ", ".join(_entry(table, lists[table.oid]) for table in tables)
    return [
        *dropped,
        f"create publication {quote(name)} for table {entries} with ({options})",
        f"comment on publication {quote(name)} is {literal(CREATED)}",
    ]


def _column_list(table: Table, publications: Sequence[Publication]) -> frozenset[str] | None:
    """The column list that a table has: where publications disagree on it, nothing can be read."""
    lists = [entry.columns for p in publications if (entry := p.listed(table.oid)) is not None]
    return None if not lists or None in lists else lists[0]


def _entry(table: Table, columns: frozenset[str] | None) -> str:
    if columns is None:
        return as_listed(table)
    return f"{as_listed(table)} ({', '.join(quote(a.name) for a in table.attributes if a.name in columns)})"


def publish_unfiltered(
    connection: psycopg.Connection[Any], source: str, name: str, statements: Collection[str]
) -> None:
    """Run such statements; raises SourceError where the role lacks the right, or an event trigger fails."""
    # The publication applies to WAL that is written from now on.
    connection.execute("set synchronous_commit = local")
    execute_ddl(connection, source, preparing(name), [*statements])
