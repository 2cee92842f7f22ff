"""Copies one table: reads it at an exported snapshot, and replaces the replica in one commit with the snapshot's LSN.

In: a planned table, divided into chunks (one query reads each), and the snapshot
Out: a `CopyResult`. It has a problem if the copy fails because of the table's own data or its replica.

Raises transient faults (such as lost connections), and faults of the lake.
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
    read_rows_by_spark,
    read_with_retries,
    write_rows_to_files,
)
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observations import get_metrics
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import describe_error_fully, is_foreign_server_error
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.assets.steps.validation.waiting import describe_waiting_reason
from pgsieve.decoding.changes.metadata_columns import TYPE_OID_BY_KIND, make_copy_expression
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Table
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.values.types import ColumnType, copy_expression
from pgsieve.decoding.wording import shorten
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.committers import Committer, FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.errors import ExecutorError, LakeError, OvertakenError, retry_after_conflict
from pgsieve.resources.lake.delta.layout import FILE_BYTES_PROPERTY
from pgsieve.resources.lake.delta.records import COPIED_KEY, Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.postgres.errors import ForeignServerError, SourceError, translate_errors
from pgsieve.resources.postgres.foreign_servers import verify_foreign_servers
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import Chunks, Snapshot
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.wal import read_current_lsn
from pgsieve.resources.work import DRIVER, add_costs, name_jobs

#: A copy logs its progress at most once in this time.
PROGRESS_SECONDS = 30.0


@dataclass(frozen=True)
class CopyResult:
    """The result of the copy of a table. `lsn` is that of the snapshot, and `version` is the Delta version of the replica."""

    schema: str
    table: str
    lsn: int
    rows: int
    seconds: float
    version: int
    row_filter: str | None
    columns: tuple[tuple[str, str], ...]
    problem: str | None = None
    #: Maps each column of the replica to its name at the publisher.
    publisher_name_by_column: Mapping[str, str] = field(default_factory=dict)
    #: True if another process has copied the table at a later LSN, or applies changes to it. That process also sets the
    #: table's sync state.
    is_overtaken: bool = False
    #: The ids of the transactions for which the snapshot of the table has to wait.
    awaited_transactions: tuple[str, ...] = ()
    #: True if the next run copies the table again, because the cause of the problem is not in the table.
    must_be_repeated: bool = False


@dataclass(frozen=True)
class PlannedTable:
    """A table to copy, divided into chunks. `former_definition` is that of its present replica; None if it has none."""

    replicated_table: ReplicatedTable
    chunks: Chunks
    former_definition: Definition | None

    @property
    def generation(self) -> int:
        """The generation of the change history (the Delta table with all changes): how often it began anew."""
        return 0 if self.former_definition is None else self.former_definition.history.generation


class Progress:
    """Logs the progress of the copy of one table, at most every half minute."""

    def __init__(self, table_name: str, part_count: int, size_bytes: int, log: Log) -> None:
        self._table_name, self._part_count, self._size_bytes, self._log = (
            table_name,
            part_count,
            size_bytes,
            log,
        )
        self._last_report_time = time.monotonic()

    def report(self, copied_count: int) -> None:
        """Log how many chunks are copied, if half a minute has passed since the last report and chunks remain."""
        if copied_count < self._part_count and time.monotonic() - self._last_report_time >= PROGRESS_SECONDS:
            self._last_report_time = time.monotonic()
            self._log(
                f"{self._table_name}: {copied_count} of {self._part_count} parts copied, of {self._size_bytes / 1024**2:,.1f} MiB in all"
            )


def make_copy_select_list(
    subscription: Subscription, replicated_table: ReplicatedTable, snapshot: Snapshot
) -> list[str]:
    """Make the select list of a copy: the columns of the table, and after them its metadata columns.

    The metadata columns have the LSN and the time of the snapshot.
    """
    expressions = make_select_list(subscription, replicated_table)
    for metadata_kind in subscription.metadata(replicated_table.table):
        expression = make_copy_expression(metadata_kind, snapshot.lsn, snapshot.time)
        expressions.append(
            copy_expression(expression, TYPE_OID_BY_KIND[metadata_kind], -1) + f" as c{len(expressions)}"
        )
    return expressions


def make_select_list(subscription: Subscription, replicated_table: ReplicatedTable) -> list[str]:
    """Make expressions for the columns of a table, named c0, c1 and so on, in the form that `convert_copy` reads."""
    attribute_by_name = {attribute.name: attribute for attribute in replicated_table.table.attributes}
    return [
        copy_expression(
            quote(name),
            attribute_by_name[name].type_oid,
            attribute_by_name[name].type_modifier,
            subscription.chosen_type((replicated_table.table.schema, replicated_table.table.name), name),
        )
        + f" as c{number}"
        for number, name in enumerate(replicated_table.columns)
    ]


@dataclass(frozen=True)
class _WrittenReplica:
    """A replica after its copy: the number of rows, its version, and whether another process has written to it since."""

    row_count: int = 0
    version: int = 0
    is_overtaken: bool = False


@dataclass(frozen=True)
class SnapshotCopy:
    """Copies tables of a subscription at one exported snapshot.

    `log` gets the progress. `read_limit` is a context manager that limits how many tables are read at the same time.
    """

    subscription: Subscription
    lake: Lake
    snapshot: Snapshot
    conninfo: Conninfo
    log: Log
    read_limit: AbstractContextManager[object]

    def copy_table(self, planned_table: PlannedTable) -> CopyResult:
        """Copy a table.

        If the table was not copied, the result has its problem, or says that another process has copied it at a later
        LSN.
        """
        start_time = time.monotonic()
        replicated_table, table = planned_table.replicated_table, planned_table.replicated_table.table
        type_by_column = self.subscription.replica_types(replicated_table)
        written_replica, problem, must_be_repeated = _WrittenReplica(), None, False
        try:
            written_replica = self._write_replica(planned_table, type_by_column)
        except OvertakenError:
            written_replica = _WrittenReplica(is_overtaken=True)
        except PgsieveError as error:
            failure, must_be_repeated = _add_hint(replicated_table, error), is_foreign_server_error(error)
            name = (table.schema, table.name)
            problem = (
                describe_waiting_reason(failure)
                if must_be_repeated
                else describe_error_fully(self.lake, failure, name)
            )
        return CopyResult(
            schema=table.schema,
            table=table.name,
            lsn=self.snapshot.lsn,
            rows=written_replica.row_count,
            seconds=time.monotonic() - start_time,
            version=written_replica.version,
            row_filter=" OR ".join(replicated_table.row_filters)
            if replicated_table.row_filters is not None
            else None,
            columns=tuple((name, column_type.spark_type) for name, column_type in type_by_column.items()),
            publisher_name_by_column={
                self.subscription.replica_name(name): name for name in replicated_table.columns
            },
            problem=problem,
            is_overtaken=written_replica.is_overtaken,
            must_be_repeated=must_be_repeated,
        )

    def _write_replica(
        self, planned_table: PlannedTable, type_by_column: Mapping[str, ColumnType]
    ) -> _WrittenReplica:
        """Write the replica of a table. Without `copy_data` it gets no rows."""
        lake, table = self.lake, planned_table.replicated_table.table
        path = lake.paths.replica(self.subscription.name, table.schema, table.name)
        # Without `copy_data`, a table that is published again keeps the rows of its replica.
        if not self.subscription.copy_data and lake.records.exists(path):
            # The replica's position (the LSN up to which it has changes) must rise, as it does by a copy. If it stayed below
            # the LSN in the table's sync state, the replica would count as put back to an earlier version.
            lake.record_position(path, self.snapshot.lsn)
            return _WrittenReplica(version=lake.records.head(path).version)
        if table.unsent_leaves and self.subscription.copy_data:
            with self.read_limit:
                verify_foreign_servers(self.subscription.slot_stream.source, (table.schema, table.name))
        chunks = planned_table.chunks if self.subscription.copy_data else Chunks([], 0)
        key = set(map(self.subscription.replica_name, planned_table.replicated_table.key))
        columns = [
            ReplicaColumn(name, column_type, name in key) for name, column_type in type_by_column.items()
        ]
        selected_rows = SelectedRows(self.conninfo, self.snapshot.name, chunks.queries, columns)
        committer = self._choose_committer(planned_table, selected_rows, chunks.bytes)
        with translate_errors(
            self.subscription.slot_stream.source.name, f'copy table "{table.qualified_name}"'
        ):
            table_layout = self.subscription.layout.find_table_layout((table.schema, table.name))
            properties = table_layout.make_delta_properties(type_by_column)
            progress = Progress(table.quoted_name, len(chunks.queries), chunks.bytes, self.log)
            with name_jobs(self.subscription.name, f"initial sync of {table.quoted_name}"):
                commit = Commit(
                    self.snapshot.lsn, overwrite=True, metadata={COPIED_KEY: True}, properties=properties
                )
                runner = lake.policy.choose_runner(chunks.bytes)
                row_count = self._write_copy(path, committer, runner, selected_rows, commit, progress)
            # A replica that existed before still has its former properties.
            if properties:
                retry_after_conflict(lake.set_properties)(path, properties)
        reach(Failpoint.TABLE_COPIED)
        head = lake.records.head(path)
        return _WrittenReplica(row_count, head.version, (head.position or 0) > self.snapshot.lsn)

    def _choose_committer(
        self, planned_table: PlannedTable, selected_rows: SelectedRows, size_bytes: int
    ) -> Committer:
        """Choose the committer, which writes the copy. If the replica is damaged, first remove what would prevent the copy.

        Raises OvertakenError and PgsieveError if the replica must not be written. If another process writes the replica
        after this call, the commit of the copy fails.
        """
        lake, table, schema = self.lake, planned_table.replicated_table.table, selected_rows.schema
        name = (table.schema, table.name)
        # Without a former copy and without `history: scd2` there is no table with versions of rows. Knowing that saves a
        # request to the store.
        has_versions = planned_table.former_definition is not None or bool(
            self.subscription.histories.find_choice(name).scd2
        )
        replica = ReplacedReplica(
            lake,
            self.subscription.name,
            name,
            planned_table.generation,
            has_versions=has_versions,
            columns=tuple(schema.names),
        )

        def choose_committer() -> Committer:
            self._require_earlier_position(replica.path, table)
            _check_names(selected_rows.columns)
            return lake.policy.choose_committer(
                replica.path, schema.names, size_bytes, lambda: schema, overwrite=True
            )

        with lake.consistent_read(
            replica.path, replica.history_path, Cuts(lake, self.subscription.name).path
        ):
            damage = replica.find_damage()
            if damage == Damage():
                return choose_committer()
        replica.remove_damage(damage)
        with lake.consistent_read():
            return choose_committer()

    def _require_earlier_position(self, path: str, table: Table) -> None:
        """Raise an error if the position of the replica is at or beyond the snapshot.

        Delta leaves out a commit whose position (its `txn` version) is not above the table's, so it would leave out the
        copy. Raises OvertakenError if another process has copied the table in the meantime, and PgsieveError if the
        publisher is behind the replica.
        """
        position, lsn = self.lake.records.position(path), self.snapshot.lsn
        if position is not None and position >= lsn:
            with self.subscription.slot_stream.source.connect() as connection:
                if position <= read_current_lsn(connection):
                    raise OvertakenError(path)
            raise PgsieveError(
                f'table "{table.qualified_name}": its replica holds changes up to {format_lsn(position)}, but the publisher is only at {format_lsn(lsn)}',
                hint="replicate another cluster into another `lake`, or drop the subscription with --delete-tables",
                sqlstate="55000",
            )

    def _write_copy(
        self,
        path: str,
        committer: Committer,
        runner: Runner,
        selected_rows: SelectedRows,
        commit: Commit,
        progress: Progress,
    ) -> int:
        """Replace the replica by the selected rows; returns the number of rows. The runner writes files, if there are any."""
        match committer:
            case InProcessCommitter():
                return self._write_in_process(path, committer, selected_rows, commit)
            case FileCommitter():
                return self._write_files(path, committer, runner, selected_rows, commit, progress)
            case SparkCommitter():
                return self._write_by_spark(path, selected_rows, commit)

    def _write_in_process(
        self, path: str, committer: InProcessCommitter, selected_rows: SelectedRows, commit: Commit
    ) -> int:
        """Read the rows into memory, and write them in this process."""
        with self.read_limit:
            numbers = range(len(selected_rows.queries))
            batches = [
                batch
                for number in numbers
                for batch in read_with_retries(partial(selected_rows.read_batches, number))
            ]
        rows = pa.Table.from_batches(batches, selected_rows.schema)
        add_costs(DRIVER, 1, rows.nbytes)
        committer.write(path, rows, commit)
        return int(rows.num_rows)

    def _write_files(
        self,
        path: str,
        committer: FileCommitter,
        runner: Runner,
        selected_rows: SelectedRows,
        commit: Commit,
        progress: Progress,
    ) -> int:
        """Let the runner write the rows into files, and commit the files in this process."""
        file_bytes = committer.find_target_file_bytes(path, commit.properties)

        def write_files() -> pa.Table:
            with self.read_limit:
                return write_rows_to_files(
                    runner, selected_rows, path, self.lake.store, file_bytes, progress.report
                )

        files = committer.commit(write_files, path, selected_rows.schema, commit)
        return sum(json.loads(file["stats"])["numRecords"] for file in files)

    def _write_by_spark(self, path: str, selected_rows: SelectedRows, commit: Commit) -> int:
        """Let Spark read and write the rows."""
        rows = read_rows_by_spark(self.lake.spark, selected_rows)
        observation, metrics = Observation(), [F.count(F.lit(1)).alias("rows")]
        # Delta in Spark does not know the property for the size of files. `_write_replica` sets it after the copy.
        properties = {name: value for name, value in commit.properties.items() if name != FILE_BYTES_PROPERTY}
        with self.read_limit:
            self.lake.write(rows.observe(observation, *metrics), path, replace(commit, properties=properties))
            return int(get_metrics(observation, metrics, lambda: self.lake.read_table(path))["rows"])


def _add_hint(replicated_table: ReplicatedTable, error: PgsieveError) -> PgsieveError:
    """If the server cannot read a foreign table or a row, name the table in its error.

    For a row, also add the row filter and a hint. Any other error is returned as it is.
    """
    if is_foreign_server_error(error):
        problem = f'cannot read table "{replicated_table.table.qualified_name}" ({error.message})'
        return ForeignServerError(problem, hint=error.hint, sqlstate=error.sqlstate)
    class_name = error.class_name if isinstance(error, ExecutorError) else type(error).__name__
    if class_name != SourceError.__name__ or error.hint:
        return error
    remedy = "correct the value at the publisher, or leave its column out by a column list"
    filter_text = ""
    if replicated_table.row_filters is not None:
        filter_text = f" where {shorten(' OR '.join(replicated_table.row_filters))}"
        remedy = f"alter the row filter, or {remedy}"
    problem = f'cannot read table "{replicated_table.table.qualified_name}"{filter_text} ({error.message})'
    return SourceError(problem, hint=remedy, sqlstate=error.sqlstate)


def is_beyond(lake: Lake, path: str, lsn: int) -> bool:
    """True if the position of a replica is beyond an LSN: it may have changes that committed at or after the LSN."""
    return (lake.records.position(path) or 0) > lsn


def _check_names(columns: Sequence[ReplicaColumn]) -> None:
    """Raise LakeError for columns that no Delta table can have: none at all, or two whose names differ only in case."""
    if not columns:
        raise LakeError(
            "no column is published, and a Delta table has at least one", hint="publish a column of the table"
        )
    name_by_folded_name: dict[str, str] = {}
    for column in columns:
        first_name = name_by_folded_name.setdefault(column.name.lower(), column.name)
        if first_name != column.name:
            raise LakeError(
                f"columns {quote(first_name)} and {quote(column.name)} differ in case alone, and a Delta table can have only one of them",
                hint="rename one, or publish a column list without it",
            )
