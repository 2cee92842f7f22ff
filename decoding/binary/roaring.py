"""64-bit Roaring bitmaps in their portable format. Delta Lake's deletion vectors have this format.

`serialize` converts distinct numbers in ascending order to the bytes of a bitmap, and `deserialize` does the reverse.
A bitmap consists of containers. A container stores up to 65,536 numbers with the same upper bits. Python code runs once
per container, never per number. Raises ValueError for bytes that are no bitmap.

https://github.com/RoaringBitmap/RoaringFormatSpec (Standard 32-bit Roaring Bitmap, Extension for 64-bit
Implementations)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

#: A bitmap begins with one of these numbers. The second number means that it has containers of runs (of adjacent
#: numbers).
_COOKIE, _COOKIE_OF_RUNS = 12346, 12347
#: A container with more numbers than this has a bit for each possible number. A smaller container lists its numbers, with
#: two bytes each.
_MOST_LISTED = 4096
_CONTAINER = 1 << 16
#: A bitmap with containers of runs has a list of the offsets of its containers if it has at least this number of them.
_LEAST_WITH_OFFSETS = 4


def serialize(numbers: Numbers) -> bytes:
    """Return the bitmap of distinct numbers; they must ascend, and must not be negative."""
    bitmaps = list(_split(numbers, 32))
    parts = [len(bitmaps).to_bytes(8, "little")]
    for upper, lower in bitmaps:
        parts += [upper.to_bytes(4, "little"), _bitmap(lower)]
    return b"".join(parts)


def deserialize(octets: bytes) -> Numbers:
    """Return the numbers of a bitmap in ascending order; raises ValueError if the bytes are no bitmap."""
    reader = _Reader(octets)
    parts = [np.empty(0, np.int64)]
    for _ in range(reader.number("<u8")):
        upper = reader.number("<u4")
        parts += [container + (upper << 32) for container in _containers(reader)]
    return np.concatenate(parts)


def _split(numbers: Numbers, bits: int) -> Iterator[tuple[int, Numbers]]:
    """Group numbers by their upper bits: all bits except the lowest `bits` ones.

    Yields the upper bits of each group, and the lower bits of its numbers.
    """
    begins = np.flatnonzero(np.diff(numbers >> bits, prepend=-1))
    for part in np.split(numbers, begins[1:]) if len(begins) else ():
        yield int(part[0] >> bits), part & ((1 << bits) - 1)


def _bitmap(numbers: Numbers) -> bytes:
    """Return the bytes of the 32-bit bitmap of numbers."""
    containers = list(_split(numbers, 16))
    described = [(upper, len(lower) - 1) for upper, lower in containers]
    bodies = [_body(lower) for _, lower in containers]
    header = np.array([_COOKIE, len(containers)], "<u4").tobytes() + np.array(described, "<u2").tobytes()
    first = len(header) + 4 * len(containers)
    offsets = first + np.cumsum([0, *(len(body) for body in bodies[:-1])])
    return b"".join([header, offsets.astype("<u4").tobytes(), *bodies])


def _body(numbers: Numbers) -> bytes:
    if len(numbers) <= _MOST_LISTED:
        return numbers.astype("<u2").tobytes()
    bits = np.zeros(_CONTAINER, np.bool_)
    bits[numbers] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _containers(reader: _Reader) -> Iterator[Numbers]:
    """Yield the numbers of each container of a 32-bit bitmap."""
    cookie = reader.number("<u4")
    if cookie == _COOKIE:
        count = reader.number("<u4")
        has_runs = np.zeros(count, np.uint8)
    elif cookie & 0xFFFF == _COOKIE_OF_RUNS:
        count = (cookie >> 16) + 1
        has_runs = np.unpackbits(reader.array("u1", (count + 7) // 8).astype(np.uint8), bitorder="little")[
            :count
        ]
    else:
        raise ValueError(f"not a Roaring bitmap: it begins with {cookie}")
    described = reader.array("<u2", 2 * count).reshape(count, 2)
    if cookie == _COOKIE or count >= _LEAST_WITH_OFFSETS:
        # The offsets of the containers are not needed, because all containers are read in order.
        reader.array("<u4", count)
    for (upper, last), is_runs in zip(described.tolist(), has_runs.tolist(), strict=True):
        yield (upper << 16) + (_numbers_in_runs(reader) if is_runs else _listed_numbers(reader, last + 1))


def _listed_numbers(reader: _Reader, count: int) -> Numbers:
    if count <= _MOST_LISTED:
        return reader.array("<u2", count)
    octets = reader.array("u1", _CONTAINER // 8).astype(np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


def _numbers_in_runs(reader: _Reader) -> Numbers:
    runs = reader.array("<u2", 2 * reader.number("<u2")).reshape(-1, 2)
    first, count = runs[:, 0], runs[:, 1] + 1
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))


class _Reader:
    """Reads numbers from bytes, from the beginning to the end."""

    def __init__(self, octets: bytes) -> None:
        self._octets, self._at = octets, 0

    def array(self, kind: str, count: int) -> Numbers:
        """Return the next `count` numbers; raises ValueError if fewer bytes remain.

        `kind` is the type of a number in numpy's notation, such as `<u4`.
        """
        values = np.frombuffer(self._octets, kind, count, self._at) if count else np.empty(0, kind)
        self._at += values.nbytes
        return values.astype(np.int64)

    def number(self, kind: str) -> int:
        """Return the next number."""
        return int(self.array(kind, 1)[0])
