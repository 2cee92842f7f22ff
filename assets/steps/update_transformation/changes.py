"""UPDATE transformation: raw messages of one relation -> decoded changes -> what a subscription gets.

A change is (commit_lsn, ordinal, number, commit_time, operation, unchanged, old, new): `old` and `new` are structs of
the relation's columns, `old` absent where the publisher sent no old tuple, `new` absent for a delete;
`unchanged` names the columns of `new` that were not sent because their TOASTed value did not change.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.records.columns import ROW_OPERATIONS, field, struct_ddl
from pgsieve.assets.steps.row_filters.condition import condition
from pgsieve.assets.steps.update_transformation.equality import comparable
from pgsieve.assets.steps.update_transformation.projection import repeated
from pgsieve.decoding.errors import ValueNotRepresentableError
from pgsieve.decoding.protocol.tuples import RelationColumns, decode_changes
from pgsieve.decoding.publications.update_transformation import UPDATE_TRANSFORMATION
from pgsieve.decoding.row_filters.analysis import RowFilter
from pgsieve.resources.lake.parquet_files import WRITTEN_DDL, Tally, write_files
from pgsieve.resources.lake.store import Store

_COLUMNS = ["commit_lsn", "ordinal", "number", "commit_time", "operation", "unchanged", "old", "new"]
_SIDES = ["old", "new"]
#: The sides once more, for row filters.
_FILTERED = ["filtered_old", "filtered_new"]
_LETTERS = pa.array(["I", "U", "D"])
_OPERATIONS = pa.array(ROW_OPERATIONS)


@dataclass(frozen=True)
class AddedColumn:
    """A column that a relation version does not have yet, and its value (an array of one) in all of its rows."""

    name: str
    spark: str
    value: pa.Array


@dataclass(frozen=True)
class FilterColumns:
    """The columns that row filters read, in the types that PostgreSQL's have here, where the replica has others."""

    names: frozenset[str]
    columns: RelationColumns
    added: Sequence[AddedColumn] = ()


def decoded_changes(
    messages: DataFrame,
    columns: RelationColumns,
    needed: Collection[str],
    key: Sequence[str],
    added: Sequence[AddedColumn] = (),
    read: FilterColumns | None = None,
) -> DataFrame:
    """Decode the Insert, Update and Delete messages of one relation version, column by column.

    `needed` are the columns to keep; the others are passed over in the bytes. Columns of `new` that were not
    sent are taken from `old`, where that has their value (identity columns). `key` names a row in an error.
    `added` columns come last. What filters `read` in other types comes besides, in `filtered_old` and `filtered_new`.
    """
    struct = _struct(columns, needed, added)
    schema = (
        "commit_lsn bigint, ordinal bigint, number bigint, commit_time timestamp, operation string,"
        f" unchanged array<string>, old {struct}, new {struct}"
    )
    names = frozenset(needed)
    raw = messages.select(*_COLUMNS[:4], "data")
    if read is None:
        return raw.mapInArrow(lambda batches: _decoded(batches, columns, names, key, added), schema)
    struct = _struct(read.columns, read.names, read.added)

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            decoded = _decoded([batch], columns, names, key, added)
            filtered = _decoded([batch], read.columns, read.names, key, read.added)
            for row, by in zip(decoded, filtered, strict=True):
                sides = [by.column(side) for side in _SIDES]
                yield pa.RecordBatch.from_arrays([*row.columns, *sides], names=[*_COLUMNS, *_FILTERED])

    return raw.mapInArrow(decode, schema + "".join(f", {name} {struct}" for name in _FILTERED))


def _struct(columns: RelationColumns, names: Collection[str], added: Sequence[AddedColumn]) -> str:
    kept = [(name, t.spark) for name, t in zip(columns.names, columns.types, strict=True) if name in names]
    return struct_ddl([*kept, *((a.name, a.spark) for a in added)])


