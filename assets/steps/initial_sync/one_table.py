"""The copy of one table: its chunks, read at an exported snapshot -> its replica, replaced in one commit.

The commit has the snapshot's LSN.

In: a planned table and the snapshot. Out: `Copied`, with the problem if the table's own data or replica fails. Raises
passing faults, and faults of the lake.
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
    read_again,
)
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observed import observed
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import explained, is_of_foreign_table
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.assets.steps.validation.waiting import waiting_for
from pgsieve.decoding.changes.metadata_columns import METADATA, copied_as
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import ReplicatedTable, Table
from pgsieve.decoding.values.types import ColumnType, copy_expression
from pgsieve.decoding.wording import shortened
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.committers import ByFiles, BySpark, Committer, InProcess
from pgsieve.resources.lake.delta.errors import (
    ExecutorError,
    LakeError,
    OverrunError,
    again_after_conflict,
)
from pgsieve.resources.lake.delta.layout import FILE_BYTES_PROPERTY
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import ForeignServerError, SourceError, refusing
from pgsieve.resources.postgres.foreign_servers import refuse_unanswering
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import Chunks, Snapshot
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.wal import current_lsn
from pgsieve.resources.work import DRIVER, called, note

#: How often a copy reports its progress.
TELL_SECONDS = 30.0


@dataclass(frozen=True)
class Copied:
    """One table's initial copy."""

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
    #: Another process has copied the table later, or applies changes to it. That process sets the table's state.
    overrun: bool = False
    #: The transactions that the table's snapshot waits for, by their ids.
    awaits: tuple[str, ...] = ()
    #: The table's data do not cause the problem: the next run copies the table again.
    again: bool = False


@dataclass(frozen=True)
class PlannedTable:
    """A table to copy, in chunks. `former` defines its present replica; None if it was never copied."""

    replicated: ReplicatedTable
    chunks: Chunks
    former: Definition | None

    @property
    def generation(self) -> int:
        """The generation of the change history that continues after the copy."""
        return 0 if self.former is None else self.former.history.generation


class Progress:
    """Reports the progress of one table's copy, at most every half minute."""

    def __init__(self, table: str, parts: int, size: int, log: Log) -> None:
        self._table, self._parts, self._size, self._log = table, parts, size, log
        self._reported = time.monotonic()

    def report(self, done: int) -> None:
        """Record the number of copied parts."""
        if done < self._parts and time.monotonic() - self._reported >= TELL_SECONDS:
            self._reported = time.monotonic()
            self._log(
                f"{self._table}: {done} of {self._parts} parts copied, of {self._size / 1024**2:,.1f} MiB in all"
            )


def copied_list(subscription: Subscription, replicated: ReplicatedTable, snapshot: Snapshot) -> list[str]:
    """The select list of the copy at a snapshot: the table's columns, then metadata."""
    selected = select_list(subscription, replicated)
    for kind in subscription.metadata(replicated.table):
        expression = copied_as(kind, snapshot.lsn, snapshot.time)
        selected.append(copy_expression(expression, METADATA[kind], -1) + f" as c{len(selected)}")
    return selected


def select_list(subscription: Subscription, replicated: ReplicatedTable) -> list[str]:
    """The table's columns in the forms that `pgsieve.decoding.values.types.from_copy` reads, called c0, c1, …."""
    attributes = {a.name: a for a in replicated.table.attributes}
    return [
        copy_expression(
            quote(name),
            attributes[name].type_oid,
            attributes[name].type_modifier,
            subscription.override((replicated.table.schema, replicated.table.name), name),
        )
        + f" as c{number}"
        for number, name in enumerate(replicated.columns)
    ]


@dataclass(frozen=True)
class _Written:
    """A replica after its copy: the rows copied, its version, and whether another process has written it since."""

    rows: int = 0
    version: int = 0
    overrun: bool = False


