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

#: A bitmap begins with one of these numbers. The second number means that some of its containers have runs, which are
#: ranges of adjacent numbers.
_COOKIE, _COOKIE_OF_RUNS = 12346, 12347
#: A container with more numbers than this has a bit for each possible number. A smaller container lists its numbers, with
#: two bytes each.
_MAX_LISTED_NUMBERS = 4096
_CONTAINER_SIZE = 1 << 16
#: A bitmap with runs and with fewer containers than this has no list of their offsets. Any other bitmap has this list.
_MIN_CONTAINERS_WITH_OFFSETS = 4


def serialize(numbers: Numbers) -> bytes:
    """Return the bitmap of distinct numbers; they must ascend, and must not be negative."""
    bitmaps = list(_group_by_upper_bits(numbers, 32))
    parts = [len(bitmaps).to_bytes(8, "little")]
    for upper, lower in bitmaps:
        parts += [upper.to_bytes(4, "little"), _serialize_bitmap(lower)]
    return b"".join(parts)


def deserialize(octets: bytes) -> Numbers:
    """Return the numbers of a bitmap in ascending order; raises ValueError if the bytes are no bitmap."""
    reader = _Reader(octets)
    parts = [np.empty(0, np.int64)]
    for _ in range(reader.read_number("<u8")):
        upper = reader.read_number("<u4")
        parts += [container + (upper << 32) for container in _read_containers(reader)]
    return np.concatenate(parts)


def _group_by_upper_bits(numbers: Numbers, bits: int) -> Iterator[tuple[int, Numbers]]:
    """Group numbers by their upper bits: all bits except the lowest `bits` ones.

    Yields the upper bits of each group, and the lower bits of its numbers.
    """
    begin = 0
    while begin < len(numbers):
        upper = int(numbers[begin] >> bits)
        end = begin + int(np.searchsorted(numbers[begin:], (upper + 1) << bits))
        yield upper, numbers[begin:end] & ((1 << bits) - 1)
        begin = end


def _serialize_bitmap(numbers: Numbers) -> bytes:
    """Return the bytes of the 32-bit bitmap of numbers."""
    containers = list(_group_by_upper_bits(numbers, 16))
    keys_and_counts = [(upper, len(lower) - 1) for upper, lower in containers]
    bodies = [_serialize_container(lower) for _, lower in containers]
    header = (
        np.array([_COOKIE, len(containers)], "<u4").tobytes() + np.array(keys_and_counts, "<u2").tobytes()
    )
    first_offset = len(header) + 4 * len(containers)
    offsets = first_offset + np.cumsum([0, *(len(body) for body in bodies[:-1])])
    return b"".join([header, offsets.astype("<u4").tobytes(), *bodies])


def _serialize_container(numbers: Numbers) -> bytes:
    if len(numbers) <= _MAX_LISTED_NUMBERS:
        return numbers.astype("<u2").tobytes()
    is_member = np.zeros(_CONTAINER_SIZE, np.bool_)
    is_member[numbers] = True
    return np.packbits(is_member, bitorder="little").tobytes()


def _read_containers(reader: _Reader) -> Iterator[Numbers]:
    """Yield the numbers of each container of a 32-bit bitmap."""
    cookie = reader.read_number("<u4")
    if cookie == _COOKIE:
        count = reader.read_number("<u4")
        run_flags = np.zeros(count, np.uint8)
    elif cookie & 0xFFFF == _COOKIE_OF_RUNS:
        count = (cookie >> 16) + 1
        run_flags = np.unpackbits(
            reader.read_array("u1", (count + 7) // 8).astype(np.uint8), bitorder="little"
        )[:count]
    else:
        raise ValueError(f"not a Roaring bitmap: it begins with {cookie}")
    keys_and_counts = reader.read_array("<u2", 2 * count).reshape(count, 2)
    if cookie == _COOKIE or count >= _MIN_CONTAINERS_WITH_OFFSETS:
        # The offsets of the containers are not needed, because all containers are read in order.
        reader.read_array("<u4", count)
    for (upper, count_minus_one), has_runs in zip(keys_and_counts.tolist(), run_flags.tolist(), strict=True):
        yield (upper << 16) + (_read_runs(reader) if has_runs else _read_numbers(reader, count_minus_one + 1))


def _read_numbers(reader: _Reader, count: int) -> Numbers:
    if count <= _MAX_LISTED_NUMBERS:
        return reader.read_array("<u2", count)
    octets = reader.read_array("u1", _CONTAINER_SIZE // 8).astype(np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


def _read_runs(reader: _Reader) -> Numbers:
    runs = reader.read_array("<u2", 2 * reader.read_number("<u2")).reshape(-1, 2)
    first_numbers, counts = runs[:, 0], runs[:, 1] + 1
    return np.repeat(first_numbers - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


class _Reader:
    """Reads numbers from bytes, from the beginning to the end."""

    def __init__(self, octets: bytes) -> None:
        self._octets, self._position = octets, 0

    def read_array(self, layout: str, count: int) -> Numbers:
        """Return the next `count` numbers; raises ValueError if fewer bytes remain.

        `layout` is the type of a number in numpy's notation, such as `<u4`.
        """
        values = np.frombuffer(self._octets, layout, count, self._position) if count else np.empty(0, layout)
        self._position += values.nbytes
        return values.astype(np.int64)

    def read_number(self, layout: str) -> int:
        """Return the next number."""
        return int(self.read_array(layout, 1)[0])
