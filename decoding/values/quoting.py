"""Quotes identifiers and literals as the server does, and shortens names to the length that the server allows.

The key words are those of PostgreSQL 18. `_KEYWORDS_SINCE` has the key words that older servers lack (PostgreSQL
documentation, SQL Key Words).

Source: quote_identifier() in src/backend/utils/adt/ruleutils.c, quote_literal() in
src/backend/utils/adt/quote.c.
"""

from __future__ import annotations

import re
from hashlib import sha256
from types import MappingProxyType

from pgsieve.decoding.server_versions import NEWEST_SERVER
from pgsieve.decoding.values.catalog_names import KEYWORDS

_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_KEYWORDS_SINCE = MappingProxyType(
    {
        **dict.fromkeys(
            ("json_array", "json_arrayagg", "json_object", "json_objectagg", "system_user"), 160000
        ),
        **dict.fromkeys(("json", "json_exists", "json_query", "json_scalar", "json_serialize"), 170000),
        **dict.fromkeys(("json_table", "json_value", "merge_action"), 170000),
    }
)


#: The greatest length of a name (NAMEDATALEN - 1). PostgreSQL shortens a longer name with only a notice. Another object
#: may already have the shortened name.
MAX_NAME_BYTES = 63


def shorten_name(name: str, max_bytes: int, digest_source: str) -> str:
    """Return an ASCII name, shortened to `max_bytes` bytes if it is longer.

    A shortened name ends with a digest of `digest_source`, so that different names stay different.
    """
    if len(name) <= max_bytes:
        return name
    return f"{name[: max_bytes - 9]}_{sha256(digest_source.encode()).hexdigest()[:8]}"


def quote_identifier(name: str, server_version: int = NEWEST_SERVER) -> str:
    """Return the name, in double quotes if necessary.

    Without quotes the server would change upper case to lower case, and parse some names as key words.
    """
    is_keyword = name in KEYWORDS and server_version >= _KEYWORDS_SINCE.get(name, 0)
    if _PLAIN_NAME.fullmatch(name) and not is_keyword:
        return name
    return '"' + name.replace('"', '""') + '"'


def quote_qualified(namespace: str, name: str, server_version: int = NEWEST_SERVER) -> str:
    """Return a quoted name with its schema (quote_qualified_identifier())."""
    return f"{quote_identifier(namespace, server_version)}.{quote_identifier(name, server_version)}"


def double_single_quotes(text: str) -> str:
    """Return text as it is written between single quotes in YAML or SQL (standard_conforming_strings)."""
    return text.replace("'", "''")


def quote_literal(text: str) -> str:
    r"""Return text as a string constant. If it has backslashes, the constant has the form E'\\'."""
    escape = "E" if "\\" in text else ""
    return escape + "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
