"""Decides how much WAL one query reads from a slot, and divides what is read into slices.

A slice is the changes from one position of the slot to another. A reading is what one query fetches from the slot.

In: positions, whether the last reading succeeded, and the messages of transactions in commit order
Out: the ends of the slices to read next, and the messages of each slice

Each reading makes the server decode the WAL from the slot's restart_lsn on. A long transaction keeps restart_lsn far
back, so the same WAL is decoded again by each reading. Therefore a large backlog should need few readings: they become
larger as long as they succeed. Raises ProtocolError for messages that cannot be parsed.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.messages import Begin, decode

#: The largest number of slices in a reading. It is limited, because the server keeps a whole reading in a temporary file.
MAX_SLICES = 8
#: If a reading has fewer bytes of WAL than this, one session reads it. A second session takes some time to be made
#: ready.
SECOND_SESSION_BYTES = 64 * 1024 * 1024
#: The smallest number of bytes in a reading; and how many readings have to succeed after a failure before they grow
#: again.
MIN_BYTES, _SUCCESSES_AFTER_FAILURE = 4 * 1024 * 1024, 4


class Stride:
    """The number of bytes of WAL in a reading. It grows after successes, and is halved after a failure."""

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._bytes = slice_bytes
        self._needed_successes, self._successes = 1, 0

    def next_ends(self, position: int, target: int, *, is_single: bool) -> list[int]:
        """The ends of the slices in the next reading, from `position` to at most `target`. With `is_single`, only one slice."""
        size = min(self._bytes, self._slice_bytes)
        slice_count = 1 if is_single else max(1, self._bytes // self._slice_bytes)
        ends = [min(position + size * index, target) for index in range(1, slice_count + 1)]
        return list(dict.fromkeys(ends))

    def grow(self) -> None:
        """Record a success. After enough of them, the next readings are larger."""
        self._successes += 1
        if self._successes >= self._needed_successes:
            self._bytes, self._successes = min(self._bytes * 2, self._slice_bytes * MAX_SLICES), 0

    def shrink(self, failed_bytes: int) -> bool:
        """Halve the next reading after a reading of `failed_bytes` has failed. Returns false if it cannot be made smaller."""
        if failed_bytes <= MIN_BYTES:
            return False
        self._bytes = max(MIN_BYTES, failed_bytes // 2)
        self._needed_successes, self._successes = _SUCCESSES_AFTER_FAILURE, 0
        return True


def divide_slices(position: int, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Divide slices between two sessions, so that each of them reads about the same amount of WAL.

    Returns the ends of the slices of each session.
    """
    middle = (position + ends[-1]) // 2
    return [*(end for end in ends if end < middle), middle], [end for end in ends if end > middle]


class TransactionsInOrder:
    """The messages of transactions in commit order, which are taken slice by slice."""

    def __init__(self, messages: Iterable[pa.Array]) -> None:
        self._messages = iter(messages)
        self._remainder: pa.Array | None = None

    def take_before(self, end: int | None) -> Iterator[pa.Array]:
        """Yields the messages of the next transactions: those that commit before `end`, or all if it is None.

        No array that is yielded is empty.
        """
        while (messages := self._next()) is not None:
            row = len(messages) if end is None else find_first_row(messages, end)
            if row < len(messages):
                self._remainder = messages.slice(row)
            if row:
                yield messages.slice(0, row)
            if row < len(messages):
                return

    def _next(self) -> pa.Array | None:
        remainder, self._remainder = self._remainder, None
        return remainder if remainder is not None else next((m for m in self._messages if len(m)), None)


def skip_earlier_transactions(
    begin: int, messages: Iterable[pa.Array], relations: RelationDescriptions
) -> TransactionsInOrder:
    """The transactions that commit at or after `begin`. Only the Relation messages of earlier ones are recorded.

    A server may crash after a slot was advanced. The slot is then at its position of the last checkpoint again, and the
    server repeats the transactions from there on (PostgreSQL documentation, 9.28.6 Replication Management Functions,
    pg_replication_slot_advance()).
    """
    transactions = TransactionsInOrder(messages)
    for repeated_messages in map(relations.insert_missing_descriptions, transactions.take_before(begin)):
        deque(repeated_messages, maxlen=0)
    return transactions


def find_first_row(messages: pa.Array, end: int) -> int:
    """Find the first transaction that commits at or after `end`. Return the row of its Begin message.

    Returns the number of rows if there is no such transaction.
    """

    def is_later(row: int) -> bool:
        begin = decode(messages[row].as_py())
        assert isinstance(begin, Begin)
        return begin.final_lsn >= end

    begin_rows = np.flatnonzero(Octets(messages).first_bytes() == Begin.tag).tolist()
    index = bisect_left(begin_rows, True, key=is_later)
    return int(begin_rows[index]) if index < len(begin_rows) else len(messages)
