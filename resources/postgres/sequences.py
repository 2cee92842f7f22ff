"""Reads the values of a publisher's sequences, as a subscriber of PostgreSQL 19 does.

In: a connection, and the sequences that publications select.
Out: one `SequenceValue` per sequence. If a sequence cannot be read, its `SequenceValue` has the problem instead of
     a value.

On PostgreSQL 19 one statement reads all sequences, by pg_get_sequence_data(). Before 19 one statement lists the
sequences, and further statements read them (PostgreSQL 19 documentation, Replicating Sequences).

Raises psycopg's errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from pgsieve.decoding.lsn import parse_lsn
from pgsieve.resources.postgres.texts import Texts, read_any_encoding

#: Lists the published sequences, as GetAllPublicationRelations() in pg_publication.c selects them.
_LIST_TEMPLATE = """
select n.nspname::text, c.relname::text, s.seqincrement > 0, {readable}
  from pg_sequence s join pg_class c on c.oid = s.seqrelid join pg_namespace n on n.oid = c.relnamespace {data}
 where c.relpersistence = 'p' and c.oid >= 16384
   and (%(all)s or {published}
        or (n.nspname::text, c.relname::text) in (select * from unnest(%(schemas)s::text[], %(names)s::text[])))
 order by 1, 2
"""
_LIST_WITH_VALUES_QUERY = _LIST_TEMPLATE.format(
    readable="d.last_value, d.is_called, d.page_lsn::text",
    data="left join lateral pg_get_sequence_data(c.oid) d on true",
    published="exists (select from pg_publication where puballsequences and pubname = any(%(publications)s))",
)
_LIST_WITH_PRIVILEGES_QUERY = _LIST_TEMPLATE.format(
    readable="has_schema_privilege(n.oid, 'usage') and has_sequence_privilege(c.oid, 'select')",
    data="",
    published="false",
)
_SEQUENCES_PER_STATEMENT = 200
#: How many times the sequences are read if one of them is dropped meanwhile, or the role loses its privileges.
_MAX_ATTEMPTS = 5

_FORBIDDEN_PROBLEM = "permission denied for sequence (42501): grant SELECT on it, and USAGE on its schema"
_ILLEGIBLE_PROBLEM = "its name has bytes that are invalid in the database's encoding (22021): rename it"
_MISSING_PROBLEM = (
    "there is no such sequence, or it is unlogged (42P01): correct `sequences` in pgsieve.yaml, or create it"
)

SequenceName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PublishedSequences:
    """The sequences that a subscription selects.

    - `publications`: publications of the server; before PostgreSQL 19 a publication cannot contain sequences
    - `names`: sequences that pgsieve.yaml names
    - `all_sequences`: whether pgsieve.yaml selects all sequences
    """

    publications: Sequence[str]
    names: frozenset[SequenceName] = frozenset()
    all_sequences: bool = False


@dataclass(frozen=True, slots=True)
class SequenceValue:
    """The value of a sequence, or the problem that prevented reading it.

    Servers before PostgreSQL 19 do not show a `page_lsn`. `ascending` says whether the increment is positive; None
    if the value was not read.
    """

    schema: str
    name: str
    last_value: int | None = None
    is_called: bool | None = None
    page_lsn: int | None = None
    problem: str | None = None
    ascending: bool | None = field(default=None, compare=False)


def read_sequences(
    connection: psycopg.Connection[Any], published_sequences: PublishedSequences
) -> tuple[SequenceValue, ...]:
    """The values of the published sequences. Sequences that do not exist come last.

    Before PostgreSQL 19, no statement is run if `published_sequences` is empty.
    """
    has_function = connection.info.server_version >= 190000
    if not (has_function or published_sequences.names or published_sequences.all_sequences):
        return ()
    names_to_read = sorted(published_sequences.names)
    parameters = {
        "all": published_sequences.all_sequences,
        "schemas": [schema for schema, _ in names_to_read],
        "names": [name for _, name in names_to_read],
        "publications": list(published_sequences.publications),
    }
    read = _read_by_function if has_function else _read_each
    values = read(connection, parameters)
    missing_names = published_sequences.names - {(v.schema, v.name) for v in values}
    return (*values, *(SequenceValue(*name, problem=_MISSING_PROBLEM) for name in sorted(missing_names)))


def _list_sequences(
    connection: psycopg.Connection[Any], query: str, parameters: dict[str, object]
) -> tuple[list[tuple[Any, ...]], set[str]]:
    """The rows of a query that lists sequences, and the illegible names in these rows."""

    def read_rows(as_bytes: bool) -> tuple[list[tuple[Any, ...]], set[str]]:
        with connection.transaction():
            texts = Texts(connection, as_bytes=as_bytes)
            return texts.cursor.execute(query.encode(), parameters).fetchall(), texts.illegible_texts

    return read_any_encoding(connection, read_rows)


def _read_by_function(
    connection: psycopg.Connection[Any], parameters: dict[str, object]
) -> list[SequenceValue]:
    """The values by pg_get_sequence_data(), which returns nulls for sequences that the role may not read."""
    rows, illegible_texts = _list_sequences(connection, _LIST_WITH_VALUES_QUERY, parameters)
    return [
        SequenceValue(schema, name, value, is_called, parse_lsn(lsn), ascending=ascending)
        if lsn is not None and illegible_texts.isdisjoint((schema, name))
        else SequenceValue(schema, name, problem=_FORBIDDEN_PROBLEM if lsn is None else _ILLEGIBLE_PROBLEM)
        for schema, name, ascending, value, is_called, lsn in rows
    ]


def _read_each(
    connection: psycopg.Connection[Any], parameters: dict[str, object], attempts: int = _MAX_ATTEMPTS
) -> list[SequenceValue]:
    """The values by a SELECT from each sequence. Sequences that the role may not read get a problem instead of a value."""
    rows, illegible_texts = _list_sequences(connection, _LIST_WITH_PRIVILEGES_QUERY, parameters)
    readable_rows, sequence_values = list[tuple[Any, ...]](), list[SequenceValue]()
    for schema, name, ascending, is_permitted in rows:
        if is_permitted and illegible_texts.isdisjoint((schema, name)):
            readable_rows.append((schema, name, ascending))
        else:
            sequence_values.append(
                SequenceValue(
                    schema, name, problem=_ILLEGIBLE_PROBLEM if is_permitted else _FORBIDDEN_PROBLEM
                )
            )
    try:
        for first_index in range(0, len(readable_rows), _SEQUENCES_PER_STATEMENT):
            batch = readable_rows[first_index : first_index + _SEQUENCES_PER_STATEMENT]
            values = _select_values(connection, [(schema, name) for schema, name, _ in batch])
            for (schema, name, ascending), (_, value, is_called) in zip(batch, values, strict=True):
                sequence_values.append(SequenceValue(schema, name, value, is_called, ascending=ascending))
    except (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege):
        if attempts == 1:
            raise
        return _read_each(connection, parameters, attempts - 1)
    return sequence_values


def _select_values(
    connection: psycopg.Connection[Any], names: Sequence[SequenceName]
) -> list[tuple[Any, ...]]:
    select = sql.SQL("select {}, last_value, is_called from {}")
    selects = [select.format(number, sql.Identifier(*name)) for number, name in enumerate(names)]
    return connection.execute(sql.SQL(" union all ").join(selects) + sql.SQL(" order by 1")).fetchall()
