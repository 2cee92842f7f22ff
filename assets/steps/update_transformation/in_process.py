"""UPDATE transformation in this process: few messages of one relation -> decoded changes -> what a subscription gets.

In and out are Arrow tables: nothing here needs a session. `decoded_batches` says what a change is, and decodes; `changes` does
the same by Spark, with any number of messages. Raises what decoding does.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.records.columns import Order
from pgsieve.assets.steps.update_transformation.decoded_batches import (
    CHANGE_COLUMNS,
    ENCODED_COLUMNS,
    SIDES,
    AddedColumn,
    FilterColumns,
    decoded_batches,
)
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.row_filters.analysis import RowFilter


def can_filter(filters: Mapping[str, Sequence[RowFilter] | None]) -> bool:
    """Whether this process can evaluate the row filters: those that are none."""
    return all(texts is None for texts in filters.values())


def decoded_changes(
    messages: pa.Table,
    columns: RelationColumns,
    names: Collection[str],
    key: Sequence[str],
    added: Sequence[AddedColumn] = (),
    read: FilterColumns | None = None,
) -> list[pa.RecordBatch]:
    """Decode the Insert, Update and Delete messages of one relation version, as `decoded_batches` does."""
    batches = messages.select(ENCODED_COLUMNS).to_batches()
    return list(decoded_batches(batches, columns, names, key, added, read))


def transformed_changes(
    changes: Iterable[pa.RecordBatch], operations: Collection[str], schema: pa.Schema
) -> pa.Table:
    """What a subscription gets of decoded changes, in the columns of `schema` (`changes_schema`) but for the slice.

    An UPDATE stays one, as there is no row filter.
    """
    schema = pa.schema([field for field in schema if field.name in CHANGE_COLUMNS])
    sent = pa.array(sorted(operations), pa.string())
    batches = [
        _projected(batch.filter(pc.is_in(batch.column("operation"), sent)), schema) for batch in changes
    ]
    return pa.Table.from_batches(batches, schema)


def _projected(changes: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = {name: changes.column(name) for name in schema.names}
    for side in SIDES:
        rows, fields = columns[side], list(schema.field(side).type)
        children = [pc.struct_field(rows, [rows.type.get_field_index(f.name)]) for f in fields]
        columns[side] = pa.StructArray.from_arrays(children, fields=fields, mask=rows.is_null())
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def truncates(places: Sequence[Order], schema: pa.Schema) -> pa.Table:
    """TRUNCATEs at these order keys, as changes of that schema; what a change has besides is NULL."""
    rows = [{"commit_lsn": lsn, "ordinal": ordinal, "operation": "truncate"} for lsn, ordinal in places]
    return pa.Table.from_pylist(rows, pa.schema([field for field in schema if field.name in CHANGE_COLUMNS]))


def in_slice(changes: Sequence[pa.Table], end: int, schema: pa.Schema) -> pa.Table:
    """Changes of a table with the slice that they are of, in the order of their keys."""
    every = pa.concat_tables(changes)
    ends = pa.array(np.full(every.num_rows, end, np.int64))
    return every.add_column(0, schema.field("slice"), ends)
