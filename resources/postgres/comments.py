"""Reads the comments on tables and their columns, which COMMENT ON has stored in the catalog pg_description.

In: a connection, and the names of tables.
Out: the comments of each table.

Raises psycopg's errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

_QUERY = """
select n.nspname, c.relname, a.attname, d.description
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
join unnest(%s::text[], %s::text[]) as wanted (schema, name) on wanted.schema = n.nspname and wanted.name = c.relname
left join pg_description d on d.objoid = c.oid and d.classoid = 'pg_class'::regclass
left join pg_attribute a on a.attrelid = c.oid and a.attnum = d.objsubid and a.attnum > 0
"""


@dataclass
class Comments:
    """The comments on one table. `comment_by_column` maps the names of columns that have a comment to their comments."""

    table_comment: str | None = None
    comment_by_column: dict[str, str] = field(default_factory=dict)


def read_comments(
    connection: psycopg.Connection[Any], tables: Sequence[tuple[str, str]]
) -> Mapping[tuple[str, str], Comments]:
    """Maps the schema and name of each table to its comments. Tables that do not exist are left out."""
    comments: dict[tuple[str, str], Comments] = {}
    parameters = [[schema for schema, _ in tables], [name for _, name in tables]]
    for schema, name, column, text in connection.execute(_QUERY, parameters):
        table_comments = comments.setdefault((schema, name), Comments())
        if text is not None and column is None:
            table_comments.table_comment = text
        elif text is not None:
            table_comments.comment_by_column[column] = text
    return comments
