"""The lake: paths of Delta tables, and writes that commit data together with its position.

In: the lake's URI and a Spark session. Out: DataFrames, and commits that carry a position as Delta's `txn`
(application id and version) and as user metadata. A write that is repeated with the same position changes
nothing (Delta protocol, transaction identifiers). Raises `LakeError` if the lake cannot be read or written.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.committers import ByFiles, BySpark, InProcess
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.commits import writable
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.named_records import NamedRecords
from pgsieve.resources.lake.delta.parquet_files import WRITTEN_DDL, write_files
from pgsieve.resources.lake.delta.records import Commit, Records, TableHead, in_order, quoted
from pgsieve.resources.lake.delta.requirements import APPEND_ONLY, constraints_in, is_append_only
from pgsieve.resources.lake.delta.spark import SparkRecords
from pgsieve.resources.lake.delta.tables import shared_tables
from pgsieve.resources.lake.executors import Executors, SparkExecutors, Threads, noted
from pgsieve.resources.lake.paths import LakePaths
from pgsieve.resources.lake.policy import DEFAULT_SETTINGS, LakeSettings, Policy
from pgsieve.resources.lake.rewriting import RowChange
from pgsieve.resources.lake.spark_writes import (
    comment_by_spark,
    committing,
    drop_constraints_by_spark,
    enable_vectors_by_spark,
    numbered,
    set_properties_by_spark,
)
from pgsieve.resources.lake.stores.storage import Storage, is_uri, storage_of
from pgsieve.resources.lake.stores.store import RowGroup, Store
from pgsieve.resources.strands import waiting, working
from pgsieve.resources.work import engine_of, named_here, note

Item = TypeVar("Item")
Done = TypeVar("Done")

#: How many tables are processed at a time: in a folder, and on an object store.
_TABLES, _TABLES_FAR_AWAY = 4, 8


@dataclass(frozen=True)
class StoredSlices:
    """The row groups with the rows of some slices, perhaps among other rows, and their table's columns."""

    groups: Sequence[RowGroup]
    schema: pa.Schema


