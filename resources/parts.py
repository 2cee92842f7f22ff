"""Divides work into parts by the number of its bytes, so that parallel workers get equal shares.

A part is what one task of Spark, or one thread, does at a time. The module also defines messages, by which parts hand
over their results to receivers. For example, each part reads some changes, and sends each change to the receiver of
the change's key. When all parts have ended, the receivers continue the work.

In: the bytes of the work, the largest size of a part, and the number of parts that run at the same time.
Out: the number of parts.

Raises nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pyarrow as pa

Item = TypeVar("Item")


class Guard(Protocol):
    """Ends work whose result is not needed."""

    def __call__(self, items: Iterable[Item], /) -> Iterator[Item]:
        """Yield the items, for example batches of rows.

        Once the result of the part is no longer needed, because another part has failed or the run ends, raise
        CancelledError instead, which ends the part.
        """


#: Does the part of the work with the given number. It passes its rows through the guard, and yields its results.
#: If it writes files, the results are a row for each file (`FILE_SCHEMA` of `lake.delta.parquet_files`).
Part = Callable[[int, Guard], Iterable[pa.RecordBatch]]

#: The columns of messages from parts to receivers. `to` is the number of the receiver. `of` is a number whose meaning
#: sender and receiver agree on, for example that of the part. `content` has bytes.
MESSAGE_SCHEMA = pa.schema({"to": pa.int32(), "of": pa.int32(), "content": pa.binary()})
#: A message as its receiver gets it: the number (`of`) and the bytes.
Message = tuple[int, pa.Buffer]


@dataclass(frozen=True)
class Receivers:
    """A number of receivers. For one receiver, `receive` gets its number and all messages to it, and yields rows."""

    count: int
    receive: Callable[[int, Sequence[Message], Guard], Iterable[pa.RecordBatch]]


def make_message(receiver: int, number: int, content: bytes | pa.Buffer) -> pa.RecordBatch:
    """A message, as a batch of one row."""
    octets = pa.py_buffer(content)
    offsets = pa.array([0, octets.size], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, octets])
    return pa.RecordBatch.from_arrays(
        [pa.array([receiver], pa.int32()), pa.array([number], pa.int32()), column], schema=MESSAGE_SCHEMA
    )


def group_by_receiver(message_rows: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, list[Message]]]:
    """Yield each receiver with the messages to it.

    If the messages to a receiver are not all next to each other, the receiver is yielded several times.
    """
    receiver, messages = -1, list[Message]()
    for batch in message_rows:
        numbers, contents = (batch.column(name) for name in ("of", "content"))
        for row_index, next_receiver in enumerate(batch.column("to").to_pylist()):
            if next_receiver != receiver and messages:
                yield receiver, messages
                messages = []
            receiver = next_receiver
            messages.append((numbers[row_index].as_py(), contents[row_index].as_buffer()))
    if messages:
        yield receiver, messages


#: The least size of a part. Starting a smaller part would take longer than the part saves.
MIN_PART_BYTES = 4 * 1024 * 1024


def count_parts(total_bytes: int, max_bytes: int, parallelism: int) -> int:
    """The number of parts of at most `max_bytes` each.

    It is a multiple of `parallelism`, so that no worker is idle in the last round, unless that would make the
    parts smaller than `MIN_PART_BYTES`.
    """
    worker_count = max(1, min(parallelism, total_bytes // MIN_PART_BYTES))
    return -(-max(1, -(-total_bytes // max_bytes)) // worker_count) * worker_count
