"""Skips a transaction by its finish LSN, as ALTER SUBSCRIPTION … SKIP (lsn = …) does.

As in PostgreSQL, the LSN is cleared at the next transaction that is not empty, even if this is another transaction than
the chosen one (clear_subscription_skip_lsn() in src/backend/replication/logical/worker.c). Raises PgsieveError for an
LSN that is passed already.
"""

from dataclasses import dataclass, replace

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.messages import FIRST, Choice, messages_of
from pgsieve.assets.steps.update_transformation.slice_contents import summarized_slice
from pgsieve.assets.steps.update_transformation.windows import Window
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class Skip:
    """The transaction that a subscription has to skip."""

    subscription: Subscription
    lake: Lake

    @property
    def _record(self) -> SubscriptionRecord:
        return SubscriptionRecord(self.lake, self.subscription.name)

    def choose(self, lsn: int | None) -> None:
        """Choose the transaction to skip by its finish LSN; None clears the choice."""
        name, state = self.subscription.name, self._record.state()
        if lsn is None:
            self._record.set(replace(state, skip_lsn=None))
            return
        if lsn == 0:
            raise PgsieveError(
                "invalid WAL location (LSN): 0/0",
                hint="name the finish LSN of a transaction, or none",
                sqlstate="22023",
            )
        transformed_lsn = TransformedSlices(self.lake, name).position()
        if lsn < transformed_lsn:
            raise PgsieveError(
                f'subscription "{name}": skip WAL location (LSN {format_lsn(lsn)}) must be greater than origin LSN'
                f" {format_lsn(transformed_lsn)}",
                hint=f"that transaction is passed; `pgsieve resync {name} TABLE` copies a table that it has set aside",
                sqlstate="22023",
            )
        if is_partly_transformed(TableStates(self.lake, name), transformed_lsn):
            raise PgsieveError(
                f'subscription "{name}": a run ended amid the slice that follows {format_lsn(transformed_lsn)}',
                hint=f"`pgsieve run {name}` finishes it",
                sqlstate="55000",
            )
        self._record.set(replace(state, skip_lsn=lsn, notice=None))

    def clear(self, skip: int | None, window: Window, log: Log, *, has_changes: bool) -> int | None:
        """Clear the LSN to skip after the window that contains it, or after a window with changes (`has_changes`).

        Returns the LSN that is still to be skipped.
        """
        if skip is None:
            return None
        if window.skipped is not None and self._is_in(window):
            notice = f"skipped the transaction finished at {format_lsn(skip)}"
        elif has_changes or window.skipped is not None:
            notice = (
                f"warning: skip LSN {format_lsn(skip)} cleared: it is not where the next transaction finished"
            )
        else:
            return skip
        state = self._record.state()
        if state.skip_lsn == skip:  # Otherwise the user has chosen another one meanwhile.
            self._record.set(replace(state, skip_lsn=None, notice=notice))
        log(f"{self.subscription.name}: {notice}")
        return None

    def _is_in(self, window: Window) -> bool:
        """Whether the window has a transaction that finished at the LSN that it skips."""
        lake, feed = self.lake, self.subscription.feed
        size = summarized_slice(lake, feed, window.slice).size
        messages = messages_of(lake, ChangeLog(lake, feed).path, [window.slice], size)
        assert window.skipped is not None
        of_transaction = Choice(after=(window.skipped, FIRST), before=(window.skipped + 1, FIRST))
        return bool(messages.chosen(of_transaction).commits())


def is_partly_transformed(states: TableStates, transformed: int) -> bool:
    """Whether a run died amid the slice after `transformed`, with some tables written: then it cannot be divided."""
    lake = states.lake
    histories = (
        (lake.paths.changes(states.subscription, *s.name, s.definition.history.generation), s.lsn)
        for s in states.newest().values()
        if s.definition
    )
    # A whole history has the position of the copy.
    return any((lake.records.position(path) or 0) > max(transformed, copied) for path, copied in histories)
