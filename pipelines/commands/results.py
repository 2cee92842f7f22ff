"""The results of the commands: frozen dataclasses of plain values, for the terminal, for JSON and for tests.

LSNs are text as PostgreSQL writes them (`16/B374D848`). Fields contain no values of rows, except the keys of rows that
differ. An error is in a result as the exception itself. Nothing here raises an error.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pgsieve.pipelines.commands.sequences import CheckedSequence, ListedSequence
from pgsieve.pipelines.commands.validation_results import ValidationReport

#: The value of a field that depends on the source, if the source does not answer.
UNKNOWN: Literal["unknown"] = "unknown"


class Progress(Protocol):
    """Shows the progress of long work. A task is a text that names a part of the work, for example `copy public.orders`.

    An implementation has to allow calls by several threads.
    """

    def start(self, task: str) -> None:
        """Show that a task begins."""

    def finish(self, task: str) -> None:
        """Show that a task ends, whether it is done or has failed."""

    def tell(self, line: str) -> None:
        """Print a line about a long task."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended the work for some subscriptions. Work done before the error stays done."""

    subscriptions: tuple[str, ...]
    error: Exception


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that ended a command. With `--json` it is the result of the command."""

    error: Exception


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that was copied by the initial sync, and its number of rows."""

    schema: str
    name: str
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AppliedTable:
    """What a run has changed in a replica: numbers of rows, after row filters, and the Delta version with these changes."""

    schema: str
    name: str
    inserted: int
    updated: int
    deleted: int
    truncated: bool
    version: int


@dataclass(frozen=True, slots=True)
class TransformedTable:
    """How many changes of one relation a run has decoded for one table, to which it applied one row filter.

    `source` is the relation, which is the table itself or one of its partitions. `row_filter` is None if there was
    none. The last four fields say how many of the `updates` were sent as each operation, or not sent. For example, an
    UPDATE that moves a row out of the filter is sent as a DELETE.
    """

    schema: str
    name: str
    source: str
    row_filter: str | None
    inserts: int
    updates: int
    deletes: int
    updates_sent_as_insert: int
    updates_sent_as_update: int
    updates_sent_as_delete: int
    updates_not_sent: int


@dataclass(frozen=True, slots=True)
class WorkCost:
    """What work has cost: the engine that did it (`driver`, `threads`, `Spark, local`), tasks, bytes written, seconds."""

    engine: str
    tasks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SubscriptionRun:
    """The result of a run for one subscription.

    - `from_lsn`, `to_lsn`: the LSN of the last cut before the run, and that of the new cut. A cut names a version of
      each replica; together these versions equal the publisher at one LSN.
    - `changed`: false if nothing was copied or applied
    - `problems`: the reasons why tables are set aside (they get no changes until they are copied again), why tables
      cannot be copied yet, why sequences cannot be read, and why the subscription is disabled
    - `notice`: a sentence that says whether the transaction to skip was skipped
    - `spent`: the cost of all steps except reading the slot
    - `warnings`: partitions whose changes are not sent, and what that means for their rows
    - `transformed`: counts of all changes that the run has decoded, also of those that the subscription does not receive
    """

    name: str
    copied: tuple[CopiedTable, ...]
    tables: tuple[AppliedTable, ...]
    from_lsn: str
    to_lsn: str
    cut_version: int | None
    changed: bool
    problems: tuple[str, ...] = ()
    notice: str | None = None
    spent: WorkCost | None = None
    warnings: tuple[str, ...] = ()
    transformed: tuple[TransformedTable, ...] = ()


