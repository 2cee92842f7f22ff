"""The commands' results: frozen dataclasses of plain values, for the terminal, for JSON and for tests.

LSNs are text as PostgreSQL writes them (`16/B374D848`). No field contains cell values except the keys of rows
that differ. An error is the exception itself. Nothing here raises.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pgsieve.pipelines.commands.sequences import CheckedSequence, ListedSequence
from pgsieve.pipelines.commands.validation_results import ValidationReport

#: The value of a field that comes from a source, if the source does not answer.
UNKNOWN: Literal["unknown"] = "unknown"


class Progress(Protocol):
    """Reports the progress of long work. A task is the text about it (`copy public.orders`).

    Several threads may call an implementation.
    """

    def start(self, task: str) -> None:
        """Begin a task."""

    def finish(self, task: str) -> None:
        """End the task, done or not."""

    def tell(self, line: str) -> None:
        """Print a line about a long task."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended the work for some subscriptions; their earlier work is durable."""

    subscriptions: tuple[str, ...]
    error: Exception


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that ended a command: its result with `--json`."""

    error: Exception


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that the initial sync copied, and its number of rows."""

    schema: str
    name: str
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AppliedTable:
    """A run's changes to a replica: rows by operation, after row filters, and the new Delta version."""

    schema: str
    name: str
    inserted: int
    updated: int
    deleted: int
    truncated: bool
    version: int


@dataclass(frozen=True, slots=True)
class TransformedTable:
    """Counts of the changes to one table that a run transformed, through one relation and one row filter.

    `source` is the relation: the table or a partition. `row_filter` is None if there was none, and
    `evaluated by the publisher` if the publisher has filtered. The last four fields count how the `updates` were sent.
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
    """What work cost: engine (`driver`, `threads`, `Spark, local`), tasks, bytes written, seconds."""

    engine: str
    tasks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SubscriptionRun:
    """The result of a run for one subscription, from the LSN of the last cut to the LSN of the new one.

    - `changed`: false if nothing was copied or applied
    - `problems`: tables that are set aside or wait, sequences that cannot be read, and a subscription that is
      disabled; each with the reason
    - `notice`: whether the transaction to skip was skipped
    - `spent`: the costs of all steps except reading the slot
    - `warnings`: partitions whose changes are not sent, and the effect on their rows
    - `transformed`: counts of all transformed changes, also of those not sent
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
    """The rows that maintenance deleted, and the files that it compacted; `name` is its asset's."""

    name: str
    rows: int
    files: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The work of `pgsieve run`, and the subscriptions that failed."""

    subscriptions: tuple[SubscriptionRun, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any subscription received changes."""
        return any(each.changed for each in self.subscriptions)

    @property
    def problems(self) -> bool:
        """Whether any table was set aside, or any subscription disabled."""
        return any(each.problems for each in self.subscriptions)


@dataclass(frozen=True, slots=True)
class ResyncedTable:
    """A table that `resync` copies again: its state before, and what had changed since it was copied."""

    schema: str
    name: str
    state: str
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResyncReport:
    """The work of `pgsieve resync`.

    `lost` is the reason for which the slot was replaced. `damaged` are pgsieve's own tables that could not be
    read. `run` is None if nothing had to be copied, or if another process follows the slot, and copies the
    tables (`followed`).
    """

    subscription: str
    tables: tuple[ResyncedTable, ...]
    lost: str | None
    run: SubscriptionRun | None
    followed: bool = False
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SkipReport:
    """The result of `pgsieve skip`: the finish LSN of the transaction to skip, or None."""

    subscription: str
    skip_lsn: str | None


@dataclass(frozen=True, slots=True)
class EnableReport:
    """The result of `pgsieve enable`: `changed` is false for a subscription that was enabled already."""

    subscription: str
    changed: bool


