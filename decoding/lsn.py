"""Log sequence numbers: PostgreSQL's text `16/B374D848` in, an integer out, and back.

Raises InvalidLsnError for text that is not a pg_lsn and for numbers outside 64 bits.
"""

from __future__ import annotations

import re

from pgsieve.decoding.errors import PgsieveError

INVALID_LSN = 0
"""InvalidXLogRecPtr: no record of the WAL starts here (src/include/access/xlogdefs.h)."""

MAX_LSN = 2**64 - 1

_PG_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_SHOWN = 40  # characters of a bad input that an error repeats


class InvalidLsnError(PgsieveError):
    """A text or a number that is not a position in the WAL."""


def parse_lsn(text: str) -> int:
    """Read a pg_lsn: two hexadecimal numbers of up to 8 digits around a slash.

    PostgreSQL documentation 8.20 (pg_lsn Type); src/backend/utils/adt/pg_lsn.c, pg_lsn_in_internal.
    """
    match = _PG_LSN.fullmatch(text)
    if match is None:
        raise InvalidLsnError(
            f'invalid input syntax for type pg_lsn: "{text[:_SHOWN]}"',
            hint="An LSN is two hexadecimal numbers around a slash, such as 16/B374D848.",
            sqlstate="22P02",
        )
    high, low = match.groups()
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: int) -> str:
    """Write a pg_lsn as servers up to 18 print it (pg_lsn_out); every server reads it."""
    if not 0 <= lsn <= MAX_LSN:
        raise InvalidLsnError(f"an LSN is a number of 64 bits, not {lsn}", sqlstate="22003")
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