@dataclass(frozen=True)
class SnapshotCopy:
    """The copies of a subscription's tables at one exported snapshot.

    `log` gets the progress every half minute. A copy enters `reading` while it reads the publisher.
    """

    subscription: Subscription
    lake: Lake
    snapshot: Snapshot
    conninfo: Conninfo
    log: Log
    reading: AbstractContextManager[object]

    def copied(self, planned: PlannedTable) -> Copied:
        """Copy a table. The result says which problem the table has, or that another process copied it later."""
        started = time.monotonic()
        replicated, table = planned.replicated, planned.replicated.table
        types = self.subscription.replica_types(replicated)
        written, problem, again = _Written(), None, False
        try:
            written = self._written(planned, types)
        except OverrunError:
            written = _Written(overrun=True)
        except PgsieveError as error:
            failure, again = _of_reading(replicated, error), is_of_foreign_table(error)
            name = (table.schema, table.name)
            problem = waiting_for(failure) if again else explained(self.lake, failure, name)
        return Copied(
            schema=table.schema,
            table=table.name,
            lsn=self.snapshot.lsn,
            rows=written.rows,
            seconds=time.monotonic() - started,
            version=written.version,
            row_filter=" OR ".join(replicated.row_filters) if replicated.row_filters is not None else None,
            columns=tuple((name, t.spark) for name, t in types.items()),
            published={self.subscription.replica_name(name): name for name in replicated.columns},
            problem=problem,
            overrun=written.overrun,
            again=again,
        )

    def _written(self, planned: PlannedTable, types: Mapping[str, ColumnType]) -> _Written:
        lake, table = self.lake, planned.replicated.table
        path = lake.paths.replica(self.subscription.name, table.schema, table.name)
        # Without copy_data a table that comes back continues with its present rows.
        if not self.subscription.copy_data and lake.records.exists(path):
            # A copy would raise the position, too. A replica below its state's LSN counts as put back from a backup.
            lake.hold_position(path, self.snapshot.lsn)
            return _Written(version=lake.records.head(path).version)
        if table.unsent_leaves and self.subscription.copy_data:
            with self.reading:
                refuse_unanswering(self.subscription.feed.source, (table.schema, table.name))
        chunks = planned.chunks if self.subscription.copy_data else Chunks([], 0)
        key = set(map(self.subscription.replica_name, planned.replicated.key))
        columns = [ReplicaColumn(name, t, name in key) for name, t in types.items()]
        selected = SelectedRows(self.conninfo, self.snapshot.name, chunks.queries, columns)
        committer = self._committer(planned, selected, chunks.bytes)
        with refusing(self.subscription.feed.source.name, f'copy table "{table.qualified}"'):
            properties = self.subscription.layout.of((table.schema, table.name)).delta()
            progress = Progress(table.qualified, len(chunks.queries), chunks.bytes, self.log)
            with called(self.subscription.name, f"initial sync of {table.schema}.{table.name}"):
                commit = Commit(
                    self.snapshot.lsn, overwrite=True, metadata={"copied": True}, properties=properties
                )
                rows = self._write_copy(path, committer, selected, commit, progress)
            # A table that existed before the copy has kept its former properties.
            if properties:
                again_after_conflict(lake.set_properties)(path, properties)
        reach(Failpoint.TABLE_COPIED)
        head = lake.records.head(path)
        return _Written(rows, head.version, (head.position or 0) > self.snapshot.lsn)

    def _committer(self, planned: PlannedTable, selected: SelectedRows, size: int) -> Committer:
        """The committer of the copy; makes room for the copy if the replica is damaged.

        Raises OverrunError and PgsieveError if the replica must not be written.

        The checks here can miss later writes by other processes: the commit of the copy detects these.
        """
        lake, table, schema = self.lake, planned.replicated.table, selected.schema
        name = (table.schema, table.name)
        # Without a former copy and without `scd2` there are no versions of rows: the store need not be asked.
        has_versions = planned.former is not None or bool(self.subscription.histories.of(name).scd2)
        replica = ReplacedReplica(
            lake, self.subscription.name, name, planned.generation, has_versions=has_versions
        )

        def decided() -> Committer:
            self._refuse_later(replica.path, table)
            _check_names(selected.columns)
            return lake.policy.committer(replica.path, schema.names, size, lambda: schema, overwrite=True)

        with lake.consistent_read(replica.path, replica.history, Cuts(lake, self.subscription.name).path):
            damage = replica.damage()
            if damage == Damage():
                return decided()
        replica.make_room(damage)
        with lake.consistent_read():
            return decided()

    def _refuse_later(self, path: str, table: Table) -> None:
        """Refuse to copy below the replica's own position: Delta would leave the commit out.

        Raises OverrunError where another process has copied the table since the snapshot.
        """
        position, lsn = self.lake.records.position(path), self.snapshot.lsn
        if position is not None and position >= lsn:
            with self.subscription.feed.source.connect() as connection:
                if position <= current_lsn(connection):
                    raise OverrunError(path)
            raise PgsieveError(
                f'table "{table.qualified}": its replica holds changes up to {format_lsn(position)}, but the publisher is only'
                f" at {format_lsn(lsn)}",
                hint="replicate another cluster into another `lake`, or drop the subscription with --delete-tables",
                sqlstate="55000",
            )

    def _write_copy(
        self, path: str, committer: Committer, selected: SelectedRows, commit: Commit, progress: Progress
    ) -> int:
        """Replace the replica by the selected rows; returns their number."""
        match committer:
            case InProcess():
                return self._write_in_process(path, committer, selected, commit)
            case ByFiles():
                return self._write_files(path, committer, selected, commit, progress)
            case BySpark():
                return self._write_by_spark(path, selected, commit)

    def _write_in_process(
        self, path: str, committer: InProcess, selected: SelectedRows, commit: Commit
    ) -> int:
        with self.reading:
            numbers = range(len(selected.queries))
            batches = [batch for number in numbers for batch in read_again(partial(selected.batches, number))]
        copied = pa.Table.from_batches(batches, selected.schema)
        note(DRIVER, 1, copied.nbytes)
        committer.write(path, copied, commit)
        return int(copied.num_rows)

    def _write_files(
        self, path: str, committer: ByFiles, selected: SelectedRows, commit: Commit, progress: Progress
    ) -> int:
        size = committer.file_bytes(path, commit.properties)

        def written() -> pa.Table:
            with self.reading:
                return copied_files(
                    self.lake.executors, selected, path, self.lake.store, size, progress.report
                )

        files = committer.commit(written, path, selected.schema, commit)
        return sum(json.loads(file["stats"])["numRecords"] for file in files)

    def _write_by_spark(self, path: str, selected: SelectedRows, commit: Commit) -> int:
        frame = copied_rows(self.lake.spark, selected)
        counted, rows = Observation(), [F.count(F.lit(1)).alias("rows")]
        # Delta in Spark does not know the target size of files; it is set afterwards.
        properties = {name: value for name, value in commit.properties.items() if name != FILE_BYTES_PROPERTY}
        with self.reading:
            self.lake.write(frame.observe(counted, *rows), path, replace(commit, properties=properties))
            return int(observed(counted, rows, lambda: self.lake.current(path))["rows"])


