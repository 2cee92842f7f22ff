"""Reads and writes the Delta tables of a lake. A write commits rows together with a position.

In: the URI of the lake, and a Spark session.
Out: DataFrames, Arrow tables, and commits. The position of a commit is in Delta's `txn` action (application id and
     version), and in the user metadata. A repeated write with the same position changes nothing (Delta protocol,
     Transaction Identifiers).

Raises `LakeError` if the lake cannot be read or written.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any, Literal, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.committers import FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.commits import writable_rows
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.named_records import NamedRecords
from pgsieve.resources.lake.delta.parquet_files import FILE_DDL, write_files
from pgsieve.resources.lake.delta.records import Commit, Records, TableHead, by_version, quoted
from pgsieve.resources.lake.delta.requirements import APPEND_ONLY, constraints_in, is_append_only
from pgsieve.resources.lake.delta.spark import SparkRecords
from pgsieve.resources.lake.delta.tables import shared_tables
from pgsieve.resources.lake.executors import Executors, SparkExecutors, Threads, arrow_schema, with_costs
from pgsieve.resources.lake.paths import LakePaths
from pgsieve.resources.lake.policy import DEFAULT_SETTINGS, LakeSettings, Policy
from pgsieve.resources.lake.rewriting import RowChange
from pgsieve.resources.lake.spark_writes import (
    comment_by_spark,
    drop_constraints_by_spark,
    enable_vectors_by_spark,
    idempotent_writes,
    number_columns,
    set_properties_by_spark,
)
from pgsieve.resources.lake.stores.storage import Storage, is_uri, storage_of
from pgsieve.resources.lake.stores.store import RowGroup, Store
from pgsieve.resources.strands import release_strand, take_strand
from pgsieve.resources.work import add_costs, engine_of, with_job_name

Item = TypeVar("Item")
Result = TypeVar("Result")

#: How many tables are processed at the same time: in a folder, and in an object store, where work mostly waits for answers.
_FOLDER_PARALLELISM, _STORE_PARALLELISM = 4, 8


@dataclass(frozen=True)
class StoredSlices:
    """The row groups that contain the rows of some slices, perhaps together with other rows; and the columns of the table."""

    groups: Sequence[RowGroup]
    schema: pa.Schema


class Lake:
    """The Delta tables of one lake: their paths, their readers and their writers."""

    def __init__(
        self,
        uri: str,
        session: Callable[[], SparkSession],
        settings: LakeSettings = DEFAULT_SETTINGS,
        storage: Storage | None = None,
        folders: Mapping[str, str] | None = None,
        *,
        temporary: bool = False,
    ) -> None:
        storage = storage or storage_of(uri)
        self._session, self._settings, self._storage = session, settings, storage
        self.access = LakeAccess(storage, temporary=temporary)
        self.paths = LakePaths(storage.address, folders, self._recorded_folders)
        self._tables = shared_tables(self.store.options)
        #: The access by delta-rs; None if delta-rs cannot reach and write the lake.
        self.local = LocalRecords(self.store, self._tables) if storage.is_reached_by_delta_rs else None
        self.records: Records = NamedRecords(
            self.local or SparkRecords(session), self.access.translate_errors
        )
        #: The runner for many rows that need no Spark expression.
        self.executors: Executors = (
            SparkExecutors(session, settings.cores) if settings.threads is None else Threads(settings.threads)
        )
        self.policy = Policy(
            self.access,
            self.local,
            self.executors,
            settings.small_bytes,
            settings.rewritten_bytes,
            vectors=settings.vectors,
            parted_changes=settings.parted_changes,
        )

    def at(self, uri: str, *, temporary: bool = False) -> "Lake":
        """The lake at another address, with the same engines; in the same store it has the same storage options, too.

        With `temporary` nothing in the lake is needed after this process.
        """
        storage = self._storage.at(uri)
        return Lake(uri, self._session, self._settings, storage, temporary=temporary)

    @property
    def uri(self) -> str:
        """The lake's address."""
        return self.access.uri

    @property
    def store(self) -> Store:
        """The files of the lake. This process and Spark's executors use them."""
        return self.access.store

    def _recorded_folders(self, subscription: str) -> str | None:
        """The template of the folders of a subscription's replicas, as the lake has recorded it."""
        rows = by_version(self.records.rows(self.paths.subscription(subscription)))
        return rows[-1].get("folders") if rows else None

    @property
    def by_spark_alone(self) -> bool:
        """True if only Spark can reach the lake."""
        return self.local is None

    def local_or(self, refusal: Exception) -> LocalRecords:
        """The access by delta-rs, for work that Spark does not do. Raises `refusal` if only Spark can reach the lake."""
        if self.local is None:
            raise refusal
        return self.local

    @property
    def parallelism(self) -> int:
        """The number of tables that are processed at the same time."""
        return _STORE_PARALLELISM if self.local is not None and is_uri(self.uri) else _FOLDER_PARALLELISM

    def map_in_parallel(self, act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results of `act` for each item, from `parallelism` threads. The threads share the tables that are open."""
        if len(items) < 2:
            return [act(item) for item in items]

        def act_and_release(item: Item) -> Result:
            try:
                with take_strand():
                    return act(item)
            finally:
                self.release_tables()

        self.release_tables()
        with release_strand(), ThreadPoolExecutor(self.parallelism) as pool:
            return [
                each.result()
                for each in [pool.submit(copy_context().run, act_and_release, item) for item in items]
            ]

    def consistent_read(self, *paths: str) -> AbstractContextManager[None]:
        """Within the block this thread requests the newest version of each table of an object store only once.

        It requests the versions of the tables at `paths` at the start, in parallel. The block must not write to
        these tables. Another process may commit to them meanwhile, so a later write must check again what the
        block has decided.
        """
        return nullcontext() if self.local is None else self._tables.consistent_read(paths)

    def heads(self, paths: Collection[str]) -> list[TableHead]:
        """The newest version and position of each table. They are requested in parallel."""
        prepare = None if self.local is None else self.local.head_of
        with nullcontext() if prepare is None else self._tables.consistent_read(paths, prepare):
            return [self.records.head(path) for path in paths]

    def release_tables(self) -> None:
        """Let other threads use the tables that this thread has open. It must be called when the thread's work ends."""
        if self.local is not None:
            self.local.release_tables()

    @property
    def spark(self) -> SparkSession:
        """The Spark session.

        It starts when it is first used. A run that finds nothing to do in a local lake needs no session.
        """
        return with_job_name(self._session())

    # reading

    def current(self, path: str) -> DataFrame:
        """The newest version of the table at a path. The table must exist."""
        return self.spark.read.format("delta").load(path)

    def as_of(self, path: str, version: int) -> DataFrame:
        """The table at a path, at one of its versions."""
        return self.spark.read.format("delta").option("versionAsOf", version).load(path)

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns."""
        with self.access.translate_errors(path):
            if self.local is not None:
                return self.local.columns(path)
            names: list[str] = self.current(path).columns
            return names

    def schema(self, path: str) -> pa.Schema:
        """The columns of a table, as an Arrow schema."""
        with self.access.translate_errors(path):
            if self.local is not None:
                return self.local.arrow_schema(path)
            return arrow_schema(self.current(path).schema)

    def bound(self, bound: Literal["min", "max"], path: str, column: str, where: str) -> Any:
        """The least or greatest value of a column where an SQL condition is true. None if it is true for no row."""
        with self.access.translate_errors(path):
            if (local := self.policy.reader(path)) is not None:
                return (local.least if bound == "min" else local.greatest)(path, column, where)
            rows = self.current(path).where(where).select(F.expr(f"{bound}({quoted(column)})"))
            return rows.collect()[0][0]

    def written_at(self, path: str) -> datetime | None:
        """The time of the newest commit of a table. None if only Spark can reach the lake, because asking Spark is slow."""
        if self.local is None:
            return None
        with self.access.translate_errors(path):
            return self.local.written_at(path)

    def columns_at(self, path: str, version: int) -> list[str]:
        """The names of the columns of a table at one of its versions."""
        with self.access.translate_errors(path):
            if self.local is not None:
                return [field.name for field in self.local.as_of(path, version).schema().fields]
            names: list[str] = self.as_of(path, version).columns
            return names

    def count(self, path: str) -> int:
        """The number of rows of a table. If delta-rs cannot read the table, Spark counts them."""
        with self.access.translate_errors(path):
            if self.local is not None and not self.local.can_read(path):
                return self.current(path).count()
        return self.records.count(path)

    def read_slices(self, path: str, ends: Collection[int], *, every: bool = False) -> DataFrame:
        """The rows of some slices.

        If delta-rs can reach the lake, Spark reads only their files, and does not read Delta's log.

        With `every` each slice must have rows: DamagedTableError is raised if delta-rs finds no rows of a slice.
        """
        with self.access.translate_errors(path):
            slices = self.local.change_log(path) if self.local else None
            files = slices.files(ends, every=every) if slices else None
        if slices is None or files is None:
            return self.current(path).where(F.col("slice").isin(sorted(ends)))
        reader = self.spark.read.schema(StructType.fromJson(json.loads(slices.table.schema().to_json())))
        rows = reader.parquet(*files) if files else reader.parquet(path).limit(0)
        return rows.where(F.col("slice").isin(sorted(ends)))

    def stored_slices(self, path: str, ends: Collection[int], *, every: bool = False) -> StoredSlices | None:
        """The row groups with the rows of some slices; None if only Spark can read them. For `every` see `read_slices`."""
        if self.local is None:
            return None
        with self.access.translate_errors(path):
            slices = self.local.change_log(path)
            groups = slices.row_groups(ends, every=every)
            return None if groups is None else StoredSlices(groups, slices.schema)

    def slice_rows(
        self,
        path: str,
        ends: Collection[int],
        size: int | None,
        *,
        columns: Sequence[str] | None = None,
        every: bool = False,
    ) -> pa.Table | None:
        """The rows of some slices in the order of their changes. None if they are many, or if only Spark can read them.

        `size` is the estimated number of their bytes; None means many. For `every` see `read_slices`.
        """
        if self.local is None or not self.policy.is_small(size):
            return None
        with self.access.translate_errors(path):
            return self.local.change_log(path).rows(ends, columns=columns, every=every)

    # writing

    def remove(self, folder: str) -> bool:
        """Remove a folder and all tables in it. Return False if it does not exist, or if only Spark can reach the lake."""
        if self.local is None:
            return False
        with self.access.translate_errors(folder):
            return self.local.remove(folder)

    def remove_log(self, path: str) -> None:
        """Remove the log of a damaged table, so that the table can be created again. Its files stay until the next vacuum."""
        if self.local is None:
            raise LakeError(
                f'Delta table "{path}" is damaged', hint="remove its folder, then run the command again"
            )
        with self.access.translate_errors(path):
            self.local.remove(f"{path}/_delta_log")

    def write(
        self,
        frame: DataFrame,
        path: str,
        commit: Commit,
        *,
        options: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        """Append rows to a table, or overwrite the table with them, in one commit.

        `options` are for Spark's writer. `size` is the estimated number of bytes, or None. Few bytes are written
        without Spark.
        """
        if commit.after is not None:
            head = self.records.head(path)
            commit.refuse_overtaken(path, head)
            commit = replace(commit, base=head.version, after=None)

        @cache
        def schema() -> pa.Schema:
            return writable_rows(self.spark.createDataFrame([], frame.schema).toArrow()).schema

        committer = self.policy.committer(path, frame.schema.names, size, schema, overwrite=commit.overwrite)
        match committer:
            case InProcessCommitter():
                with self.access.translate_errors(path):
                    rows = writable_rows(frame.toArrow())
                add_costs(engine_of(self.spark), 1, rows.nbytes)
                committer.write(path, rows, commit)
            case FileCommitter():
                file_schema, store, bytes_ = (
                    schema(),
                    self.store,
                    committer.file_bytes(path, commit.properties),
                )
                files = frame.mapInArrow(
                    lambda batches: write_files(path, file_schema, batches, store=store, size=bytes_),
                    FILE_DDL,
                )
                committer.commit(
                    lambda: with_costs(engine_of(self.spark), None, files.toArrow()),
                    path,
                    file_schema,
                    commit,
                )
            case SparkCommitter():
                add_costs(engine_of(self.spark), 1, size or 0)
                committer.write(
                    frame, path, commit, exists=lambda: self.records.exists(path), options=options
                )

    def commit_files(
        self, path: str, schema: pa.Schema, files: Sequence[Mapping[str, Any]], commit: Commit
    ) -> None:
        """Commit files that this process has written. `files` are rows of `FILE_SCHEMA`."""
        local = self.local_or(LakeError(f'Delta table "{path}": only Spark writes it', sqlstate="55000"))
        with self.access.translate_errors(path):
            local.commit(path, schema, files, commit)

    def comment(self, path: str, description: str | None, columns: Mapping[str, str]) -> None:
        """Set the missing descriptions of a table and its columns. Does nothing if only Spark can reach the lake."""
        if self.local is None:
            return
        with self.access.translate_errors(path):
            description, columns = self.local.missing_comments(path, description, columns)
            if self.local.can_write(path):
                self.local.comment(path, description, columns)
            elif description is not None or columns:
                comment_by_spark(self.spark, path, description, columns, self.records.position(path))

    def set_properties(self, path: str, properties: Mapping[str, str]) -> int | None:
        """Set Delta properties of a table. Return the version before; None if the table has these properties already."""
        with self.access.translate_errors(path):
            missing_properties = dict(properties.items() - self._properties(path).items())
            if not missing_properties:
                return None
            version = self.records.version(path)
            if self.local is not None and self.local.can_set_properties(path):
                self.local.set_properties(path, missing_properties)
            else:
                set_properties_by_spark(self.spark, path, missing_properties, self.records.position(path))
            return version

    def remove_row_checks(self, path: str) -> None:
        """Remove CHECK constraints and the append-only property, which another writer has set. Rows and position stay."""
        with self.access.translate_errors(path):
            properties = self._properties(path)
            if constraints := constraints_in(properties):
                if self.local is not None and self.local.can_set_properties(path):
                    self.local.drop_constraints(path, constraints)
                else:
                    drop_constraints_by_spark(self.spark, path, constraints, self.records.position(path))
        if is_append_only(properties):
            self.set_properties(path, {APPEND_ONLY: "false"})

    def has_row_checks(self, path: str) -> bool:
        """True if the table has properties that `remove_row_checks` removes."""
        with self.access.translate_errors(path):
            properties = self._properties(path)
        return is_append_only(properties) or bool(constraints_in(properties))

    def _properties(self, path: str) -> Mapping[str, str]:
        if self.local is not None:
            return self.local.properties(path)
        details = self.spark.sql(f"describe detail delta.{quoted(path)}").collect()
        properties: dict[str, str] = details[0]["properties"]
        return properties

    def record_position(self, path: str, position: int) -> None:
        """Commit a position to a table, without any rows."""
        with self.access.translate_errors(path):
            if local := self.policy.local_writer(path):
                local.append(path, local.arrow_schema(path).empty_table(), position)
            else:
                self.write(self.current(path).limit(0), path, Commit(position))

    def add_columns(self, path: str, schema: pa.Schema, ddl: str, base: int) -> None:
        """Add columns at the end of a table. They are NULL in all rows that exist.

        `schema` has the old and the new columns. `ddl` is the same schema in Spark's types. For `base` see
        `Commit`.
        """
        with self.access.translate_errors(path):
            if local := self.policy.local_writer(path):
                local.append(path, schema.empty_table(), base=base)
            else:
                self.write(self.spark.createDataFrame([], ddl), path, Commit(base=base))

    def rewrite(
        self,
        path: str,
        change: RowChange,
        base: int | None,
        *,
        into: str | None = None,
        position: int | None = None,
    ) -> None:
        """Replace the rows of a table by the results of `change`, in one commit that keeps the position.

        With `into`, the table at that path gets the results instead, with the position `position`. For `base` see
        `Commit`.
        """
        size, target = (self.records.size(path) if self.local else None), into or path
        commit = Commit(position, overwrite=True, base=base)
        committer = self.policy.in_process(target, change.schema.names, size)
        local = self.policy.reader(path, size)
        if committer is not None and local is not None:
            with self.access.translate_errors(path):
                batches = local.table(path).select(list(change.columns)).to_batches()
                new_rows = writable_rows(pa.Table.from_batches(map(change.of, batches), change.schema))
            committer.write(target, new_rows, commit)
            return
        names, of = list(change.columns), change.of
        rows = number_columns(self.current(path).select(*map(quoted, names)))
        changed_rows = rows.mapInArrow(
            lambda batches: (of(batch.rename_columns(names)) for batch in batches), change.ddl
        )
        self.write(changed_rows, target, commit)

    def idempotent_writes(
        self, position: int | None, *, vectors: bool, metadata: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Commit each SQL write of the block only once per table and position. See `spark_writes.idempotent_writes`."""
        return idempotent_writes(self.spark, position, vectors=vectors, metadata=metadata)

    def enable_deletion_vectors(self, path: str) -> None:
        """Enable deletion vectors in a table, unless the user has disabled them, or delta-rs would not find them."""
        if self.local is not None and row_removal.has_hidden_vectors(path):
            return
        if self.records.has_deletion_vectors(path) is None:
            with self.access.translate_errors(path):
                if (
                    self.local is not None
                    and self.policy.vectors
                    and row_removal.can_enable_marking(self.local, path)
                ):
                    with suppress(UnmarkableError):
                        row_removal.enable_marking(self.local, path)
                        return
                enable_vectors_by_spark(self.spark, path)