@dataclass(frozen=True, slots=True)
class MaintainedFolder:
    """How many rows maintenance has deleted, and how many files it has compacted. `name` is the folder's asset key in Dagster."""

    name: str
    rows: int
    files: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of `pgsieve run`: the work for each subscription, and the subscriptions that failed."""

    subscriptions: tuple[SubscriptionRun, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def changed(self) -> bool:
        """True if something was copied or applied for a subscription."""
        return any(each.changed for each in self.subscriptions)

    @property
    def problems(self) -> bool:
        """True if a subscription has problems: for example, a table is set aside, or the subscription is disabled."""
        return any(each.problems for each in self.subscriptions)


@dataclass(frozen=True, slots=True)
class ResyncedTable:
    """A table that `pgsieve resync` copies again: its state before, and what has changed since it was copied."""

    schema: str
    name: str
    state: str
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResyncReport:
    """The result of `pgsieve resync`.

    - `lost`: the reason for which the slot was replaced; None if it was not
    - `run`: the work for the subscription. None if nothing had to be copied, or if `followed` is true.
    - `followed`: true if another process follows the slot. That process copies the tables.
    - `damaged`: pgsieve's own tables in the lake that could not be read, and were replaced
    """

    subscription: str
    tables: tuple[ResyncedTable, ...]
    lost: str | None
    run: SubscriptionRun | None
    followed: bool = False
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SkipReport:
    """The result of `pgsieve skip`: the LSN at which the transaction to skip ends; None if none is skipped."""

    subscription: str
    skip_lsn: str | None


@dataclass(frozen=True, slots=True)
class EnableReport:
    """The result of `pgsieve enable`. `changed` is false if the subscription was already enabled."""

    subscription: str
    changed: bool


@dataclass(frozen=True, slots=True)
class DropReport:
    """What `pgsieve drop` has removed, and what was `left` on the server.

    `altered` has the publications that stay without some of their tables. `kept_for` has the other subscriptions that need
    the slot, which was kept for them.
    """

    subscription: str
    slot: str | None
    altered: tuple[str, ...]
    publications: tuple[str, ...]
    kept_for: tuple[str, ...]
    folders: tuple[str, ...]
    left: str | None
    #: The names that were removed from Spark's catalog.
    unregistered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A replication slot (`pg_replication_slots`), and how far the lake has read it.

    The slot's messages are stored in the lake's change log.

    - `subscription`: the subscription that has the slot for itself (`row_filter: publisher`); None for a shared slot
    - `exists`, `active`: `unknown` if the `problem` is that of the source
    - `lag_bytes`: the bytes of WAL between the LSN that the slot has confirmed and the server's current LSN
    - `lag_seconds`: how long the oldest commit that the change log does not have yet has been waiting
    - `retained_bytes`: the bytes of WAL that the server retains for the slot
    - `safe_wal_bytes`: how many bytes of WAL can still be written before the slot may be lost; None if there is no
      limit
    - `problem`: why the source is not used (it does not answer, or is another publisher than that of the lake's changes),
      or why the change log cannot be read
    - `decoding`: `always`, or `while a slot exists`. In the second case, dropping the last logical slot of the server
      switches logical decoding off.
    """

    source: str
    subscription: str | None
    slot: str
    exists: bool | Literal["unknown"]
    active: bool | Literal["unknown"]
    wal_status: str | None
    confirmed_lsn: str | None
    lag_bytes: int | None
    change_log_lsn: str | None
    problem: str | None = None
    lag_seconds: float | None = None
    retained_bytes: int | None = None
    safe_wal_bytes: int | None = None
    decoding: str | None = None


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A replica: its sync state, its row filter and its position (`lsn`, up to which changes are applied).

    - `problem`: the reason for its state
    - `behind`: true if no changes are applied to it now, because it is set aside or has to be copied
    - `row_filter`: None if every row matches; `unknown` if the source does not answer
    - `since_copy`: how the table's publications have changed since it was copied. These changes have an effect on its
      rows only after `pgsieve resync` has copied it again.
    """

    schema: str
    name: str
    state: str
    row_filter: str | None
    lsn: str | None
    version: int | None
    rows: int | None = None
    problem: str | None = None
    since_copy: tuple[str, ...] = ()
    behind: bool = False


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """A subscription and its tables.

    - `reason`: why it is not `enabled`
    - `skip_lsn`: the LSN at which the transaction to skip ends
    - `problem`: why the subscription as a whole cannot be replicated
    - `seconds_behind`: how long the oldest commit that the replicas do not have yet has been waiting. It is 0 if no
      commit is waiting, and None if this is unknown.
    - `last_success`: the last time at which all changes were applied (ISO 8601, UTC)
    - `warnings`: the same as in `SubscriptionRun`
    """

    name: str
    source: str
    row_filter: str
    tables: tuple[TableStatus, ...]
    enabled: bool = True
    reason: str | None = None
    skip_lsn: str | None = None
    notice: str | None = None
    problem: str | None = None
    seconds_behind: float | None = None
    last_success: str | None = None
    sequences: tuple[ListedSequence, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The result of `pgsieve status`."""

    slots: tuple[SlotStatus, ...]
    subscriptions: tuple[SubscriptionStatus, ...]