def _of_reading(replicated: ReplicatedTable, error: PgsieveError) -> PgsieveError:
    """Add the expression and the remedy to an error of a row, or foreign table, that the server cannot read.

    Returns any other error as it is.
    """
    if is_of_foreign_table(error):
        what = f'cannot read table "{replicated.table.qualified}" ({error.message})'
        return ForeignServerError(what, hint=error.hint, sqlstate=error.sqlstate)
    kind = error.kind if isinstance(error, ExecutorError) else type(error).__name__
    if kind != SourceError.__name__ or error.hint:
        return error
    remedy = "correct the value at the publisher, or leave its column out by a column list"
    where = ""
    if replicated.row_filters is not None:
        where = f" where {shortened(' OR '.join(replicated.row_filters))}"
        remedy = f"alter the row filter, or {remedy}"
    what = f'cannot read table "{replicated.table.qualified}"{where} ({error.message})'
    return SourceError(what, hint=remedy, sqlstate=error.sqlstate)


def is_beyond(lake: Lake, path: str, lsn: int) -> bool:
    """Whether a replica has changes that committed at or after an LSN."""
    return (lake.records.position(path) or 0) > lsn


def _check_names(columns: Sequence[ReplicaColumn]) -> None:
    """Raise LakeError for columns that no Delta table can have: none, or two whose names differ only in case."""
    if not columns:
        raise LakeError(
            "no column is published, and a Delta table has at least one", hint="publish a column of the table"
        )
    seen: dict[str, str] = {}
    for column in columns:
        other = seen.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise LakeError(
                f"columns {quote(other)} and {quote(column.name)} differ in case alone, and a Delta table has one of them",
                hint="rename one, or publish a column list without it",
            )
