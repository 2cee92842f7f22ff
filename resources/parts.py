"""The parts that work is divided into, and their number: by its bytes, and so that parallel workers share it evenly.

In: bytes, the most that one part should have, and how many parts run at a time. Out: a number. Raises
nothing.
"""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

#: Passes batches on as long as their result is wanted.
Guard = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Reads a part by its number, passes its rows through the guard, and yields its results: a row (`WRITTEN`) for each file.
Part = Callable[[int, Guard], Iterable[pa.RecordBatch]]

#: This many bytes are worth a part of their own.
LEAST_BYTES = 4 * 1024 * 1024


def number_of_parts(size: int, most: int, parallelism: int) -> int:
    """The number of parts of at most `most` bytes each.

    A multiple of `parallelism`, unless parts would become too small.
    """
    shared = max(1, min(parallelism, size // LEAST_BYTES))
    return -(-max(1, -(-size // most)) // shared) * shared
