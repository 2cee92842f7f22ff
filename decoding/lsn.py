"""Log sequence numbers: converts PostgreSQL's text, such as `16/B374D848`, to an integer and back.

Raises InvalidLsnError for text that is not a pg_lsn, and for numbers that do not fit in 64 bits.
"""

from __future__ import annotations

import re

from pgsieve.decoding.errors import PgsieveError

INVALID_LSN = 0
"""InvalidXLogRecPtr: no record of the WAL has this position (src/include/access/xlogdefs.h)."""

MAX_LSN = 2**64 - 1

_PG_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_MAX_SHOWN_CHARACTERS = 40


class InvalidLsnError(PgsieveError):
    """A text or a number that is not a position in the WAL."""


def parse_lsn(text: str) -> int:
    """Parse a pg_lsn: two hexadecimal numbers of up to 8 digits around a slash.

    PostgreSQL documentation, pg_lsn Type; pg_lsn_in_internal() in src/backend/utils/adt/pg_lsn.c.
    """
    match = _PG_LSN.fullmatch(text)
    if match is None:
        raise InvalidLsnError(
            f'invalid input syntax for type pg_lsn: "{text[:_MAX_SHOWN_CHARACTERS]}"',
            hint="An LSN is two hexadecimal numbers around a slash, such as 16/B374D848.",
            sqlstate="22P02",
        )
    high, low = match.groups()
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: int) -> str:
    """Print a pg_lsn as servers up to 18 do (pg_lsn_out()); every server can parse this form."""
    if not 0 <= lsn <= MAX_LSN:
        raise InvalidLsnError(f"an LSN is a number of 64 bits, not {lsn}", sqlstate="22003")
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
