"""Parses names that are written as in SQL.

In: a name such as `public.orders` or `"Sales"."Order Lines"`
Out: the parts of the name, as they are in the catalog

Raises ValueError if the text is not such a name. The message does not contain the text. `parse_table_name` raises
PgsieveError instead. Its message has the text, which is an argument of a command.
"""

import re
import string

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import MAX_NAME_BYTES

_ASCII_LOWER_CASE = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_NAME_PART = re.compile(
    r"""(?: "(?P<quoted>(?:[^"]|"")*)" | (?P<plain>[A-Za-z_\u0080-\U0010ffff][\w$\u0080-\U0010ffff]*) )""",
    re.VERBOSE | re.ASCII,
)


def parse_qualified_name(text: str, part_count: int) -> tuple[str, ...]:
    """Split a qualified name into its parts. Raises ValueError if it does not have exactly `part_count` parts.

    A part without quotes is folded to lower case. A part within double quotes stays as it is, except that `""` becomes
    one quote (PostgreSQL documentation, 4.1.1). Only ASCII letters are folded, as PostgreSQL does in a multi-byte
    encoding (`src/backend/parser/scansup.c`).
    """
    names: list[str] = []
    offset = 0
    while True:
        match = _NAME_PART.match(text, offset)
        if match is None:
            raise ValueError(
                "is not a name as SQL writes it (double quotes around names with other characters)"
            )
        quoted_part = match["quoted"]
        name = (
            match["plain"].translate(_ASCII_LOWER_CASE)
            if quoted_part is None
            else quoted_part.replace('""', '"')
        )
        if not name:
            raise ValueError("has an empty name between double quotes")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"has a name longer than {MAX_NAME_BYTES} bytes")
        names.append(name)
        offset = match.end()
        if offset == len(text):
            break
        if text[offset] != ".":
            raise ValueError(
                "is not a name as SQL writes it (double quotes around names with other characters)"
            )
        offset += 1
    if len(names) != part_count:
        raise ValueError(
            f"has {len(names)} name{'s' if len(names) > 1 else ''} where {part_count} are needed"
        )
    return tuple(names)


def quote_name(*parts: str) -> str:
    """Join parts to a qualified name, with quotes where they are needed. `parse_qualified_name` gives the parts back."""
    return ".".join(
        part if re.fullmatch(r"[a-z_][a-z0-9_$]*", part) else '"' + part.replace('"', '""') + '"'
        for part in parts
    )


def parse_table_name(text: str) -> tuple[str, str]:
    """Parse the name of a table in a command's argument into its schema and name. Raises PgsieveError."""
    try:
        schema, table = parse_qualified_name(text, 2)
    except ValueError as error:
        raise PgsieveError(
            f"table {text!r} {error}", hint='write SCHEMA.TABLE, as in public.orders or "Sales"."Order Lines"'
        ) from None
    return schema, table
