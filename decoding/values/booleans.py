"""The words that PostgreSQL reads as true and false (parse_bool_with_len, src/backend/utils/adt/bool.c)."""

from __future__ import annotations

from types import MappingProxyType

BOOLEANS = MappingProxyType(
    {
        **dict.fromkeys(("t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"), True),
        **dict.fromkeys(("f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0"), False),
    }
)
"""Maps each word, and each abbreviation that PostgreSQL reads, to its value. All are in lower case."""