class Lake:
    """The Delta tables of one lake: their paths, readers and writers."""

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
        #: delta-rs; None if it cannot reach and write the lake.
        self.local = LocalRecords(self.store, self._tables) if storage.by_delta_rs else None
        self.records: Records = NamedRecords(self.local or SparkRecords(session), self.access.refusing)
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
        )

    def at(self, uri: str, *, temporary: bool = False) -> "Lake":
        """Another lake with the same engines and, in the same store, the same options.

        `temporary`: nothing in it has to outlive this process.
        """
        storage = self._storage.beside(uri)
        return Lake(uri, self._session, self._settings, storage, temporary=temporary)

    @property
    def uri(self) -> str:
        """The lake's address."""
        return self.access.uri

    @property
    def store(self) -> Store:
        """The files of the lake, for this process and for executors."""
        return self.access.store

    def _recorded_folders(self, subscription: str) -> str | None:
        """The recorded template of the folders of a subscription's replicas."""
        rows = in_order(self.records.rows(self.paths.subscription(subscription)))
        return rows[-1].get("folders") if rows else None

    @property
    def parallelism(self) -> int:
        """How many tables are processed in parallel.

        They are more on an object store, where most of the time is spent waiting for answers.
        """
        return _TABLES_FAR_AWAY if self.local is not None and is_uri(self.uri) else _TABLES

    def in_parallel(self, act: Callable[[Item], Done], items: Sequence[Item]) -> list[Done]:
        """The results of `act` for each item, in `parallelism` threads, which share the open tables."""
        if len(items) < 2:
            return [act(item) for item in items]

        def one(item: Item) -> Done:
            try:
                with working():
                    return act(item)
            finally:
                self.release_tables()

        self.release_tables()
        with waiting(), ThreadPoolExecutor(self.parallelism) as pool:
            return [each.result() for each in [pool.submit(copy_context().run, one, item) for item in items]]

    def consistent_read(self, *paths: str) -> AbstractContextManager[None]:
        """Within the block this thread looks up the newest version of each table on an object store only once.

        It looks up the tables at `paths` at once, in parallel. The block must not write to these tables. As
        another process may commit meanwhile, a later write has to check all decisions of the block again.
        """
        return nullcontext() if self.local is None else self._tables.consistent_read(paths)

    def heads(self, paths: Collection[str]) -> list[TableHead]:
        """The newest version and position of each of some tables, read together."""
        ask = None if self.local is None else self.local.head_of
        with nullcontext() if ask is None else self._tables.consistent_read(paths, ask):
            return [self.records.head(path) for path in paths]

    def release_tables(self) -> None:
        """Release this thread's open tables for other threads, at the end of its work."""
        if self.local is not None:
            self.local.release_tables()

    @property
    def spark(self) -> SparkSession:
        """The session, started at its first use, as a run with nothing to do in a local lake needs none."""
        return named_here(self._session())

    # reading

    def current(self, path: str) -> DataFrame:
        """The newest version of the table at a path; the table must exist."""
        return self.spark.read.format("delta").load(path)

    def as_of(self, path: str, version: int) -> DataFrame:
        """One version of a table."""
        return self.spark.read.format("delta").option("versionAsOf", version).load(path)

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns."""
        with self.access.refusing(path):
            if self.local is not None:
                return self.local.columns(path)
            names: list[str] = self.current(path).columns
            return names

    def columns_at(self, path: str, version: int) -> list[str]:
        """The names of the columns of a version of a table."""
        with self.access.refusing(path):
            if self.local is not None:
                return [field.name for field in self.local.as_of(path, version).schema().fields]
            names: list[str] = self.as_of(path, version).columns
            return names

    def count(self, path: str) -> int:
        """How many rows a table has, counted by Spark if delta-rs cannot read it."""
        with self.access.refusing(path):
            if self.local is not None and not self.local.is_read(path):
                return self.current(path).count()
        return self.records.count(path)

    def slices_of(self, path: str, ends: Collection[int], *, every: bool = False) -> DataFrame:
        """The rows of some slices. If delta-rs reaches the lake, Spark reads their files without Delta's log.

        `every` says that each slice has rows. Then DamagedTableError is raised if delta-rs finds no rows of
        one.
        """
        with self.access.refusing(path):
            slices = self.local.change_log(path) if self.local else None
            files = slices.files(ends, every=every) if slices else None
        if slices is None or files is None:
            return self.current(path).where(F.col("slice").isin(sorted(ends)))
        reader = self.spark.read.schema(StructType.fromJson(json.loads(slices.table.schema().to_json())))
        rows = reader.parquet(*files) if files else reader.parquet(path).limit(0)
        return rows.where(F.col("slice").isin(sorted(ends)))

    def stored_slices(self, path: str, ends: Collection[int], *, every: bool = False) -> StoredSlices | None:
        """Where the rows of some slices are stored; None if only Spark may read them.

        `every` as in `slices_of`.
        """
        if self.local is None:
            return None
        with self.access.refusing(path):
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
        """The rows of some slices in the order of their changes, if they are few.

        `size` is the estimate of their bytes; None means many. Returns None if they are many, or if only
        Spark may read them. `every` as in `slices_of`.
        """
        if self.local is None or not self.policy.is_small(size):
            return None
        with self.access.refusing(path):
            return self.local.change_log(path).rows(ends, columns=columns, every=every)

    # writing

    def remove_log(self, path: str) -> None:
        """Remove the log of a damaged table, so that it can be made anew.

        Its files stay until they are vacuumed.
        """
        if self.local is None:
            raise LakeError(
                f'Delta table "{path}" is damaged', hint="remove its folder, then run the command again"
            )
        with self.access.refusing(path):
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
        """Append to a table, or overwrite it, in one commit.

        `options` are those of Spark's writer. `size` is the estimate of the rows' bytes, or None; few rows
        are written without Spark.
        """
        if commit.after is not None:
            head = self.records.head(path)
            commit.refuse_overrun(path, head)
            commit = replace(commit, base=head.version, after=None)

        @cache
        def schema() -> pa.Schema:
            return writable(self.spark.createDataFrame([], frame.schema).toArrow()).schema

        written = self.policy.committer(path, frame.schema.names, size, schema, overwrite=commit.overwrite)
        match written:
            case InProcess():
                with self.access.refusing(path):
                    rows = writable(frame.toArrow())
                note(engine_of(self.spark), 1, rows.nbytes)
                written.write(path, rows, commit)
            case ByFiles():
                given, store, bytes_ = schema(), self.store, written.file_bytes(path, commit.properties)
                files = frame.mapInArrow(
                    lambda batches: write_files(path, given, batches, store=store, size=bytes_), WRITTEN_DDL
                )
                written.commit(
                    lambda: noted(engine_of(self.spark), None, files.toArrow()), path, given, commit
                )
            case BySpark():
                note(engine_of(self.spark), 1, size or 0)
                written.write(frame, path, commit, exists=lambda: self.records.exists(path), options=options)

    def comment(self, path: str, description: str | None, columns: Mapping[str, str]) -> None:
        """Set missing descriptions of a table and its columns.

        Does nothing if only Spark reaches the lake.
        """
        if self.local is None:
            return
        with self.access.refusing(path):
            lacking, of_columns = self.local.lacking_comments(path, description, columns)
            if self.local.is_written(path):
                self.local.comment(path, lacking, of_columns)
            elif lacking is not None or of_columns:
                comment_by_spark(self.spark, path, lacking, of_columns, self.records.position(path))

    def set_properties(self, path: str, properties: Mapping[str, str]) -> int | None:
        """Set Delta properties of a table.

        Returns the previous version; None if the table has the properties already.
        """
        with self.access.refusing(path):
            lacking = dict(properties.items() - self._properties(path).items())
            if not lacking:
                return None
            version = self.records.version(path)
            if self.local is not None and self.local.takes_properties(path):
                self.local.set_properties(path, lacking)
            else:
                set_properties_by_spark(self.spark, path, lacking, self.records.position(path))
            return version

    def take_any_row(self, path: str) -> None:
        """Remove CHECK constraints and the append-only property, which only other writers set.

        Rows and position stay.
        """
        with self.access.refusing(path):
            properties = self._properties(path)
            if constraints := constraints_in(properties):
                if self.local is not None and self.local.takes_properties(path):
                    self.local.drop_constraints(path, constraints)
                else:
                    drop_constraints_by_spark(self.spark, path, constraints, self.records.position(path))
        if is_append_only(properties):
            self.set_properties(path, {APPEND_ONLY: "false"})

    def refuses_rows(self, path: str) -> bool:
        """Whether other writers have set properties of a table that `take_any_row` removes."""
        with self.access.refusing(path):
            properties = self._properties(path)
        return is_append_only(properties) or bool(constraints_in(properties))

    def _properties(self, path: str) -> Mapping[str, str]:
        if self.local is not None:
            return self.local.properties(path)
        described = self.spark.sql(f"describe detail delta.{quoted(path)}").collect()
        properties: dict[str, str] = described[0]["properties"]
        return properties

    def hold_position(self, path: str, position: int) -> None:
        """Record a position in a table by a commit without rows."""
        with self.access.refusing(path):
            if local := self.policy.reached(path):
                local.append(path, local.arrow_schema(path).empty_table(), position)
            else:
                self.write(self.current(path).limit(0), path, Commit(position))

    def add_columns(self, path: str, schema: pa.Schema, ddl: str, base: int) -> None:
        """Add columns to the end of a table, with NULLs.

        `schema` has all of its columns, `ddl` the same in Spark's types. `base` as in `Commit`.
        """
        with self.access.refusing(path):
            if local := self.policy.reached(path):
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
        """Replace a table's rows by the result of `change`, in one commit that keeps the position.

        `into` is another table that gets the rows, with the position `position`. `base` as in `Commit`.
        """
        size, target = (self.records.size(path) if self.local else None), into or path
        commit = Commit(position, overwrite=True, base=base)
        written = self.policy.committer(target, change.schema.names, size)
        local = self.policy.reader(path, size)
        if isinstance(written, InProcess) and local is not None:
            with self.access.refusing(path):
                batches = local.table(path).select(list(change.columns)).to_batches()
                changed = writable(pa.Table.from_batches(map(change.of, batches), change.schema))
            written.write(target, changed, commit)
            return
        names, of = list(change.columns), change.of
        rows = numbered(self.current(path).select(*map(quoted, names)))
        changed_rows = rows.mapInArrow(
            lambda batches: (of(batch.rename_columns(names)) for batch in batches), change.ddl
        )
        self.write(changed_rows, target, commit)

    def committing(
        self, position: int | None, *, vectors: bool, metadata: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Within the block each SQL write of this session is done once per table and position.

        Without a position, tables keep theirs. `vectors` lets MERGE mark rows in tables with deletion
        vectors.
        """
        return committing(self.spark, position, vectors=vectors, metadata=metadata)

    def enable_deletion_vectors(self, path: str) -> None:
        """Enable deletion vectors in a table that has grown, unless the user disabled them, or delta-rs would not find them."""
        if self.local is not None and row_removal.hides_vectors(path):
            return
        if self.records.has_deletion_vectors(path) is None:
            with self.access.refusing(path):
                if self.local is not None and self.policy.vectors and row_removal.lets_mark(self.local, path):
                    with suppress(UnmarkableError):
                        row_removal.enable_marking(self.local, path)
                        return
                enable_vectors_by_spark(self.spark, path)
