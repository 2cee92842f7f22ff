"""Divides work into parts by its bytes, so that parallel workers share it evenly.

In: the bytes of the work, the largest size of a part in bytes, and the number of parts that run at a time.
Out: the number of parts. Raises nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

#: Passes batches on, and ends the part by CancelledError once its result is no longer needed.
Guard = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Runs the part with a number: passes its rows through the guard, and yields results, usually a row
#: (`FILE_SCHEMA`) for each file that it writes.
Part = Callable[[int, Guard], Iterable[pa.RecordBatch]]

#: What parts send to receivers: the receiver's number, the part's or another number, and bytes.
MESSAGE_SCHEMA = pa.schema({"to": pa.int32(), "of": pa.int32(), "content": pa.binary()})
#: A number and bytes that a receiver gets.
Message = tuple[int, pa.Buffer]


@dataclass(frozen=True)
class Receivers:
    """A number of receivers; `receive` handles all messages to one of them, by its number, and yields rows."""

    number: int
    receive: Callable[[int, Sequence[Message], Guard], Iterable[pa.RecordBatch]]


def message(receiver: int, number: int, content: bytes | pa.Buffer) -> pa.RecordBatch:
    """A message, as a row."""
    octets = pa.py_buffer(content)
    offsets = pa.array([0, octets.size], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, octets])
    return pa.RecordBatch.from_arrays(
        [pa.array([receiver], pa.int32()), pa.array([number], pa.int32()), column], schema=MESSAGE_SCHEMA
    )


def by_receiver(message_rows: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, list[Message]]]:
    """The messages to each receiver, as far as they come one after the other."""
    receiver, messages = -1, list[Message]()
    for batch in message_rows:
        numbers, contents = (batch.column(name) for name in ("of", "content"))
        for place, next_receiver in enumerate(batch.column("to").to_pylist()):
            if next_receiver != receiver and messages:
                yield receiver, messages
                messages = []
            receiver = next_receiver
            messages.append((numbers[place].as_py(), contents[place].as_buffer()))
    if messages:
        yield receiver, messages


#: A smaller part costs more than it saves.
MIN_PART_BYTES = 4 * 1024 * 1024


def number_of_parts(size: int, max_bytes: int, parallelism: int) -> int:
    """The number of parts of at most `max_bytes` each; a multiple of `parallelism`, unless parts would be too small."""
    workers = max(1, min(parallelism, size // MIN_PART_BYTES))
    return -(-max(1, -(-size // max_bytes)) // workers) * workers
