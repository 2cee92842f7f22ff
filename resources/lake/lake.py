"""The lake: paths of Delta tables, and writes whose position stands in the same commit as the data.

In: the lake's URI and a Spark session. Out: DataFrames, and commits that carry a position as Delta's `txn`
(application id and version) and as user metadata. A write repeated with the same version changes nothing
(Delta protocol, transaction identifiers). Raises `LakeError` where the lake cannot be read or written.
"""

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import dagster as dg
import pyarrow as pa
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError
from pydantic import Field
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.deletion_vectors import UnmarkableError
from pgsieve.resources.lake.delta.delta_rs import COLUMN_MAPPING, LocalRecords, writable
from pgsieve.resources.lake.delta.errors import (
    ConcurrentWriteError,
    DamagedTableError,
    ExecutorError,
    LakeError,
    LakeUnavailableError,
    OverrunError,
    SparkLostError,
    StoreUnavailableError,
    causes,
    first_line,
    is_conflict,
    is_lost,
    missing_file,
    of_one_folder,
    raise_ours,
    refusal,
    told,
)
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.layout import FOLDERS, file_bytes
from pgsieve.resources.lake.delta.named_records import NamedRecords
from pgsieve.resources.lake.delta.parquet_files import WRITTEN_DDL, write_files
from pgsieve.resources.lake.delta.records import (
    APPLICATION,
    Records,
    commit_metadata,
    in_order,
    kept_metadata,
    quoted,
)
from pgsieve.resources.lake.delta.spark import SparkRecords
from pgsieve.resources.lake.delta.tables import shared_tables
from pgsieve.resources.lake.executors import Executors, SparkExecutors, Threads, cores_of
from pgsieve.resources.lake.kept_commits import check_commits_are_kept
from pgsieve.resources.lake.overrun import NewerVersionError, guarded
from pgsieve.resources.lake.paths import LakePaths
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.lake.stores.storage import Storage, is_uri, storage_of
from pgsieve.resources.lake.stores.store import RowGroup, Store
from pgsieve.resources.lake.stores.store_errors import StoreRefusal, store_refusal
from pgsieve.resources.lake.way import Way, is_exact

Item = TypeVar("Item")
Done = TypeVar("Done")

_TXN_APP = "spark.databricks.delta.write.txnAppId"
_TXN_VERSION = "spark.databricks.delta.write.txnVersion"
#: What Spark raises: errors that it checks for itself, and what Java does beneath it.
SPARK_ERRORS = (PySparkException, Py4JError)
#: Spark's setting for what a commit's user metadata says.
METADATA = "spark.databricks.delta.commitInfo.userMetadata"
#: How columns are named that delta-rs adds to those of a table.
_OF_DELTA_RS = "__delta_rs_"
_VECTORS = "spark.databricks.delta.merge.deletionVectors.persistent"
_ANY_PROPERTY = "spark.databricks.delta.allowArbitraryProperties.enabled"
_WANT_VECTORS = "spark.databricks.delta.properties.defaults.enableDeletionVectors"

_LOGGER = logging.getLogger(__name__)

#: What a writable lake takes: a full disk may still have room for an empty file.
_PROBE, _PROBE_NAME = bytes(64 * 1024), ".pgsieve-write-probe"
_DAMAGED = 'restore it from a backup, or make it again: pgsieve\'s documentation, "A damaged lake"'

#: Lakes and servers that keep commits, as this process knows; one thread finds out.
_safe: set[tuple[str, str]] = set()
_TRYING = Lock()

#: Spark configuration of pgsieve's own: batches of a local lake up to this size are written without Spark.
SMALL_BYTES = "spark.pgsieve.smallBytes"
SMALL_BYTES_DEFAULT = 8 * 1024 * 1024
#: Another one: of replicas up to this size files are written once more without rows that go; in larger ones these are marked.
REWRITTEN_BYTES = "spark.pgsieve.rewrittenBytes"
REWRITTEN_BYTES_DEFAULT = 64 * 1024 * 1024


def column_mapping(columns: Iterable[str]) -> dict[str, str]:
    """Delta properties of a new table: column mapping, only where Parquet forbids a name as it is."""
    if any(set(name) & set(" ,;{}()\n\t=") for name in columns):
        return {COLUMN_MAPPING: "name"}
    return {}


