"""Identifiers and literals in SQL text, quoted as the server does, and names cut to the server's length.

Text in, text out; raises nothing. Source: quote_identifier in src/backend/utils/adt/ruleutils.c,
quote_literal in utils/adt/quote.c. The key words are those of PostgreSQL 18; `_SINCE` has those that older
servers lack (appendix C).
"""

from __future__ import annotations

import re
from hashlib import sha256
from types import MappingProxyType

from pgsieve.decoding.server_versions import NEWEST_SERVER
from pgsieve.decoding.values.catalog_names import KEYWORDS

_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")
_SINCE = MappingProxyType(
    {
        **dict.fromkeys(
            ("json_array", "json_arrayagg", "json_object", "json_objectagg", "system_user"), 160000
        ),
        **dict.fromkeys(("json", "json_exists", "json_query", "json_scalar", "json_serialize"), 170000),
        **dict.fromkeys(("json_table", "json_value", "merge_action"), 170000),
    }
)


#: NAMEDATALEN - 1. PostgreSQL cuts a longer name with a notice, and the cut name may be another object's.
MAX_BYTES = 63


def cut_name(name: str, longest: int, whole: str) -> str:
    """Return an ASCII name of at most `longest` bytes.

    A longer name is cut, and ends with a digest of `whole`.
    """
    if len(name) <= longest:
        return name
    return f"{name[: longest - 9]}_{sha256(whole.encode()).hexdigest()[:8]}"


def quote_identifier(name: str, server_version: int = NEWEST_SERVER) -> str:
    """Return the name, in double quotes if this server would read it as another name or as a key word."""
    is_keyword = name in KEYWORDS and server_version >= _SINCE.get(name, 0)
    if _PLAIN.fullmatch(name) and not is_keyword:
        return name
    return '"' + name.replace('"', '""') + '"'


def quote_qualified(namespace: str, name: str, server_version: int = NEWEST_SERVER) -> str:
    """A name with its schema (quote_qualified_identifier)."""
    return f"{quote_identifier(namespace, server_version)}.{quote_identifier(name, server_version)}"


def quote_literal(text: str) -> str:
    """A string constant; text with backslashes becomes an escape string constant."""
    escape = "E" if "\\" in text else ""
    return escape + "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
