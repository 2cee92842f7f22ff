"""Delta tables in a folder of this machine, by delta-rs: `Records`, and small writes without a JVM.

A write that Spark would need a second for takes milliseconds here, so small batches of a local lake are written
and merged by delta-rs in this process; large ones, and everything in a lake at a URI, by Spark.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import (
    CommitProperties,
    DeltaTable,
    QueryBuilder,
    Schema,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.transaction import AddAction, RemoveAction

from resources.records import APPLICATION, commit_metadata

#: Several row groups a file, so that decoding one is shared among the cores.
_ROW_GROUP = 128 * 1024
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
        query = QueryBuilder().register("t", DeltaTable(path)).execute("select * from t")
        return pa.table(query.read_all())

    def messages(self, path: str, end: int) -> list[bytes]:
        """The raw messages of one slice of a change log, in their order."""
        query = QueryBuilder().register("t", DeltaTable(path))
        rows = query.execute(f"select data from t where slice = {end:d} order by number").read_all()
        messages: list[bytes] = pa.table(rows)["data"].to_pylist()
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

        Batches of a reader are written as they come.
        """
        if position is not None and self._holds(path, position):
            return
        exists = self.exists(path)
        write_deltalake(
            path,
            rows,
            mode="overwrite" if overwrite else "append",
            schema_mode=("overwrite" if overwrite else "merge") if exists else None,
            configuration=None if exists else properties,
            target_file_size=_FILE_BYTES,
            writer_properties=WriterProperties(max_row_group_size=_ROW_GROUP, compression="SNAPPY"),
            commit_properties=_commit(position, metadata),
        )

    def has_schema(self, path: str, schema: pa.Schema) -> bool:
        """Whether `commit` can add files of this schema: there is no table, or it has just these columns."""
        return not self.exists(path) or pa.schema(DeltaTable(path).schema().to_arrow()).equals(
            pa.schema(Schema.from_arrow(schema).to_arrow())
        )

    def commit(
        self,
        path: str,
        schema: pa.Schema,
        files: Iterable[Mapping[str, Any]],
        position: int,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Add files that `parquet_files` has written in one commit, once per position; a new table is made first."""
        if self._holds(path, position):
            return
        delta = Schema.from_arrow(schema)
        if not self.exists(path):
            DeltaTable.create(path, delta, configuration=properties)
        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(f["path"], f["size"], {}, now, True, f["stats"]) for f in files
        ]
        DeltaTable(path).create_write_transaction(
            actions,
            "overwrite" if overwrite else "append",
            delta,
            commit_properties=_commit(position, metadata),
        )

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
        if self._holds(path, position):
            return {}

        def new(column: str, value: str) -> str:
            if column not in unknown:
                return f"s.{value}"
            return f"case when s.{unknown[column]} then t.{_quoted(column)} else s.{value} end"

        on = " and ".join(f"t.{_quoted(column)} = s.{value}" for column, value in key.items())
        metrics = (
            DeltaTable(path)
            .merge(
                source,
                on,
                source_alias="s",
                target_alias="t",
                writer_properties=WriterProperties(max_row_group_size=_ROW_GROUP, compression="SNAPPY"),
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

    def _holds(self, path: str, position: int) -> bool:
        held = self.position(path)
        return held is not None and held >= position

    def version(self, path: str) -> int:
        """The newest version of a table."""
        return DeltaTable(path).version()

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        return sum(pa.table(DeltaTable(path).get_add_actions())["size_bytes"].to_pylist())

    def count(self, path: str) -> int:
        """How many rows a table has."""
        query = QueryBuilder().register("t", DeltaTable(path)).execute("select count(*) as rows from t")
        return int(pa.table(query.read_all())["rows"][0].as_py())

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The slices, from the statistics of the files: a file holds one slice."""
        if (self.position(path) or 0) <= after:
            return []
        return sorted({s for s in self._files(path).values() if s is not None and s > after})

    def slice_files(self, path: str, ends: Collection[int]) -> tuple[str, list[str]] | None:
        """The schema (Spark's JSON) and the Parquet files of some slices, to be read without Delta's log.

        None where plain Parquet is not what Delta would read (mapped columns, deleted rows) or statistics are missing.
        """
        files = self._files(path)
        if None in files.values() or not self.is_plain(path):
            return None
        return DeltaTable(path).schema().to_json(), [
            str(Path(path, unquote(f))) for f, end in files.items() if end in ends
        ]

    def is_plain(self, path: str) -> bool:
        """Whether the rows of a table are those of its Parquet files, without mapped columns or deleted rows."""
        table = DeltaTable(path)
        mapping = table.metadata().configuration.get(COLUMN_MAPPING, "none")
        return mapping == "none" and not pa.table(table.deletion_vectors().read_all()).num_rows

    def _files(self, path: str) -> dict[str, int | None]:
        """Each file and the slice it holds."""
        files = pa.table(DeltaTable(path).get_add_actions(flatten=True))
        if "max.slice" not in files.column_names:
            return {}
        return dict(zip(files["path"].to_pylist(), files["max.slice"].to_pylist(), strict=True))

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


def _commit(position: int | None, metadata: Mapping[str, Any] | None = None) -> CommitProperties:
    transactions = None if position is None else [Transaction(APPLICATION, position)]
    return CommitProperties(
        custom_metadata={"userMetadata": commit_metadata(position, metadata)}, app_transactions=transactions
    )