@dataclass(frozen=True, slots=True)
class DropReport:
    """The objects that `pgsieve drop` removed; `left` are objects that it left on the server.

    `kept_for` are the other subscriptions that need the slot.
    """

    subscription: str
    slot: str | None
    altered: tuple[str, ...]
    publications: tuple[str, ...]
    kept_for: tuple[str, ...]
    folders: tuple[str, ...]
    left: str | None
    #: The names that were removed from the catalog.
    unregistered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A replication slot (`pg_replication_slots`) and how far the lake has read it.

    `subscription` is set if the slot belongs to one subscription (mode `publisher`).

    - `lag_bytes` is the WAL between the confirmed LSN and the server's current one.
    - `lag_seconds` is how long the oldest commit that the change log lacks has been waiting.
    - `retained_bytes` is the WAL that the slot retains.
    - `safe_wal_bytes` is how much WAL may still be written before the slot can be lost (None: any amount).
    - `problem` says why the source did not answer. Then `exists` and `active` are unknown.
    - `decoding` is `always`, or `while a slot exists`: then dropping the last logical slot switches logical
      decoding off.
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
    """A replica table: its sync state, its row filter and its position.

    `problem` is the reason for its state. `row_filter` is None if every row passes, and `unknown` if the
    source does not answer. `since_copy` lists the changes of its publications since it was copied; they take
    effect when `pgsieve resync` copies it again.
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


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """A subscription and its tables.

    - `reason`: why it is not `enabled`
    - `skip_lsn`: the finish LSN of the transaction that it will skip
    - `problem`: the obstacle for the whole subscription
    - `seconds_behind`: how long the oldest commit that the replicas lack has been waiting (0: none; None:
      unknown)
    - `last_success`: the last time at which all changes were applied (ISO 8601, UTC)
    - `warnings`: as in `SubscriptionRun`
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
    """A replica table compared with `SELECT … WHERE <row filter>` on the publisher at the same LSN.

    `differing_keys` has the keys of some rows that differ, as text. `problem` is the reason why the table
    could not be compared or repaired. `repaired` is the number of rows written and of rows deleted; None
    without a repair.
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

    @property
    def is_compared(self) -> bool:
        """Whether the rows of both sides were compared: they are equal, or some keys differ."""
        return self.equal or bool(self.differing_keys)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of `pgsieve check`, and the subscriptions that it could not check.

    `warnings` name partitions whose changes are not sent: their rows differ, or were not compared.
    """

    tables: tuple[CheckedTable, ...]
    failures: tuple[Failure, ...] = ()
    sequences: tuple[CheckedSequence, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all tables and all sequences are equal."""
        return all(table.equal for table in self.tables) and all(each.equal for each in self.sequences)


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """The rows of a table of the demo: of the publisher, of pgsieve in one mode, of the built-in subscriber."""

    table: str
    row_filter: str
    columns: tuple[str, ...]
    publisher: tuple[tuple[str, ...], ...]
    replica: tuple[tuple[str, ...], ...]
    subscriber: tuple[tuple[str, ...], ...]

    @property
    def equal(self) -> bool:
        """Whether the replica has exactly the rows of the built-in subscriber."""
        return sorted(self.replica) == sorted(self.subscriber)


@dataclass(frozen=True, slots=True)
class LargeTableStep:
    """The seconds that CREATE SUBSCRIPTION and pgsieve took for some rows or changes of the large table."""

    title: str
    rows: int
    subscriber: float
    pgsieve: float
    spent: WorkCost | None


@dataclass(frozen=True, slots=True)
class LargeTableReport:
    """The demo's large table: the steps (its copy, its changes), and whether `check` found no difference."""

    steps: tuple[LargeTableStep, ...]
    equal: bool


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of `pgsieve demo`: its configuration file, its lake, every comparison, and its seconds.

    `sized` is the result for the large table; None without a large table.
    """

    config: Path
    lake: str
    tables: tuple[ComparedTable, ...]
    seconds: float
    sized: LargeTableReport | None = None

    @property
    def equal(self) -> bool:
        """Whether every replica had the built-in subscriber's rows, and `check` found no difference."""
        return all(table.equal for table in self.tables) and (self.sized is None or self.sized.equal)


@dataclass(frozen=True, slots=True)
class JarSet:
    """The jars of a package and of its dependencies: their number and size."""

    package: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class JarsReport:
    """The result of `pgsieve jars`: the packages, and the folder of the copy."""

    packages: tuple[JarSet, ...]
    folder: str | None


@dataclass(frozen=True)
class EngineReport:
    """The warm engine: whether it serves, its address, uptime and memory, and whether a run uses it.

    `current` is true for an engine with this configuration's settings and this version; runs use no other one.
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
    """The result of `pgsieve engine stop`: `stopped` is false if no engine ran."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class LiveDemo:
    """The running demo of `pgsieve demo --ui`: its web page, its pgsieve.yaml, its source, and its log."""

    url: str
    config: Path
    conninfo: str
    log: Path


@dataclass(frozen=True, slots=True)
class SurveyedPublication:
    """A publication that a database has: its tables, and the operations that it publishes."""

    name: str
    tables: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SurveyedTable:
    """A table to choose; without a replica identity only its INSERTs can be published.

    A partition tree is represented by its root, which has an identity if the root and all leaves have one.
    """

    schema: str
    name: str
    has_identity: bool
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class InitReport:
    """The files that `pgsieve init` wrote, the role in them, and the findings of validate.

    `variable` is the environment variable for the password; None if libpq finds the password itself.
    `statements` is None if validate finds a problem. `inserts_only` are the tables that publish only INSERTs.
    """

    config: Path
    statements: Path | None
    variable: str | None
    role: str
    validation: ValidationReport
    inserts_only: tuple[str, ...] = ()
