"""Converts rows of older files of a table to the present columns of the table.

Delta can add columns, and fields of structs, without rewriting the files of the table. In rows of older files they
are NULL.

In: rows as an Arrow table, and the present columns.
Out: an Arrow table.

Raises ArrowInvalid if a value does not fit, which does not happen in pgsieve's tables.
"""

import pyarrow as pa
import pyarrow.compute as pc


def conform(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the columns of a schema. Columns are matched by their names. Missing columns are NULL."""
    columns = [
        _conform_values(rows[field.name].combine_chunks(), field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _conform_values(values: pa.Array | pa.ChunkedArray, data_type: pa.DataType) -> pa.Array:
    """Convert values to a type. Fields of a struct type that the values lack become NULL."""
    if isinstance(values, pa.ChunkedArray):  # combine_chunks returns a ChunkedArray if there are no chunks.
        values = pa.concat_arrays(values.chunks) if values.chunks else pa.nulls(0, values.type)
    if values.type.equals(data_type):
        return values
    if not pa.types.is_struct(data_type):
        return values.cast(data_type)
    children = [
        _conform_values(pc.struct_field(values, [field_index]), field.type)
        if (field_index := values.type.get_field_index(field.name)) >= 0
        else pa.nulls(len(values), field.type)
        for field in data_type
    ]
    null_mask = values.is_null()
    if not children:
        return pa.nulls(len(values), data_type)
    return pa.StructArray.from_arrays(children, fields=list(data_type), mask=null_mask)
