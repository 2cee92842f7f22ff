"""UPDATE transformation in this process: few messages of one relation -> decoded changes -> what a subscription gets.

In and out are Arrow tables: nothing here needs a session. `decoded_batches` says what a change is, and decodes; `changes` does
the same by Spark, with any number of messages. Raises what decoding does.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.records.columns import ROW_OPERATIONS, Order
from pgsieve.assets.steps.update_transformation.decoded_batches import (
    CHANGE_COLUMNS,
    ENCODED_COLUMNS,
    FILTERED_SIDES,
    SIDES,
    AddedColumn,
    FilterColumns,
    decoded_batches,
)
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.publications.update_transformation import UPDATE_TRANSFORMATION
from pgsieve.decoding.row_filters.evaluation.compiler import NotEvaluableError
from pgsieve.decoding.row_filters.evaluation.verdicts import condition
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.resources.lake.delta.conforming import field_of

Mask = npt.NDArray[np.bool_]
#: What each change is sent as: a place in `ROW_OPERATIONS`, or `NOTHING`.
Codes = npt.NDArray[np.int32]
_OPERATIONS = pa.array(ROW_OPERATIONS)
_CODES = {operation: number for number, operation in enumerate(ROW_OPERATIONS)}
#: A change that is not sent.
NOTHING = -1
#: For insert, update and delete the row filters that are ORed, None for no filter.
Filters = Mapping[str, Sequence[RowFilter] | None]


def can_filter(filters: Filters) -> bool:
    """Whether this process can evaluate the row filters."""
    try:
        for each in filters.values():
            if each:
                condition(*(row_filter.tree for row_filter in each))
    except NotEvaluableError:
        return False
    return True


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
    changes: Iterable[pa.RecordBatch], filters: Filters, operations: Collection[str], schema: pa.Schema
) -> pa.Table:
    """What a subscription gets of decoded changes, in the columns of `schema` (`changes_schema`) but for the slice.

    An UPDATE that is transformed is sent whatever `operations` says of insert and delete (29.4.3). Raises what PostgreSQL
    raises for a row of which it would have to evaluate a filter.
    """
    batches = [
        as_sent(batch, sent_as(batch, operations_of(batch), filters, operations), schema) for batch in changes
    ]
    return pa.Table.from_batches(batches, _without_slice(schema))


def operations_of(changes: pa.RecordBatch) -> Codes:
    """The operations of decoded changes: places in `ROW_OPERATIONS`."""
    return np.asarray(pc.index_in(changes.column("operation"), _OPERATIONS))


def sent_as(
    changes: pa.RecordBatch, operation: Codes, filters: Filters, operations: Collection[str]
) -> Codes:
    """What decoded changes, with the columns that filters read, are sent as: places in `ROW_OPERATIONS`, or `NOTHING`."""
    old, new = FILTERED_SIDES if FILTERED_SIDES[0] in changes.schema.names else SIDES
    has_old = np.asarray(changes.column("old").is_valid())

    def matches(of: str, side: str, rows: Mask) -> Mask:
        return _matches(filters[of], changes.column(side), rows & (operation == _CODES[of]))

    every = np.ones(len(operation), np.bool_)
    becomes = np.full(len(operation), NOTHING, np.int32)
    if "delete" in operations:
        becomes[matches("delete", old, has_old)] = _CODES["delete"]
    if "insert" in operations:
        becomes[matches("insert", new, every)] = _CODES["insert"]
    updates = operation == _CODES["update"]
    if "update" in operations and filters["update"] is None:
        becomes[updates] = _CODES["update"]
    elif "update" in operations and updates.any():
        before, after = matches("update", old, has_old), matches("update", new, every)
        # Without an old tuple the new row alone decides.
        before = np.where(has_old, before, after)
        for (old_matches, new_matches), sent in UPDATE_TRANSFORMATION.items():
            if sent is not None:
                becomes[updates & (before == old_matches) & (after == new_matches)] = _CODES[sent]
    return becomes


def as_sent(changes: pa.RecordBatch, becomes: Codes, schema: pa.Schema) -> pa.RecordBatch:
    """Decoded changes as they are sent (`sent_as`), without those that are not, in the columns of `schema` but for the slice."""
    columns = {name: changes.column(name) for name in CHANGE_COLUMNS}
    columns["operation"] = _OPERATIONS.take(pa.array(becomes, mask=becomes == NOTHING))
    for name, gone in (("old", "insert"), ("new", "delete"), ("unchanged", "delete")):
        columns[name] = _without(columns[name], becomes == _CODES[gone])
    sent = _projected(pa.record_batch(columns), _without_slice(schema))
    return sent if (becomes != NOTHING).all() else sent.filter(columns["operation"].is_valid())


def _without_slice(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name in CHANGE_COLUMNS])


def _matches(filters: Sequence[RowFilter] | None, rows: pa.StructArray, concerned: Mask) -> Mask:
    """Which of the rows that are concerned pass any of the filters; NULL counts as no. No other row is looked at."""
    if filters is None:
        return concerned
    passed = np.zeros(len(concerned), np.bool_)
    if filters and concerned.any():
        batch = pa.RecordBatch.from_struct_array(
            rows if concerned.all() else rows.filter(pa.array(concerned))
        )
        verdicts = condition(*(row_filter.tree for row_filter in filters))(batch)
        passed[concerned] = np.asarray(verdicts.fill_null(False))
    return passed


def _without(values: pa.Array, absent: Mask) -> pa.Array:
    """The values; NULL where they are absent."""
    if not absent.any():
        return values
    return values.take(pa.array(np.arange(len(values)), mask=absent))


def _projected(changes: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = {name: changes.column(name) for name in schema.names}
    for side in SIDES:
        rows, fields = columns[side], list(schema.field(side).type)
        children = [field_of(rows, f.name) for f in fields]
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
