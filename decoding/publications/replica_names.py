"""Makes plain names for a replica's columns from the publisher's names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_identifier

_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
#: The start of a word in `lineNo` or `HTTPPort`.
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def to_snake_case(name: str) -> str:
    """Return a name of only `a-z`, `0-9` and `_`: `Line No` and `lineNo` become `line_no`."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    snake_name = re.sub(r"[^A-Za-z0-9]+", "_", _WORD_START.sub("_", letters)).strip("_").lower()
    return snake_name if _PLAIN_NAME.fullmatch(snake_name) else f"_{snake_name}"


def refuse_shared_names(table: str, columns: Iterable[str]) -> None:
    """Raise PgsieveError if `to_snake_case` gives two columns of a table the same name."""
    column_by_name: dict[str, str] = {}
    for column in columns:
        first_column = column_by_name.setdefault(to_snake_case(column), column)
        if first_column != column:
            raise PgsieveError(
                f'table "{table}": columns {quote_identifier(first_column)} and {quote_identifier(column)} would both be'
                f" {to_snake_case(column)} in the replica",
                hint="rename one of them, or leave `names: snake` out of the subscription's layout",
                sqlstate="42701",
            )