class Lake(LakePaths):
    """The Delta tables of one lake."""

    def __init__(
        self,
        uri: str,
        session: Callable[[], SparkSession],
        small_bytes: int = SMALL_BYTES_DEFAULT,
        storage: Storage | None = None,
        folders: Mapping[str, str] | None = None,
        threads: int | None = None,
        vectors: bool = True,
        rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT,
    ) -> None:
        storage = storage or storage_of(uri)
        super().__init__(storage.address, folders)
        #: The files of the lake, for this process and for executors.
        self.store = Store.of(storage)
        self._storage = storage
        self._session = session
        #: Whether these are threads of this process, which share what it has in memory.
        self.has_threads = threads is not None
        #: Who writes many rows that no Spark expression has to see.
        self.executors: Executors = SparkExecutors(session) if threads is None else Threads(threads)
        #: delta-rs, where it reaches the lake and may write there.
        self._tables = shared_tables(self.store.options)
        self.local: LocalRecords | None = (
            LocalRecords(self.store, self._tables) if storage.by_delta_rs else None
        )
        self.records: Records = NamedRecords(self.local or SparkRecords(session), self.refusing)
        self._small_bytes = small_bytes
        #: Whether the user has deletion vectors in large tables.
        self._vectors = vectors
        #: Of replicas up to so many bytes files are written once more for rows that go; -1: of none.
        self.rewritten_bytes = rewritten_bytes

    def folders_of(self, subscription: str) -> str:
        """The template of the folders of a subscription's replicas: as it was given, or else as the lake has recorded it."""
        if subscription not in self._folders:
            rows = in_order(self.records.rows(self.subscription(subscription)))
            self._folders[subscription] = (rows[-1].get("folders") if rows else None) or FOLDERS
        return self._folders[subscription]

    def is_small(self, size: int | None) -> bool:
        """Whether so many bytes may pass through this process; where they are not counted (None) they may not."""
        return self.local is not None and size is not None and size <= self._small_bytes

    def is_reached(self, path: str, columns: Iterable[str]) -> bool:
        """Whether delta-rs can write a table of these columns: names that are mapped, or were once, only Spark writes.

        So it does a table that asks of its writers what delta-rs does not do.
        """
        if self.local is None or column_mapping(columns):
            return False
        with self.refusing(path):
            return self.local.is_unmapped(path) and self.local.is_written(path)

    def way(
        self,
        path: str,
        columns: Sequence[str],
        size: int | None,
        schema: Callable[[], pa.Schema] | None = None,
        *,
        overwrite: bool = False,
        key: Iterable[str] = (),
    ) -> Way:
        """Who writes about `size` bytes (None: many) of rows with these columns into a table.

        Without the `schema` of files there is no way by files. `overwrite`: the rows replace the table's. `key` are the
        types of columns that rows are found by.
        """
        if self.local is None or not self.is_reached(path, columns):
            return _chosen(path, Way.SPARK, "delta-rs does not write it, or its names are mapped")
        with self.refusing(path):
            if not self.is_small(size):
                reason = "many rows" if size is None else f"{size} bytes"
            elif not is_exact(key):
                reason = "a key that Arrow does not compare as PostgreSQL does"
            elif any(name.startswith(_OF_DELTA_RS) for name in columns):
                reason = "a name that a MERGE of delta-rs' has for itself"
            elif overwrite and self.local.permutes(path, columns):
                reason = "columns in another order"
            else:
                return _chosen(path, Way.IN_PROCESS, f"{size} bytes")
            if schema is not None and self.local.takes_files(path, schema(), overwrite=overwrite):
                return _chosen(path, Way.FILES, reason)
        return _chosen(path, Way.SPARK, reason)

    def takes_rewriting(self, path: str, columns: Collection[str]) -> bool:
        """Whether this process may replace files of a table by others with some rows less; `columns` are those of its rows."""
        if self.local is None:
            return False
        with self.refusing(path):
            return self.local.takes_rewriting(path, columns)

    def takes_marking(self, path: str, columns: Collection[str]) -> bool:
        """Whether this process may mark rows of a table in deletion vectors; `columns` are those of its rows."""
        if self.local is None or not self._vectors:
            return False
        with self.refusing(path):
            return self.local.takes_marking(path, columns)

    def files_to_mark(
        self, path: str, matches: Sequence[FileMatches], base: int
    ) -> list[Mapping[str, Any]] | None:
        """How the log of a table has the files in which there are `matches`, to mark rows in them; None where that cannot be.

        The table gets deletion vectors where it had none: then OverrunError is raised, as where its version is not `base`.
        """
        assert self.local is not None
        with self.refusing(path):
            try:
                if not self.local.has_deletion_vectors(path):
                    self.local.enable_deletion_vectors(path)
                if self.local.version(path) != base:
                    raise OverrunError(path)
                return self.local.added_files(path, matches, base)
            except UnmarkableError as error:
                _LOGGER.debug("%s: %s", path, error)
                return None

    def way_to_read(self, path: str, size: int | None = None) -> Way:
        """Who reads so many bytes of a table, or its rows as they come (None): this process where no column is mapped."""
        if self.local is None or not (size is None or self.is_small(size)):
            return Way.SPARK
        with self.refusing(path):
            return Way.IN_PROCESS if self.local.is_readable(path) else Way.SPARK

    def side_by_side(self, act: Callable[[Item], Done], items: Sequence[Item], threads: int) -> list[Done]:
        """What `act` makes of each item, in so many threads, which share the tables that are held open."""
        if len(items) < 2:
            return [act(item) for item in items]

        def one(item: Item) -> Done:
            try:
                return act(item)
            finally:
                self.lend_tables()

        self.lend_tables()
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, items))

    def one_moment(self, *paths: str) -> AbstractContextManager[None]:
        """Within the block this thread asks each table of an object store once which version is its newest.

        Of those at `paths` all at once, and now. Nothing is written to them within the block, and nothing is decided in it that a
        version committed meanwhile must not outlive: who writes afterwards looks again.
        """
        return nullcontext() if self.local is None else self._tables.one_moment(paths)

    def lend_tables(self) -> None:
        """Leave the tables that this thread holds open to others: it has finished with its work."""
        if self.local is not None:
            self.local.lend_tables()

    @property
    def spark(self) -> SparkSession:
        """The session, made at first use: a run with nothing to do in a local lake needs none."""
        return self._session()

    # reading

    def current(self, path: str) -> DataFrame:
        """The table at a path that is known to exist."""
        return self.spark.read.format("delta").load(path)

    def as_of(self, path: str, version: int) -> DataFrame:
        """One version of a table."""
        return self.spark.read.format("delta").option("versionAsOf", version).load(path)

    def count(self, path: str) -> int:
        """How many rows a table has: by Spark where delta-rs does not do what it asks of its readers."""
        with self.refusing(path):
            if self.local is not None and not self.local.is_read(path):
                return self.current(path).count()
        return self.records.count(path)

    def slices_of(self, path: str, ends: Collection[int], *, every: bool = False) -> DataFrame:
        """The rows of some slices: in a local lake by their files, without reading Delta's log in Spark.

        `every` says that each has rows: then DamagedTableError is raised in a local lake where one has none.
        """
        with self.refusing(path):
            readable = self.local.slice_files(path, ends, every=every) if self.local else None
        if readable is None:
            return self.current(path).where(F.col("slice").isin(sorted(ends)))
        schema, files = readable
        reader = self.spark.read.schema(StructType.fromJson(json.loads(schema)))
        rows = reader.parquet(*files) if files else reader.parquet(path).limit(0)
        return rows.where(F.col("slice").isin(sorted(ends)))

    def slice_groups(self, path: str, ends: Collection[int], *, every: bool = False) -> list[RowGroup] | None:
        """The row groups that have the rows of some slices, and maybe others; None where only Spark may read them.

        `every` as in `slices_of`.
        """
        if self.local is None:
            return None
        with self.refusing(path):
            return self.local.slice_groups(path, ends, every=every)

    def slice_rows(
        self,
        path: str,
        ends: Collection[int],
        size: int | None,
        *,
        columns: Sequence[str] | None = None,
        every: bool = False,
    ) -> pa.Table | None:
        """The rows of some slices in the order of their changes, where they are few: about `size` bytes (None: many).

        None where only Spark may read them. `every` as in `slices_of`.
        """
        if self.local is None or not self.is_small(size):
            return None
        with self.refusing(path):
            return self.local.slice_rows(path, ends, columns=columns, every=every)

    # writing

    def remove_log(self, path: str) -> None:
        """Take the log of a damaged table away, so that it can be made anew; its files stay until they are vacuumed."""
        if self.local is None:
            raise LakeError(
                f'Delta table "{path}" is damaged', hint="remove its folder, then run the command again"
            )
        with self.refusing(path):
            self.local.remove(f"{path}/_delta_log")

    def check_writable(self) -> None:
        """Raise LakeUnavailableError now rather than after the copy; only a local lake can be tried cheaply.

        Raises UnsafeStoreError where a store with S3's interface may lose commits.
        """
        if not is_uri(self.uri):
            self.try_writing()
        self.check_commits_are_kept()

    def check_commits_are_kept(self, *, record: bool = True) -> None:
        """Raise UnsafeStoreError where the store may lose commits; S3 itself is not tried.

        Without `record` what is made for that is removed, and nothing is left in the lake.
        """
        endpoint = self._storage.endpoint()
        if self.local is None or endpoint is None or not self._storage.imitates_s3():
            return
        with _TRYING:
            if (tried := (self.uri, endpoint)) not in _safe:
                with self.refusing(self.uri):
                    check_commits_are_kept(self.uri, self.store, endpoint, record=record)
                _safe.add(tried)

    def check_permitted(self) -> None:
        """Raise LakeUnavailableError where a folder does not let this user write; makes nothing, and asks no store."""
        if is_uri(self.uri):
            return
        folder = Path(self.uri).absolute()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        if not there.is_dir():
            raise self._unavailable(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise self._unavailable(f"{os.strerror(errno.EACCES)} ({there})")

    def try_writing(self) -> None:
        """Raise LakeUnavailableError where the lake does not take a file; where only Spark writes, that is not tried."""
        if is_uri(self.uri):
            if self.local is not None:
                with self.refusing(self.uri):
                    self.store.probe(self.uri, _PROBE_NAME)
            return
        try:
            folder = Path(self.uri)
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / _PROBE_NAME
            try:
                probe.write_bytes(_PROBE)
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from error

    def _unavailable(self, refused: str) -> LakeUnavailableError:
        """The error that says what refuses, how much room there is, and that nothing is lost."""
        folders = {self.uri: "lake", tempfile.gettempdir(): "temporary files"}
        free = [
            f"{shutil.disk_usage(folder).free / 1024**2:,.1f} MiB free for {use} ({folder})"
            for folder, use in folders.items()
            if Path(folder).is_dir()
        ]
        return LakeUnavailableError(
            f'lake "{self.uri}" cannot be written: {refused}' + (f"; {', '.join(free)}" if free else ""),
            hint="make room, give this user the right to write there, or choose another `lake` in pgsieve.yaml; then run"
            " again: nothing is lost, a slot is confirmed only up to what the lake holds",
        )

    def write(
        self,
        frame: DataFrame,
        path: str,
        *,
        position: int | None,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        size: int | None = None,
        base: int | None = None,
        after: int | None = None,
    ) -> None:
        """Append to (or overwrite) a table in one commit; with a position, once per position.

        `properties` are those of a new table. `size` is about how many bytes the rows have, where that is
        known: few are written without Spark, unless names have to be mapped. `base` is the version that the rows were
        planned from, `after` the position (0: none): OverrunError is raised where the table has another one.
        """
        properties = properties or {}
        if after is not None:
            standing = self.records.standing(path)
            if (standing.position or 0) != after:
                raise OverrunError(path)
            base = standing.version if base is None else base

        @cache
        def schema() -> pa.Schema:
            return writable(self.spark.createDataFrame([], frame.schema).toArrow()).schema

        match self.way(path, frame.columns, size, schema, overwrite=overwrite):
            case Way.IN_PROCESS:
                assert self.local is not None
                with self.refusing(path):
                    rows = writable(frame.toArrow())
                    self.local.write(
                        path,
                        rows,
                        position,
                        overwrite=overwrite,
                        metadata=metadata,
                        properties=properties,
                        base=base,
                    )
            case Way.FILES:
                given, store, size = schema(), self.store, self.file_bytes(path, properties)
                written = frame.mapInArrow(
                    lambda batches: write_files(path, given, batches, store=store, size=size), WRITTEN_DDL
                )
                self.commit_files(
                    written.toArrow,
                    path,
                    given,
                    position,
                    overwrite=overwrite,
                    metadata=metadata,
                    properties=properties,
                    base=base,
                )
            case Way.SPARK:
                self._write_by_spark(
                    guarded(frame, path, base, self.store),
                    path,
                    position,
                    overwrite=overwrite,
                    metadata=metadata,
                    properties=properties,
                    options=options or {},
                )

    def _write_by_spark(
        self,
        frame: DataFrame,
        path: str,
        position: int | None,
        *,
        overwrite: bool,
        metadata: Mapping[str, Any] | None,
        properties: Mapping[str, str],
        options: Mapping[str, str],
    ) -> None:
        writer = (
            frame.write.format("delta")
            .mode("overwrite" if overwrite else "append")
            .options(**({} if position is None else {"txnAppId": APPLICATION, "txnVersion": str(position)}))
            .option("userMetadata", commit_metadata(position, metadata))
            .options(**properties, **options)
        )
        writer = (
            writer.option("overwriteSchema", "true") if overwrite else writer.option("mergeSchema", "true")
        )
        with self.refusing(path):
            if overwrite and COLUMN_MAPPING in properties and self.records.exists(path):
                self.spark.sql(
                    f"alter table delta.{quoted(path)} set tblproperties ('{COLUMN_MAPPING}' = 'name')"
                )
            writer.save(path)

    def commit_files(
        self,
        written: Callable[[], pa.Table],
        path: str,
        schema: pa.Schema,
        position: int | None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
        base: int | None = None,
        after: int | None = None,
        removed: Mapping[str, int] | None = None,
    ) -> list[dict[str, Any]]:
        """Have files `written` (`pgsieve.resources.lake.delta.parquet_files`), and commit them; returns their rows.

        `base` and `after` as in `write`. `removed` are files of the version `base` that go, by the paths in its log, with
        their sizes.
        """
        assert self.local is not None
        with self.refusing(path):
            files: list[dict[str, Any]] = written().to_pylist()
            self.local.commit(
                path,
                schema,
                files,
                position,
                overwrite=overwrite,
                metadata=metadata,
                properties=properties,
                base=base,
                after=after,
                removed=removed,
            )
        return files

    def commit_marked(
        self,
        written: Callable[[], pa.Table],
        path: str,
        marked: Iterable[tuple[FileMatches, Mapping[str, Any]]],
        position: int,
        base: int,
    ) -> list[dict[str, Any]]:
        """Have files `written` as for `commit_files`, and commit them with rows `marked` as deleted; returns their rows."""
        assert self.local is not None
        with self.refusing(path):
            files: list[dict[str, Any]] = written().to_pylist()
            self.local.mark_rows(path, marked, files, position, base)
        return files

    def file_bytes(self, path: str, properties: Mapping[str, str]) -> int:
        """How large the files of a table should be; `properties` are those of a new table."""
        assert self.local is not None
        with self.refusing(path):
            return file_bytes(self.local.properties(path) if self.local.exists(path) else properties)

    def set_properties(self, path: str, properties: Mapping[str, str]) -> int | None:
        """Have a table have these Delta properties; the version before, None where it has them already."""
        with self.refusing(path):
            if self.local is not None:
                present = self.local.properties(path)
            else:
                present = self.spark.sql(f"describe detail delta.{quoted(path)}").collect()[0]["properties"]
            lacking = dict(properties.items() - present.items())
            if not lacking:
                return None
            version = self.records.version(path)
            if self.local is not None and self.local.takes_properties(path):
                self.local.set_properties(path, lacking)
            else:
                self._set_properties_by_spark(path, lacking)
            return version

    def _set_properties_by_spark(self, path: str, properties: Mapping[str, str]) -> None:
        assignments = ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
        self._alter_by_spark(path, [f"set tblproperties ({assignments})"])

    def comment(self, path: str, description: str | None, columns: Mapping[str, str]) -> None:
        """Have a table that delta-rs reaches, and its columns, described so, where they are not yet."""
        assert self.local is not None
        with self.refusing(path):
            lacking, of_columns = self.local.lacking_comments(path, description, columns)
            if self.local.is_written(path):
                self.local.comment(path, lacking, of_columns)
            elif lacking is not None or of_columns:
                table = [] if lacking is None else [f"set tblproperties ('comment' = {_literal(lacking)})"]
                altered = [f"alter column {quoted(n)} comment {_literal(c)}" for n, c in of_columns.items()]
                self._alter_by_spark(path, [*table, *altered])

    def _alter_by_spark(self, path: str, changes: Sequence[str]) -> None:
        settings = {
            METADATA: kept_metadata(self.records.position(path)),
            # The size of files is delta-rs' property, and Databricks'.
            _ANY_PROPERTY: "true",
        }
        try:
            for name, value in settings.items():
                self.spark.conf.set(name, value)
            for change in changes:
                self.spark.sql(f"alter table delta.{quoted(path)} {change}")
        finally:
            for name in settings:
                self.spark.conf.unset(name)

    def add_columns(self, path: str, schema: pa.Schema, ddl: str, base: int) -> None:
        """Add columns to the end of a table, NULL in its rows; `schema` has all of its columns, `ddl` Spark's types.

        `base` as in `write`.
        """
        with self.refusing(path):
            if self.local and self.is_reached(path, schema.names):
                self.local.append(path, schema.empty_table(), base=base)
            else:
                self.write(self.spark.createDataFrame([], ddl), path, position=None, base=base)

    def rewrite(
        self,
        path: str,
        columns: Sequence[str],
        change: Callable[[pa.RecordBatch], pa.RecordBatch],
        schema: pa.Schema,
        ddl: str,
        base: int,
    ) -> None:
        """Replace a table's rows by what `change` makes of them, in one commit that keeps the position.

        `columns` are read, `schema` is what is written, `ddl` the same in Spark's types; `base` as in `write`.
        """
        size = self.records.size(path) if self.local else None
        if (self.way(path, schema.names, size), self.way_to_read(path, size)) == (Way.IN_PROCESS,) * 2:
            assert self.local is not None
            with self.refusing(path):
                batches = self.local.table(path).select(columns).to_batches()
                changed = writable(pa.Table.from_batches(map(change, batches), schema))
                self.local.write(path, changed, None, overwrite=True, base=base)
            return
        rows = numbered(self.current(path).select(*(quoted(name) for name in columns)))
        changed_rows = rows.mapInArrow(
            lambda batches: (change(batch.rename_columns(list(columns))) for batch in batches), ddl
        )
        self.write(changed_rows, path, position=None, overwrite=True, base=base)

    @contextmanager
    def committing(
        self, position: int | None, *, vectors: bool, metadata: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Within the block every SQL write of this session is done once per table and position.

        Without a position tables keep theirs. `vectors` lets MERGE mark rows in deletion vectors, in tables that
        have them.
        """
        conf = self.spark.conf
        if position is not None:
            conf.set(_TXN_APP, APPLICATION)
            conf.set(_TXN_VERSION, str(position))
        conf.set(METADATA, commit_metadata(position, metadata))
        conf.set(_VECTORS, str(vectors).lower())
        try:
            yield
        finally:
            for key in (_TXN_APP, _TXN_VERSION, METADATA, _VECTORS):
                conf.unset(key)

    def enable_deletion_vectors(self, path: str) -> None:
        """Let a table that was small so far mark rows in deletion vectors, unless the user turned them off, for it or for all."""
        wanted = self.spark.conf.get(_WANT_VECTORS, "true") == "true"
        if wanted and self.records.has_deletion_vectors(path) is None:
            with self.refusing(path):
                self.spark.sql(
                    f"alter table delta.{quoted(path)} set tblproperties ('delta.enableDeletionVectors' = 'true')"
                )

    @contextmanager
    def refusing(self, path: str) -> Iterator[None]:
        """Name the table when it cannot be read or written, or the lake where that refuses as a whole."""
        try:
            yield
        except (DeltaError, OSError, pa.ArrowException, *SPARK_ERRORS) as error:
            self.refuse_unavailable(error)
            if isinstance(error, SPARK_ERRORS):
                try:
                    raise_ours(error)
                except ExecutorError as ours:
                    if ours.kind == NewerVersionError.__name__:
                        raise OverrunError(path) from error
                    raise
            raise _named(path, error) from error

    def refuse_unavailable(self, error: Exception) -> None:
        """Raise LakeUnavailableError or SparkLostError where an error says that these fail, not one table."""
        if is_lost(error):
            raise SparkLostError(
                "Spark lost executors, or is gone",
                hint="see Spark's log, above or of its server; `pgsieve run` goes on from the last commit",
            ) from error
        if is_uri(self.uri) and (refused := store_refusal(causes(error))):
            raise self._refused(refused) from error
        if (code := refusal(error)) is None:
            return
        if of_one_folder(code):
            self.check_writable()  # Raises where it is not that folder alone.
        else:
            raise self._unavailable(os.strerror(code)) from error

    def _refused(self, refused: StoreRefusal) -> LakeUnavailableError:
        """The error that names the lake, says why its store refuses, and what to do."""
        kind = StoreUnavailableError if refused.passes else LakeUnavailableError
        return kind(f'lake "{self.uri}": {refused.what}', hint=refused.hint)


#: What Delta says where another writer committed first; of classic Spark it comes in a Java exception's words.
_CONFLICT = re.compile(
    r"(?m)^(?:: )?(?:[\w.]+: )?\[DELTA_(?:CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
)


def _named(path: str, error: Exception) -> LakeError:
    """The error of a table."""
    by_spark = isinstance(error, SPARK_ERRORS)
    if is_conflict(error) or (by_spark and _CONFLICT.search(str(error))):
        return ConcurrentWriteError(
            f'Delta table "{path}": other writers commit to it faster than pgsieve does',
            hint="nobody else should write to it; `pgsieve run` goes on from the last commit",
        )
    if file := missing_file(error):
        return DamagedTableError(f'Delta table "{path}": its file "{file}" is missing', hint=_DAMAGED)
    message = told(error) if by_spark else first_line(error)
    if (code := refusal(error)) is not None:
        message = os.strerror(code)
    seen = "see Spark's log, above or of its server; " if by_spark else ""
    return LakeError(
        f'Delta table "{path}": {message}', hint=f"{seen}`pgsieve run` goes on from the last commit"
    )


def _literal(text: str) -> str:
    """A text as Spark's SQL writes it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _chosen(path: str, way: Way, reason: str) -> Way:
    _LOGGER.debug('Delta table "%s": %s (%s)', path, way.name, reason)
    return way


def numbered(frame: DataFrame) -> DataFrame:
    """The frame with columns c0, c1, …: mapInArrow reads a name with dots or backticks as something else."""
    return frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))


class LakeResource(dg.ConfigurableResource["LakeResource"]):
    """The lake as a Dagster resource: its URI, the Spark engine that reads and writes it, and templates of folders.

    `folders` are those of subscriptions' replicas; of the others the lake has recorded them.
    """

    uri: str
    engine: SparkEngine
    folders: dict[str, str] = Field(default={})

    def open(self) -> Lake:
        """The lake; its session is made when it is first needed."""
        small = int(self.engine.spark_config.get(SMALL_BYTES, SMALL_BYTES_DEFAULT))
        return Lake(
            self.uri,
            lambda: self.engine.session,
            small,
            folders=self.folders,
            threads=cores_of(self.engine.master),
            vectors=self.engine.spark_config.get(_WANT_VECTORS, "true").lower() == "true",
            rewritten_bytes=int(self.engine.spark_config.get(REWRITTEN_BYTES, REWRITTEN_BYTES_DEFAULT)),
        )
