"""Raw messages of one relation version -> decoded changes: Arrow batches in, Arrow batches out, whoever has them.

A change is (commit_lsn, ordinal, number, commit_time, operation, unchanged, old, new): `old` and `new` are structs of
the relation's columns, `old` absent where the publisher sent no old tuple, `new` absent for a delete;
`unchanged` names the columns of `new` that were not sent because their TOASTed value did not change.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.records.columns import ROW_OPERATIONS
from pgsieve.assets.steps.update_transformation.projection import repeated
from pgsieve.decoding.changes.equality import comparable
from pgsieve.decoding.errors import ValueNotRepresentableError
from pgsieve.decoding.protocol.tuples import RelationColumns, decode_changes
from pgsieve.decoding.values.replica_output import shown
from pgsieve.resources.lake.delta.conforming import field_of
from pgsieve.resources.lake.delta.parquet_files import Tally

CHANGE_COLUMNS = ("commit_lsn", "ordinal", "number", "commit_time", "operation", "unchanged", "old", "new")
#: What is read of a message.
ENCODED_COLUMNS = (*CHANGE_COLUMNS[:4], "data")
SIDES = ("old", "new")
#: The sides once more, for row filters.
FILTERED_SIDES = ("filtered_old", "filtered_new")
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
    """The columns that row filters read, in the types that PostgreSQL's have here, where the replica has others.

    A key of what is decoded of some messages; types and values are compared, but have no hash.
    """

    names: frozenset[str]
    columns: RelationColumns = field(hash=False)
    added: Sequence[AddedColumn] = field(default=(), hash=False)


def decoded_batches(
    batches: Iterable[pa.RecordBatch],
    columns: RelationColumns,
    names: Collection[str],
    key: Sequence[str],
    added: Sequence[AddedColumn] = (),
    read: FilterColumns | None = None,
) -> Iterator[pa.RecordBatch]:
    """Decode Insert, Update and Delete messages column by column: `names` and the `added` columns, which come last.

    Columns of `new` that were not sent are taken from `old`, where that has their value (identity columns). `key` names a
    row in an error. What filters `read` in other types comes besides, in `filtered_old` and `filtered_new`.
    """
    for batch in batches:
        if not batch.num_rows:
            continue
        changes = _decoded(batch, columns, names, key, added)
        if read is not None:
            filtered = _decoded(batch, read.columns, read.names, key, read.added)
            sides = [filtered.column(side) for side in SIDES]
            changes = pa.RecordBatch.from_arrays(
                [*changes.columns, *sides], names=[*CHANGE_COLUMNS, *FILTERED_SIDES]
            )
        yield changes


def _decoded(
    batch: pa.RecordBatch,
    columns: RelationColumns,
    names: Collection[str],
    key: Sequence[str],
    added: Sequence[AddedColumn],
) -> pa.RecordBatch:
    data = batch.column("data")
    try:
        changes = decode_changes(data, columns, old_columns=names, new_columns=names, complete=True)
    except ValueNotRepresentableError as error:
        raise error.in_row(_key_of(data.slice(error.row, 1), columns, key)) from None
    return pa.RecordBatch.from_arrays(
        [
            *(batch.column(name) for name in CHANGE_COLUMNS[:4]),
            _OPERATIONS.take(pc.index_in(changes.operation, _LETTERS)),
            changes.unchanged,
            _with_added(changes.old, added, pc.equal(changes.old_kind, "O")),
            _with_added(changes.new, added, changes.new.is_valid()),
        ],
        names=CHANGE_COLUMNS,
    )


def _with_added(rows: pa.StructArray, added: Sequence[AddedColumn], whole: pa.Array) -> pa.StructArray:
    """Rows with the added columns, whose value only a `whole` row has: an old key has only the key's columns."""
    if not added:
        return rows
    values = [pc.if_else(whole, repeated(a.value, len(rows)), pa.scalar(None, a.value.type)) for a in added]
    fields = [*rows.type, *(pa.field(a.name, a.value.type) for a in added)]
    children = [pc.struct_field(rows, [i]) for i in range(rows.type.num_fields)]
    return pa.StructArray.from_arrays([*children, *values], fields=fields, mask=rows.is_null())


def _key_of(message: pa.Array, columns: RelationColumns, key: Sequence[str]) -> Mapping[str, str]:
    """The key of one change; nothing where that is what cannot be converted."""
    with suppress(ValueNotRepresentableError):
        change = decode_changes(message, columns, old_columns=key, new_columns=key)
        rows = change.old if change.old.null_count == 0 else change.new
        if rows.null_count == 0:
            return {
                field.name: shown(pc.struct_field(rows, [place]))[0] for place, field in enumerate(rows.type)
            }
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


def empty_tally() -> Tally:
    """What `count_changes` adds to."""
    return {"key_changes": 0, "unchanged": []}


def count_changes(batch: pa.RecordBatch, key: Sequence[str], tally: Tally) -> None:
    """Add to a tally the changes by operation, the `key_changes`, and the columns that some change left out (`unchanged`).

    Of the tuples only the columns of the key are looked at: without a key the batch needs none.
    """

    def add(name: str, count: int) -> None:
        tally[name] = tally.get(name, 0) + count

    for counted in pc.value_counts(batch.column("operation")).to_pylist():
        add(counted["values"], counted["counts"])
    differs = pa.array(np.zeros(batch.num_rows, np.bool_))
    for name in key:
        sides = comparable(pa.chunked_array([field_of(batch.column(s), name) for s in ("old", "new")]))
        old, new = sides.slice(0, batch.num_rows), sides.slice(batch.num_rows)
        # An old tuple of another replica identity has NULL there, which finds no row: the new key's is not changed.
        only_one = pc.xor(pc.is_null(old), pc.is_null(new))
        differs = pc.or_(differs, pc.or_(only_one, pc.fill_null(pc.not_equal(old, new), False)))
    if key:
        moves = pc.and_(pc.equal(batch.column("operation"), "update"), pc.is_valid(batch.column("old")))
        differs = pc.and_(moves, differs)
    add("key_changes", pc.sum(differs).as_py() or 0)
    left_out = pc.unique(pc.list_flatten(batch.column("unchanged"))).to_pylist()
    tally["unchanged"] = sorted({*tally.get("unchanged", ()), *left_out})
