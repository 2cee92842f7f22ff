"""A bounded reader: the bytes of one message in, numbers and strings in wire order out.

Every reading method names what it reads. Raises ProtocolError, and nothing else, with the message's
name, the offset and what was expected there; never reads or allocates beyond the message. Integers are
big-endian (PostgreSQL documentation 54.6, Message Data Types; src/backend/libpq/pqformat.c).
"""

from __future__ import annotations

import struct
from typing import NoReturn

from pgsieve.decoding.errors import ProtocolError

PROTOCOL_VIOLATION = "08P01"

# Formats rather than struct.Struct objects, which cannot be sent to Spark's executors.
_I8, _U16, _I16, _U32, _I32, _U64, _I64 = "!b", "!H", "!h", "!I", "!i", "!Q", "!q"


class Cursor:
    """A position in the bytes of one message, which only moves forward."""

    __slots__ = ("_data", "_message", "_offset", "_size")

    def __init__(self, data: bytes | bytearray | memoryview, message: str, *, offset: int = 0) -> None:
        self._data = bytes(data)  # no copy when it is bytes already
        self._size = len(self._data)
        self._message = message
        self._offset = offset

    @property
    def offset(self) -> int:
        """Bytes read so far."""
        return self._offset

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return self._size - self._offset

    def fail(self, expected: str, *, back: int = 0) -> NoReturn:
        """Raise this message's error; what is wrong began `back` bytes ago."""
        raise ProtocolError(
            f"malformed {self._message} message at offset {self._offset - back}: expected {expected}",
            sqlstate=PROTOCOL_VIOLATION,
        )

    def end(self) -> None:
        """Check that the whole message was read."""
        if self.remaining:
            self.fail(f"the end of the message, but {self.remaining} bytes remain")

    def u8(self, what: str) -> int:
        """Read an unsigned byte."""
        start = self._offset
        if start >= self._size:
            self.fail(f"{what} of 1 byte, but 0 remain")
        self._offset = start + 1
        return self._data[start]

    def i8(self, what: str) -> int:
        """Read a signed byte."""
        return self._integer(_I8, what)

    def u16(self, what: str) -> int:
        """Read an unsigned integer of 16 bits."""
        return self._integer(_U16, what)

    def i16(self, what: str) -> int:
        """Read a signed integer of 16 bits."""
        return self._integer(_I16, what)

    def u32(self, what: str) -> int:
        """Read an unsigned integer of 32 bits: OIDs and transaction ids are such."""
        return self._integer(_U32, what)

    def i32(self, what: str) -> int:
        """Read a signed integer of 32 bits."""
        return self._integer(_I32, what)

    def u64(self, what: str) -> int:
        """Read an unsigned integer of 64 bits: LSNs are such."""
        return self._integer(_U64, what)

    def i64(self, what: str) -> int:
        """Read a signed integer of 64 bits."""
        return self._integer(_I64, what)

    def cstr(self, what: str) -> str:
        """Read a string that ends with a zero byte."""
        end = self._data.find(b"\0", self._offset)
        if end < 0:
            self.fail(f"{what}, a string that ends with a zero byte")
        # An invalid UTF-8 name concerns only its own table.
        text = str(self._data[self._offset : end], "utf-8", "surrogateescape")
        self._offset = end + 1
        return text

    def byten(self, length: int, what: str) -> bytes:
        """Read `length` bytes (the manual's Byten)."""
        start = self._offset
        end = start + length
        if length < 0 or end > self._size:
            self.fail(f"{what} of {length} bytes, but {self.remaining} remain")
        self._offset = end
        return self._data[start:end]

    def sized(self, what: str) -> bytes:
        """Read a length in 32 bits and that many bytes."""
        start = self._offset + 4
        if start <= self._size:
            length: int = struct.unpack_from(_I32, self._data, start - 4)[0]
            end = start + length
            if start <= end <= self._size:
                self._offset = end
                return self._data[start:end]
        return self.byten(self.i32(f"length of {what}"), what)  # Raises the fitting error.

    def flags(self, what: str, *, allowed: int) -> int:
        """Read a byte of flags, none of them outside `known`."""
        value = self.u8(what)
        if value & ~allowed:
            self.fail(f"{what} with no bit outside 0x{allowed:02x}, not 0x{value:02x}", back=1)
        return value

    def valid_xid(self, what: str) -> int:
        """Read a transaction id that is set (TransactionIdIsValid)."""
        return self.u32(what) or self.fail(f"{what}, not zero", back=4)

    def valid_lsn(self, what: str) -> int:
        """Read an LSN that is set (XLogRecPtrIsValid)."""
        return self.u64(what) or self.fail(f"{what}, not zero", back=8)

    def fits(self, count: int, what: str, *, item_size: int) -> int:
        """Check a count just read: this many items of at least `item_size` bytes must remain."""
        if not 0 <= count * item_size <= self.remaining:
            self.fail(f"a number of {what} that {self.remaining} bytes can hold, not {count}")
        return count

    def _integer(self, layout: str, what: str) -> int:
        start = self._offset
        size = struct.calcsize(layout)
        end = start + size
        if end > self._size:
            self.fail(f"{what} of {size} bytes, but {self.remaining} remain")
        self._offset = end
        value: int = struct.unpack_from(layout, self._data, start)[0]
        return value
