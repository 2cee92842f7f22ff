"""The state of a subscription as a whole, like subenabled and subskiplsn in PostgreSQL's catalog pg_subscription.

A slice is the changes from one position of the slot to another. A change history has the changes of one table, by
slice. The state is the newest row of the Delta table `_subscription`. If the table has no row, the subscription is
enabled and skips nothing. Raises SubscriptionDisabledError before work on a disabled subscription would begin.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa

from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.delta.layout import DEFAULT_FOLDER_TEMPLATE
from pgsieve.resources.lake.delta.records import get_commit_version, sort_by_version
from pgsieve.resources.lake.lake import Lake

#: A row without the column `version`, by which rows are ordered. This column is added when the row is written.
SUBSCRIPTION_SCHEMA = pa.schema(
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
    """The replicas are in folders of another template (the setting `folders`) than that in pgsieve.yaml."""


class SubscriptionDisabledError(PgsieveError):
    """An error has disabled the subscription (`disable_on_error`), and it has not been enabled since then."""


@dataclass(frozen=True)
class SubscriptionState:
    """Whether a subscription is enabled, and other facts about the subscription as a whole.

    - `reason`: the reason why it is disabled
    - `skip_lsn`: the commit LSN of the transaction that will be skipped
    - `notice`: a sentence about the last transaction that was skipped
    - `folders`: the template of the replicas' folders; None until it is recorded
    - `properties`: the Delta properties that were last set on the replicas, as JSON; None until then
    - `clustered`: the columns by which each replica was last clustered, as JSON; None if there was no clustering
    - `database`: the publisher's database (a `resources.postgres.database.Database` as text); None until it is recorded
    - `deleted_up_to`: the LSN up to which maintenance may have deleted slices of change histories; None if it is not
      known
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
    """The error for a disabled subscription. It says why the subscription is disabled, and how the user can enable it."""
    return SubscriptionDisabledError(
        f'subscription "{subscription}" is disabled: {state.reason}',
        hint=f"correct the reason; then `pgsieve enable {subscription}`; then the command that the reason names, if any;"
        f" then `pgsieve run {subscription}`",
        sqlstate="55000",
    )


@dataclass(frozen=True)
class SubscriptionRecord:
    """The table `_subscription` of one subscription.

    Steps that copy tables or apply changes write it, and so do maintenance and the commands `skip`, `enable`, `drop` and
    `resync`.
    """

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.subscription(self.subscription)

    def read_state(self) -> SubscriptionState:
        """The state in the newest row."""
        rows = self.lake.records.rows(self.path)
        if not rows:
            return SubscriptionState()
        newest_row = sort_by_version(rows)[-1]
        return SubscriptionState(
            newest_row["enabled"],
            newest_row["reason"],
            newest_row["skip_lsn"],
            newest_row["notice"],
            newest_row.get("folders"),
            newest_row.get("properties"),
            newest_row.get("clustered"),
            newest_row.get("database"),
            newest_row.get("deleted_up_to"),
        )

    def newest_version(self) -> int:
        """The Delta version of the newest row; -1 if there is none."""
        return max((get_commit_version(row) for row in self.lake.records.rows(self.path)), default=-1)

    def change_state(self, change: Callable[[SubscriptionState], SubscriptionState]) -> SubscriptionState:
        """Record what `change` makes of the newest state, unless it is the same. Returns the former state.

        Several processes may do this at the same time: a run, maintenance, and commands. If another process has recorded
        a state meanwhile, `change` is called again with that state. So no process undoes what another one has recorded.
        """

        def attempt() -> SubscriptionState:
            # The version is read before the state. If a state is recorded in between, the append fails.
            base_version = max(self.lake.records.head(self.path).version, 0)
            former_state = self.read_state()
            new_state = change(former_state)
            if new_state != former_state:
                row = {"at": datetime.now(UTC), **asdict(new_state)}
                self.lake.records.append_versioned(
                    self.path, pa.Table.from_pylist([row], SUBSCRIPTION_SCHEMA), base_version
                )
            return former_state

        return retry_after_conflict(attempt)()

    def write_state(self, state: SubscriptionState) -> None:
        """Record a state, whatever the newest one is."""
        self.change_state(lambda _: state)

    def record_deleted_lsn(self, end_lsn: int) -> None:
        """Record the LSN up to which maintenance will delete slices of change histories.

        A read as of an earlier moment is then refused if it needs these slices.
        """
        self.change_state(lambda state: replace(state, deleted_up_to=max(end_lsn, state.deleted_up_to or 0)))

    def disable(self, reason: str) -> None:
        """Disable the subscription. Until it is enabled again, nothing is copied or applied."""
        self.change_state(lambda state: replace(state, enabled=False, reason=reason))

    def enable(self) -> bool:
        """Enable the subscription, which goes on where it stopped. Returns false if it was already enabled."""
        return not self.change_state(lambda state: replace(state, enabled=True, reason=None)).enabled

    def record_folders(self) -> None:
        """Record the template of the replicas' folders. Raises FoldersChangedError as `require_same_folders` does."""
        state, folders = self.require_same_folders(), self.lake.paths.folder_template(self.subscription)
        if (state.folders or DEFAULT_FOLDER_TEMPLATE) != folders:
            self.change_state(lambda newest_state: replace(newest_state, folders=folders))

    def require_same_folders(self) -> SubscriptionState:
        """The state. Raises FoldersChangedError if there are replicas in folders of another template than the lake's."""
        state = self.read_state()
        recorded_template, folders = (
            state.folders or DEFAULT_FOLDER_TEMPLATE,
            self.lake.paths.folder_template(self.subscription),
        )
        if recorded_template == folders or not TableStates(self.lake, self.subscription).may_have_replicas():
            return state
        raise FoldersChangedError(
            f'subscription "{self.subscription}": its replicas are in folders named "{recorded_template}", and pgsieve.yaml says'
            f' "{folders}"',
            hint=f'say `folders: "{recorded_template}"` again; or `pgsieve drop {self.subscription}` and `pgsieve run'
            f" {self.subscription}`, which copies all tables into folders of the new names and leaves the former ones as they"
            " are (`drop --delete-tables` deletes them)",
            sqlstate="55000",
        )

    def require_enabled(self) -> SubscriptionState:
        """Return the state of an enabled subscription. Raises SubscriptionDisabledError if it is disabled.

        Also raises the errors of `require_same_folders`.
        """
        state = self.require_same_folders()
        if not state.enabled:
            raise disabled_error(self.subscription, state)
        return state
