"""Delta tables that delta-rs reaches, in a folder or on an object store: `Records`, and small writes without a JVM.

A write that Spark would need a second for takes milliseconds here, so small batches are written and merged by delta-rs
in this process; large ones, and everything in a lake that delta-rs does not reach, by Spark.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import (
    CommitProperties,
    DeltaTable,
    QueryBuilder,
    Schema,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import LocalFileSystem

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.delta import deletion_vectors
from pgsieve.resources.lake.delta.bounds import bounded_if_possible, writer_properties
from pgsieve.resources.lake.delta.conforming import conformed
from pgsieve.resources.lake.delta.deletion_vectors import Marked, deleted_rows
from pgsieve.resources.lake.delta.errors import DamagedTableError, OverrunError, commit_again
from pgsieve.resources.lake.delta.key_lookup import (
    FileMatches,
    Key,
    bounds_of,
    files_within,
    matched_files,
    present_keys,
    rows_of,
)
from pgsieve.resources.lake.delta.layout import file_bytes
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import (
    APPLICATION,
    VERSIONED,
    Standing,
    commit_metadata,
    kept_metadata,
    versioned,
)
from pgsieve.resources.lake.delta.tables import Tables, shared_tables
from pgsieve.resources.lake.stores.store import RowGroup, Store, joined

#: In a column's metadata, where Spark has its comment, too.
COMMENT = "comment"
COLUMN_MAPPING = "delta.columnMapping.mode"
_VECTORS = deletion_vectors.PROPERTY
#: What tables may ask of their writers that one who replaces whole files complies with.
_REWRITABLE = {"appendOnly", "deletionVectors", "invariants", "timestampNtz"}
#: What tables may ask of their writers and readers that delta-rs does, too.
_WRITTEN = _REWRITABLE | {
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "generatedColumns",
    "v2Checkpoint",
    "variantType",
}
#: What asks for something by "true", which Spark reads in any letters, and delta-rs and this process only in small ones.
_SWITCHES = ("delta.appendOnly", "delta.enableChangeDataFeed", _VECTORS)
#: What a table asks of each row: CHECK constraints among its properties, and by a column's metadata.
_CONSTRAINT = "delta.constraints."
_OF_ROWS = ("delta.generationExpression", "delta.identity.", "delta.invariants", "CURRENT_DEFAULT")
#: What delta-rs writes as it is in a path of the log, besides letters and digits; all else it encodes.
_NOT_ENCODED = "!$&'()+,-./:;=@_~"


class LocalRecords:
    """Delta tables that delta-rs reaches."""

    def __init__(self, store: Store | None = None, tables: Tables | None = None) -> None:
        self.store = store or Store()
        self._tables = tables or shared_tables(self.store.options)

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""
        return self._tables.exists(path)

    def table_at(self, path: str) -> DeltaTable:
        """The newest version of a table."""
        return self._tables.open(path)

    def present_keys(self, path: str, keys: pa.Table) -> set[Key]:
        """Those of some keys that a table has; the columns of `keys` have the table's names."""
        return present_keys(self.table_at(path), path, self.store, keys)

    def rows_of(self, path: str, keys: pa.Table, schema: pa.Schema) -> pa.Table:
        """The rows of some keys, with the columns of a schema."""
        return rows_of(self.table_at(path), path, self.store, keys, schema)

    def matches(
        self, path: str, keys: pa.Table, among: Iterable[npt.NDArray[np.bool_]], most_bytes: int | None
    ) -> list[FileMatches] | None:
        """Where a table has some keys, file by file; None where it is not plain and may have one, or in more bytes of files.

        `among` are parts of the keys with bounds of their own: only files are read that may have a key within those. Of files
        with twice as many bytes none is read. Without `most_bytes` the files may have as many as they like, and deletion vectors.
        """
        table = self.table_at(path)
        parts = [keys.filter(pa.array(part)) for part in among if part.any()]
        near = {name for part in parts for name in files_within(table, bounds_of(part))}
        if not near:
            return []
        if most_bytes is None:
            return list(matched_files(table, path, self.store, keys, near, deleted_rows(table)))
        files = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
        size = sum(file["size_bytes"] for file in files if unquote(file["path"]) in near)
        if not is_plain(table) or size > 2 * most_bytes:
            return None
        matches, size = list[FileMatches](), 0
        for match in matched_files(table, path, self.store, keys, near, {}):
            matches.append(match)
            size += match.size
            if size > most_bytes:
                return None
        return matches

    def arrow_schema(self, path: str) -> pa.Schema:
        """The columns of a table as Arrow."""
        return arrow_schema(self.table_at(path))

    def takes_rewriting(self, path: str, columns: Collection[str]) -> bool:
        """Whether `replace_rows` may rewrite the files of a table: it is plain, and asks no more of those who write.

        It has these `columns` alone: what a user has added keeps its values only where rows are merged.
        """
        table = self.table_at(path)
        return (
            is_plain(table)
            and all(map(is_removable, pa.table(table.get_add_actions())["path"].to_pylist()))
            and _takes_changes(table, columns)
        )

    def takes_marking(self, path: str, columns: Collection[str]) -> bool:
        """Whether `mark_rows` may mark rows of a table as deleted: it lies in a folder, and asks no more of those who write.

        It has these `columns` alone, as for `takes_rewriting`.
        """
        if not self._in_folder(path):
            return False
        table = self.table_at(path)
        configuration = table.metadata().configuration
        return (
            _is_unmapped(table)
            and _takes_changes(table, columns)
            and table.protocol().min_writer_version in {1, 2, 7}
            and configuration.get("delta.appendOnly", "false") != "true"
            and configuration.get(_VECTORS) != "false"
        )

    def enable_deletion_vectors(self, path: str) -> None:
        """Let writers of a table in a folder mark rows in deletion vectors; rows and position stay."""
        deletion_vectors.refuse_unlinkable(self._folder(path))
        table = self.table_at(path)
        information = _information("SET TBLPROPERTIES", table.version(), kept_metadata(self.position(path)))
        deletion_vectors.enable(self._folder(path), table, information)

    def added_files(self, path: str, matches: Sequence[FileMatches], base: int) -> list[Mapping[str, Any]]:
        """How the log has files in which there are `matches`; raises UnmarkableError where `mark_rows` could not mark there."""
        deletion_vectors.refuse_unlinkable(self._folder(path))
        found = deletion_vectors.added_files(self._folder(path), base, {match.name for match in matches})
        return [found[match.name] for match in matches]

    def mark_rows(
        self,
        path: str,
        marked: Iterable[tuple[FileMatches, Mapping[str, Any]]],
        files: Iterable[Mapping[str, Any]],
        position: int,
        base: int,
    ) -> None:
        """Mark rows as deleted, given with how the log has their files, and add files, in one commit, once per position.

        `base` as in `write`. The table has deletion vectors enabled.
        """
        now = time.time_ns() // 1_000_000
        rows = [
            Marked(dict(added), np.union1d(match.deleted, match.rows).astype(np.int64))
            for match, added in marked
        ]
        new = [
            {
                "path": file["path"],
                "partitionValues": {},
                "size": file["size"],
                "modificationTime": now,
                "dataChange": True,
                "stats": file["stats"],
            }
            for file in files
        ]
        others = [
            {"commitInfo": _information("MERGE", base, commit_metadata(position))},
            {"txn": {"appId": APPLICATION, "version": position, "lastUpdated": now}},
        ]

        def attempt(table: DeltaTable | None) -> None:
            if table is None or _holds(path, self._standing(path, table).position, position, overwrite=False):
                return
            deletion_vectors.commit_marked(self._folder(path), base, rows, new, others, now)
            self._checkpoint(self.table_at(path))

        self._committed(path, attempt, base=base)

    def _checkpoint(self, table: DeltaTable) -> None:
        """What delta-rs does after commits of its own."""
        interval = int(table.metadata().configuration.get("delta.checkpointInterval", 100))
        if table.version() % interval == 0:
            table.create_checkpoint()

    def _in_folder(self, path: str) -> bool:
        return isinstance(self.store.system(path)[0], LocalFileSystem)

    def _folder(self, path: str) -> Path:
        return Path(self.store.system(path)[1])

    def plain_batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a plain table, with the columns of a schema, a batch at a time."""
        for file in _files(path, self.table_at(path)):
            yield from self.store.batches(file, schema)

    def remove(self, folder: str) -> bool:
        """Remove a folder with all tables in it; False where there is none."""
        self._tables.forget()
        return self.store.remove(folder)

    def lend_tables(self) -> None:
        """Leave the tables that this thread holds open to other threads: it works with none of them at the moment."""
        self._tables.lend()

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table for which an SQL condition holds; none where there is no table."""
        table = self._opened(path)
        return [] if table is None else self._rows(path, table, where)

    def _rows(self, path: str, table: DeltaTable, where: str) -> list[dict[str, Any]]:
        query = f"select * from t where {where}"
        return self._tables.remembered(path, table, query, lambda: _queried(table, query).to_pylist())

    def newest(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column; none where there is no table."""
        if (table := self._opened(path)) is None:
            return []
        return self._tables.remembered(
            path, table, f"newest {column}", lambda: self._newest(path, table, column)
        )

    def _newest(self, path: str, table: DeltaTable, column: str) -> list[dict[str, Any]]:
        # The statistics of the files tell the number; then only the file that has it is read.
        files = pa.table(table.get_add_actions(flatten=True))
        greatest = files[f"max.{column}"] if f"max.{column}" in files.column_names else pa.nulls(1)
        if len(greatest) == 0:
            return []
        if greatest.null_count:
            greatest = _queried(table, f"select {_quoted(column)} from t")[column]
        return self._rows(path, table, f"{_quoted(column)} = {pc.max(greatest).as_py():d}")

    def table(self, path: str) -> pa.Table:
        """All rows of a table that is known to be small."""
        return _queried(self.table_at(path), "select * from t")

    def batches(self, path: str, version: int) -> Iterator[pa.RecordBatch]:
        """The rows of one version of a table, a batch at a time."""
        query = QueryBuilder().register("t", self._tables.as_of(path, version)).execute("select * from t")
        yield from pa.RecordBatchReader.from_stream(query)

    def messages(self, path: str, end: int) -> list[bytes]:
        """The raw messages of one slice of a change log, in their order."""
        rows = _queried(self.table_at(path), f"select data from t where slice = {end:d} order by number")
        messages: list[bytes] = rows["data"].to_pylist()
        return messages

    def append(
        self,
        path: str,
        rows: pa.Table,
        position: int | None = None,
        *,
        base: int | None = None,
        after: int | None = None,
    ) -> None:
        """Append rows in one commit; with a position, once per position."""
        self.write(path, rows, position, base=base, after=after)

    def append_versioned(self, path: str, rows: pa.Table, base: int | None = None) -> None:
        """Append rows that say which Delta version they came with; raises CommitFailedError after another writer."""
        table = self._opened(path) or self._created(path, versioned(rows, 0).schema)
        version = table.version() + 1
        if base not in {None, table.version()}:
            raise OverrunError(path)
        write_deltalake(
            table,
            versioned(rows, version),
            schema_mode="merge",
            mode="append",
            commit_properties=CommitProperties(
                custom_metadata={"userMetadata": commit_metadata(None)},
                max_commit_retries=0,
                app_transactions=[Transaction(VERSIONED, version)],
            ),
        )

    def write(
        self,
        path: str,
        rows: pa.Table | pa.RecordBatchReader,
        position: int | None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
        base: int | None = None,
        after: int | None = None,
    ) -> None:
        """Append (or overwrite with) rows in one commit; with a position, once per position.

        Batches of a reader are written as they come. Where another writer was faster it is done again, but for a
        reader's: then CommitFailedError is raised. `base` is the version that the rows were planned from, `after` the
        position (0: none): where the table has another one, OverrunError is raised, as where an overwrite would set a
        position back.
        """

        def attempt(table: DeltaTable | None) -> None:
            if _holds(path, self._standing(path, table).position, position, overwrite=overwrite):
                return

            def written(files: WriterProperties) -> None:
                write_deltalake(
                    path if table is None else table,
                    rows,
                    mode="error" if table is None else "overwrite" if overwrite else "append",
                    schema_mode=("overwrite" if overwrite else "merge") if table else None,
                    configuration=None if table else properties,
                    storage_options=self._tables.options if table is None else None,
                    target_file_size=file_bytes(_configuration(table, properties)),
                    writer_properties=files,
                    commit_properties=_commit(
                        position, metadata, alone=overwrite or base is not None or table is None
                    ),
                )

            if isinstance(rows, pa.Table):
                bounded_if_possible(written, rows.schema, rows)
            else:
                # A reader's rows come only once.
                written(writer_properties(rows.schema))

        self._committed(path, attempt, base=base, after=after, once=not isinstance(rows, pa.Table))

    def takes_files(self, path: str, schema: pa.Schema, *, overwrite: bool = False) -> bool:
        """Whether `commit` can add files of this schema: there is no table, or it has these columns.

        Others, which the files lack, are NULL in their rows; an overwrite is to leave no others. A table that is partitioned, or
        asks something of each row, takes none.
        """
        if not self.exists(path):
            return True
        if not _takes_any_row(table := self.table_at(path)):
            return False
        held = pa.struct(arrow_schema(table))
        given = pa.struct(pa.schema(Schema.from_arrow(schema).to_arrow()))
        return bool(held == given) if overwrite else self.is_unmapped(path) and _has_fields(held, given)

    def permutes(self, path: str, columns: Sequence[str]) -> bool:
        """Whether a table has these columns in another order, which delta-rs would leave when overwriting."""
        if not self.exists(path):
            return False
        names = [field.name for field in self.table_at(path).schema().fields]
        return names != list(columns) and sorted(names) == sorted(columns)

    def commit(
        self,
        path: str,
        schema: pa.Schema,
        files: Iterable[Mapping[str, Any]],
        position: int | None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
        base: int | None = None,
        after: int | None = None,
        removed: Mapping[str, int] | None = None,
    ) -> None:
        """Add files that `parquet_files` has written in one commit, once per position; a new table is made first.

        Where another writer was faster it is done again; `base` and `after` as in `write`. `removed` are files of the
        version `base` that go, by the paths in its log, with their sizes.
        """
        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(f["path"], f["size"], {}, now, True, f["stats"]) for f in files
        ]
        actions += [removal(name, size, now, changes=True) for name, size in (removed or {}).items()]

        def attempt(table: DeltaTable | None) -> None:
            if _holds(path, self._standing(path, table).position, position, overwrite=overwrite):
                return
            if table is None:
                table = DeltaTable.create(
                    path,
                    Schema.from_arrow(schema),
                    configuration=properties,
                    storage_options=self._tables.options,
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
                if table.version():  # It is opened after it is made: with what others have written meanwhile.
                    raise CommitFailedError(f"{path} has been written to")
            table.create_write_transaction(
                actions,
                "overwrite" if overwrite else "append",
                table.schema(),
                commit_properties=_commit(position, metadata, alone=overwrite or base is not None),
            )

        self._committed(path, attempt, base=base, after=after)

    def _committed(
        self,
        path: str,
        attempt: Callable[[DeltaTable | None], None],
        *,
        base: int | None,
        after: int | None = None,
        once: bool = False,
    ) -> None:
        """Commit to the table as it is now, again where another writer was faster; to the version `base` at most once."""

        def commit() -> None:
            table = self._opened(path)
            standing = self._standing(path, table)
            # What is committed from here on makes this commit fail.
            if base not in {None, standing.version} or after not in {None, standing.position or 0}:
                raise OverrunError(path)
            try:
                attempt(table)
            except DeltaError as error:
                # Also where this very commit was made, and only what follows it failed: a new plan tells.
                if base is not None and self.standing(path).version != base:
                    raise OverrunError(path) from error
                if table is None and not isinstance(error, CommitFailedError) and self.exists(path):
                    raise CommitFailedError(str(error)) from error
                raise

        if once or base is not None:
            commit()
        else:
            commit_again(commit)()

    def merge(
        self,
        path: str,
        source: pa.Table,
        merge: Merge,
        position: int,
        base: int,
    ) -> Mapping[str, int]:
        """Merge a net change into a keyed table in one commit, once per position; rows by kind of change.

        `base` as in `write`.
        """
        metrics: dict[str, Any] = {}
        clauses = merge.clauses(_quoted)

        def attempt(table: DeltaTable | None) -> None:
            assert table is not None
            target = table

            def merged(files: WriterProperties) -> Mapping[str, Any]:
                merger = target.merge(
                    source,
                    clauses.on,
                    source_alias="s",
                    target_alias="t",
                    writer_properties=files,
                    commit_properties=_commit(position, alone=True),
                )
                done: Mapping[str, Any] = (
                    merger.when_matched_delete(clauses.deletes)
                    .when_matched_update(dict(clauses.update))
                    .when_not_matched_insert(dict(clauses.insert), clauses.inserts)
                    .execute()
                )
                return done

            metrics.update(bounded_if_possible(merged, arrow_schema(target), source))

        self._committed(path, attempt, base=base)
        return {kind: int(metrics[f"num_target_rows_{kind}"]) for kind in ("inserted", "updated", "deleted")}

    def replace_rows(
        self,
        path: str,
        staying: Callable[[pa.RecordBatch], pa.Array | None],
        rows: pa.Table,
        position: int,
        base: int,
    ) -> None:
        """Take rows out of a plain table and add others in one commit, once per position.

        `staying` is asked for each batch which rows stay (None: all); files of which all rows do stay as they are. `base` as
        in `write`.
        """
        table = self.table_at(path)
        if table.version() != base:
            raise OverrunError(path)
        schema, size = rows.schema, file_bytes(table.metadata().configuration)
        removed: dict[str, int] = {}
        added: list[dict[str, Any]] = []

        def write(batches: Iterable[pa.RecordBatch]) -> None:
            for file in write_files(path, schema, batches, store=self.store, size=size):
                added.extend(file.to_pylist())

        for action in pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist():
            file = joined(path, unquote(action["path"]))
            masks = [staying(batch) for batch in self.store.batches(file, schema)]
            if any(mask is not None for mask in masks):
                removed[action["path"]] = action["size_bytes"]
                again = zip(self.store.batches(file, schema), masks, strict=True)
                kept = (batch if mask is None else batch.filter(mask) for batch, mask in again)
                write(batch for batch in kept if batch.num_rows)
        write(batch for batch in rows.to_batches() if batch.num_rows)
        self.commit(path, schema, added, position, base=base, removed=removed)

    def lacking_comments(
        self, path: str, description: str | None, columns: Mapping[str, str]
    ) -> tuple[str | None, dict[str, str]]:
        """The description of a table that it does not have yet, None where it has it, and those of its columns."""
        table = self.table_at(path)
        held = {field.name: (field.metadata or {}).get(COMMENT, "") for field in table.schema().fields}
        lacking = {
            name: columns.get(name, "") for name, comment in held.items() if columns.get(name, "") != comment
        }
        wanted = description or ""
        return None if (table.metadata().description or "") == wanted else wanted, lacking

    def comment(self, path: str, description: str | None, columns: Mapping[str, str]) -> None:
        """Have a table and some of its columns described so; rows and position stay."""
        table = self.table_at(path)
        committed = {"userMetadata": kept_metadata(self.position(path))}
        properties = CommitProperties(custom_metadata=committed)
        if description is not None:
            table.alter.set_table_description(description, commit_properties=properties)
        for field in table.schema().fields:
            if field.name in columns:
                # What else stands there stays: a column's number and name in files that have mapped names.
                metadata = {**(field.metadata or {}), COMMENT: columns[field.name]}
                table.alter.set_column_metadata(field.name, metadata, commit_properties=properties)

    def properties(self, path: str) -> Mapping[str, str]:
        """The Delta properties of a table; none where there is no table."""
        return _configuration(self._opened(path), None)

    def takes_properties(self, path: str) -> bool:
        """Whether `set_properties` leaves a table to the readers that it has.

        Where the protocol lists features, delta-rs adds one for the variant type, which few readers know.
        """
        table = self.table_at(path)
        return _is_unmapped(table) and _is_written(table) and table.protocol().writer_features is None

    def set_properties(self, path: str, properties: Mapping[str, str]) -> None:
        """Set Delta properties of a table; rows and position stay."""
        committed = {"userMetadata": kept_metadata(self.position(path))}
        self.table_at(path).alter.set_table_properties(
            dict(properties),
            raise_if_not_exists=False,
            commit_properties=CommitProperties(custom_metadata=committed),
        )

    def position(self, path: str) -> int | None:
        """The position of the newest commit of pgsieve's."""
        return self.standing(path).position

    def standing(self, path: str) -> Standing:
        """The newest version and the position of it, of one moment."""
        return self._standing(path, self._opened(path))

    def _standing(self, path: str, table: DeltaTable | None) -> Standing:
        if table is None:
            return Standing()
        # delta-rs reads the whole log for it.
        (row,) = self._tables.remembered(
            path, table, "position", lambda: [{"position": table.transaction_version(APPLICATION)}]
        )
        return Standing(table.version(), row["position"])

    def _opened(self, path: str) -> DeltaTable | None:
        return self._tables.open_if_any(path)

    def _created(self, path: str, schema: pa.Schema) -> DeltaTable:
        try:
            return DeltaTable.create(path, Schema.from_arrow(schema), storage_options=self._tables.options)
        except DeltaError:
            if (table := self._opened(path)) is None:
                raise
            return table  # Another writer was faster.

    def stamp(self, path: str) -> tuple[str, int] | None:
        """The table's identifier, which a table that is made anew does not share, and its newest version.

        And when that was written: a folder that was put back gets other commits of the same number.
        """
        if (table := self._opened(path)) is None:
            return None
        entry = joined(path, f"_delta_log/{table.version():020d}.json")
        (row,) = self._tables.remembered(
            path, table, "written", lambda: [{"written": self.store.written_at(entry)}]
        )
        return f"{table.metadata().id} {row['written']}", table.version()

    def version(self, path: str) -> int:
        """The newest version of a table."""
        return self.table_at(path).version()

    def is_restored(self, path: str, since: int) -> bool:
        """Whether somebody has gone back in a table that had this version; two looks at its folder where it still has."""
        entries = [f"{version:020d}.json" for version in (since, since + 1)]
        if self.store.has_each(joined(path, "_delta_log"), entries) == [True, False]:
            return False
        table = self.table_at(path)
        later = table.version() - since
        return later < 0 or any(c.get("operation") == "RESTORE" for c in table.history(later) if later)

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        return sum(pa.table(self.table_at(path).get_add_actions())["size_bytes"].to_pylist())

    def count(self, path: str) -> int:
        """How many rows a table has."""
        return int(_queried(self.table_at(path), "select count(*) as rows from t")["rows"][0].as_py())

    def written_at(self, path: str) -> datetime:
        """When the newest commit was made."""
        (newest,) = self.table_at(path).history(1)
        return datetime.fromtimestamp(newest["timestamp"] / 1000, UTC)

    def least(self, path: str, column: str, where: str) -> Any:
        """The least value of a column in the rows for which an SQL condition holds; None where there is none."""
        least = _queried(self.table_at(path), f"select min({_quoted(column)}) as m from t where {where}")["m"]
        return least[0].as_py()

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The slices, from the statistics of the files; a file of several slices (after compaction) is looked into."""
        if (self.position(path) or 0) <= after:
            return []
        ends: set[int] = set()
        for file, bounds in _files(path, self.table_at(path)).items():
            if bounds and (bounds[1] <= after or bounds[0] == bounds[1]):
                ends.add(bounds[1])
            else:
                rows = self.store.read(file, columns=["slice"])
                ends.update(pc.unique(rows["slice"]).to_pylist())
        return sorted(end for end in ends if end > after)

    def slice_files(
        self, path: str, ends: Collection[int], *, every: bool = False
    ) -> tuple[str, list[str]] | None:
        """The schema (Spark's JSON) and the Parquet files of some slices, to be read without Delta's log.

        The files may hold other slices, too. None where plain Parquet is not what Delta would read (mapped columns,
        deleted rows) or statistics are missing. Raises DamagedTableError where a file is not there, or, if `every` slice has
        rows, one of them.
        """
        table = self.table_at(path)
        files = self._slice_files(path, table, ends, every=every)
        return None if files is None else (table.schema().to_json(), files)

    def slice_groups(self, path: str, ends: Collection[int], *, every: bool = False) -> list[RowGroup] | None:
        """The row groups of the files of some slices, in the files' order; None, and DamagedTableError, as in `slice_files`."""
        files = self._slice_files(path, self.table_at(path), ends, every=every)
        return None if files is None else [group for file in files for group in self.store.row_groups(file)]

    def _slice_files(
        self, path: str, table: DeltaTable, ends: Collection[int], *, every: bool
    ) -> list[str] | None:
        chosen, lacking = [], set(ends)
        for file, bounds in _files(path, table).items():
            if bounds is None:
                return None
            if present := {end for end in ends if bounds[0] <= end <= bounds[1]}:
                if not self.store.has(file):
                    raise DamagedTableError(f'Delta table "{path}": its file "{file}" is missing')
                chosen.append(file)
                lacking -= present
        if every and lacking:
            ends_lacking = ", ".join(map(format_lsn, sorted(lacking)))
            raise DamagedTableError(
                f'Delta table "{path}": it has lost the slices that end at {ends_lacking}'
            )
        return chosen if is_plain(table) else None

    def slice_rows(
        self, path: str, ends: Collection[int], *, columns: Sequence[str] | None = None, every: bool = False
    ) -> pa.Table | None:
        """The rows of some slices in the order of their changes; None, and DamagedTableError, as in `slice_files`."""
        table = self.table_at(path)
        files = self._slice_files(path, table, ends, every=every)
        if files is None:
            return None
        schema = arrow_schema(table)
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        within = pc.field("slice").isin(sorted(ends))
        rows = pa.concat_tables(
            [
                schema.empty_table(),
                *(conformed(self.store.read(f, columns=columns, filters=within), schema) for f in files),
            ]
        )
        return rows.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])

    def is_readable(self, path: str) -> bool:
        """Whether delta-rs and Arrow read the rows of a table as they are: it has no mapped columns, and no partitions.

        And it asks of its readers nothing that delta-rs does not do.
        """
        table = self.table_at(path)
        return _is_unmapped(table) and _is_read(table) and not table.metadata().partition_columns

    def is_unmapped(self, path: str) -> bool:
        """Whether the columns of a table, if there is one, have their own names in its files."""
        table = self._opened(path)
        return table is None or _is_unmapped(table)

    def is_written(self, path: str) -> bool:
        """Whether delta-rs writes to a table, if there is one: it does all that this asks of its writers."""
        table = self._opened(path)
        return table is None or _is_written(table)

    def is_read(self, path: str) -> bool:
        """Whether delta-rs reads a table: it does all that this asks of its readers."""
        return _is_read(self.table_at(path))

    def has_deletion_vectors(self, path: str) -> bool | None:
        """Whether writers of the table may mark rows in deletion vectors; None where its properties do not say."""
        said = self.table_at(path).metadata().configuration.get(_VECTORS)
        return None if said is None else said.lower() == "true"


