"""Scans the headers of messages.

In: batches of raw messages. Out: columns with which to order and group these messages.

The scan reads only the type byte, the relation and the transaction of each message, for all messages of a batch
together. `pgsieve.decoding.protocol.tuples` decodes the rows later. Raises ProtocolError for messages outside
transactions, except logical decoding messages that are not transactional. Also raises it for messages of streamed and
prepared transactions, which the module `transactions` must assemble first.

PostgreSQL documentation, Logical Streaming Replication Protocol, Logical Replication Message Formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets, UnsignedIntegers
from pgsieve.decoding.errors import ProtocolError

_POSTGRES_EPOCH_MICROS = 946_684_800_000_000  # 2000-01-01 UTC in Unix time

_BEGIN, _COMMIT, _MESSAGE = b"BCM"
# Sizes in bytes. A message with a relation id has at least _MIN_RELATION_BYTES bytes, and a logical decoding message has
# at least _MIN_MESSAGE_BYTES bytes.
_BEGIN_BYTES, _COMMIT_BYTES, _MIN_RELATION_BYTES = 21, 26, 5
_MIN_MESSAGE_BYTES = 15


def _make_lookup_table(letters: bytes) -> npt.NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[np.frombuffer(letters, np.uint8)] = True
    return table


_IS_KNOWN = _make_lookup_table(b"BCORYIUDTM")
_HAS_RELATION = _make_lookup_table(b"RIUD")
_IS_ROW_CHANGE = _make_lookup_table(b"IUD")
_IS_CHANGE = _make_lookup_table(b"IUDTM")


@dataclass(frozen=True, slots=True)
class MessageHeaders:
    """The headers of messages; each array has one element per message.

    - `kind` is the type byte.
    - `relation_id` is set for Relation, Insert, Update and Delete messages, and 0 for others.
    - `commit_lsn`, `commit_time` and `xid` belong to the message's transaction. `commit_lsn` is the start of the
      commit record, which a Begin message calls the final LSN. `commit_time` is in microseconds since 1970-01-01
      UTC.
    - `end_lsn` is set for Commit messages, and 0 for others. It is the end of the commit record. A client confirms
      this LSN when it has stored the transaction.
    - `ordinal` orders the messages of a transaction. The n-th change (Insert, Update, Delete, Truncate or
      Message) has the ordinal 2n. Any other message has the odd number between the ordinals of the changes before and
      after it.

    Relation messages, which each session sends at different places, are not counted. So a change has the same
    (commit_lsn, ordinal) in every session. A change is described by the relation's last Relation message before it.

    For a message outside transactions, `commit_lsn` is the message's own LSN, and `commit_time`, `xid` and `ordinal`
    are 0.
    """

    kind: npt.NDArray[np.uint8]
    relation_id: npt.NDArray[np.int64]
    commit_lsn: npt.NDArray[np.int64]
    ordinal: npt.NDArray[np.int64]
    commit_time: npt.NDArray[np.int64]
    xid: npt.NDArray[np.int64]
    end_lsn: npt.NDArray[np.int64]


class HeaderScanner:
    """Scans consecutive batches of messages of one session; a transaction may span batches."""

    def __init__(self) -> None:
        # The transaction that is open when the next batch begins, and the number of its changes in earlier batches.
        # If no transaction is open, the LSN is 0.
        self._open_lsn = self._open_time = self._open_xid = self._open_change_count = 0

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction is open: its Begin was scanned, and its Commit was not."""
        return self._open_lsn != 0

    def scan(self, data: pa.Array) -> MessageHeaders:
        """Return the headers of the next batch of messages (binary or large_binary)."""
        octets = Octets(data)
        starts, sizes = octets.starts, octets.ends - octets.starts
        first_integers = octets.read_integers(starts)
        kind = (first_integers >> 56).astype(np.uint8)
        _require((sizes > 0) & _IS_KNOWN[kind], kind, "is not part of a transaction that is sent at commit")
        has_relation = _HAS_RELATION[kind]
        _require(~has_relation | (sizes >= _MIN_RELATION_BYTES), kind, "ends before its relation")

        begins, commits = np.flatnonzero(kind == _BEGIN), np.flatnonzero(kind == _COMMIT)
        _require(sizes[begins] == _BEGIN_BYTES, kind[begins], f"does not have {_BEGIN_BYTES} bytes")
        _require(sizes[commits] == _COMMIT_BYTES, kind[commits], f"does not have {_COMMIT_BYTES} bytes")
        _require(first_integers[commits] >> 48 & 0xFF == 0, kind[commits], "has unknown flags")
        begin_starts = starts[begins]
        # Element 0 of these arrays is the transaction that the previous batch left open. Element n is the n-th
        # transaction that begins in this batch.
        lsns = np.append(self._open_lsn, _to_signed(octets.read_integers(begin_starts + 1)))
        commit_times = np.append(
            self._open_time, _to_signed(octets.read_integers(begin_starts + 9)) + _POSTGRES_EPOCH_MICROS
        )
        xids = np.append(self._open_xid, _to_signed(octets.read_integers(begin_starts + 17) >> np.uint64(32)))
        _require(lsns[1:] > 0, kind[begins], "has no final LSN")
        transaction_index = np.cumsum(kind == _BEGIN)

        # Begin and Commit must alternate. All other messages must be between Begin and Commit, except logical
        # decoding messages that are not transactional.
        open_count = (1 if self._open_lsn else 0) + transaction_index - np.cumsum(kind == _COMMIT)
        is_inside = open_count + (kind == _COMMIT) == 1
        is_outside, outside_messages = ~is_inside, np.flatnonzero((kind == _MESSAGE) & ~is_inside)
        _require(open_count >> 1 == 0, kind, "opens or ends a transaction out of turn")
        _require(sizes[outside_messages] >= _MIN_MESSAGE_BYTES, kind[outside_messages], "is too short")
        is_not_transactional = np.zeros(len(kind), np.bool_)
        is_not_transactional[outside_messages] = (first_integers[outside_messages] >> 48 & 0xFF) == 0
        _require(is_inside | is_not_transactional, kind, "came outside of a transaction")

        commit_lsn, commit_time, xid = (values[transaction_index] for values in (lsns, commit_times, xids))
        end_lsn = np.zeros(len(kind), np.int64)
        commit_starts = starts[commits]
        begin_lsn = _to_signed(octets.read_integers(commit_starts + 2))
        _require(begin_lsn == commit_lsn[commits], kind[commits], "does not match its Begin")
        end_lsn[commits] = _to_signed(octets.read_integers(commit_starts + 10))

        is_change = _IS_CHANGE[kind]
        change_counts = np.cumsum(is_change)
        earlier_change_counts = np.append(-self._open_change_count, change_counts[begins])[transaction_index]
        ordinal = 2 * (change_counts - earlier_change_counts) + ~is_change
        # A message outside transactions has an LSN of its own, but no commit time and no transaction id.
        commit_lsn[is_outside] = _to_signed(octets.read_integers(starts[is_outside] + 2))
        commit_time[is_outside] = xid[is_outside] = ordinal[is_outside] = 0

        if len(kind):
            is_open = bool(open_count[-1])
            self._open_lsn, self._open_time, self._open_xid = (
                (int(lsns[-1]), int(commit_times[-1]), int(xids[-1])) if is_open else (0, 0, 0)
            )
            self._open_change_count = int(change_counts[-1] - earlier_change_counts[-1]) if is_open else 0
        relation_id = np.where(has_relation, first_integers >> 24 & 0xFFFFFFFF, 0).astype(np.int64)
        return MessageHeaders(kind, relation_id, commit_lsn, ordinal, commit_time, xid, end_lsn)


def find_begun_xids_and_changed_relations(data: pa.Array) -> tuple[set[int], set[int]]:
    """Return the xids of the transactions that begin in these messages, and the ids of the relations that change.

    A relation changes if one of the messages is an Insert, Update or Delete of the relation.
    """
    octets = Octets(data)
    kind = octets.first_bytes()
    begins, changes = octets.starts[kind == _BEGIN], octets.starts[_IS_ROW_CHANGE[kind]]
    xids = octets.read_integers(begins + 17) >> np.uint64(32)
    relations = octets.read_integers(changes) >> np.uint64(24) & np.uint64(0xFFFFFFFF)
    return set(np.unique(xids).tolist()), set(np.unique(relations).tolist())


def _to_signed(integers: UnsignedIntegers) -> npt.NDArray[np.int64]:
    return integers.view(np.int64)


def _require(condition: npt.NDArray[np.bool_], kind: npt.NDArray[Any], failure: str) -> None:
    """Raise ProtocolError if the condition is false for a message; the error has the type of the first such message."""
    if not condition.all():
        wrong_kind = int(kind[int(np.argmin(condition))])
        raise ProtocolError(f"message of type {chr(wrong_kind)!r} {failure}", sqlstate="08P01")
