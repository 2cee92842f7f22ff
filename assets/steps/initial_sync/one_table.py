"""The copy of one table: chunks read at an exported snapshot -> the replica, replaced in one commit with that LSN.

In: a planned table and the snapshot. Out: `CopyResult`, with the problem if it is of the table's own data or replica.
Raises transient faults, and faults of the lake.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.initial_sync.damaged_replicas import Damage, ReplacedReplica
from pgsieve.assets.steps.initial_sync.rows import (
    ReplicaColumn,
    SelectedRows,
    copied_files,
    copied_rows,
    read_with_retries,
)
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observations import observed_metrics
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import full_reason, is_of_foreign_table
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.assets.steps.validation.waiting import waiting_reason
from pgsieve.decoding.changes.metadata_columns import METADATA, metadata_copy_expression
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import ReplicatedTable, Table
from pgsieve.decoding.values.types import ColumnType, copy_expression
from pgsieve.decoding.wording import shorten
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.committers import Committer, FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.errors import (
    ExecutorError,
    LakeError,
    OvertakenError,
    retry_after_conflict,
)
from pgsieve.resources.lake.delta.layout import FILE_BYTES_PROPERTY
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import ForeignServerError, SourceError, translate_errors
from pgsieve.resources.postgres.foreign_servers import verify_foreign_servers
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import Chunks, Snapshot
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.wal import current_lsn
from pgsieve.resources.work import DRIVER, add_costs, name_jobs

#: The interval at which a copy reports its progress.
PROGRESS_SECONDS = 30.0


@dataclass(frozen=True)
class CopyResult:
    """The result of one table's copy: `lsn` is the snapshot's, `version` the replica's Delta version."""

    schema: str
    table: str
    lsn: int
    rows: int
    seconds: float
    version: int
    row_filter: str | None
    columns: tuple[tuple[str, str], ...]
    problem: str | None = None
    #: The publisher's name of each column of the table.
    published: Mapping[str, str] = field(default_factory=dict)
    #: Another process has copied the table at a later LSN, or applies changes to it; it also sets the table's state.
    overtaken: bool = False
    #: The transactions that the table's snapshot waits for, by their ids.
    awaits: tuple[str, ...] = ()
    #: The problem is not the table's own: the next run copies it again.
    again: bool = False


@dataclass(frozen=True)
class PlannedTable:
    """A table to copy, divided into chunks. `former` is the definition of its present replica, None without one."""

    replicated: ReplicatedTable
    chunks: Chunks
    former: Definition | None

    @property
    def generation(self) -> int:
        """The generation of the change history that continues after the copy."""
        return 0 if self.former is None else self.former.history.generation


class Progress:
    """Logs the progress of one table's copy, at most every half minute."""

    def __init__(self, table: str, parts: int, size: int, log: Log) -> None:
        self._table, self._parts, self._size, self._log = table, parts, size, log
        self._reported = time.monotonic()

    def report(self, copied_parts: int) -> None:
        """Log the number of copied parts, if half a minute has passed and parts remain."""
        if copied_parts < self._parts and time.monotonic() - self._reported >= PROGRESS_SECONDS:
            self._reported = time.monotonic()
            self._log(
                f"{self._table}: {copied_parts} of {self._parts} parts copied, of {self._size / 1024**2:,.1f} MiB in all"
            )


def copy_select_list(
    subscription: Subscription, replicated: ReplicatedTable, snapshot: Snapshot
) -> list[str]:
    """The select list of a copy: the table's columns, then the metadata columns with the snapshot's LSN and time."""
    selected = select_list(subscription, replicated)
    for kind in subscription.metadata(replicated.table):
        expression = metadata_copy_expression(kind, snapshot.lsn, snapshot.time)
        selected.append(copy_expression(expression, METADATA[kind], -1) + f" as c{len(selected)}")
    return selected


def select_list(subscription: Subscription, replicated: ReplicatedTable) -> list[str]:
    """The table's columns, named c0, c1, …, in the forms that `pgsieve.decoding.values.types.from_copy` reads."""
    attributes = {a.name: a for a in replicated.table.attributes}
    return [
        copy_expression(
            quote(name),
            attributes[name].type_oid,
            attributes[name].type_modifier,
            subscription.chosen_type((replicated.table.schema, replicated.table.name), name),
        )
        + f" as c{number}"
        for number, name in enumerate(replicated.columns)
    ]


@dataclass(frozen=True)
class _WrittenReplica:
    """A replica after its copy: the number of copied rows, its version, and whether another process has written to it."""

    rows: int = 0
    version: int = 0
    overtaken: bool = False


