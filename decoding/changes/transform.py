"""Transforms messages into the changes that a subscription receives, and applies row filters as pgoutput does.

In: batches of pgoutput's messages (`ENCODED_COLUMNS`), all of one relation version (one description of the relation's
columns). Out: batches of changes in the replica's columns, and counts of changes by their operation before and after
row filters.

Raises the errors of `decode_batch`. If a filter fails for a row, raises the error that PostgreSQL would raise.

PostgreSQL documentation, Row Filters: UPDATE Transformations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import (
    CHANGE_COLUMNS,
    ROW_OPERATIONS,
    SIDES,
    schema_without_slice,
    struct_field,
)
from pgsieve.decoding.changes.decode import AddedColumn, FilterColumns, decode_batch
from pgsieve.decoding.changes.metadata_columns import MetadataColumns
from pgsieve.decoding.changes.sent_as import NOT_SENT, ChangeKind, Origin
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.publications.update_transformation import UPDATE_TRANSFORMATION
from pgsieve.decoding.row_filters.evaluation.verdicts import VerdictFunction, compile_filters
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.decoding.wording import shorten

_Mask: TypeAlias = npt.NDArray[np.bool_]
#: One element per change: the index in `ROW_OPERATIONS` of the operation that is sent for the change, or `NOT_SENT`.
_Codes: TypeAlias = npt.NDArray[np.int32]
#: Maps insert, update and delete to row filters. A row is sent if one of them matches; None means that all rows are sent.
Filters: TypeAlias = Mapping[str, Sequence[RowFilter] | None]
#: Maps insert, update and delete to the function that evaluates their filters on a batch of rows, or to None.
_Conditions: TypeAlias = Mapping[str, VerdictFunction | None]
#: A function that returns the filter columns (the columns that row filters read) of a batch of messages. If it does not
#: have them yet, it calls its second argument, which decodes them.
FilterColumnCache: TypeAlias = Callable[[FilterColumns, Callable[[], pa.RecordBatch]], pa.RecordBatch]

_OPERATIONS = pa.array(ROW_OPERATIONS)
_CODE_BY_OPERATION = {operation: number for number, operation in enumerate(ROW_OPERATIONS)}


def _decode_without_cache(
    _filter_columns: FilterColumns, decode: Callable[[], pa.RecordBatch]
) -> pa.RecordBatch:
    return decode()


@dataclass(frozen=True)
class EncodedMessages:
    """A batch of messages of one relation version.

    `filter_column_cache` keeps the decoded filter columns of the batch. If several subscriptions transform the same
    batch, the columns are decoded only once.
    """

    batch: pa.RecordBatch
    filter_column_cache: FilterColumnCache = _decode_without_cache


@dataclass(frozen=True)
class Transformation:
    """Transforms the messages of one relation version into the changes that a subscription receives.

    Spark sends objects of this class to executors.

    - `columns` are the columns of the relation version, and `added` are the columns that were added after it.
    - `schema` is the schema of the replica's changes (`changes_schema`). `add_slice` adds its column `slice` later.
    - `key` is the replica's key.
    - `operations` are the operations that the publications send.
    - `filter_columns` has the columns that the filters read. It is None if there are no filters.
    - `origin` is the relation from which the changes come, and under which they are counted.
    - `metadata` are the metadata columns in `schema`. The publisher's table does not have these.
    """

    columns: RelationColumns
    schema: pa.Schema
    key: Sequence[str]
    operations: frozenset[str]
    filters: Filters
    added: Sequence[AddedColumn] = ()
    filter_columns: FilterColumns | None = None
    origin: Origin = field(default_factory=Origin)
    metadata: MetadataColumns = field(default_factory=MetadataColumns)

    def transform(
        self, messages: Iterable[EncodedMessages], counts: Counter[ChangeKind]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes that the subscription receives, in the columns of `schema` except `slice`.

        Adds all changes to `counts`. An UPDATE that becomes an INSERT or DELETE is sent even if `operations` has no
        INSERT or DELETE. If the filters reject a change, only its filter columns are decoded.
        """
        conditions: _Conditions = {
            operation: None if filters is None else _compile_condition(filters)
            for operation, filters in self.filters.items()
        }
        names = frozenset(f.name for f in self.schema.field("new").type) - self.metadata.kinds.keys()
        for encoded_batch in messages:
            batch, sent_codes = encoded_batch.batch, None
            if not batch.num_rows:
                continue
            if self.filter_columns is not None:
                sent_codes = self._find_sent_codes(
                    self._decode_filter_columns(self.filter_columns, encoded_batch), conditions, counts
                )
                is_sent = sent_codes != NOT_SENT
                batch, sent_codes = batch.filter(pa.array(is_sent)), sent_codes[is_sent]
            if batch.num_rows:
                decoded = decode_batch(batch, self.columns, names, self.key, self.added)
                codes = (
                    self._find_sent_codes(decoded, conditions, counts) if sent_codes is None else sent_codes
                )
                yield _select_sent_changes(decoded, codes, self.schema, self.metadata)

    def _decode_filter_columns(
        self, filter_columns: FilterColumns, messages: EncodedMessages
    ) -> pa.RecordBatch:
        """Decode the messages into changes that have only the filter columns."""

        def decode() -> pa.RecordBatch:
            return decode_batch(
                messages.batch,
                filter_columns.columns,
                filter_columns.names,
                filter_columns.key,
                filter_columns.added,
            )

        return messages.filter_column_cache(filter_columns, decode)

    def _find_sent_codes(
        self, changes: pa.RecordBatch, conditions: _Conditions, counts: Counter[ChangeKind]
    ) -> _Codes:
        """Return the code of the operation that is sent for each change, and count the changes."""
        codes: _Codes = np.asarray(pc.index_in(changes.column("operation"), _OPERATIONS))
        sent_codes = _compute_sent_codes(changes, codes, conditions, self.operations)
        self.origin.add_counts(codes, sent_codes, counts)
        return sent_codes