def _information(operation: str, base: int, metadata: str) -> dict[str, Any]:
    """What a commit that this process writes says of itself, as delta-rs has its own say it."""
    return {
        "timestamp": time.time_ns() // 1_000_000,
        "operation": operation,
        "operationParameters": {},
        "readVersion": base,
        "isBlindAppend": False,
        "engineInfo": "pgsieve",
        "userMetadata": metadata,
    }


def writable(rows: pa.Table) -> pa.Table:
    """Rows that came from Spark, as delta-rs can write them.

    Every column and field is nullable, as Delta would keep a constraint that PostgreSQL may drop; and each
    buffer is made anew, as Spark leaves out the offsets of empty lists, which delta-rs reads all the same.
    """
    cast = rows.cast(pa.schema([_nullable(field) for field in rows.schema]))
    return cast.take(pa.array(range(cast.num_rows), pa.int64()))


def _is_unmapped(table: DeltaTable) -> bool:
    return table.metadata().configuration.get(COLUMN_MAPPING, "none") == "none"


def _is_read(table: DeltaTable) -> bool:
    """Whether delta-rs does what a table asks of its readers."""
    return set(table.protocol().reader_features or ()) <= _WRITTEN


def _is_written(table: DeltaTable) -> bool:
    """Whether delta-rs does what a table asks of its writers; version 6 of their protocol has identity columns, which it does not."""
    protocol, configuration = table.protocol(), table.metadata().configuration
    return (
        protocol.min_writer_version != 6
        and set(protocol.writer_features or ()) <= _WRITTEN
        and all(configuration.get(name, "false") in {"true", "false"} for name in _SWITCHES)
    )


