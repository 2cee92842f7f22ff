"""Skips a transaction by its commit LSN (PostgreSQL's finish LSN), as ALTER SUBSCRIPTION … SKIP (lsn = …) does.

A slice is the changes from one position of the slot to another. A window is the part of a slice that is transformed
(decoded and filtered) in one go.

As in PostgreSQL, the next transaction that has changes clears the LSN to skip, even if it is not the transaction that
the user has named (clear_subscription_skip_lsn() in src/backend/replication/logical/worker.c). Raises PgsieveError for
an LSN that has already been passed.
"""

from dataclasses import dataclass, replace

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.messages import (
    FIRST_ORDINAL,
    MessageFilter,
    open_messages,
    read_commit_lsns,
)
from pgsieve.assets.steps.update_transformation.slice_contents import read_slice_contents
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

    def set_lsn(self, lsn: int | None) -> None:
        """Choose the transaction to skip by its commit LSN. None clears the choice."""
        name = self.subscription.name
        if lsn is None:
            self._record.change_state(lambda state: replace(state, skip_lsn=None))
            return
        if lsn == 0:
            raise PgsieveError(
                "invalid WAL location (LSN): 0/0",
                hint="name the finish LSN of a transaction, or none",
                sqlstate="22023",
            )
        transformed_lsn = TransformedSlices(self.lake, name).read_position()
        if lsn < transformed_lsn:
            raise PgsieveError(
                f'subscription "{name}": skip WAL location (LSN {format_lsn(lsn)}) must be greater than origin LSN'
                f" {format_lsn(transformed_lsn)}",
                hint=f"that transaction is transformed already; `pgsieve resync {name} TABLE` copies the table on which it failed",
                sqlstate="22023",
            )
        if is_partly_transformed(TableStates(self.lake, name), transformed_lsn):
            raise PgsieveError(
                f'subscription "{name}": a run ended amid the slice that follows {format_lsn(transformed_lsn)}',
                hint=f"`pgsieve run {name}` finishes it",
                sqlstate="55000",
            )
        self._record.change_state(lambda state: replace(state, skip_lsn=lsn, notice=None))

    def clear(self, skip_lsn: int | None, window: Window, log: Log, *, has_changes: bool) -> int | None:
        """Clear the LSN to skip after the window that contains it, or after a window that has changes (`has_changes`).

        Returns the LSN that still has to be skipped; None if there is none.
        """
        if skip_lsn is None:
            return None
        if window.skipped_lsn is not None and self._has_skipped_transaction(window):
            notice = f"skipped the transaction finished at {format_lsn(skip_lsn)}"
        elif has_changes or window.skipped_lsn is not None:
            notice = f"warning: skip LSN {format_lsn(skip_lsn)} cleared: it is not where the next transaction finished"
        else:
            return skip_lsn
        # If the LSNs differ, the user has chosen another transaction meanwhile.
        self._record.change_state(
            lambda state: (
                replace(state, skip_lsn=None, notice=notice) if state.skip_lsn == skip_lsn else state
            )
        )
        log(f"{self.subscription.name}: {notice}")
        return None

    def _has_skipped_transaction(self, window: Window) -> bool:
        """True if the slice of the window has a transaction whose commit LSN is the LSN to skip."""
        lake, slot_stream = self.lake, self.subscription.slot_stream
        size = read_slice_contents(lake, slot_stream, window.slice_end).size
        messages = open_messages(lake, ChangeLog(lake, slot_stream).path, [window.slice_end], size)
        assert window.skipped_lsn is not None
        transaction_filter = MessageFilter(
            after_order=(window.skipped_lsn, FIRST_ORDINAL),
            before_order=(window.skipped_lsn + 1, FIRST_ORDINAL),
        )
        return bool(read_commit_lsns(messages.apply_filter(transaction_filter)))


def is_partly_transformed(states: TableStates, transformed_lsn: int) -> bool:
    """True if a run died in the middle of the slice after `transformed_lsn`, after it had written the changes of some tables.

    Then the slice can no longer be divided at the transaction to skip: these tables may have its changes already.
    """
    lake = states.lake
    histories = (
        (
            lake.paths.change_history(states.subscription, *state.name, state.definition.history.generation),
            state.lsn,
        )
        for state in states.read_newest().values()
        if state.definition
    )
    # A change history (the Delta table with a table's changes) may begin with the copied rows. Then its position is the
    # LSN of the copy, before it has any change.
    return any(
        (lake.records.position(path) or 0) > max(transformed_lsn, copy_lsn) for path, copy_lsn in histories
    )