def _compile_condition(filters: Sequence[RowFilter]) -> VerdictFunction:
    """Return a function that tells for each row whether one of the filters matches. Its errors contain the filters' text."""
    compute_verdicts = compile_filters(*(row_filter.tree for row_filter in filters))

    def find_verdicts(batch: pa.RecordBatch) -> pa.BooleanArray:
        try:
            return compute_verdicts(batch)
        except (FilterValueError, NumericError) as error:
            expression = shorten(" OR ".join(row_filter.expression for row_filter in filters))
            raise type(error)(
                f"row filter {expression}: {error.message}",
                hint="alter the row filter, or correct the row at the publisher",
                sqlstate=error.sqlstate,
            ) from None

    return find_verdicts


def _compute_sent_codes(
    changes: pa.RecordBatch, codes: _Codes, conditions: _Conditions, operations: Collection[str]
) -> _Codes:
    """Return the code of the operation that is sent for each change, or `NOT_SENT`.

    `codes` has the code of each change before row filters. `changes` need only the filter columns.
    """
    has_old = np.asarray(changes.column("old").is_valid())

    def mask_matches(operation: str, side: str, rows: _Mask) -> _Mask:
        return _mask_matches(
            conditions[operation], changes.column(side), rows & (codes == _CODE_BY_OPERATION[operation])
        )

    all_rows = np.ones(len(codes), np.bool_)
    sent_codes = np.full(len(codes), NOT_SENT, np.int32)
    if "delete" in operations:
        sent_codes[mask_matches("delete", "old", has_old)] = _CODE_BY_OPERATION["delete"]
    if "insert" in operations:
        sent_codes[mask_matches("insert", "new", all_rows)] = _CODE_BY_OPERATION["insert"]
    is_update = codes == _CODE_BY_OPERATION["update"]
    if "update" in operations and conditions["update"] is None:
        sent_codes[is_update] = _CODE_BY_OPERATION["update"]
    elif "update" in operations and is_update.any():
        old_mask, new_mask = mask_matches("update", "old", has_old), mask_matches("update", "new", all_rows)
        # If the message has no old tuple, the result of the filter for the new row also counts for the old row.
        old_mask = np.where(has_old, old_mask, new_mask)
        for (old_matches, new_matches), sent_operation in UPDATE_TRANSFORMATION.items():
            if sent_operation is not None:
                sent_codes[is_update & (old_mask == old_matches) & (new_mask == new_matches)] = (
                    _CODE_BY_OPERATION[sent_operation]
                )
    return sent_codes


