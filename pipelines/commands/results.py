"""The commands' results: frozen dataclasses of plain values, for the terminal, JSON and tests alike.

LSNs are text as PostgreSQL writes them (`16/B374D848`). No field contains a cell value, except keys of rows
that differ. Errors are kept as they were raised. Nothing here raises.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pgsieve.pipelines.commands.sequences import CheckedSequence, ListedSequence
from pgsieve.pipelines.commands.validation_results import ValidationReport

#: The value of a field that only a source can tell, if it does not answer.
UNKNOWN: Literal["unknown"] = "unknown"


class Progress(Protocol):
    """Reports the progress of long work; a task is named by its work (`copy public.orders`).

    Implementations may be called from several threads.
    """

    def start(self, task: str) -> None:
        """Begin a task."""

    def finish(self, task: str) -> None:
        """End the task, done or not."""

    def tell(self, line: str) -> None:
        """Report the progress of a long task."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended the part of some subscriptions; their earlier work is durable."""

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
    """The changes of a run to one replica table: rows by operation, after row filters, and the new Delta version."""

    schema: str
    name: str
    inserted: int
    updated: int
    deleted: int
    truncated: bool
    version: int


@dataclass(frozen=True, slots=True)
class TransformedTable:
    """The changes of one table that a run transformed and that came through one relation (`source`, the table or a partition).

    `row_filter` decided, None without one. The other fields count what `updates` were sent as.
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
class Spent:
    """The costs of work: the engine (`driver`, `threads`, `Spark, local`), its tasks, the bytes they wrote, seconds."""

    engine: str
    tasks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SubscriptionRun:
    """The result of a run for one subscription, from the LSN before it to the LSN of its cut.

    `changed` is false if there was nothing new. A problem is a table set aside, a sequence that cannot be read, or
    the subscription disabled, with the reason. `notice` says whether the LSN to skip was skipped. `spent` are the
    costs of all steps except the slot's. `warnings` name partitions whose changes are not sent, and the effect on
    their rows. `transformed` counts the changes that came, also those not sent.
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
    spent: Spent | None = None
    warnings: tuple[str, ...] = ()
    transformed: tuple[TransformedTable, ...] = ()


@dataclass(frozen=True, slots=True)
class MaintainedFolder:
    """What maintenance, by the name of its asset, deleted and compacted."""

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
    """A table that was to be copied again: its state before, and what had changed since it was copied."""

    schema: str
    name: str
    state: str
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResyncReport:
    """The work of `pgsieve resync`.

    `lost` says what was wrong with a slot that was replaced, `damaged` which of pgsieve's own tables could
    not be read. `run` is None where nothing had to be copied, or where the process that follows the slot does
    it (`followed`).
    """

    subscription: str
    tables: tuple[ResyncedTable, ...]
    lost: str | None
    run: SubscriptionRun | None
    followed: bool = False
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SkipReport:
    """The choice of `pgsieve skip`: the finish LSN of the transaction that a subscription will skip, None for none."""

    subscription: str
    skip_lsn: str | None


@dataclass(frozen=True, slots=True)
class EnableReport:
    """The result of `pgsieve enable`: `changed` is false for a subscription that was enabled already."""

    subscription: str
    changed: bool


@dataclass(frozen=True, slots=True)
class DropReport:
    """What `pgsieve drop` removed, and what it left: `kept_for` are the subscriptions that need the slot."""

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

    `subscription` is set for a slot of one subscription's own (mode `publisher`).

    - `lag_bytes` is the WAL between the confirmed LSN and the server's current one.
    - `lag_seconds` is how long the oldest commit that the change log lacks has been waiting.
    - `retained_bytes` is the WAL that the slot keeps.
    - `safe_wal_bytes` is how much WAL may still be written before the slot can be lost (None: any amount).
    - `problem` says why the source could not be asked. Then it is unknown whether the slot exists, and
      whether a process reads it.
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
    """A replica table: its sync state, its row filter and its position; `problem` says why it is set aside.

    `row_filter` is None where every row passes, and `unknown` where the source does not say it. `since_copy`
    lists the changes of its publications since it was copied; `pgsieve resync` copies it again.
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
    """A subscription and its tables; whether it is enabled and why not, and the finish LSN it will skip.

    `problem` is what stops all of it. `seconds_behind` is how long the oldest commit that the replicas lack
    has been waiting (0: none waits; None: unknown). `last_success` is when all changes were last found
    applied (ISO 8601, UTC). `warnings` are those of a run.
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
    """What `pgsieve status` shows."""

    slots: tuple[SlotStatus, ...]
    subscriptions: tuple[SubscriptionStatus, ...]


