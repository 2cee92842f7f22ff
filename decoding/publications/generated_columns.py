"""Row filters over generated columns that changes do not contain.

In: the text of a row filter, and its table. Out: the filter with each such column replaced by the expression that
generates it. The server does the same for virtual columns (expand_generated_columns_in_expr() in
src/backend/rewrite/rewriteHandler.c).

Servers before 18 do not send stored generated columns. pgsieve replaces these columns, too. A generation expression
is immutable, so it has the value that the server stored. Raises UnsupportedFilterError for a column whose
expression can have another value than the column.

PostgreSQL documentation, Generated Columns.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from pgsieve.decoding.errors import UnsupportedFilterError
from pgsieve.decoding.publications.catalog import Attribute, Table
from pgsieve.decoding.row_filters import grammar
from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.nodes import BPCHAR, VARCHAR

#: If a text is too long for one of these types, an explicit cast cuts the text, but an assignment to a column fails.
_LENGTH_LIMITED_TYPES: Final = frozenset({BPCHAR, VARCHAR})


def expand_unsent_columns(filter_text: str, table: Table) -> str:
    """Return a row filter that reads only columns that changes contain.

    Text that cannot be parsed is returned unchanged; the parser of row filters reports it later.
    """
    unsent_columns = {a.name: a for a in table.attributes if not a.is_sent}
    if not unsent_columns:
        return filter_text
    try:
        tree = grammar.parse(filter_text)
    except (grammar.InvalidSyntaxError, RefusedError, RecursionError):
        return filter_text
    references = [c for c in tree.find_all(exp.Column) if grammar.folded_name(c.this) in unsent_columns]
    for column in sorted(references, key=lambda c: int(c.this.meta["start"]), reverse=True):
        expression = _cast_generation_expression(unsent_columns[grammar.folded_name(column.this)], table)
        start, end = int(column.parts[0].meta["start"]), int(column.this.meta["end"]) + 1
        filter_text = filter_text[:start] + expression + filter_text[end:]
    return filter_text


def _cast_generation_expression(column: Attribute, table: Table) -> str:
    """The column's generation expression, with a cast to the column's type.

    The server casts the expression to this type, but does not print the cast.
    """
    if column.type_oid in _LENGTH_LIMITED_TYPES and column.type_modifier != -1:
        raise UnsupportedFilterError(
            f"row filter of {table.quoted_name} cannot be evaluated outside PostgreSQL: {column.name}: it is a generated"
            f" column of type {column.type_name}",
            hint="use row_filter: publisher",
        )
    return f"(({column.generation_expression})::{column.type_name})"
