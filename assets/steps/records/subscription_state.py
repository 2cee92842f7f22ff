"""The state of a subscription as a whole, like subenabled and subskiplsn of pg_subscription (section 51.53).

Kept in the Delta table `_subscription`, appended to, the newest row counting; without one the subscription is
enabled and skips nothing. Raises SubscriptionDisabledError where a disabled subscription is asked to go on.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.delta.records import in_order, version_of
from pgsieve.resources.lake.lake import Lake

#: The state of a subscription as a whole; the newest row counts. `version`, which orders them, comes when written.
SUBSCRIPTION = pa.schema(
    {
        "at": pa.timestamp("us", "UTC"),
        "enabled": pa.bool_(),
        "reason": pa.string(),
        "skip_lsn": pa.int64(),
        "notice": pa.string(),
    }
)


class SubscriptionDisabledError(PgsieveError):
    """The subscription was disabled by an error (`disable_on_error`), and nobody has enabled it since."""


@dataclass(frozen=True)
class SubscriptionState:
    """Whether a subscription is enabled, and why not; the finish LSN it skips, and what became of the last one."""

    enabled: bool = True
    reason: str | None = None
    skip_lsn: int | None = None
    notice: str | None = None


def disabled_error(subscription: str, state: SubscriptionState) -> SubscriptionDisabledError:
    """The refusal to go on with a disabled subscription: why it is disabled, and how it is enabled."""
    return SubscriptionDisabledError(
        f'subscription "{subscription}" is disabled: {state.reason}',
        hint=f"mend the reason, or skip the transaction that it names (`pgsieve skip {subscription} LSN`); then"
        f" `pgsieve enable {subscription}` and `pgsieve run {subscription}`",
        sqlstate="55000",
    )


@dataclass(frozen=True)
class SubscriptionRecord:
    """The table `_subscription` of one subscription; every step that stops at an error writes it, and `skip` and `enable`."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """Where it is."""
        return self.lake.subscription(self.subscription)

    def state(self) -> SubscriptionState:
        """The newest state."""
        rows = self.lake.records.rows(self.path)
        if not rows:
            return SubscriptionState()
        newest = in_order(rows)[-1]
        return SubscriptionState(newest["enabled"], newest["reason"], newest["skip_lsn"], newest["notice"])

    def newest_version(self) -> int:
        """The version of the row that counts; -1 where there is none."""
        return max((version_of(row) for row in self.lake.records.rows(self.path)), default=-1)

    def set(self, state: SubscriptionState) -> None:
        """Record the state, unless it is the one that stands there already."""
        if state == self.state():
            return
        row = {
            "at": datetime.now(UTC),
            "enabled": state.enabled,
            "reason": state.reason,
            "skip_lsn": state.skip_lsn,
            "notice": state.notice,
        }
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], SUBSCRIPTION))

    def disable(self, reason: str) -> None:
        """Let nothing more be copied or applied, until somebody enables the subscription."""
        self.set(replace(self.state(), enabled=False, reason=reason))

    def enable(self) -> bool:
        """Let the subscription go on from where it stopped; False where it was enabled already."""
        state = self.state()
        self.set(replace(state, enabled=True, reason=None))
        return not state.enabled

    def refuse_disabled(self) -> SubscriptionState:
        """The state of an enabled subscription; raises SubscriptionDisabledError for one that is disabled."""
        state = self.state()
        if not state.enabled:
            raise disabled_error(self.subscription, state)
        return state
