"""The copy of one table: its chunks, read at an exported snapshot -> its replica, replaced in one commit.

The commit has the snapshot's LSN.

In: a planned table and the snapshot. Out: `Copied`, with the problem where the table's own data or replica fails. Raises
what passes by itself, and what is the lake's fault.
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

from pgsieve.assets.steps.initial_sync.damaged_replicas import Damage, damage_of, make_room
from pgsieve.assets.steps.initial_sync.rows import (
    ReplicaColumn,
    copied_batches,
    copied_files,
    copied_rows,
    read_again,
    replica_schema,
)
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observed import observed
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import explained
from pgsieve.assets.steps.subscription import (
    Subscription,
)
from pgsieve.decoding.changes.metadata_columns import METADATA, copied_as
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import ReplicatedTable, Table
from pgsieve.decoding.values.types import copy_expression
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
from pgsieve.resources.postgres.errors import SourceError, refusing
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import (
    Chunks,
    Snapshot,
)
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
    #: Another process has copied the table later, or applies to it: its state is from that process.
    overrun: bool = False
    #: The transactions that the table's snapshot waits for, by their ids.
    awaits: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedTable:
    """A table to copy, in chunks, and the generation of the change history that continues after it."""

    replicated: ReplicatedTable
    chunks: Chunks
    generation: int


class Progress:
    """Reports the progress of one table's copy, at most every half minute."""

    def __init__(self, table: str, parts: int, size: int, log: Log) -> None:
        self._table, self._parts, self._size, self._log = table, parts, size, log
        self._told = time.monotonic()

    def hear(self, done: int) -> None:
        """Record the number of copied parts."""
        if done < self._parts and time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
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


def copy_table(
    subscription: Subscription,
    lake: Lake,
    planned: PlannedTable,
    conninfo: Conninfo,
    snapshot: Snapshot,
    log: Log,
    reading: AbstractContextManager[object],
) -> Copied:
    """Copy a table at a snapshot; its own problem, or another process that copied it later, is in the result.

    `log` gets the progress every half minute. `reading` is entered while the publisher is read.
    """
    started = time.monotonic()
    replicated, table = planned.replicated, planned.replicated.table
    types = subscription.replica_types(replicated)
    path = lake.paths.replica(subscription.name, table.schema, table.name)
    problem, rows, version, overrun = None, 0, 0, False
    try:
        # Without copy_data a table that comes back continues with its present rows.
        kept = not subscription.copy_data and lake.records.exists(path)
        if not kept:
            chunks = planned.chunks if subscription.copy_data else Chunks([], 0)
            key = set(map(subscription.replica_name, replicated.key))
            columns = [ReplicaColumn(name, t, name in key) for name, t in types.items()]
            committer = _committer(subscription, lake, planned, snapshot, chunks.bytes, columns)
            with refusing(subscription.feed.source.name, f'copy table "{table.qualified}"'):
                properties = subscription.layout.of((table.schema, table.name)).delta()
                progress = Progress(table.qualified, len(chunks.queries), chunks.bytes, log)
                with called(subscription.name, f"initial sync of {table.schema}.{table.name}"):
                    rows = _write_copy(
                        lake,
                        path,
                        committer,
                        chunks,
                        conninfo,
                        snapshot,
                        columns,
                        properties,
                        progress,
                        reading,
                    )
                # A table that existed before kept its own.
                if properties:
                    again_after_conflict(lake.set_properties)(path, properties)
            reach(Failpoint.TABLE_COPIED)
        else:
            # As a copy would: a replica below its state's LSN is taken for one that was put back.
            lake.hold_position(path, snapshot.lsn)
        head = lake.records.head(path)
        overrun = not kept and (head.position or 0) > snapshot.lsn
        version = head.version
    except OverrunError:
        overrun = True
    except PgsieveError as error:
        problem = explained(lake, _of_reading(replicated, error), (table.schema, table.name))
    return Copied(
        schema=table.schema,
        table=table.name,
        lsn=snapshot.lsn,
        rows=rows,
        seconds=time.monotonic() - started,
        version=version,
        row_filter=" OR ".join(replicated.row_filters) if replicated.row_filters is not None else None,
        columns=tuple((name, t.spark) for name, t in types.items()),
        published={subscription.replica_name(name): name for name in replicated.columns},
        problem=problem,
        overrun=overrun,
    )


