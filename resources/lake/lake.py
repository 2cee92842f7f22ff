"""The lake: paths of Delta tables, and writes whose position stands in the same commit as the data.

In: the lake's URI and a Spark session. Out: DataFrames, and commits that carry a position as Delta's `txn`
(application id and version) and as user metadata. A write repeated with the same version changes nothing
(Delta protocol, transaction identifiers). Raises `LakeError` where the lake cannot be read or written.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from pgsieve.decoding.changes.digests import Sought
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.commits import writable
from pgsieve.resources.lake.delta.errors import LakeError, OverrunError
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.layout import FOLDERS, file_bytes
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.named_records import NamedRecords
from pgsieve.resources.lake.delta.parquet_files import WRITTEN_DDL, write_files
from pgsieve.resources.lake.delta.records import Records, Standing, in_order, quoted
from pgsieve.resources.lake.delta.requirements import APPEND_ONLY, constraints_in, is_append_only
from pgsieve.resources.lake.delta.spark import SparkRecords
from pgsieve.resources.lake.executors import INLINE, Executors, SparkExecutors, Threads, noted
from pgsieve.resources.lake.overrun import guarded
from pgsieve.resources.lake.row_lookup import row_matches
from pgsieve.resources.lake.spark_writes import (
    comment_by_spark,
    committing,
    drop_constraints_by_spark,
    enable_vectors_by_spark,
    numbered,
    set_properties_by_spark,
    write_by_spark,
)
from pgsieve.resources.lake.stores.storage import Storage, is_uri, storage_of
from pgsieve.resources.lake.stores.store import RowGroup
from pgsieve.resources.lake.way import (
    REWRITTEN_BYTES_DEFAULT,
    SMALL_BYTES_DEFAULT,
    LakeWays,
    Way,
    names_at_every_depth,
)
from pgsieve.resources.work import engine_of, named_here, note

Item = TypeVar("Item")
Done = TypeVar("Done")

#: So many tables are worked with at a time.
_TABLES, _TABLES_FAR_AWAY = 4, 8
_LOGGER = logging.getLogger(__name__)


class Lake(LakeWays):
    """The Delta tables of one lake."""

    def __init__(
        self,
        uri: str,
        session: Callable[[], SparkSession],
        small_bytes: int = SMALL_BYTES_DEFAULT,
        storage: Storage | None = None,
        folders: Mapping[str, str] | None = None,
        threads: int | None = None,
        cores: int | None = None,
        vectors: bool = True,
        rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT,
    ) -> None:
        storage = storage or storage_of(uri)
        super().__init__(storage, folders, small_bytes, vectors=vectors)
        self._session = session
        #: Who writes many rows that no Spark expression has to see.
        self.executors: Executors = SparkExecutors(session, cores) if threads is None else Threads(threads)
        self.records: Records = NamedRecords(self.local or SparkRecords(session), self.refusing)
        #: Of replicas up to so many bytes files are written once more for rows that go; -1: of none.
        self.rewritten_bytes = rewritten_bytes

    def runner(self, size: int | None) -> Executors:
        """What runs functions on so many bytes (None: many): this thread where they are few, else the executors."""
        return INLINE if self.is_small(size) else self.executors

    def expect(self, size: int) -> None:
        """Have what would run functions on so many bytes be started, before there are all of them."""
        if self.local is not None:
            self.runner(size).prepare()

    def parts_beside(self, size: int) -> int:
        """How many parts of so many bytes are run at a time."""
        return self.runner(size).number

    def folders_of(self, subscription: str) -> str:
        """The template of the folders of a subscription's replicas: as it was given, or else as the lake has recorded it."""
        if subscription not in self._folders:
            rows = in_order(self.records.rows(self.subscription(subscription)))
            self._folders[subscription] = (rows[-1].get("folders") if rows else None) or FOLDERS
        return self._folders[subscription]

    def row_matches(self, path: str, sought: Sought, schema: pa.Schema) -> list[FileMatches]:
        """Where a table has rows of some digests, made of the columns of a schema; `keys` of a match are places of digests."""
        assert self.local is not None
        with self.refusing(path):
            runner = self.runner(self.records.size(path))
            return row_matches(self.local.table_at(path), path, self.store, sought, schema, runner)

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
                    row_removal.enable_marking(self.local, path)
                if self.local.version(path) != base:
                    raise OverrunError(path)
                return row_removal.added_files(self.local, path, matches, base)
            except UnmarkableError as error:
                _LOGGER.debug("%s: %s", path, error)
                return None

    @property
    def beside(self) -> int:
        """How many tables are worked with side by side: far away a table waits for its store most of the time."""
        return _TABLES_FAR_AWAY if self.local is not None and is_uri(self.uri) else _TABLES

    def side_by_side(self, act: Callable[[Item], Done], items: Sequence[Item]) -> list[Done]:
        """What `act` makes of each item, in `beside` threads, which share the tables that are held open."""
        if len(items) < 2:
            return [act(item) for item in items]

        def one(item: Item) -> Done:
            try:
                return act(item)
            finally:
                self.lend_tables()

        self.lend_tables()
        with ThreadPoolExecutor(self.beside) as pool:
            return [each.result() for each in [pool.submit(copy_context().run, one, item) for item in items]]

    def one_moment(self, *paths: str) -> AbstractContextManager[None]:
        """Within the block this thread asks each table of an object store once which version is its newest.

        Of those at `paths` all at once, and now. Nothing is written to them within the block, and nothing is decided in it that a
        version committed meanwhile must not outlive: who writes afterwards looks again.
        """
        return nullcontext() if self.local is None else self._tables.one_moment(paths)

    def standings(self, paths: Collection[str]) -> list[Standing]:
        """The newest version of each of some tables, and the position of it, of one moment."""
        ask = None if self.local is None else self.local.standing_of
        with nullcontext() if ask is None else self._tables.one_moment(paths, ask):
            return [self.records.standing(path) for path in paths]

    def lend_tables(self) -> None:
        """Leave the tables that this thread holds open to others: it has finished with its work."""
        if self.local is not None:
            self.local.lend_tables()

    @property
    def spark(self) -> SparkSession:
        """The session, made at first use: a run with nothing to do in a local lake needs none."""
        return named_here(self._session())

    # reading

    def current(self, path: str) -> DataFrame:
        """The table at a path that is known to exist."""
        return self.spark.read.format("delta").load(path)

    def as_of(self, path: str, version: int) -> DataFrame:
        """One version of a table."""
        return self.spark.read.format("delta").option("versionAsOf", version).load(path)

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns."""
        with self.refusing(path):
            if self.local is not None:
                return self.local.columns(path)
            names: list[str] = self.current(path).columns
            return names

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
            slices = self.local.change_log(path) if self.local else None
            files = slices.files(ends, every=every) if slices else None
        if slices is None or files is None:
            return self.current(path).where(F.col("slice").isin(sorted(ends)))
        reader = self.spark.read.schema(StructType.fromJson(json.loads(slices.table.schema().to_json())))
        rows = reader.parquet(*files) if files else reader.parquet(path).limit(0)
        return rows.where(F.col("slice").isin(sorted(ends)))

    def slice_groups(self, path: str, ends: Collection[int], *, every: bool = False) -> list[RowGroup] | None:
        """The row groups that have the rows of some slices, and maybe others; None where only Spark may read them.

        `every` as in `slices_of`.
        """
        if self.local is None:
            return None
        with self.refusing(path):
            return self.local.change_log(path).row_groups(ends, every=every)

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
            return self.local.change_log(path).rows(ends, columns=columns, every=every)

    # writing

    def remove_log(self, path: str) -> None:
        """Take the log of a damaged table away, so that it can be made anew; its files stay until they are vacuumed."""
        if self.local is None:
            raise LakeError(
                f'Delta table "{path}" is damaged', hint="remove its folder, then run the command again"
            )
        with self.refusing(path):
            self.local.remove(f"{path}/_delta_log")

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

        match self.way(path, names_at_every_depth(frame.schema), size, schema, overwrite=overwrite):
            case Way.IN_PROCESS:
                assert self.local is not None
                with self.refusing(path):
                    rows = writable(frame.toArrow())
                    note(engine_of(self.spark), 1, rows.nbytes)
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
                    lambda: noted(engine_of(self.spark), None, written.toArrow()),
                    path,
                    given,
                    position,
                    overwrite=overwrite,
                    metadata=metadata,
                    properties=properties,
                    base=base,
                )
            case Way.SPARK:
                note(engine_of(self.spark), 1, size or 0)
                with self.refusing(path):
                    write_by_spark(
                        guarded(frame, path, base, self.store),
                        path,
                        position,
                        overwrite=overwrite,
                        metadata=metadata,
                        properties=properties,
                        options=options or {},
                        exists=lambda: self.records.exists(path),
                    )

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
            row_removal.mark_rows(self.local, path, marked, files, position, base)
        return files

    def file_bytes(self, path: str, properties: Mapping[str, str]) -> int:
        """How large the files of a table should be; `properties` are those of a new table."""
        assert self.local is not None
        with self.refusing(path):
            return file_bytes(self.local.properties(path) if self.local.exists(path) else properties)

    def comment(self, path: str, description: str | None, columns: Mapping[str, str]) -> None:
        """Have a table that delta-rs reaches, and its columns, described so, where they are not yet."""
        assert self.local is not None
        with self.refusing(path):
            lacking, of_columns = self.local.lacking_comments(path, description, columns)
            if self.local.is_written(path):
                self.local.comment(path, lacking, of_columns)
            elif lacking is not None or of_columns:
                comment_by_spark(self.spark, path, lacking, of_columns, self.records.position(path))

    def set_properties(self, path: str, properties: Mapping[str, str]) -> int | None:
        """Have a table have these Delta properties; the version before, None where it has them already."""
        with self.refusing(path):
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
        """Take from a table what others have made it refuse rows for, by their commits of metadata; rows and position stay.

        That is what pgsieve sets of no table: CHECK constraints, and that rows are only appended.
        """
        with self.refusing(path):
            properties = self._properties(path)
            if constraints := constraints_in(properties):
                if self.local is not None and self.local.takes_properties(path):
                    self.local.drop_constraints(path, constraints)
                else:
                    drop_constraints_by_spark(self.spark, path, constraints, self.records.position(path))
        if is_append_only(properties):
            self.set_properties(path, {APPEND_ONLY: "false"})

    def refuses_rows(self, path: str) -> bool:
        """Whether others have made a table refuse rows, as `take_any_row` says."""
        with self.refusing(path):
            properties = self._properties(path)
        return is_append_only(properties) or bool(constraints_in(properties))

    def _properties(self, path: str) -> Mapping[str, str]:
        if self.local is not None:
            return self.local.properties(path)
        described = self.spark.sql(f"describe detail delta.{quoted(path)}").collect()
        properties: dict[str, str] = described[0]["properties"]
        return properties

    def hold_position(self, path: str, position: int) -> None:
        """Have a table that keeps its rows hold a position, in a commit without rows."""
        with self.refusing(path):
            if self.local and self.is_reached(path, self.local.columns(path)):
                self.local.append(path, self.local.arrow_schema(path).empty_table(), position)
            else:
                self.write(self.current(path).limit(0), path, position=position)

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

    def committing(
        self, position: int | None, *, vectors: bool, metadata: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Within the block every SQL write of this session is done once per table and position.

        Without a position tables keep theirs. `vectors` lets MERGE mark rows in deletion vectors, in tables that
        have them.
        """
        return committing(self.spark, position, vectors=vectors, metadata=metadata)

    def enable_deletion_vectors(self, path: str) -> None:
        """Let a table that was small so far mark rows in deletion vectors, unless the user turned them off, for it or for all."""
        if self.records.has_deletion_vectors(path) is None:
            with self.refusing(path):
                enable_vectors_by_spark(self.spark, path)
