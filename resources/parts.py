"""Divides work into parts by its bytes, so that parallel workers share it evenly.

In: the bytes of the work, the largest size of a part, and how many parts run at a time. Out: the number of
parts. Raises nothing.
"""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

#: Passes batches on until the result is no longer needed.
Guard = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Reads a part by its number, passes its rows through the guard, and yields its results: a row (`WRITTEN`)
#: for each file.
Part = Callable[[int, Guard], Iterable[pa.RecordBatch]]

#: A smaller part costs more than it saves.
LEAST_BYTES = 4 * 1024 * 1024


def number_of_parts(size: int, most: int, parallelism: int) -> int:
    """The number of parts of at most `most` bytes each.

    It is a multiple of `parallelism`, unless parts would become too small.
    """
    shared = max(1, min(parallelism, size // LEAST_BYTES))
    return -(-max(1, -(-size // most)) // shared) * shared