def _of_reading(replicated: ReplicatedTable, error: PgsieveError) -> PgsieveError:
    """The error of a row that the server cannot read, with the expression and the remedy.

    Any other error as it is.
    """
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
    """Whether a replica has more than what committed before an LSN."""
    return (lake.records.position(path) or 0) > lsn


def _committer(
    subscription: Subscription,
    lake: Lake,
    planned: PlannedTable,
    snapshot: Snapshot,
    size: int,
    columns: Sequence[ReplicaColumn],
) -> Committer:
    """The committer of the copy, once there is room for it.

    Raises OverrunError and PgsieveError where it must not be written.

    The checks here are of one moment: the copy's commit finds later writes.
    """
    table, schema = planned.replicated.table, replica_schema(columns)
    name = table.schema, table.name
    path, history = (
        lake.paths.replica(subscription.name, *name),
        lake.paths.changes(subscription.name, *name, planned.generation),
    )

    def decided() -> Committer:
        _refuse_later(subscription, lake, path, table, snapshot)
        _check_names(columns)
        return lake.policy.committer(path, schema.names, size, lambda: schema, overwrite=True)

    with lake.consistent_read(path, history, Cuts(lake, subscription.name).path):
        damage = damage_of(subscription.name, lake, name, planned.generation)
        if damage == Damage():
            return decided()
    make_room(subscription.name, lake, damage)
    with lake.consistent_read():
        return decided()


def _refuse_later(
    subscription: Subscription, lake: Lake, path: str, table: Table, snapshot: Snapshot
) -> None:
    """Refuse to copy below the replica's own position: Delta would leave the commit out.

    Raises OverrunError where another process has copied the table since the snapshot.
    """
    position = lake.records.position(path)
    if position is not None and position >= snapshot.lsn:
        with subscription.feed.source.connect() as connection:
            if position <= current_lsn(connection):
                raise OverrunError(path)
        raise PgsieveError(
            f'table "{table.qualified}": its replica holds changes up to {format_lsn(position)}, but the publisher is only'
            f" at {format_lsn(snapshot.lsn)}",
            hint="replicate another cluster into another `lake`, or drop the subscription with --delete-tables",
            sqlstate="55000",
        )


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


def _write_copy(
    lake: Lake,
    path: str,
    committer: Committer,
    chunks: Chunks,
    conninfo: Conninfo,
    snapshot: Snapshot,
    columns: Sequence[ReplicaColumn],
    properties: Mapping[str, str],
    progress: "Progress",
    reading: AbstractContextManager[object],
) -> int:
    """Replace the replica by the rows at the snapshot; returns their number.

    `properties` are Delta's, of a new replica.
    """
    schema = replica_schema(columns)
    commit = Commit(snapshot.lsn, overwrite=True, metadata={"copied": True}, properties=properties)
    match committer:
        case InProcess():
            with reading:
                batches = [
                    batch
                    for query in chunks.queries
                    for batch in read_again(partial(copied_batches, conninfo, snapshot.name, query, columns))
                ]
            copied = pa.Table.from_batches(batches, schema)
            note(DRIVER, 1, copied.nbytes)
            committer.write(path, copied, commit)
            return int(copied.num_rows)
        case ByFiles():
            size = committer.file_bytes(path, properties)
            queries = chunks.queries

            def written() -> pa.Table:
                with reading:
                    return copied_files(
                        lake.executors,
                        conninfo,
                        snapshot.name,
                        queries,
                        columns,
                        path,
                        lake.store,
                        size,
                        progress.hear,
                    )

            files = committer.commit(written, path, schema, commit)
            return sum(json.loads(file["stats"])["numRecords"] for file in files)
        case BySpark():
            with reading:
                return _copy_by_spark(lake, path, chunks, conninfo, snapshot, columns, commit)


def _copy_by_spark(
    lake: Lake,
    path: str,
    chunks: Chunks,
    conninfo: Conninfo,
    snapshot: Snapshot,
    columns: Sequence[ReplicaColumn],
    commit: Commit,
) -> int:
    frame = copied_rows(lake.spark, conninfo, snapshot.name, chunks.queries, columns)
    counted, rows = Observation(), [F.count(F.lit(1)).alias("rows")]
    # Delta in Spark does not know the target size of files; it is set afterwards.
    properties = {name: value for name, value in commit.properties.items() if name != FILE_BYTES_PROPERTY}
    lake.write(frame.observe(counted, *rows), path, replace(commit, properties=properties))
    return int(observed(counted, rows, lambda: lake.current(path))["rows"])