@dataclass(frozen=True)
class SnapshotCopy:
    """The copies of a subscription's tables at one exported snapshot.

    `log` gets the progress. `reading` limits how many copies read the publisher at the same time.
    """

    subscription: Subscription
    lake: Lake
    snapshot: Snapshot
    conninfo: Conninfo
    log: Log
    reading: AbstractContextManager[object]

    def copy_table(self, planned: PlannedTable) -> CopyResult:
        """Copy a table. The result has the table's problem, or says that another process has copied it later."""
        start_time = time.monotonic()
        replicated, table = planned.replicated, planned.replicated.table
        types = self.subscription.replica_types(replicated)
        written_replica, problem, copies_again = _WrittenReplica(), None, False
        try:
            written_replica = self._write_replica(planned, types)
        except OvertakenError:
            written_replica = _WrittenReplica(overtaken=True)
        except PgsieveError as error:
            failure, copies_again = _with_hint(replicated, error), is_of_foreign_table(error)
            name = (table.schema, table.name)
            problem = waiting_reason(failure) if copies_again else full_reason(self.lake, failure, name)
        return CopyResult(
            schema=table.schema,
            table=table.name,
            lsn=self.snapshot.lsn,
            rows=written_replica.rows,
            seconds=time.monotonic() - start_time,
            version=written_replica.version,
            row_filter=" OR ".join(replicated.row_filters) if replicated.row_filters is not None else None,
            columns=tuple((name, t.spark) for name, t in types.items()),
            published={self.subscription.replica_name(name): name for name in replicated.columns},
            problem=problem,
            overtaken=written_replica.overtaken,
            again=copies_again,
        )

    def _write_replica(self, planned: PlannedTable, types: Mapping[str, ColumnType]) -> _WrittenReplica:
        lake, table = self.lake, planned.replicated.table
        path = lake.paths.replica(self.subscription.name, table.schema, table.name)
        # Without copy_data, a table that is published again continues with the rows that its replica has.
        if not self.subscription.copy_data and lake.records.exists(path):
            # The position has to rise as with a copy: a replica below its state's LSN counts as put back.
            lake.record_position(path, self.snapshot.lsn)
            return _WrittenReplica(version=lake.records.head(path).version)
        if table.unsent_leaves and self.subscription.copy_data:
            with self.reading:
                verify_foreign_servers(self.subscription.feed.source, (table.schema, table.name))
        chunks = planned.chunks if self.subscription.copy_data else Chunks([], 0)
        key = set(map(self.subscription.replica_name, planned.replicated.key))
        columns = [ReplicaColumn(name, t, name in key) for name, t in types.items()]
        selected = SelectedRows(self.conninfo, self.snapshot.name, chunks.queries, columns)
        committer = self._committer(planned, selected, chunks.bytes)
        with translate_errors(self.subscription.feed.source.name, f'copy table "{table.qualified}"'):
            properties = self.subscription.layout.of((table.schema, table.name)).delta()
            progress = Progress(table.qualified, len(chunks.queries), chunks.bytes, self.log)
            with name_jobs(self.subscription.name, f"initial sync of {table.schema}.{table.name}"):
                commit = Commit(
                    self.snapshot.lsn, overwrite=True, metadata={"copied": True}, properties=properties
                )
                rows = self._write_copy(path, committer, selected, commit, progress)
            # A replica that existed before the copy still has its former properties.
            if properties:
                retry_after_conflict(lake.set_properties)(path, properties)
        reach(Failpoint.TABLE_COPIED)
        head = lake.records.head(path)
        return _WrittenReplica(rows, head.version, (head.position or 0) > self.snapshot.lsn)

    def _committer(self, planned: PlannedTable, rows: SelectedRows, size: int) -> Committer:
        """The committer of the copy; removes the obstacles if the replica is damaged.

        Raises OvertakenError and PgsieveError if the replica must not be written. Later writes of other processes make
        the commit of the copy fail.
        """
        lake, table, schema = self.lake, planned.replicated.table, rows.schema
        name = (table.schema, table.name)
        # Without a former copy and without `scd2` there are no versions of rows, so no request to the store is needed.
        has_versions = planned.former is not None or bool(self.subscription.histories.of(name).scd2)
        replica = ReplacedReplica(
            lake, self.subscription.name, name, planned.generation, has_versions=has_versions
        )

        def choose() -> Committer:
            self._refuse_position(replica.path, table)
            _check_names(rows.columns)
            return lake.policy.committer(replica.path, schema.names, size, lambda: schema, overwrite=True)

        with lake.consistent_read(replica.path, replica.history, Cuts(lake, self.subscription.name).path):
            damage = replica.damage()
            if damage == Damage():
                return choose()
        replica.remove_damage(damage)
        with lake.consistent_read():
            return choose()

    def _refuse_position(self, path: str, table: Table) -> None:
        """Raise if the replica's position is at or beyond the snapshot: Delta would leave out the copy's commit.

        OvertakenError: another process has copied the table since. PgsieveError: the publisher is behind the replica.
        """
        position, lsn = self.lake.records.position(path), self.snapshot.lsn
        if position is not None and position >= lsn:
            with self.subscription.feed.source.connect() as connection:
                if position <= current_lsn(connection):
                    raise OvertakenError(path)
            raise PgsieveError(
                f'table "{table.qualified}": its replica holds changes up to {format_lsn(position)}, but the publisher is only'
                f" at {format_lsn(lsn)}",
                hint="replicate another cluster into another `lake`, or drop the subscription with --delete-tables",
                sqlstate="55000",
            )

    def _write_copy(
        self, path: str, committer: Committer, rows: SelectedRows, commit: Commit, progress: Progress
    ) -> int:
        """Replace the replica by the selected rows; returns their number."""
        match committer:
            case InProcessCommitter():
                return self._write_in_process(path, committer, rows, commit)
            case FileCommitter():
                return self._write_files(path, committer, rows, commit, progress)
            case SparkCommitter():
                return self._write_by_spark(path, rows, commit)

    def _write_in_process(
        self, path: str, committer: InProcessCommitter, selected: SelectedRows, commit: Commit
    ) -> int:
        with self.reading:
            numbers = range(len(selected.queries))
            batches = [
                batch for number in numbers for batch in read_with_retries(partial(selected.batches, number))
            ]
        copied_rows = pa.Table.from_batches(batches, selected.schema)
        add_costs(DRIVER, 1, copied_rows.nbytes)
        committer.write(path, copied_rows, commit)
        return int(copied_rows.num_rows)

    def _write_files(
        self, path: str, committer: FileCommitter, rows: SelectedRows, commit: Commit, progress: Progress
    ) -> int:
        size = committer.file_bytes(path, commit.properties)

        def written() -> pa.Table:
            with self.reading:
                return copied_files(self.lake.executors, rows, path, self.lake.store, size, progress.report)

        files = committer.commit(written, path, rows.schema, commit)
        return sum(json.loads(file["stats"])["numRecords"] for file in files)

    def _write_by_spark(self, path: str, selected: SelectedRows, commit: Commit) -> int:
        frame = copied_rows(self.lake.spark, selected)
        observation, rows = Observation(), [F.count(F.lit(1)).alias("rows")]
        # Delta in Spark does not know the property for the size of files; `_written` sets it afterwards.
        properties = {name: value for name, value in commit.properties.items() if name != FILE_BYTES_PROPERTY}
        with self.reading:
            self.lake.write(frame.observe(observation, *rows), path, replace(commit, properties=properties))
            return int(observed_metrics(observation, rows, lambda: self.lake.current(path))["rows"])


