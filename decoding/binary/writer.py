"""The cursor's mirror: numbers and strings in wire order in, the bytes of one message out.

What the cursor refuses to read is refused here too, as ProtocolError: a value that does not fit its
field, a zero byte in a string, an unset LSN where one is required.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import NoReturn

from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION
from pgsieve.decoding.errors import ProtocolError


class Writer:
    """The bytes of one message, which only grow."""

    __slots__ = ("_data", "_message")

    def __init__(self, message: str) -> None:
        self._data = bytearray()
        self._message = message

    def getvalue(self) -> bytes:
        """Everything written so far."""
        return bytes(self._data)

    def fail(self, expected: str) -> NoReturn:
        """Raise this message's error."""
        raise ProtocolError(
            f"cannot encode {self._message} message: expected {expected}", sqlstate=PROTOCOL_VIOLATION
        )

    def u8(self, value: int, what: str) -> None:
        """Write an unsigned byte."""
        self._integer("!B", value, what)

    def i16(self, value: int, what: str) -> None:
        """Write a signed integer of 16 bits."""
        self._integer("!h", value, what)

    def u32(self, value: int, what: str) -> None:
        """Write an unsigned integer of 32 bits."""
        self._integer("!I", value, what)

    def i32(self, value: int, what: str) -> None:
        """Write a signed integer of 32 bits."""
        self._integer("!i", value, what)

    def u64(self, value: int, what: str) -> None:
        """Write an unsigned integer of 64 bits."""
        self._integer("!Q", value, what)

    def i64(self, value: int, what: str) -> None:
        """Write a signed integer of 64 bits."""
        self._integer("!q", value, what)

    def cstr(self, text: str, what: str) -> None:
        """Write a string and a zero byte."""
        encoded = b""
        with suppress(UnicodeEncodeError):  # A lone surrogate that stands for no byte.
            encoded = text.encode("utf-8", "surrogateescape") if "\0" not in text else b""
        # Surrogates for bytes that form UTF-8 become another text.
        if encoded.decode("utf-8", "surrogateescape") != text:
            self.fail(f"{what}, a string of characters without a zero one")
        self._data += encoded
        self._data.append(0)

    def byten(self, content: bytes) -> None:
        """Write bytes as they are."""
        self._data += content

    def sized(self, content: bytes, what: str) -> None:
        """Write the length in 32 bits and the bytes."""
        self.i32(len(content), what)
        self._data += content

    def valid_xid(self, value: int, what: str) -> None:
        """Write a transaction id that is set."""
        self.u32(value or self.fail(f"{what}, not zero"), what)

    def valid_lsn(self, value: int, what: str) -> None:
        """Write an LSN that is set."""
        self.u64(value or self.fail(f"{what}, not zero"), what)

    def _integer(self, layout: str, value: int, what: str) -> None:
        size = struct.calcsize(layout)
        try:
            self._data += struct.pack(layout, value)
        except struct.error:
            self.fail(f"{what} that fits {size} bytes")