def _mask_matches(
    compute_verdicts: VerdictFunction | None, rows: pa.StructArray, is_evaluated: _Mask
) -> _Mask:
    """Return the mask of the rows that match; only the rows in the mask `is_evaluated` are evaluated."""
    if compute_verdicts is None:
        return is_evaluated
    matches = np.zeros(len(is_evaluated), np.bool_)
    if is_evaluated.any():
        batch = pa.RecordBatch.from_struct_array(
            rows if is_evaluated.all() else rows.filter(pa.array(is_evaluated))
        )
        matches[is_evaluated] = np.asarray(compute_verdicts(batch).fill_null(False))
    return matches


def _select_sent_changes(
    changes: pa.RecordBatch, sent_codes: _Codes, schema: pa.Schema, metadata: MetadataColumns
) -> pa.RecordBatch:
    """Return the changes that are sent, in the columns of `schema` except `slice`."""
    original_operations = changes.column("operation")
    columns = {name: changes.column(name) for name in CHANGE_COLUMNS}
    columns["operation"] = _OPERATIONS.take(pa.array(sent_codes, mask=sent_codes == NOT_SENT))
    for name, operation in (("old", "insert"), ("new", "delete"), ("unchanged", "delete")):
        columns[name] = _set_null(columns[name], sent_codes == _CODE_BY_OPERATION[operation])
    sent_changes = _project(columns, schema_without_slice(schema), metadata, original_operations)
    if (sent_codes != NOT_SENT).all():
        return sent_changes
    return sent_changes.filter(columns["operation"].is_valid())


def _set_null(values: pa.Array, mask: _Mask) -> pa.Array:
    """Return the values with NULL where `mask` is true."""
    if not mask.any():
        return values
    return values.take(pa.array(np.arange(len(values)), mask=mask))


def _project(
    columns: Mapping[str, pa.Array],
    schema: pa.Schema,
    metadata: MetadataColumns,
    original_operations: pa.Array,
) -> pa.RecordBatch:
    """Return the changes in the columns of a schema.

    If the schema has metadata columns, they are added. A new row gets the metadata of the change that made it. An
    old row gets metadata as if the change had deleted it.
    """
    arrays = {name: columns[name] for name in schema.names}

    def project_value(rows: pa.StructArray, side: str, row_field: pa.Field) -> pa.Array:
        if row_field.name not in metadata.kinds:
            return struct_field(rows, row_field.name)
        is_new = side == "new"
        return (
            metadata.make_values(row_field.name, columns, len(rows))
            if is_new
            else metadata.make_old_row_values(row_field.name, columns, original_operations)
        )

    for side in SIDES:
        rows, fields = arrays[side], list(schema.field(side).type)
        children = [project_value(rows, side, row_field) for row_field in fields]
        arrays[side] = pa.StructArray.from_arrays(children, fields=fields, mask=rows.is_null())
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def truncate_changes(
    truncates: Sequence[tuple[int, int, datetime | None]], schema: pa.Schema
) -> pa.RecordBatch:
    """Return TRUNCATEs as changes without `slice`; `truncates` has their commit LSNs, ordinals and commit times."""
    rows = [
        {"commit_lsn": lsn, "ordinal": ordinal, "commit_time": time, "operation": "truncate"}
        for lsn, ordinal, time in truncates
    ]
    return pa.RecordBatch.from_pylist(rows, schema_without_slice(schema))


def add_slice(changes: pa.RecordBatch, slice_end: int, schema: pa.Schema) -> pa.RecordBatch:
    """Add the end LSN of the slice (the changes between two positions of the slot) as the first column of changes."""
    slice_ends = pa.array(np.full(changes.num_rows, slice_end, np.int64))
    return pa.RecordBatch.from_arrays([slice_ends, *changes.columns], schema=schema)
