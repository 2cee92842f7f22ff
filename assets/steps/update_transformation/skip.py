"""Skips a transaction, as ALTER SUBSCRIPTION ...

SKIP (lsn = ...) does: its finish LSN is chosen, and cleared.

PostgreSQL clears it at the next transaction that is not empty, whether it was the chosen one or not
(clear_subscription_skip_lsn() in src/backend/replication/logical/worker.c). Raises PgsieveError for an LSN
that is already passed.
"""

from dataclasses import replace

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.records.transformed import Transformed
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.messages import FIRST, Choice, messages_of
from pgsieve.assets.steps.update_transformation.slice_contents import summarized_slice
from pgsieve.assets.steps.update_transformation.windows import Window
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.lake import Lake


def clear_skip(
    lake: Lake, subscription: Subscription, skip: int | None, window: Window, applied: bool, log: Log
) -> int | None:
    """Clear the LSN to skip after the window it is in, or after one of which something was applied.

    Returns the present LSN.
    """
    if skip is None:
        return None
    if window.skipped is not None and _is_in(lake, subscription, window):
        notice = f"skipped the transaction finished at {format_lsn(skip)}"
    elif applied or window.skipped is not None:
        notice = (
            f"warning: skip LSN {format_lsn(skip)} cleared: it is not where the next transaction finished"
        )
    else:
        return skip
    state = SubscriptionRecord(lake, subscription.name).state()
    if state.skip_lsn == skip:  # Otherwise another one was chosen meanwhile.
        SubscriptionRecord(lake, subscription.name).set(replace(state, skip_lsn=None, notice=notice))
    log(f"{subscription.name}: {notice}")
    return None


def _is_in(lake: Lake, subscription: Subscription, window: Window) -> bool:
    size = summarized_slice(lake, subscription.feed, window.slice).size
    messages = messages_of(lake, ChangeLog(lake, subscription.feed).path, [window.slice], size)
    assert window.skipped is not None
    of_transaction = Choice(after=(window.skipped, FIRST), before=(window.skipped + 1, FIRST))
    return bool(messages.chosen(of_transaction).commits())


def set_skip(subscription: Subscription, lake: Lake, lsn: int | None) -> None:
    """Choose the transaction to skip by its finish LSN; None chooses none."""
    name = subscription.name
    state = SubscriptionRecord(lake, name).state()
    if lsn is None:
        SubscriptionRecord(lake, name).set(replace(state, skip_lsn=None))
        return
    if lsn == 0:
        raise PgsieveError(
            "invalid WAL location (LSN): 0/0",
            hint="name the finish LSN of a transaction, or none",
            sqlstate="22023",
        )
    done = Transformed(lake, name).position()
    if lsn < done:
        raise PgsieveError(
            f'subscription "{name}": skip WAL location (LSN {format_lsn(lsn)}) must be greater than origin LSN'
            f" {format_lsn(done)}",
            hint=f"that transaction is done with; a table that it set aside comes back by `pgsieve resync {name} TABLE`",
            sqlstate="22023",
        )
    if is_begun(lake, name, done):
        raise PgsieveError(
            f'subscription "{name}": a run ended amid what follows {format_lsn(done)}',
            hint=f"`pgsieve run {name}` finishes it",
            sqlstate="55000",
        )
    SubscriptionRecord(lake, name).set(replace(state, skip_lsn=lsn, notice=None))


def is_begun(lake: Lake, subscription: str, done: int) -> bool:
    """Whether a run died after it had transformed some tables beyond `done`: then that slice cannot be cut."""
    states = TableStates(lake, subscription).newest().values()
    histories = (
        (lake.paths.changes(subscription, *s.name, s.definition.history.generation), s.lsn)
        for s in states
        if s.definition
    )
    # A whole history has the position of the copy.
    return any((lake.records.position(path) or 0) > max(done, copied) for path, copied in histories)
