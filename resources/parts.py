"""Divides work into parts by its bytes, so that parallel workers share it evenly.

In: the bytes of the work, the largest size of a part in bytes, and the number of parts that run at a time.
Out: the number of parts. Raises nothing.
"""

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

#: Passes batches on, and ends the part by CancelledError once its result is no longer needed.
Guard = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Runs the part with a number: passes its rows through the guard, and yields results, usually a row
#: (`FILE_SCHEMA`) for each file that it writes.
Part = Callable[[int, Guard], Iterable[pa.RecordBatch]]

#: A smaller part costs more than it saves.
MIN_PART_BYTES = 4 * 1024 * 1024


def number_of_parts(size: int, max_bytes: int, parallelism: int) -> int:
    """The number of parts of at most `max_bytes` each; a multiple of `parallelism`, unless parts would be too small."""
    workers = max(1, min(parallelism, size // MIN_PART_BYTES))
    return -(-max(1, -(-size // max_bytes)) // workers) * workers
