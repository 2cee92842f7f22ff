"""Identifiers and literals in SQL text, quoted where the server quotes them.

Text in, text out; raises nothing. quote_identifier in src/backend/utils/adt/ruleutils.c, quote_literal in
utils/adt/quote.c. Which words are key words changes between servers: `decoding.catalog_names` says of which.
"""

from __future__ import annotations

import re

from decoding.catalog_names import KEYWORDS

_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")


def quote_identifier(name: str) -> str:
    """The name, in double quotes where it would be read as another name or as a key word."""
    if _PLAIN.fullmatch(name) and name not in KEYWORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


def quote_qualified(namespace: str, name: str) -> str:
    """A name with its schema (quote_qualified_identifier)."""
    return f"{quote_identifier(namespace)}.{quote_identifier(name)}"


def quote_literal(text: str) -> str:
    """A string constant; one with backslashes is an escape string constant."""
    escape = "E" if "\\" in text else ""
    return escape + "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
