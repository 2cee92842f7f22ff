"""How much WAL is read from a slot at once, and how a reading is divided into slices.

In: positions, faults, and the messages of transactions in commit order. Out: the ends of the slices to read
next, and the messages of each. Every reading decodes from the slot's restart_lsn, which a long transaction holds back.
So readings grow as long as they succeed, so that a backlog takes few readings. Raises ProtocolError.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.messages import Begin, decode

#: The most slices of a reading: the server keeps everything that it has decoded in a temporary file.
MAX_SLICES = 8
#: A reading of fewer bytes of WAL uses one session: a second one needs time to be made ready.
SECOND_SESSION_BYTES = 64 * 1024 * 1024
#: The smallest reading. After a failure this many readings have to succeed before they grow.
MIN_BYTES, _SUCCESSES_AFTER_FAILURE = 4 * 1024 * 1024, 4


class Stride:
    """The number of bytes of WAL in a reading: it grows after successes, and is halved after a failure."""

    def __init__(self, slice_bytes: int) -> None:
        self._slice = slice_bytes
        self._bytes = slice_bytes
        self._needed, self._successes = 1, 0

    def next_ends(self, position: int, target: int, *, single: bool) -> list[int]:
        """The ends of the slices of the next reading, from `position` to at most `target`; one slice if `single`."""
        size = min(self._bytes, self._slice)
        number = 1 if single else max(1, self._bytes // self._slice)
        ends = [min(position + size * each, target) for each in range(1, number + 1)]
        return list(dict.fromkeys(ends))

    def grow(self) -> None:
        """Let the next readings grow."""
        self._successes += 1
        if self._successes >= self._needed:
            self._bytes, self._successes = min(self._bytes * 2, self._slice * MAX_SLICES), 0

    def shrink(self, failed_bytes: int) -> bool:
        """Halve the next reading; False if `failed_bytes`, the bytes that failed, cannot be halved."""
        if failed_bytes <= MIN_BYTES:
            return False
        self._bytes = max(MIN_BYTES, failed_bytes // 2)
        self._needed, self._successes = _SUCCESSES_AFTER_FAILURE, 0
        return True


def halves(position: int, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Divide the ends of slices between two sessions, so that each reads about the same amount of WAL."""
    middle = (position + ends[-1]) // 2
    return [*(end for end in ends if end < middle), middle], [end for end in ends if end > middle]


class TransactionsInOrder:
    """The messages of transactions in commit order, which are taken slice by slice."""

    def __init__(self, messages: Iterable[pa.Array]) -> None:
        self._messages = iter(messages)
        self._remainder: pa.Array | None = None

    def before(self, end: int | None) -> Iterator[pa.Array]:
        """The messages of the next transactions that commit before `end`, or of all if it is None; no array is empty."""
        while (messages := self._next()) is not None:
            row = len(messages) if end is None else _first_from(messages, end)
            if row < len(messages):
                self._remainder = messages.slice(row)
            if row:
                yield messages.slice(0, row)
            if row < len(messages):
                return

    def _next(self) -> pa.Array | None:
        remainder, self._remainder = self._remainder, None
        return remainder if remainder is not None else next((m for m in self._messages if len(m)), None)


def transactions_from(
    begin: int, messages: Iterable[pa.Array], relations: RelationDescriptions
) -> TransactionsInOrder:
    """The transactions that commit at or after `begin`; of earlier ones only the Relation messages are recorded.

    If a server crashed after a slot was advanced, the slot is at the last checkpoint's position again, and the server
    sends earlier transactions again (PostgreSQL documentation, 9.28.6 Replication Management Functions,
    pg_replication_slot_advance()).
    """
    transactions = TransactionsInOrder(messages)
    for sent_again in map(relations.insert_missing, transactions.before(begin)):
        deque(sent_again, maxlen=0)
    return transactions


def _first_from(messages: pa.Array, end: int) -> int:
    """The row at which the first transaction that commits at or after `end` begins; the number of rows if there is none."""

    def is_later(row: int) -> bool:
        begin = decode(messages[row].as_py())
        assert isinstance(begin, Begin)
        return begin.final_lsn >= end

    begin_rows = np.flatnonzero(Octets(messages).kinds() == Begin.tag).tolist()
    first = bisect_left(begin_rows, True, key=is_later)
    return int(begin_rows[first]) if first < len(begin_rows) else len(messages)
