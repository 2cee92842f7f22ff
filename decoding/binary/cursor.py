"""Reads the numbers and strings of one message in order, with bounds checks.

In: the bytes of a message. Out: its fields. Each method takes the name of the field that it reads. It raises only
ProtocolError, with the message's name, the offset and the expected bytes. It never reads beyond the end of the message,
and never allocates more memory than the message needs. Integers are big-endian.

PostgreSQL documentation, Message Data Types; src/backend/libpq/pqformat.c.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from pgsieve.decoding.errors import ProtocolError

PROTOCOL_VIOLATION = "08P01"

# These are strings and not struct.Struct objects, because Spark cannot send the latter to executors.
_I8, _U16, _I16, _U32, _I32, _U64, _I64 = "!b", "!H", "!h", "!I", "!i", "!Q", "!q"


class Cursor:
    """A position in the bytes of one message. The position only moves forward."""

    __slots__ = ("_data", "_message", "_offset", "_size")

    def __init__(self, data: bytes | bytearray | memoryview, message: str, *, offset: int = 0) -> None:
        self._data = bytes(data)  # This copies the data only if it is not of type bytes.
        self._size = len(self._data)
        self._message = message
        self._offset = offset

    @property
    def offset(self) -> int:
        """The number of bytes read so far."""
        return self._offset

    @property
    def remaining(self) -> int:
        """The number of bytes not read yet."""
        return self._size - self._offset

    def fail(self, expected: str, *, bytes_before: int = 0) -> NoReturn:
        """Raise ProtocolError for a wrong field, which begins `bytes_before` bytes before the present position."""
        raise ProtocolError(
            f"malformed {self._message} message at offset {self._offset - bytes_before}: expected {expected}",
            sqlstate=PROTOCOL_VIOLATION,
        )

    def expect_end(self) -> None:
        """Raise ProtocolError if bytes remain."""
        if self.remaining:
            self.fail(f"the end of the message, but {self.remaining} bytes remain")

    def u8(self, field: str) -> int:
        """Read an unsigned byte."""
        start = self._offset
        if start >= self._size:
            self.fail(f"{field} of 1 byte, but 0 remain")
        self._offset = start + 1
        return self._data[start]

    def i8(self, field: str) -> int:
        """Read a signed byte."""
        return self._integer(_I8, field)

    def u16(self, field: str) -> int:
        """Read an unsigned integer of 16 bits."""
        return self._integer(_U16, field)

    def i16(self, field: str) -> int:
        """Read a signed integer of 16 bits."""
        return self._integer(_I16, field)

    def u32(self, field: str) -> int:
        """Read an unsigned integer of 32 bits, such as an OID or a transaction id."""
        return self._integer(_U32, field)

    def i32(self, field: str) -> int:
        """Read a signed integer of 32 bits."""
        return self._integer(_I32, field)

    def u64(self, field: str) -> int:
        """Read an unsigned integer of 64 bits, such as an LSN."""
        return self._integer(_U64, field)

    def i64(self, field: str) -> int:
        """Read a signed integer of 64 bits."""
        return self._integer(_I64, field)

    def cstr(self, field: str) -> str:
        """Read a string that ends with a zero byte."""
        end = self._data.find(b"\0", self._offset)
        if end < 0:
            self.fail(f"{field}, a string that ends with a zero byte")
        # With surrogateescape, bytes that are not UTF-8 raise no error. A table with such a name would otherwise stop
        # the replication of all other tables.
        text = str(self._data[self._offset : end], "utf-8", "surrogateescape")
        self._offset = end + 1
        return text

    def byten(self, length: int, field: str) -> bytes:
        """Read `length` bytes (Byten in the documentation)."""
        start = self._offset
        end = start + length
        if length < 0 or end > self._size:
            self.fail(f"{field} of {length} bytes, but {self.remaining} remain")
        self._offset = end
        return self._data[start:end]

    def length_prefixed(self, field: str) -> bytes:
        """Read a length of 32 bits, and as many bytes as the length says."""
        start = self._offset + 4
        if start <= self._size:
            length: int = struct.unpack_from(_I32, self._data, start - 4)[0]
            end = start + length
            if start <= end <= self._size:
                self._offset = end
                return self._data[start:end]
        return self.byten(self.i32(f"length of {field}"), field)  # This raises the error.

    def flags(self, field: str, *, allowed: int) -> int:
        """Read a byte of flags; raises ProtocolError if a bit is set that is not in `allowed`."""
        value = self.u8(field)
        if value & ~allowed:
            self.fail(f"{field} with no bit outside 0x{allowed:02x}, not 0x{value:02x}", bytes_before=1)
        return value

    def valid_xid(self, field: str) -> int:
        """Read a transaction id; raises ProtocolError for zero (TransactionIdIsValid)."""
        return self.u32(field) or self.fail(f"{field}, not zero", bytes_before=4)

    def valid_lsn(self, field: str) -> int:
        """Read an LSN; raises ProtocolError for zero (XLogRecPtrIsValid)."""
        return self.u64(field) or self.fail(f"{field}, not zero", bytes_before=8)

    def check_count(self, count: int, field: str, *, item_size: int) -> int:
        """Return the count of items that was just read, if the rest of the message is long enough for them.

        `item_size` is the least number of bytes of an item. Raises ProtocolError if the rest is too short.
        """
        if not 0 <= count * item_size <= self.remaining:
            self.fail(f"a number of {field} that {self.remaining} bytes can hold, not {count}")
        return count

    def _integer(self, layout: str, field: str) -> int:
        start = self._offset
        size = struct.calcsize(layout)
        end = start + size
        if end > self._size:
            self.fail(f"{field} of {size} bytes, but {self.remaining} remain")
        self._offset = end
        value: int = struct.unpack_from(layout, self._data, start)[0]
        return value