def _with_hint(replicated: ReplicatedTable, error: PgsieveError) -> PgsieveError:
    """Add the row filter and a hint to the server's error for a row or foreign table that it cannot read.

    Returns any other error as it is.
    """
    if is_of_foreign_table(error):
        problem = f'cannot read table "{replicated.table.qualified}" ({error.message})'
        return ForeignServerError(problem, hint=error.hint, sqlstate=error.sqlstate)
    kind = error.kind if isinstance(error, ExecutorError) else type(error).__name__
    if kind != SourceError.__name__ or error.hint:
        return error
    remedy = "correct the value at the publisher, or leave its column out by a column list"
    filter_text = ""
    if replicated.row_filters is not None:
        filter_text = f" where {shorten(' OR '.join(replicated.row_filters))}"
        remedy = f"alter the row filter, or {remedy}"
    problem = f'cannot read table "{replicated.table.qualified}"{filter_text} ({error.message})'
    return SourceError(problem, hint=remedy, sqlstate=error.sqlstate)


def is_beyond(lake: Lake, path: str, lsn: int) -> bool:
    """Whether a replica has changes that committed at or after an LSN."""
    return (lake.records.position(path) or 0) > lsn


def _check_names(columns: Sequence[ReplicaColumn]) -> None:
    """Raise LakeError for columns that no Delta table can have: no column, or two whose names differ only in case."""
    if not columns:
        raise LakeError(
            "no column is published, and a Delta table has at least one", hint="publish a column of the table"
        )
    names_by_folded: dict[str, str] = {}
    for column in columns:
        first_name = names_by_folded.setdefault(column.name.lower(), column.name)
        if first_name != column.name:
            raise LakeError(
                f"columns {quote(first_name)} and {quote(column.name)} differ in case alone, and a Delta table can have only one of them",
                hint="rename one, or publish a column list without it",
            )
