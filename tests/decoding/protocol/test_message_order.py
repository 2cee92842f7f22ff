"""The order of a session's messages: valid sequences, and messages that have no place in one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.message_order import MessageOrder
from pgsieve.decoding.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
)

BEGIN, COMMIT = Begin(100, 0, 7), Commit(100, 108, 0)
CHANGE = Truncate((1,), cascade=False, restart_identity=False)
FIRST_BLOCK, NEXT_BLOCK, STOP = (
    StreamStart(7, first_segment=True),
    StreamStart(7, first_segment=False),
    StreamStop(),
)
STREAM_COMMIT, STREAM_ABORT = StreamCommit(7, 100, 108, 0), StreamAbort(7, 7)
SUBTRANSACTION_ABORT = StreamAbort(7, 8)
ORIGIN = Origin(50, "elsewhere")
BEGIN_PREPARE, PREPARE = BeginPrepare(100, 108, 0, 7, "gid"), Prepare(100, 108, 0, 7, "gid")
COMMIT_PREPARED = CommitPrepared(200, 208, 0, 7, "gid")
OUTSIDE = LogicalMessage(transactional=False, lsn=1, prefix="p", content=b"")


@pytest.mark.parametrize(
    "messages",
    [
        [BEGIN, CHANGE, COMMIT, OUTSIDE, Begin(200, 0, 8), Commit(200, 208, 0)],
        [BEGIN, ORIGIN, CHANGE, COMMIT],
        [FIRST_BLOCK, ORIGIN, CHANGE, STOP],
        [FIRST_BLOCK, STOP, Begin(90, 0, 6), Commit(90, 98, 0), NEXT_BLOCK, CHANGE, STOP, STREAM_COMMIT],
        [FIRST_BLOCK, STOP, SUBTRANSACTION_ABORT, NEXT_BLOCK, STOP, STREAM_ABORT, FIRST_BLOCK],
        [STREAM_ABORT],  # the server noticed the abort before it sent a block
        [BEGIN_PREPARE, CHANGE, PREPARE, COMMIT_PREPARED],
        [PREPARE, COMMIT_PREPARED],  # PostgreSQL 18 sends this for a transaction that only locked rows
        [FIRST_BLOCK, STOP, StreamPrepare(100, 108, 0, 7, "gid"), COMMIT_PREPARED],
    ],
)
def test_these_are_in_order(messages: Sequence[Message]) -> None:
    order = MessageOrder()
    for message in messages:
        order.check(message)


@pytest.mark.parametrize(
    ("before", "message", "place"),
    [
        ([], CHANGE, "within a transaction"),
        ([BEGIN], BEGIN, "after the end of the transaction or block that Begin began"),
        ([BEGIN], OUTSIDE, "after the end of the transaction or block that Begin began"),
        ([BEGIN, CHANGE], ORIGIN, "directly after the begin"),
        ([FIRST_BLOCK, STOP, NEXT_BLOCK], ORIGIN, "directly after the begin"),
        ([BEGIN], Commit(101, 108, 0), "with the LSN and the transaction of its begin message"),
        ([BEGIN], PREPARE, "to end an open transaction or block of its kind"),
        ([BEGIN_PREPARE], Prepare(100, 108, 0, 7, "another"), "with the LSN and the transaction"),
        ([], NEXT_BLOCK, "after the first block"),
        ([FIRST_BLOCK, STOP], FIRST_BLOCK, "which is still open"),
        ([FIRST_BLOCK], STREAM_COMMIT, "after the end of the transaction or block that StreamStart began"),
        ([], STREAM_COMMIT, "after a block"),
        ([FIRST_BLOCK, STOP], COMMIT_PREPARED, "which is still open"),
        ([BEGIN_PREPARE, PREPARE], BEGIN, "which is still open"),
        ([PREPARE], PREPARE, "which is still open"),
        ([FIRST_BLOCK, STOP], PREPARE, "which is still open"),
    ],
)
def test_a_message_out_of_order_is_an_error_that_names_its_place(
    before: Sequence[Message], message: Message, place: str
) -> None:
    order = MessageOrder()
    for each in before:
        order.check(each)
    with pytest.raises(ProtocolError, match=place) as raised:
        order.check(message)
    assert type(message).__name__ in raised.value.message


def test_the_block_of_a_message() -> None:
    order = MessageOrder()
    blocks = []
    for message in (FIRST_BLOCK, CHANGE, STOP, Begin(90, 0, 6)):
        order.check(message)
        blocks.append(order.block_xid)
    assert blocks == [7, 7, None, None]
