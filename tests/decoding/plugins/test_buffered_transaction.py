"""A transaction that is buffered until it commits: an aborted subtransaction removes its changes."""

from __future__ import annotations

from pgsieve.decoding.plugins.buffered_transaction import BufferedTransaction
from pgsieve.decoding.protocol.messages import LogicalMessage, encode


def buffered(*xids: int) -> BufferedTransaction:
    """A streamed transaction whose n-th change belongs to the n-th of these subtransactions."""
    transaction = BufferedTransaction(is_streamed=True)
    for number, xid in enumerate(xids):
        message = LogicalMessage(transactional=True, lsn=1, prefix="", content=str(number).encode(), xid=xid)
        transaction.add(message, encode(message), ())
    return transaction


def left(transaction: BufferedTransaction) -> list[str]:
    changes = [change for change, _ in transaction.decode_changes()]
    return [change.content.decode() for change in changes if isinstance(change, LogicalMessage)]


def test_the_changes_come_in_order() -> None:
    assert left(buffered(7, 8, 7)) == ["0", "1", "2"]


def test_an_aborted_subtransaction_removes_everything_since_its_first_change() -> None:
    transaction = buffered(7, 8, 9, 8)
    transaction.abort(8)
    assert left(transaction) == ["0"]


def test_a_subtransaction_that_was_removed_with_another_has_nothing_left_to_remove() -> None:
    transaction = buffered(7, 8, 9)
    transaction.abort(8)
    message = LogicalMessage(transactional=True, lsn=1, prefix="", content=b"later", xid=7)
    transaction.add(message, encode(message), ())
    transaction.abort(9)
    assert left(transaction) == ["0", "later"]


def test_a_subtransaction_without_changes_removes_nothing() -> None:
    transaction = buffered(7)
    transaction.abort(8)
    assert left(transaction) == ["0"]
