"""The state of a subscription as a whole, like subenabled and subskiplsn of pg_subscription (section 51.53).

It is the newest row of the Delta table `_subscription`. Without a row the
subscription is enabled and skips nothing. Raises SubscriptionDisabledError where a disabled subscription
should continue.
"""

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa

from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.delta.layout import FOLDERS
from pgsieve.resources.lake.delta.records import in_order, version_of
from pgsieve.resources.lake.lake import Lake

#: The state of a subscription as a whole; the newest row counts. `version`, which orders the rows, is added
#: when they are written.
SUBSCRIPTION = pa.schema(
    {
        "at": pa.timestamp("us", "UTC"),
        "enabled": pa.bool_(),
        "reason": pa.string(),
        "skip_lsn": pa.int64(),
        "notice": pa.string(),
        "folders": pa.string(),
        "properties": pa.string(),
        "clustered": pa.string(),
        "database": pa.string(),
        "deleted_up_to": pa.int64(),
    }
)


class FoldersChangedError(PgsieveError):
    """The replicas are in folders of another template than pgsieve.yaml has."""


class SubscriptionDisabledError(PgsieveError):
    """The subscription was disabled by an error (`disable_on_error`), and has not been enabled since."""


@dataclass(frozen=True)
class SubscriptionState:
    """Whether a subscription is enabled, and why not; the finish LSN to skip, and the result of the last skip.

    Each of these is None until it is first recorded:

    - `folders`: the template of the replicas' folders
    - `properties`: their Delta properties in pgsieve.yaml, as JSON
    - `clustered`: the last clustering of their rows, as JSON
    - `database`: the database that they replicate (`Database` as text)
    - `deleted_up_to`: the LSN up to which maintenance may have deleted slices of change histories
    """

    enabled: bool = True
    reason: str | None = None
    skip_lsn: int | None = None
    notice: str | None = None
    folders: str | None = None
    properties: str | None = None
    clustered: str | None = None
    database: str | None = None
    deleted_up_to: int | None = 0


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
    """The table `_subscription` of one subscription.

    Every step that stops at an error writes it, as do `skip` and `enable`.
    """

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.subscription(self.subscription)

    def state(self) -> SubscriptionState:
        """The newest state."""
        rows = self.lake.records.rows(self.path)
        if not rows:
            return SubscriptionState()
        newest = in_order(rows)[-1]
        return SubscriptionState(
            newest["enabled"],
            newest["reason"],
            newest["skip_lsn"],
            newest["notice"],
            newest.get("folders"),
            newest.get("properties"),
            newest.get("clustered"),
            newest.get("database"),
            newest.get("deleted_up_to"),
        )

    def newest_version(self) -> int:
        """The version of the row that counts; -1 where there is none."""
        return max((version_of(row) for row in self.lake.records.rows(self.path)), default=-1)

    def set(self, state: SubscriptionState) -> None:
        """Record the state, unless it equals the newest one."""
        if state == self.state():
            return
        row = {"at": datetime.now(UTC), **asdict(state)}
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], SUBSCRIPTION))

    def note_deleted(self, upto: int) -> None:
        """Record that slices of change histories will be deleted: the moments before their end become unreadable."""
        if (state := self.state()).deleted_up_to is None or upto > state.deleted_up_to:
            self.set(replace(state, deleted_up_to=upto))

    def disable(self, reason: str) -> None:
        """Let nothing more be copied or applied until the subscription is enabled."""
        self.set(replace(self.state(), enabled=False, reason=reason))

    def enable(self) -> bool:
        """Let the subscription continue from where it stopped; False where it was enabled already."""
        state = self.state()
        self.set(replace(state, enabled=True, reason=None))
        return not state.enabled

    def keep_folders(self) -> None:
        """Record the template of the replicas' folders.

        Raises FoldersChangedError where they have another one.
        """
        state, folders = self.refuse_other_folders(), self.lake.paths.folders_of(self.subscription)
        if (state.folders or FOLDERS) != folders:
            self.set(replace(state, folders=folders))

    def refuse_other_folders(self) -> SubscriptionState:
        """The state.

        Raises FoldersChangedError where the replicas' template is not the one with which the lake is opened.
        """
        state = self.state()
        recorded, folders = state.folders or FOLDERS, self.lake.paths.folders_of(self.subscription)
        if recorded == folders or not TableStates(self.lake, self.subscription).may_have_replicas():
            return state
        raise FoldersChangedError(
            f'subscription "{self.subscription}": its replicas are in folders named "{recorded}", and pgsieve.yaml says'
            f' "{folders}"',
            hint=f'say `folders: "{recorded}"` again; or `pgsieve drop {self.subscription}` and `pgsieve run'
            f" {self.subscription}`, which copies all tables into folders of the new names and leaves the former ones as they"
            " are (`drop --delete-tables` deletes them)",
            sqlstate="55000",
        )

    def refuse_disabled(self) -> SubscriptionState:
        """The state of an enabled subscription; raises SubscriptionDisabledError for a disabled one.

        Also raises the errors of `refuse_other_folders`.
        """
        state = self.refuse_other_folders()
        if not state.enabled:
            raise disabled_error(self.subscription, state)
        return state
