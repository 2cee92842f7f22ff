"""64-bit Roaring bitmaps in their portable format: numbers in, bytes out, and back.

In: distinct numbers in ascending order, or the bytes of a bitmap. Out: the bytes, or the numbers. A container
stores up to 65,536 numbers with the same upper bits, so Python runs nothing per number. Raises ValueError for
bytes that are no bitmap.

https://github.com/RoaringBitmap/RoaringFormatSpec (Standard 32-bit Roaring Bitmap, Extension for 64-bit
Implementations)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

#: The first number of a bitmap without and with containers of runs.
_COOKIE, _COOKIE_OF_RUNS = 12346, 12347
#: A container with more numbers than this has a bit for each possible number; a smaller one lists its numbers, in
#: two bytes each.
_MOST_LISTED = 4096
_CONTAINER = 1 << 16
#: A bitmap with containers of runs has the offsets of its containers from this many containers on.
_LEAST_WITH_OFFSETS = 4


def serialize(numbers: Numbers) -> bytes:
    """The bitmap of distinct numbers, which ascend and are not negative."""
    bitmaps = list(_split(numbers, 32))
    parts = [len(bitmaps).to_bytes(8, "little")]
    for upper, lower in bitmaps:
        parts += [upper.to_bytes(4, "little"), _bitmap(lower)]
    return b"".join(parts)


def deserialize(octets: bytes) -> Numbers:
    """The numbers of a bitmap, in ascending order; raises ValueError."""
    read = _Read(octets)
    parts = [np.empty(0, np.int64)]
    for _ in range(read.number("<u8")):
        upper = read.number("<u4")
        parts += [container + (upper << 32) for container in _containers(read)]
    return np.concatenate(parts)


def _split(numbers: Numbers, bits: int) -> Iterator[tuple[int, Numbers]]:
    """Group numbers by their upper bits; yield the upper bits, and the lower bits of the numbers in the group."""
    begins = np.flatnonzero(np.diff(numbers >> bits, prepend=-1))
    for part in np.split(numbers, begins[1:]) if len(begins) else ():
        yield int(part[0] >> bits), part & ((1 << bits) - 1)


def _bitmap(numbers: Numbers) -> bytes:
    """The 32-bit bitmap of numbers."""
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


def _containers(read: _Read) -> Iterator[Numbers]:
    """The numbers of each container of a 32-bit bitmap."""
    cookie = read.number("<u4")
    if cookie == _COOKIE:
        count = read.number("<u4")
        has_runs = np.zeros(count, np.uint8)
    elif cookie & 0xFFFF == _COOKIE_OF_RUNS:
        count = (cookie >> 16) + 1
        has_runs = np.unpackbits(read.array("u1", (count + 7) // 8).astype(np.uint8), bitorder="little")[
            :count
        ]
    else:
        raise ValueError(f"not a Roaring bitmap: it begins with {cookie}")
    described = read.array("<u2", 2 * count).reshape(count, 2)
    if cookie == _COOKIE or count >= _LEAST_WITH_OFFSETS:
        read.array("<u4", count)  # Where the containers begin; they follow one another.
    for (upper, last), is_runs in zip(described.tolist(), has_runs.tolist(), strict=True):
        yield (upper << 16) + (_numbers_in_runs(read) if is_runs else _listed_numbers(read, last + 1))


def _listed_numbers(read: _Read, count: int) -> Numbers:
    if count <= _MOST_LISTED:
        return read.array("<u2", count)
    octets = read.array("u1", _CONTAINER // 8).astype(np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


def _numbers_in_runs(read: _Read) -> Numbers:
    runs = read.array("<u2", 2 * read.number("<u2")).reshape(-1, 2)
    first, count = runs[:, 0], runs[:, 1] + 1
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))


class _Read:
    """Reads bytes from the beginning to the end."""

    def __init__(self, octets: bytes) -> None:
        self._octets, self._at = octets, 0

    def array(self, kind: str, count: int) -> Numbers:
        """The next numbers of a kind; raises ValueError where the bytes end before."""
        values = np.frombuffer(self._octets, kind, count, self._at) if count else np.empty(0, kind)
        self._at += values.nbytes
        return values.astype(np.int64)

    def number(self, kind: str) -> int:
        """The next number."""
        return int(self.array(kind, 1)[0])
