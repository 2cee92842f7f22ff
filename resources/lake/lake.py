"""Reads and writes the Delta tables of a lake. A write commits rows together with a position.

In: the URI of the lake, and a Spark session.
Out: DataFrames, Arrow tables, and commits. The position of a commit (the LSN up to which the table has all changes) is
     in Delta's `txn` action (application id and version), and in the user metadata. A repeated write with the same
     position changes nothing (Delta protocol, Transaction Identifiers).

Raises `LakeError` if the lake cannot be read or written.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.committers import FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.commits import make_writable
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.feed_property import (
    FEED_PROPERTY,
    find_reserved_columns,
    is_feed_impossible,
)
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.named_records import NamedRecords
from pgsieve.resources.lake.delta.parquet_files import FILE_DDL, write_files
from pgsieve.resources.lake.delta.queries import Bound
from pgsieve.resources.lake.delta.records import Commit, Records, TableHead, quote_name, sort_by_version
from pgsieve.resources.lake.delta.requirements import APPEND_ONLY, find_constraints, is_append_only
from pgsieve.resources.lake.delta.slices import SparkSlices, StoredSlices
from pgsieve.resources.lake.delta.spark import SparkRecords
from pgsieve.resources.lake.delta.tables import share_tables
from pgsieve.resources.lake.in_process_runners import ThreadRunner
from pgsieve.resources.lake.paths import LakePaths
from pgsieve.resources.lake.policy import DEFAULT_SETTINGS, LakeSettings, Policy
from pgsieve.resources.lake.runners import (
    Runner,
    SparkRunner,
    is_interruption,
    record_costs,
    stop_until_done,
    to_arrow_schema,
)
from pgsieve.resources.lake.spark_writes import (
    add_commit_costs,
    drop_constraints_by_spark,
    enable_vectors_by_spark,
    set_properties_by_spark,
    write_comments_by_spark,
)
from pgsieve.resources.lake.stores.storage import Storage, find_storage, is_uri
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.strands import count_as_waiting, count_as_working
from pgsieve.resources.work import add_costs, name_engine, with_job_name

Item = TypeVar("Item")
Result = TypeVar("Result")

#: How many tables are processed at the same time: in a folder, and in an object store, where work mostly waits for answers.
_FOLDER_PARALLELISM, _STORE_PARALLELISM = 4, 8


class Lake:
    """The Delta tables of one lake: their paths, their readers and their writers."""

    def __init__(
        self,
        uri: str,
        get_session: Callable[[], SparkSession],
        settings: LakeSettings = DEFAULT_SETTINGS,
        storage: Storage | None = None,
        template_by_subscription: Mapping[str, str] | None = None,
        *,
        temporary: bool = False,
    ) -> None:
        storage = storage or find_storage(uri)
        self._get_session, self._settings, self._storage = get_session, settings, storage
        self.access = LakeAccess(storage, temporary=temporary)
        self.paths = LakePaths(storage.address, template_by_subscription, self._find_recorded_template)
        self._tables = share_tables(self.store.options)
        #: The access by delta-rs; None if only Spark can reach the lake.
        self.delta_rs = DeltaRsRecords(self.store, self._tables) if storage.is_reached_by_delta_rs else None
        spark_records = SparkRecords(lambda: self.spark)
        self.records: Records = NamedRecords(self.delta_rs or spark_records, self.access.translate_errors)
        #: The runner (Spark or threads) for work on many rows that needs no Spark expression.
        self.runner: Runner = (
            SparkRunner(get_session, settings.core_count)
            if settings.thread_count is None
            else ThreadRunner(settings.thread_count)
        )
        self.policy = Policy(
            self.access,
            self.delta_rs,
            spark_records,
            self.runner,
            settings.small_bytes,
            settings.rewritten_bytes,
            wants_vectors=settings.wants_vectors,
            min_parted_changes=settings.min_parted_changes,
        )

    def with_address(self, uri: str, *, temporary: bool = False) -> "Lake":
        """The lake at another address, with the same Spark session and settings.

        If both addresses are in the same store, both lakes have the same storage options.

        With `temporary`, the lake is not needed after this process.
        """
        storage = self._storage.with_address(uri)
        return Lake(uri, self._get_session, self._settings, storage, temporary=temporary)

    @property
    def uri(self) -> str:
        """The lake's address."""
        return self.access.uri

    @property
    def store(self) -> Store:
        """The access to the files of the lake, for this process and for Spark's executors."""
        return self.access.store

    def _find_recorded_template(self, subscription: str) -> str | None:
        """The template of the folders of a subscription's replicas, as it was recorded (`layout` of pgsieve.yaml)."""
        rows = sort_by_version(self.records.rows(self.paths.subscription(subscription)))
        return rows[-1].get("folders") if rows else None

    @property
    def is_reached_by_spark_only(self) -> bool:
        """True if only Spark can reach the lake."""
        return self.delta_rs is None

    def require_delta_rs(self, error: Exception) -> DeltaRsRecords:
        """The access by delta-rs, for work that Spark does not do. Raises `error` if only Spark can reach the lake."""
        if self.delta_rs is None:
            raise error
        return self.delta_rs

    @property
    def parallelism(self) -> int:
        """The number of tables that are processed at the same time."""
        return _STORE_PARALLELISM if self.delta_rs is not None and is_uri(self.uri) else _FOLDER_PARALLELISM

    def map_in_parallel(self, act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results of `act` for each item, from `parallelism` threads. The threads share open tables."""
        if len(items) < 2:
            return [act(item) for item in items]

        def act_and_release(item: Item) -> Result:
            try:
                with count_as_working():
                    return act(item)
            finally:
                self.release_tables()

        self.release_tables()
        # A strand is the work for one subscription, for example. Only one strand works at a time (`pgsieve.resources.strands`).
        # The threads of the pool work for the strand of this thread, which waits for them.
        with count_as_waiting(), ThreadPoolExecutor(self.parallelism) as pool:
            futures = [pool.submit(copy_context().run, act_and_release, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException as error:
                # After an error of one item the others go on. After an interruption (Ctrl-C) nothing does.
                if is_interruption(error):
                    stop_until_done(self.runner, futures, error)
                raise

    def consistent_read(self, *paths: str) -> AbstractContextManager[None]:
        """Within the block this thread requests the newest version of each table of an object store only once.

        It requests the versions of the tables at `paths` at the start, in parallel. The block must not write to
        these tables. Another process may write to them meanwhile. So what the block has decided must be checked again
        when it is written.
        """
        return nullcontext() if self.delta_rs is None else self._tables.consistent_read(paths)

    def read_heads(self, paths: Collection[str]) -> list[TableHead]:
        """The newest version and position of each table. On an object store they are requested in parallel."""
        prepare = None if self.delta_rs is None else self.delta_rs.read_head
        with nullcontext() if prepare is None else self._tables.consistent_read(paths, prepare):
            return [self.records.head(path) for path in paths]

    def release_tables(self) -> None:
        """Give the tables that this thread has open to other threads.

        It must be called when the thread's work ends.
        """
        if self.delta_rs is not None:
            self.delta_rs.release_tables()

    @property
    def spark(self) -> SparkSession:
        """The Spark session.

        It starts when it is first used. A run that finds nothing to do in a local lake needs no session.
        """
        return with_job_name(self._get_session())

    # reading

    def read_table(self, path: str) -> DataFrame:
        """The newest version of the table at a path. The table must exist."""
        return self.spark.read.format("delta").load(path)

    def read_version(self, path: str, version: int) -> DataFrame:
        """The table at a path, at one of its versions."""
        return self.spark.read.format("delta").option("versionAsOf", version).load(path)

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns."""
        with self.access.translate_errors(path):
            if self.delta_rs is not None:
                return self.delta_rs.columns(path)
            names: list[str] = self.read_table(path).columns
            return names

    def schema(self, path: str) -> pa.Schema:
        """The columns of a table, as an Arrow schema."""
        with self.access.translate_errors(path):
            if self.delta_rs is not None:
                return self.delta_rs.arrow_schema(path)
            return to_arrow_schema(self.read_table(path).schema)

    def find_column_bound(
        self, bound: Bound, path: str, column: str, where: str, time: datetime | None = None
    ) -> Any:
        """The least or greatest value of a column where an SQL condition is true. None if it is true for no row.

        Both delta-rs and Spark have to understand the condition. In it, `{time}` stands for `time`.
        """
        with self.access.translate_errors(path):
            return self.policy.choose_reader(path).find_column_bound(bound, path, column, where, time)

    def read_last_commit_time(self, path: str) -> datetime | None:
        """The time of the newest commit of a table. None if only Spark can reach the lake, because asking Spark is slow."""
        if self.delta_rs is None:
            return None
        with self.access.translate_errors(path):
            return self.delta_rs.read_last_commit_time(path)

    def read_columns_of_version(self, path: str, version: int) -> list[str]:
        """The names of the columns of a table at one of its versions."""
        with self.access.translate_errors(path):
            if self.delta_rs is not None:
                return [field.name for field in self.delta_rs.open_version(path, version).schema().fields]
            names: list[str] = self.read_version(path, version).columns
            return names

    def count_rows(self, path: str, version: int | None = None) -> int:
        """The number of rows of a table, without `version` of its newest version.

        If delta-rs cannot read the table, Spark counts the rows.
        """
        with self.access.translate_errors(path):
            if self.delta_rs is not None and not self.delta_rs.can_read(path):
                table = self.read_table(path) if version is None else self.read_version(path, version)
                return table.count()
        return self.records.count_rows(path, version)

    def find_slices(
        self, path: str, slice_ends: Collection[int], *, must_exist: bool = False
    ) -> StoredSlices | SparkSlices:
        """Find the slices that end at `slice_ends`. A slice is the changes between two positions of the slot.

        The result reads their rows, and raises errors of delta-rs and Arrow. With `must_exist` each slice must have rows:
        DamagedTableError is raised if delta-rs finds no rows of a slice.
        """
        if self.delta_rs is None:
            return SparkSlices(path, frozenset(slice_ends))
        with self.access.translate_errors(path):
            return self.delta_rs.open_slices(path).find(slice_ends, must_exist=must_exist)

    # writing

    def remove(self, folder: str) -> bool:
        """Remove a folder and all tables in it. Return False if it does not exist, or if only Spark can reach the lake."""
        if self.delta_rs is None:
            return False
        with self.access.translate_errors(folder):
            return self.delta_rs.remove(folder)

    def remove_log(self, path: str) -> None:
        """Remove the log of a damaged table, so that the table can be created again. Its files stay until the next vacuum."""
        if self.delta_rs is None:
            raise LakeError(
                f'Delta table "{path}" is damaged', hint="remove its folder, then run the command again"
            )
        with self.access.translate_errors(path):
            self.delta_rs.remove(f"{path}/_delta_log")

    def write(
        self,
        frame: DataFrame,
        path: str,
        commit: Commit,
        *,
        options: Mapping[str, str] | None = None,
        byte_count: int | None = None,
    ) -> None:
        """Append rows to a table, or overwrite the table with them, in one commit.

        `options` are for Spark's writer. `byte_count` is the estimated number of bytes, or None. If the bytes are few,
        Spark only computes the rows, and this process commits them.
        """
        if commit.expected_position is not None:
            head = self.records.head(path)
            commit.raise_if_overtaken(path, head)
            commit = replace(commit, expected_version=head.version, expected_position=None)

        @cache
        def make_schema() -> pa.Schema:
            return make_writable(self.spark.createDataFrame([], frame.schema).toArrow()).schema

        committer = self.policy.choose_committer(
            path, frame.schema.names, byte_count, make_schema, overwrite=commit.overwrite
        )
        match committer:
            case InProcessCommitter():
                with self.access.translate_errors(path):
                    rows = make_writable(frame.toArrow())
                add_costs(name_engine(self.spark), 1, rows.nbytes)
                committer.write(path, rows, commit)
            case FileCommitter():
                file_schema, store, target_bytes = (
                    make_schema(),
                    self.store,
                    committer.find_target_file_bytes(path, commit.properties),
                )
                files = frame.mapInArrow(
                    lambda batches: write_files(
                        path, file_schema, batches, store=store, target_bytes=target_bytes
                    ),
                    FILE_DDL,
                )
                committer.commit(
                    lambda: record_costs(name_engine(self.spark), None, files.toArrow()),
                    path,
                    file_schema,
                    commit,
                )
            case SparkCommitter():
                committer.write(
                    frame, path, commit, exists=lambda: self.records.exists(path), options=options
                )
                with self.access.translate_errors(path):
                    add_commit_costs(self.spark, path)

    def commit_files(
        self, path: str, schema: pa.Schema, files: Sequence[Mapping[str, Any]], commit: Commit
    ) -> None:
        """Commit files that this process has written. `files` has a row of `FILE_SCHEMA` for each."""
        delta_rs = self.require_delta_rs(
            LakeError(f'Delta table "{path}": only Spark writes it', sqlstate="55000")
        )
        with self.access.translate_errors(path):
            delta_rs.commit(path, schema, files, commit)

    def set_comments(self, path: str, description: str | None, columns: Mapping[str, str]) -> None:
        """Set the missing descriptions of a table and its columns. Does nothing if only Spark can reach the lake."""
        if self.delta_rs is None:
            return
        with self.access.translate_errors(path):
            description, columns = self.delta_rs.find_missing_comments(path, description, columns)
            if self.delta_rs.can_write(path):
                self.delta_rs.set_comments(path, description, columns)
            elif description is not None or columns:
                write_comments_by_spark(self.spark, path, description, columns, self.records.position(path))

    def set_properties(self, path: str, properties: Mapping[str, str]) -> int | None:
        """Set Delta properties of a table. Return the former version; None if the table has these properties already."""
        with self.access.translate_errors(path):
            missing_properties = dict(properties.items() - self._read_properties(path).items())
            if not missing_properties:
                return None
            version = self.records.version(path)
            if self.delta_rs is not None and self.delta_rs.can_set_properties(path):
                self.delta_rs.set_properties(path, missing_properties)
            else:
                set_properties_by_spark(self.spark, path, missing_properties, self.records.position(path))
            return version

    def remove_row_checks(self, path: str, columns: Collection[str]) -> None:
        """Remove what another writer has set and what could refuse rows with these columns. Rows and position stay.

        This is: CHECK constraints, the append-only property, and a change data feed that the columns make impossible.
        """
        with self.access.translate_errors(path):
            properties = self._read_properties(path)
            if constraints := find_constraints(properties):
                if self.delta_rs is not None and self.delta_rs.can_set_properties(path):
                    self.delta_rs.drop_constraints(path, constraints)
                else:
                    drop_constraints_by_spark(self.spark, path, constraints, self.records.position(path))
        if is_append_only(properties):
            self.set_properties(path, {APPEND_ONLY: "false"})
        self.remove_impossible_feed(path, columns)

    def has_row_checks(self, path: str, columns: Collection[str]) -> bool:
        """True if the table has properties that `remove_row_checks` removes."""
        with self.access.translate_errors(path):
            properties = self._read_properties(path)
        return (
            is_append_only(properties)
            or bool(find_constraints(properties))
            or is_feed_impossible(properties, columns)
        )

    def remove_impossible_feed(self, path: str, columns: Collection[str]) -> None:
        """Remove the table's change data feed if a table with these columns cannot have one."""
        if find_reserved_columns(columns):
            with self.access.translate_errors(path):
                properties = self._read_properties(path)
            if is_feed_impossible(properties, columns):
                self.set_properties(path, {FEED_PROPERTY: "false"})

    def _read_properties(self, path: str) -> Mapping[str, str]:
        if self.delta_rs is not None:
            return self.delta_rs.properties(path)
        details = self.spark.sql(f"describe detail delta.{quote_name(path)}").collect()
        properties: dict[str, str] = details[0]["properties"]
        return properties

    def record_position(self, path: str, position: int) -> None:
        """Commit a position to a table, without any rows."""
        with self.access.translate_errors(path):
            match self.policy.choose_small_committer(path):
                case InProcessCommitter() as committer:
                    committer.write(path, self.schema(path).empty_table(), Commit(position))
                case SparkCommitter():
                    self.write(self.read_table(path).limit(0), path, Commit(position))

    def add_columns(self, path: str, schema: pa.Schema, ddl: str, expected_version: int) -> None:
        """Add columns at the end of a table. They are NULL in all rows that exist.

        `schema` has the old and the new columns. `ddl` is the same schema in Spark's types. For `expected_version` see
        `Commit`.
        """
        commit = Commit(expected_version=expected_version)
        match self.policy.choose_small_committer(path):
            case InProcessCommitter() as committer:
                committer.write(path, schema.empty_table(), commit)
            case SparkCommitter():
                self.write(self.spark.createDataFrame([], ddl), path, commit)

    def enable_deletion_vectors(self, path: str) -> bool:
        """Enable deletion vectors in a table. Returns True if this took a commit.

        Does nothing if the user has disabled them, or if delta-rs could not find the files of the vectors
        (`row_removal.has_hidden_vectors`).
        """
        if self.delta_rs is not None and row_removal.has_hidden_vectors(path):
            return False
        if self.records.has_deletion_vectors(path) is not None:
            return False
        with self.access.translate_errors(path):
            if (
                self.delta_rs is not None
                and self.policy.wants_vectors
                and row_removal.can_enable_marking(self.delta_rs, path)
            ):
                with suppress(UnmarkableError):
                    row_removal.enable_marking(self.delta_rs, path)
                    return True
            return enable_vectors_by_spark(self.spark, path)