def _configuration(table: DeltaTable | None, properties: Mapping[str, str] | None) -> Mapping[str, str]:
    """The Delta properties of a table; of one that is still to be made those that it will have."""
    if table is None:
        return properties or {}
    configuration: dict[str, str] = table.metadata().configuration
    return configuration


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The columns of a table."""
    return pa.schema(table.schema().to_arrow())


def is_removable(path: str) -> bool:
    """Whether `removal` names a file as the log does; other writers may encode other characters."""
    return quote(unquote(path), safe=_NOT_ENCODED) == path


def removal(path: str, size: int, time_ms: int, *, changes: bool) -> RemoveAction:
    """What takes a file out of a table, by its path in the log; `changes` says whether rows change by it.

    delta-rs encodes the path once more. Of one that is encoded already it would remove nothing, and the rows stayed.
    """
    return RemoveAction(unquote(path), changes, time_ms, size, {})


def is_plain(table: DeltaTable) -> bool:
    """Whether the rows of a table are those of its Parquet files: no mapped columns, deleted rows or partitions."""
    if table.metadata().partition_columns:  # Files lack these columns.
        return False
    return (
        _is_unmapped(table) and _is_read(table) and not pa.table(table.deletion_vectors().read_all()).num_rows
    )


def _takes_any_row(table: DeltaTable) -> bool:
    """Whether who writes files of a table needs to look at no row: it has no partitions, constraints or computed values.

    Writer versions 3 to 6 list no features that would tell (Delta's protocol, Writer Version Requirements).
    """
    metadata, fields = table.metadata(), table.schema().fields
    return not (
        metadata.partition_columns
        or any(name.startswith(_CONSTRAINT) for name in metadata.configuration)
        or any(not field.nullable for field in fields)
        or any(name.startswith(_OF_ROWS) for field in fields for name in field.metadata or {})
    )


def _takes_changes(table: DeltaTable, columns: Collection[str]) -> bool:
    """Whether who takes rows out of a table of these columns and adds others owes nothing else: no feed of changes, no rule."""
    return (
        _is_written(table)
        and {field.name for field in table.schema().fields} == set(columns)
        and _takes_any_row(table)
        and set(table.protocol().writer_features or ()) <= _REWRITABLE
        and table.metadata().configuration.get("delta.enableChangeDataFeed", "false") != "true"
    )


def _files(path: str, table: DeltaTable) -> dict[str, tuple[int, int] | None]:
    """Each Parquet file with the first and the last slice that it holds; None where statistics are missing."""
    files: dict[str, tuple[int, int] | None] = {}
    actions = pa.table(table.get_add_actions(flatten=True))
    # Bounds of users' columns may be dates that Python cannot hold.
    read = [name for name in ("path", "min.slice", "max.slice") if name in actions.column_names]
    for row in actions.select(read).to_pylist():
        least, greatest = row.get("min.slice"), row.get("max.slice")
        bounded = least is not None and greatest is not None
        files[joined(path, unquote(row["path"]))] = (least, greatest) if bounded else None
    return files


def _has_fields(held: pa.DataType, given: pa.DataType) -> bool:
    """Whether a type has all that another one has, structs field by field in any order."""
    if not (pa.types.is_struct(held) and pa.types.is_struct(given)):
        return bool(held == given)
    return all(
        held.get_field_index(f.name) >= 0 and _has_fields(held.field(f.name).type, f.type) for f in given
    )


def _nullable(field: pa.Field) -> pa.Field:
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_nullable(inner) for inner in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(_nullable(kind.value_field))
    return pa.field(field.name, kind, nullable=True)


def _quoted(column: str) -> str:
    """A column quoted for DataFusion."""
    return '"' + column.replace('"', '""') + '"'


def _queried(table: DeltaTable, query: str) -> pa.Table:
    """What SQL says of a table `t`; raises DeltaError where a file is missing, which delta-rs gives no class."""
    result = QueryBuilder().register("t", table).execute(query)
    try:
        return pa.table(result.read_all())
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise DeltaError(str(error)) from error


def _holds(path: str, recorded: int | None, position: int | None, *, overwrite: bool) -> bool:
    """Whether a table has a position already; raises OverrunError where an overwrite would set it back.

    What is written is based on the same version, so that of two writers of a position the slower is refused.
    """
    if recorded is None or position is None:
        return False
    if overwrite and recorded > position:
        raise OverrunError(path)
    return recorded >= position


def _commit(
    position: int | None, metadata: Mapping[str, Any] | None = None, *, alone: bool = False
) -> CommitProperties:
    """How to commit; with a position, or `alone`, to the version that was opened and to no later one.

    delta-rs would let an overwrite follow a compaction, whose files it does not know of: the former rows would stay. And
    it would let the first commit of a table follow another first one, having read nothing that could conflict.
    """
    transactions = None if position is None else [Transaction(APPLICATION, position)]
    return CommitProperties(
        custom_metadata={"userMetadata": commit_metadata(position, metadata)},
        max_commit_retries=0 if alone or position is not None else None,
        app_transactions=transactions,
    )
