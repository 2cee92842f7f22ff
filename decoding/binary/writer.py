"""Writes the numbers and strings of one message in order; `pgsieve.decoding.binary.cursor` reads them again.

In: the fields of a message. Out: its bytes. Raises ProtocolError for values that the cursor would refuse: a number that
does not fit its field, a zero byte in a string, or zero as an LSN or transaction id that must be set.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import NoReturn

from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION
from pgsieve.decoding.errors import ProtocolError


class Writer:
    """The bytes of one message. Each method appends a field."""

    __slots__ = ("_data", "_message")

    def __init__(self, message: str) -> None:
        self._data = bytearray()
        self._message = message

    def getvalue(self) -> bytes:
        """Return the bytes that were written so far."""
        return bytes(self._data)

    def fail(self, expected: str) -> NoReturn:
        """Raise ProtocolError with the message's name."""
        raise ProtocolError(
            f"cannot encode {self._message} message: expected {expected}", sqlstate=PROTOCOL_VIOLATION
        )

    def u8(self, value: int, field: str) -> None:
        """Write an unsigned byte."""
        self._integer("!B", value, field)

    def i16(self, value: int, field: str) -> None:
        """Write a signed integer of 16 bits."""
        self._integer("!h", value, field)

    def u32(self, value: int, field: str) -> None:
        """Write an unsigned integer of 32 bits."""
        self._integer("!I", value, field)

    def i32(self, value: int, field: str) -> None:
        """Write a signed integer of 32 bits."""
        self._integer("!i", value, field)

    def u64(self, value: int, field: str) -> None:
        """Write an unsigned integer of 64 bits."""
        self._integer("!Q", value, field)

    def i64(self, value: int, field: str) -> None:
        """Write a signed integer of 64 bits."""
        self._integer("!q", value, field)

    def cstr(self, text: str, field: str) -> None:
        """Write a string and a zero byte."""
        octets = b""
        # Only surrogates that stand for a byte can be encoded. For others `octets` stays empty, and the check below fails.
        with suppress(UnicodeEncodeError):
            octets = text.encode("utf-8", "surrogateescape") if "\0" not in text else b""
        # Surrogates stand for single bytes. If several such bytes are together valid UTF-8, the cursor would read them as
        # another text.
        if octets.decode("utf-8", "surrogateescape") != text:
            self.fail(f"{field}, a string without a zero character or a lone surrogate")
        self._data += octets
        self._data.append(0)

    def byten(self, content: bytes) -> None:
        """Write bytes as they are."""
        self._data += content

    def length_prefixed(self, content: bytes, field: str) -> None:
        """Write a length of 32 bits, and the bytes."""
        self.i32(len(content), field)
        self._data += content

    def valid_xid(self, value: int, field: str) -> None:
        """Write a transaction id; raises ProtocolError for zero."""
        self.u32(value or self.fail(f"{field}, not zero"), field)

    def valid_lsn(self, value: int, field: str) -> None:
        """Write an LSN; raises ProtocolError for zero."""
        self.u64(value or self.fail(f"{field}, not zero"), field)

    def _integer(self, layout: str, value: int, field: str) -> None:
        size = struct.calcsize(layout)
        try:
            self._data += struct.pack(layout, value)
        except struct.error:
            self.fail(f"{field} that fits {size} bytes")