def _decoded(
    batches: Iterable[pa.RecordBatch],
    columns: RelationColumns,
    names: Collection[str],
    key: Sequence[str],
    added: Sequence[AddedColumn] = (),
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if not batch.num_rows:
            continue
        data = batch.column("data")
        try:
            changes = decode_changes(data, columns, old_columns=names, new_columns=names, complete=True)
        except ValueNotRepresentableError as error:
            raise error.in_row(_key_of(data.slice(error.row, 1), columns, key)) from None
        yield pa.RecordBatch.from_arrays(
            [
                *(batch.column(name) for name in _COLUMNS[:4]),
                _OPERATIONS.take(pc.index_in(changes.operation, _LETTERS)),
                changes.unchanged,
                _with_added(changes.old, added, pc.equal(changes.old_kind, "O")),
                _with_added(changes.new, added, changes.new.is_valid()),
            ],
            names=_COLUMNS,
        )


def _with_added(rows: pa.StructArray, added: Sequence[AddedColumn], whole: pa.Array) -> pa.StructArray:
    """Rows with the added columns, whose value only a `whole` row has: an old key has only the key's columns."""
    if not added:
        return rows
    values = [pc.if_else(whole, repeated(a.value, len(rows)), pa.scalar(None, a.value.type)) for a in added]
    fields = [*rows.type, *(pa.field(a.name, a.value.type) for a in added)]
    children = [pc.struct_field(rows, [i]) for i in range(rows.type.num_fields)]
    return pa.StructArray.from_arrays([*children, *values], fields=fields, mask=rows.is_null())


def _key_of(message: pa.Array, columns: RelationColumns, key: Sequence[str]) -> Mapping[str, object]:
    """The key of one change; nothing where that is what cannot be converted."""
    with suppress(ValueNotRepresentableError):
        change = decode_changes(message, columns, old_columns=key, new_columns=key)
        row: Mapping[str, object] | None = change.old[0].as_py() or change.new[0].as_py()
        return row or {}
    return {}


def changes_schema(columns: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """The columns of a table's transformed changes as Arrow, for a replica of these columns."""
    row = pa.struct([pa.field(name, kind) for name, kind in columns])
    return pa.schema(
        [
            ("slice", pa.int64()),
            ("commit_lsn", pa.int64()),
            ("ordinal", pa.int64()),
            ("number", pa.int64()),
            ("commit_time", pa.timestamp("us", "UTC")),
            ("operation", pa.string()),
            ("unchanged", pa.list_(pa.string())),
            ("old", row),
            ("new", row),
        ]
    )


def unfiltered_files(
    messages: DataFrame,
    columns: RelationColumns,
    slice_end: int,
    key: Sequence[str],
    schema: pa.Schema,
    folder: str,
    store: Store,
) -> DataFrame:
    """Decoded changes as they are, written into files by the executors; one row (`WRITTEN`) a file.

    A file's tally counts its changes by operation, its `key_changes`, and by name the columns that some change
    left out as unchanged (`unchanged`).
    """
    names = frozenset(schema.field("new").type.names)

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in _decoded(batches, columns, names, key):
            ends = pa.array(np.full(batch.num_rows, slice_end, np.int64))
            yield pa.RecordBatch.from_arrays([ends, *batch.columns], schema=schema)

    def count(batch: pa.RecordBatch, tally: Tally) -> None:
        _count_changes(batch, key, tally)

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return write_files(folder, schema, rows(batches), count, store)

    return messages.select(*_COLUMNS[:4], "data").mapInArrow(write, WRITTEN_DDL)


def _count_changes(batch: pa.RecordBatch, key: Sequence[str], tally: Tally) -> None:
    def add(name: str, count: int) -> None:
        tally[name] = tally.get(name, 0) + count

    for counted in pc.value_counts(batch.column("operation")).to_pylist():
        add(counted["values"], counted["counts"])
    moved = pa.array(np.zeros(batch.num_rows, np.bool_))
    for name in key:
        sides = comparable(pa.chunked_array([pc.struct_field(batch.column(s), name) for s in ("old", "new")]))
        old, new = sides.slice(0, batch.num_rows), sides.slice(batch.num_rows)
        moved = pc.or_(moved, pc.fill_null(pc.not_equal(old, new), False))
    add("key_changes", pc.sum(moved).as_py() or 0)
    left_out = pc.unique(pc.list_flatten(batch.column("unchanged"))).to_pylist()
    tally["unchanged"] = sorted({*tally.get("unchanged", ()), *left_out})


def transformed_changes(
    changes: DataFrame,
    filters: Mapping[str, Sequence[RowFilter] | None],
    operations: Collection[str],
    columns: Sequence[str],
) -> DataFrame:
    """What a subscription gets of decoded changes: filtered, UPDATEs transformed, published columns only.

    `filters` has for insert, update and delete the row filters that are ORed, None for no filter. An
    UPDATE that is transformed is sent whatever `operations` says of insert and delete (29.4.3).
    """
    if all(texts is None for texts in filters.values()):
        # Nothing to evaluate, and no UPDATE becomes anything else.
        sent = changes.where(F.col("operation").isin(sorted(operations)))
        return sent.withColumns({side: _projected(changes, side, columns) for side in _SIDES})
    old, new = _FILTERED if _FILTERED[0] in changes.columns else _SIDES
    operation = F.col("operation")
    becomes: Column = F.lit(None).cast("string")
    if "delete" in operations:
        matches = (operation == "delete") & _matches(filters["delete"], old, "delete")
        becomes = F.when(matches, "delete").otherwise(becomes)
    if "update" in operations:
        becomes = F.when(operation == "update", _update(filters["update"], old, new)).otherwise(becomes)
    if "insert" in operations:
        matches = (operation == "insert") & _matches(filters["insert"], new, "insert")
        becomes = F.when(matches, "insert").otherwise(becomes)
    is_insert, is_delete = operation == "insert", operation == "delete"
    return (
        changes.withColumn("operation", becomes)
        .where(F.col("operation").isNotNull())
        .select(
            *_COLUMNS[:4],
            "operation",
            F.when(~is_delete & (F.size("unchanged") > 0), F.col("unchanged")).alias("unchanged"),
            F.when(~is_insert, _projected(changes, "old", columns)).alias("old"),
            F.when(~is_delete, _projected(changes, "new", columns)).alias("new"),
        )
    )


def _fields(changes: DataFrame, struct: str) -> list[str]:
    return list(changes.schema[struct].dataType.fieldNames())  # type: ignore[attr-defined]


def _projected(changes: DataFrame, struct: str, columns: Sequence[str]) -> Column:
    if _fields(changes, struct) == list(columns):
        return F.col(struct)
    return F.when(F.col(struct).isNotNull(), F.struct(*(field(struct, name).alias(name) for name in columns)))


def _matches(filters: Sequence[RowFilter] | None, struct: str, operation: str) -> Column:
    """Whether a row of this operation passes any of the filters; NULL counts as no."""
    if filters is None:
        return F.lit(True)
    concerned = (F.col("operation") == operation) & F.col(struct).isNotNull()
    matched = F.lit(False)
    for row_filter in filters:
        passes = condition(row_filter, lambda name: field(struct, name), concerned)
        matched = matched | F.coalesce(passes, F.lit(False))
    return matched


def _update(filters: Sequence[RowFilter] | None, old: str, new: str) -> Column:
    """The operation an UPDATE becomes, by these structs; without an old tuple the new row alone decides."""
    if filters is None:
        return F.lit("update")
    after = _matches(filters, new, "update")
    before = F.when(F.col(old).isNull(), after).otherwise(_matches(filters, old, "update"))
    result: Column = F.lit(None).cast("string")
    for (old_matches, new_matches), operation in UPDATE_TRANSFORMATION.items():
        row = (before if old_matches else ~before) & (after if new_matches else ~after)
        result = F.when(row, F.lit(operation)).otherwise(result)
    return result
