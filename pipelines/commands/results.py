"""What the commands return: frozen dataclasses of plain values, for the terminal, JSON and tests alike.

LSNs are text as PostgreSQL writes them (`16/B374D848`). No field holds a cell value, except keys of rows that
differ. Errors are kept as they were raised. Nothing here raises.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pgsieve.pipelines.commands.sequences import CheckedSequence, ListedSequence
from pgsieve.pipelines.commands.validation_results import ValidationReport

#: What a source would say that does not answer.
UNKNOWN: Literal["unknown"] = "unknown"


class Progress(Protocol):
    """Where long work reports how far it is; a task is named by what it does (`copy public.orders`).

    Implementations may be called from several threads.
    """

    def start(self, task: str) -> None:
        """Begin a task."""

    def finish(self, task: str) -> None:
        """End the task, done or not."""

    def tell(self, line: str) -> None:
        """Say how far a task is that takes long."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended the part of some subscriptions; what was done for them before is durable."""

    subscriptions: tuple[str, ...]
    error: Exception


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that ended a command: with `--json` its result."""

    error: Exception


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table of which the initial sync copied so many rows."""

    schema: str
    name: str
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AppliedTable:
    """What a run did to one replica table: rows by operation, after row filters, and the Delta version it left."""

    schema: str
    name: str
    inserted: int
    updated: int
    deleted: int
    truncated: bool
    version: int


@dataclass(frozen=True, slots=True)
class TransformedTable:
    """What a run transformed of one table: the changes that came through a relation (`source`, the table or a partition).

    `row_filter` decided; None: there is none. The others say what became of `updates`.
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
    """What work took: the engine that ran it (`driver`, `threads`, `Spark, local`), in how many tasks, the bytes they wrote, seconds."""

    engine: str
    tasks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SubscriptionRun:
    """What a run did for one subscription, from the LSN before it to the LSN of its cut.

    `changed` is false when there was nothing new; a problem is a table set aside, a sequence that cannot be read, or the
    subscription disabled, with the reason. `notice` says what became of the LSN to skip. `spent` is what the work took, of all its steps but the slot's.
    `warnings` name partitions whose changes are not sent, and what becomes of their rows.
    `transformed` says what became of the changes that came, also where nothing was sent.
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
    """What `pgsieve run` did, and which subscriptions failed meanwhile."""

    subscriptions: tuple[SubscriptionRun, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any subscription got anything new."""
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
    """What `pgsieve resync` did.

    `lost` says what was wrong with a slot that was replaced, `damaged` which of pgsieve's own tables could not be read. `run`
    is None where nothing had to be copied, or where the process that follows the slot does it (`followed`).
    """

    subscription: str
    tables: tuple[ResyncedTable, ...]
    lost: str | None
    run: SubscriptionRun | None
    followed: bool = False
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SkipReport:
    """What `pgsieve skip` chose: the finish LSN of the transaction that a subscription will skip, None for none."""

    subscription: str
    skip_lsn: str | None


@dataclass(frozen=True, slots=True)
class EnableReport:
    """What `pgsieve enable` did: `changed` is false for a subscription that was enabled already."""

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
    #: The names that were taken out of the catalog.
    unregistered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A replication slot (`pg_replication_slots`) and how far the lake has read it.

    `subscription` is set for a slot of one subscription's own (mode `publisher`). `lag_bytes` is the WAL
    between the confirmed LSN and the server's current one, `lag_seconds` for how long the oldest commit that the change
    log lacks has been waiting, `retained_bytes` the WAL that the slot keeps, `safe_wal_bytes` what may still be written
    before the slot can be lost (None: any amount). `problem` says why the source could not be asked: whether there is such a slot,
    and whether a process reads it, is unknown then. `decoding` is
    `always`, or `while a slot exists`: then the last logical slot that is dropped switches logical decoding off.
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

    `row_filter` is None where every row passes, and `unknown` where the source does not say it.
    `since_copy` is what changed in its publications since it was copied; `pgsieve resync` copies it again.
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

    `problem` is what stands in the way of all of it. `seconds_behind` says for how long the oldest commit that the
    replicas lack has been waiting (0: none waits; None: unknown), `last_success` when everything that was there was
    last found applied (ISO 8601, UTC). `warnings` are those of a run.
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
    """A replica table beside `SELECT … WHERE <row filter>` on the publisher at the same LSN.

    `differing_keys` is a sample: keys only, as text. `repaired` has the rows written and those taken out, None where
    nobody repaired the table.
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


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `pgsieve check` found, and the subscriptions that it could not check.

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
    """One table of the demo as the publisher, pgsieve in one mode, and the built-in subscriber hold it."""

    table: str
    row_filter: str
    columns: tuple[str, ...]
    publisher: tuple[tuple[str, ...], ...]
    replica: tuple[tuple[str, ...], ...]
    subscriber: tuple[tuple[str, ...], ...]

    @property
    def equal(self) -> bool:
        """Whether the replica holds just the rows of the built-in subscriber."""
        return sorted(self.replica) == sorted(self.subscriber)


@dataclass(frozen=True, slots=True)
class SizedStep:
    """The seconds that CREATE SUBSCRIPTION and pgsieve took for so many rows, or changes, of the demo; `spent` as of a run."""

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
    """What `pgsieve demo` did: its configuration file, its lake, every comparison, and the seconds it took.

    `sized` is the main job at size, None where that was left out.
    """

    config: Path
    lake: str
    tables: tuple[ComparedTable, ...]
    seconds: float
    sized: SizedReport | None = None

    @property
    def equal(self) -> bool:
        """Whether every replica held the rows of the built-in subscriber, and `check` found the large one equal."""
        return all(table.equal for table in self.tables) and (self.sized is None or self.sized.equal)


@dataclass(frozen=True, slots=True)
class JarSet:
    """Jars that Spark needs together: the package that needs the others, and how many files and bytes they are."""

    package: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class JarsReport:
    """What `pgsieve jars` has at hand, and the folder that it was copied to."""

    packages: tuple[JarSet, ...]
    folder: str | None


@dataclass(frozen=True)
class EngineReport:
    """The warm engine: whether it serves, where, since how many seconds, its memory, and whether a run uses it.

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
    """What `pgsieve engine stop` did: `stopped` is false where no engine ran."""

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

    Of a partition tree it is the root; it has one where all its leaves have.
    """

    schema: str
    name: str
    has_identity: bool
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class InitReport:
    """What `pgsieve init` wrote, for which role, and what validate says of it.

    `variable` is the variable of the environment in which the password is expected; None where libpq finds it. `statements`
    is None as long as validate finds a problem. Of the tables in `inserts_only` only INSERTs are published.
    """

    config: Path
    statements: Path | None
    variable: str | None
    role: str
    validation: ValidationReport
    inserts_only: tuple[str, ...] = ()
