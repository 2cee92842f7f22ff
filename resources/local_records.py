"""Delta tables in a folder of this machine, by delta-rs: `Records`, and small writes without a JVM.

A write that Spark would need a second for takes milliseconds here, so small batches of a local lake are written
and merged by delta-rs in this process; large ones, and everything in a lake at a URI, by Spark.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import (
    CommitProperties,
    DeltaTable,
    QueryBuilder,
    Schema,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from decoding.lsn import format_lsn
from resources.lake_errors import DamagedTableError, again_after_conflict
from resources.records import APPLICATION, commit_metadata

#: Several row groups a file, so that decoding one is shared among the cores.
ROW_GROUP = 128 * 1024
_FILE_BYTES = 128 * 1024 * 1024
COLUMN_MAPPING = "delta.columnMapping.mode"
_VECTORS = "delta.enableDeletionVectors"


class LocalRecords:
    """Delta tables in a folder of this machine."""

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""
        return Path(path, "_delta_log").is_dir() and DeltaTable.is_deltatable(path)

    def rows(self, path: str) -> list[dict[str, Any]]:
        """All rows of a small table; none where there is no table."""
        return self.table(path).to_pylist() if self.exists(path) else []

    def table(self, path: str) -> pa.Table:
        """All rows of a table that is known to be small."""
        return _queried(path, "select * from t")

    def batches(self, path: str, version: int) -> Iterator[pa.RecordBatch]:
        """The rows of one version of a table, a batch at a time."""
        query = QueryBuilder().register("t", DeltaTable(path, version=version)).execute("select * from t")
        yield from pa.RecordBatchReader.from_stream(query)

    def messages(self, path: str, end: int) -> list[bytes]:
        """The raw messages of one slice of a change log, in their order."""
        rows = _queried(path, f"select data from t where slice = {end:d} order by number")
        messages: list[bytes] = rows["data"].to_pylist()
        return messages

    def append(self, path: str, rows: pa.Table, position: int | None = None) -> None:
        """Append rows in one commit; with a position, once per position."""
        self.write(path, rows, position)

    def write(
        self,
        path: str,
        rows: pa.Table | pa.RecordBatchReader,
        position: int | None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Append (or overwrite with) rows in one commit; with a position, once per position.

        Batches of a reader are written as they come. Where another writer was faster it is done again, but for a
        reader's: then CommitFailedError is raised.
        """

        def attempt() -> None:
            table = self._opened(path)
            if _holds(table, position):
                return
            write_deltalake(
                path if table is None else table,
                rows,
                mode="overwrite" if overwrite else "append",
                schema_mode=("overwrite" if overwrite else "merge") if table else None,
                configuration=None if table else properties,
                target_file_size=_FILE_BYTES,
                writer_properties=WriterProperties(max_row_group_size=ROW_GROUP, compression="SNAPPY"),
                commit_properties=_commit(position, metadata, alone=overwrite),
            )

        if isinstance(rows, pa.Table):
            again_after_conflict(attempt)()
        else:
            attempt()

    def takes_files(self, path: str, schema: pa.Schema, *, overwrite: bool = False) -> bool:
        """Whether `commit` can add files of this schema: there is no table, or it has these columns.

        Others, which the files lack, are NULL in their rows; an overwrite is to leave no others.
        """
        if not self.exists(path):
            return True
        held = pa.struct(pa.schema(DeltaTable(path).schema().to_arrow()))
        given = pa.struct(pa.schema(Schema.from_arrow(schema).to_arrow()))
        return bool(held == given) if overwrite else self.is_unmapped(path) and _has_fields(held, given)

    def permutes(self, path: str, schema: pa.Schema) -> bool:
        """Whether a table has these columns in another order, which delta-rs would leave when overwriting."""
        if not self.exists(path):
            return False
        names = [field.name for field in DeltaTable(path).schema().fields]
        return names != schema.names and sorted(names) == sorted(schema.names)

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
    ) -> None:
        """Add files that `parquet_files` has written in one commit, once per position; a new table is made first.

        Where another writer was faster it is done again.
        """
        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(f["path"], f["size"], {}, now, True, f["stats"]) for f in files
        ]

        def attempt() -> None:
            table = self._opened(path)
            if _holds(table, position):
                return
            if table is None:
                table = DeltaTable.create(path, Schema.from_arrow(schema), configuration=properties)
            table.create_write_transaction(
                actions,
                "overwrite" if overwrite else "append",
                table.schema(),
                commit_properties=_commit(position, metadata, alone=overwrite),
            )

        again_after_conflict(attempt)()

    def merge(
        self,
        path: str,
        source: pa.Table,
        key: Mapping[str, str],
        values: Mapping[str, str],
        unknown: Mapping[str, str],
        position: int,
    ) -> Mapping[str, int]:
        """Merge a net change into a keyed table in one commit, once per position; rows by kind of change.

        `source` has a column `action` (delete, update or upsert); `key` and `values` map columns of the table
        to its columns, `unknown` to those that say whether a row keeps its value.
        """
        table = DeltaTable(path)
        if _holds(table, position):
            return {}

        def new(column: str, value: str) -> str:
            if column not in unknown:
                return f"s.{value}"
            return f"case when s.{unknown[column]} then t.{_quoted(column)} else s.{value} end"

        on = " and ".join(f"t.{_quoted(column)} = s.{value}" for column, value in key.items())
        metrics = (
            table.merge(
                source,
                on,
                source_alias="s",
                target_alias="t",
                writer_properties=WriterProperties(max_row_group_size=ROW_GROUP, compression="SNAPPY"),
                commit_properties=_commit(position),
            )
            .when_matched_delete("s.action = 'delete'")
            .when_matched_update({_quoted(c): new(c, v) for c, v in values.items()})
            .when_not_matched_insert({_quoted(c): f"s.{v}" for c, v in values.items()}, "s.action = 'upsert'")
            .execute()
        )
        return {kind: int(metrics[f"num_target_rows_{kind}"]) for kind in ("inserted", "updated", "deleted")}

    def position(self, path: str) -> int | None:
        """The position of the newest commit of pgsieve's."""
        return DeltaTable(path).transaction_version(APPLICATION) if self.exists(path) else None

    def _opened(self, path: str) -> DeltaTable | None:
        return DeltaTable(path) if self.exists(path) else None

    def version(self, path: str) -> int:
        """The newest version of a table."""
        return DeltaTable(path).version()

    def is_restored(self, path: str, since: int) -> bool:
        """Whether somebody has gone back in a table that had this version; two looks at its folder where it still has."""
        entries = [Path(path, "_delta_log", f"{version:020d}.json") for version in (since, since + 1)]
        if entries[0].exists() and not entries[1].exists():
            return False
        table = DeltaTable(path)
        later = table.version() - since
        return later < 0 or any(c.get("operation") == "RESTORE" for c in table.history(later) if later)

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        return sum(pa.table(DeltaTable(path).get_add_actions())["size_bytes"].to_pylist())

    def count(self, path: str) -> int:
        """How many rows a table has."""
        return int(_queried(path, "select count(*) as rows from t")["rows"][0].as_py())

    def written_at(self, path: str) -> datetime:
        """When the newest commit was made."""
        (newest,) = DeltaTable(path).history(1)
        return datetime.fromtimestamp(newest["timestamp"] / 1000, UTC)

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The slices, from the statistics of the files; a file of several slices (after compaction) is looked into."""
        if (self.position(path) or 0) <= after:
            return []
        ends: set[int] = set()
        for file, bounds in self._files(path).items():
            if bounds and (bounds[1] <= after or bounds[0] == bounds[1]):
                ends.add(bounds[1])
            else:
                ends.update(pc.unique(pq.read_table(file, columns=["slice"])["slice"]).to_pylist())
        return sorted(end for end in ends if end > after)

    def slice_files(
        self, path: str, ends: Collection[int], *, every: bool = False
    ) -> tuple[str, list[str]] | None:
        """The schema (Spark's JSON) and the Parquet files of some slices, to be read without Delta's log.

        The files may hold other slices, too. None where plain Parquet is not what Delta would read (mapped columns,
        deleted rows) or statistics are missing. Raises DamagedTableError where a file is not there, or, if `every` slice has
        rows, one of them.
        """
        chosen, lacking = [], set(ends)
        for file, bounds in self._files(path).items():
            if bounds is None:
                return None
            if held := {end for end in ends if bounds[0] <= end <= bounds[1]}:
                if not Path(file).exists():
                    raise DamagedTableError(f'Delta table "{path}": its file "{file}" is missing')
                chosen.append(file)
                lacking -= held
        if every and lacking:
            listed = ", ".join(map(format_lsn, sorted(lacking)))
            raise DamagedTableError(f'Delta table "{path}": it has lost the slices that end at {listed}')
        return (DeltaTable(path).schema().to_json(), chosen) if self.is_plain(path) else None

    def is_plain(self, path: str) -> bool:
        """Whether the rows of a table are those of its Parquet files, without mapped columns or deleted rows."""
        return (
            self.is_unmapped(path) and not pa.table(DeltaTable(path).deletion_vectors().read_all()).num_rows
        )

    def is_unmapped(self, path: str) -> bool:
        """Whether the columns of a table have their own names in its files."""
        return DeltaTable(path).metadata().configuration.get(COLUMN_MAPPING, "none") == "none"

    def _files(self, path: str) -> dict[str, tuple[int, int] | None]:
        """Each Parquet file with the first and the last slice that it holds; None where statistics are missing."""
        table = pa.table(DeltaTable(path).get_add_actions(flatten=True))
        files: dict[str, tuple[int, int] | None] = {}
        for row in table.to_pylist():
            least, greatest = row.get("min.slice"), row.get("max.slice")
            known = least is not None and greatest is not None
            files[str(Path(path, unquote(row["path"])))] = (least, greatest) if known else None
        return files

    def has_deletion_vectors(self, path: str) -> bool:
        """Whether writers of the table may mark rows in deletion vectors."""
        return DeltaTable(path).metadata().configuration.get(_VECTORS) == "true"


def writable(rows: pa.Table) -> pa.Table:
    """Rows that came from Spark, as delta-rs can write them.

    Every column and field is nullable, as Delta would keep a constraint that PostgreSQL may drop; and each
    buffer is made anew, as Spark leaves out the offsets of empty lists, which delta-rs reads all the same.
    """
    cast = rows.cast(pa.schema([_nullable(field) for field in rows.schema]))
    return cast.take(pa.array(range(cast.num_rows), pa.int64()))


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


def _queried(path: str, query: str) -> pa.Table:
    """What SQL says of a table `t`; raises DeltaError where a file is missing, which delta-rs gives no class."""
    result = QueryBuilder().register("t", DeltaTable(path)).execute(query)
    try:
        return pa.table(result.read_all())
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise DeltaError(str(error)) from error


def _holds(table: DeltaTable | None, position: int | None) -> bool:
    """Whether this version of a table has a position already.

    What is written is based on the same version, so that of two writers of a position the slower is refused.
    """
    held = None if table is None or position is None else table.transaction_version(APPLICATION)
    return held is not None and position is not None and held >= position


def _commit(
    position: int | None, metadata: Mapping[str, Any] | None = None, *, alone: bool = False
) -> CommitProperties:
    """How to commit; `alone` not after any other writer.

    delta-rs would let an overwrite follow a compaction, whose files it does not know of: the former rows would stay.
    """
    transactions = None if position is None else [Transaction(APPLICATION, position)]
    return CommitProperties(
        custom_metadata={"userMetadata": commit_metadata(position, metadata)},
        max_commit_retries=0 if alone else None,
        app_transactions=transactions,
    )