@dataclass(frozen=True, slots=True)
class CheckedTable:
    """A replica table compared with `SELECT … WHERE <row filter>` on the publisher at the same LSN.

    `differing_keys` is a sample: keys only, as text. `problem` says why the table could not be compared, or not
    repaired. `repaired` has the rows written and deleted, None without a repair.
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
    def compared(self) -> bool:
        """Whether the rows of both sides were compared: they are equal, or some keys differ."""
        return self.equal or bool(self.differing_keys)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of `pgsieve check`, and the subscriptions that it could not check.

    `warnings` name partitions whose changes are not sent: why a table differs, and what was not compared.
    """

    tables: tuple[CheckedTable, ...]
    failures: tuple[Failure, ...] = ()
    sequences: tuple[CheckedSequence, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether no table differs, and no sequence."""
        return all(table.equal for table in self.tables) and all(each.equal for each in self.sequences)


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """One table of the demo in the publisher, in pgsieve in one mode, and in the built-in subscriber."""

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
class SizedStep:
    """The seconds of CREATE SUBSCRIPTION and of pgsieve for this many rows, or changes, of the demo; `spent` as of a run."""

    title: str
    rows: int
    subscriber: float
    pgsieve: float
    spent: Spent | None


@dataclass(frozen=True, slots=True)
class SizedReport:
    """The demo's main job at size: its steps, and whether `check` found the replica equal to the publisher."""

    steps: tuple[SizedStep, ...]
    equal: bool


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of `pgsieve demo`: its configuration file, its lake, every comparison, and its seconds.

    `sized` is the main job at size, None where that was left out.
    """

    config: Path
    lake: str
    tables: tuple[ComparedTable, ...]
    seconds: float
    sized: SizedReport | None = None

    @property
    def equal(self) -> bool:
        """Whether every replica had the rows of the built-in subscriber, and `check` found the large one equal."""
        return all(table.equal for table in self.tables) and (self.sized is None or self.sized.equal)


@dataclass(frozen=True, slots=True)
class JarSet:
    """Jars that Spark needs together: the package that needs the others, and the number and bytes of files."""

    package: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class JarsReport:
    """The jars of `pgsieve jars`, and the folder of the copy."""

    packages: tuple[JarSet, ...]
    folder: str | None


@dataclass(frozen=True)
class EngineReport:
    """The warm engine: whether it serves, its address, uptime and memory, and whether a run uses it.

    `current` says whether it serves this configuration and this version: runs use no other.
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
    """The result of `pgsieve engine stop`: `stopped` is false where no engine ran."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class LiveDemo:
    """What `pgsieve demo --ui` keeps running, and where a person looks at it: a page, pgsieve.yaml, the source, a log."""

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
    """A table that may be published; without a replica identity only its INSERTs.

    For a partition tree it is the root; it has an identity where all its leaves have one.
    """

    schema: str
    name: str
    has_identity: bool
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class InitReport:
    """What `pgsieve init` wrote, for which role, and validate's findings.

    `variable` is the environment variable of the password; None where libpq finds it. `statements` is None as
    long as validate finds a problem. For the tables in `inserts_only` only INSERTs are published.
    """

    config: Path
    statements: Path | None
    variable: str | None
    role: str
    validation: ValidationReport
    inserts_only: tuple[str, ...] = ()