@dataclass(frozen=True, slots=True)
class CheckedTable:
    """A replica that was compared with `SELECT … WHERE <row filter>` on the publisher at the same LSN.

    - `differing_keys`: the keys of some rows that differ, as text
    - `only_publisher`, `only_replica`: how many rows only one side has; rows are matched by their keys, or by all their
      values if there is no key
    - `different`: how many rows have the same key and other values
    - `repaired`: how many rows the repair has written, and how many it has deleted; None if nothing was repaired
    - `problem`: the reason why the table could not be compared or repaired
    """

    subscription: str
    schema: str
    name: str
    rows_publisher: int
    rows_replica: int
    equal: bool
    differing_keys: tuple[str, ...]
    lsn: str
    repaired: tuple[int, int] | None = None
    problem: str | None = None
    only_publisher: int = 0
    only_replica: int = 0
    different: int = 0

    @property
    def is_compared(self) -> bool:
        """True if the rows of both sides were compared. In that case they are equal, or there are `differing_keys`."""
        return self.equal or bool(self.differing_keys)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of `pgsieve check`, and the subscriptions that it could not check.

    `warnings` name partitions whose changes are not sent. Their rows differ, or were not compared.
    """

    tables: tuple[CheckedTable, ...]
    failures: tuple[Failure, ...] = ()
    sequences: tuple[CheckedSequence, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if all tables and all sequences are equal."""
        return all(table.equal for table in self.tables) and all(each.equal for each in self.sequences)


@dataclass(frozen=True, slots=True)
class JarSet:
    """A package for Spark: how many jars it has, including those on which it depends, and their size."""

    package: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class JarsReport:
    """The result of `pgsieve jars`: the packages, and the folder into which their jars were copied, if any."""

    packages: tuple[JarSet, ...]
    folder: str | None


@dataclass(frozen=True)
class EngineReport:
    """The warm engine, a Spark server that keeps running after a run: its address, uptime (`seconds`) and memory.

    - `serving`: true if it is running and has started to serve
    - `current`: true if it has this configuration's settings and this version of pgsieve. Runs use no other engine.
    - `used`: true if a run uses it now
    """

    serving: bool
    address: str | None = None
    pid: int | None = None
    version: str | None = None
    current: bool = False
    used: bool = False
    seconds: int = 0
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStopReport:
    """The result of `pgsieve engine stop`. `stopped` is false if no engine was running."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class SurveyedPublication:
    """A publication that a database has: its tables, and the operations that it publishes."""

    name: str
    tables: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SurveyedTable:
    """A table that the user of `pgsieve init` can choose.

    `has_identity` is true if it has a replica identity. If not, only its INSERTs can be published. A partitioned table
    stands for all its partitions. For it `has_identity` is true if it and all its leaf partitions have a replica identity.
    """

    schema: str
    name: str
    has_identity: bool
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class InitReport:
    """The files that `pgsieve init` has written, the role in them, and the findings of `validate`.

    - `statements`: the file with the SQL for the role; None if `validate` found a problem
    - `variable`: the environment variable for the password; None if libpq finds the password itself
    - `inserts_only`: the tables of which only INSERTs are published
    """

    config: Path
    statements: Path | None
    variable: str | None
    role: str
    validation: ValidationReport
    inserts_only: tuple[str, ...] = ()
