"""The UPDATE transformation (section 29.4.3): messages of one relation version -> the subscription's changes.

In: batches of stored messages (`ENCODED_COLUMNS`). Out: batches of changes in the replica's columns, and
counts of changes by operation and result. Raises the errors of decoding, and PostgreSQL's errors if a filter
fails for a row.
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

from pgsieve.decoding.changes.columns import CHANGE_COLUMNS, ROW_OPERATIONS, SIDES, field_of, without_slice
from pgsieve.decoding.changes.decode import AddedColumn, FilterColumns, decoded
from pgsieve.decoding.changes.metadata_columns import MetadataColumns
from pgsieve.decoding.changes.sent_as import NOTHING, Origin, SentAs
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.publications.update_transformation import UPDATE_TRANSFORMATION
from pgsieve.decoding.row_filters.evaluation.verdicts import Verdicts, condition
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.decoding.wording import shortened

_Mask: TypeAlias = npt.NDArray[np.bool_]
#: For each change the index in `ROW_OPERATIONS` of the operation as which it is sent, or `NOTHING`.
_Codes: TypeAlias = npt.NDArray[np.int32]
#: For insert, update and delete the row filters that are ORed, None for no filter.
Filters: TypeAlias = Mapping[str, Sequence[RowFilter] | None]
#: For insert, update and delete the verdict on a batch of rows, None for no filter.
_Conditions: TypeAlias = Mapping[str, Verdicts | None]
#: Returns the columns that filters read of a batch of messages; makes them unless another transformation has.
Shared: TypeAlias = Callable[[FilterColumns, Callable[[], pa.RecordBatch]], pa.RecordBatch]

_OPERATIONS = pa.array(ROW_OPERATIONS)
_CODES = {operation: number for number, operation in enumerate(ROW_OPERATIONS)}


def _alone(_read: FilterColumns, make: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
    return make()


@dataclass(frozen=True)
class Encoded:
    """A batch of messages.

    `shared` gives the columns that filters read, decoded once for several transformations.
    """

    batch: pa.RecordBatch
    shared: Shared = _alone


@dataclass(frozen=True)
class Transformation:
    """Decodes the messages of a relation version into the changes that the subscription gets.

    It is sent to executors. `schema` is that of the replica's changes (`changes_schema`), `key` its key.
    `read` are the columns that the filters read; None without filters. Changes are counted by `origin`.
    `metadata` are columns of `schema` that the table does not have.
    """

    columns: RelationColumns
    schema: pa.Schema
    key: Sequence[str]
    operations: frozenset[str]
    filters: Filters
    added: Sequence[AddedColumn] = ()
    read: FilterColumns | None = None
    origin: Origin = field(default_factory=Origin)
    metadata: MetadataColumns = field(default_factory=MetadataColumns)

    def changes(self, messages: Iterable[Encoded], counts: Counter[SentAs]) -> Iterator[pa.RecordBatch]:
        """The subscription's changes, in the columns of `schema` except the slice.

        They are counted in `counts`. See `made`.
        """
        return (sent for sent, _ in self.made(messages, counts))

    def made(
        self, messages: Iterable[Encoded], counts: Counter[SentAs]
    ) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """The same, each batch with the operations of its changes before row filters.

        A transformed UPDATE is sent even if `operations` has no insert or delete (29.4.3). Changes that the
        filters reject are decoded only as far as the filters read.
        """
        conditions: _Conditions = {
            operation: None if filters is None else _named(filters)
            for operation, filters in self.filters.items()
        }
        names = frozenset(f.name for f in self.schema.field("new").type) - self.metadata.kinds.keys()
        for each in messages:
            chosen, becomes = each.batch, None
            if not chosen.num_rows:
                continue
            if self.read is not None:
                becomes = self._codes(self._filtered(self.read, each), conditions, counts)
                is_sent = becomes != NOTHING
                chosen, becomes = chosen.filter(pa.array(is_sent)), becomes[is_sent]
            if chosen.num_rows:
                whole = decoded(chosen, self.columns, names, self.key, self.added)
                codes = self._codes(whole, conditions, counts) if becomes is None else becomes
                yield _as_sent(whole, codes, self.schema, self.metadata)

    def _filtered(self, read: FilterColumns, messages: Encoded) -> pa.RecordBatch:
        """The changes with the columns that filters read."""

        def make() -> pa.RecordBatch:
            return decoded(messages.batch, read.columns, read.names, read.key, read.added)

        return messages.shared(read, make)

    def _codes(self, changes: pa.RecordBatch, conditions: _Conditions, counts: Counter[SentAs]) -> _Codes:
        """Count decoded changes, and return the codes of the operations as which they are sent."""
        operation: _Codes = np.asarray(pc.index_in(changes.column("operation"), _OPERATIONS))
        becomes = _sent_as(changes, operation, conditions, self.operations)
        self.origin.count(operation, becomes, counts)
        return becomes


def _named(filters: Sequence[RowFilter]) -> Verdicts:
    """The verdict of row filters that are ORed; an error of their evaluation names them."""
    evaluated = condition(*(each.tree for each in filters))

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        try:
            return evaluated(batch)
        except (FilterValueError, NumericError) as error:
            where = shortened(" OR ".join(each.expression for each in filters))
            raise type(error)(
                f"row filter {where}: {error.message}",
                hint="alter the row filter, or correct the row at the publisher",
                sqlstate=error.sqlstate,
            ) from None

    return verdicts_on


def _sent_as(
    changes: pa.RecordBatch, operation: _Codes, conditions: _Conditions, operations: Collection[str]
) -> _Codes:
    """The codes of the operations as which changes are sent; `changes` have the columns that filters read."""
    has_old = np.asarray(changes.column("old").is_valid())

    def matches(of: str, side: str, rows: _Mask) -> _Mask:
        return _matches(conditions[of], changes.column(side), rows & (operation == _CODES[of]))

    every = np.ones(len(operation), np.bool_)
    becomes = np.full(len(operation), NOTHING, np.int32)
    if "delete" in operations:
        becomes[matches("delete", "old", has_old)] = _CODES["delete"]
    if "insert" in operations:
        becomes[matches("insert", "new", every)] = _CODES["insert"]
    updates = operation == _CODES["update"]
    if "update" in operations and conditions["update"] is None:
        becomes[updates] = _CODES["update"]
    elif "update" in operations and updates.any():
        before, after = matches("update", "old", has_old), matches("update", "new", every)
        # Without an old tuple the new row alone decides.
        before = np.where(has_old, before, after)
        for (old_matches, new_matches), sent in UPDATE_TRANSFORMATION.items():
            if sent is not None:
                becomes[updates & (before == old_matches) & (after == new_matches)] = _CODES[sent]
    return becomes


def _matches(verdicts: Verdicts | None, rows: pa.StructArray, concerned: _Mask) -> _Mask:
    """The mask of the `concerned` rows that pass; NULL counts as no. Other rows are not evaluated."""
    if verdicts is None:
        return concerned
    passed = np.zeros(len(concerned), np.bool_)
    if concerned.any():
        batch = pa.RecordBatch.from_struct_array(
            rows if concerned.all() else rows.filter(pa.array(concerned))
        )
        passed[concerned] = np.asarray(verdicts(batch).fill_null(False))
    return passed


def _as_sent(
    changes: pa.RecordBatch, becomes: _Codes, schema: pa.Schema, metadata: MetadataColumns
) -> tuple[pa.RecordBatch, pa.Array]:
    """The changes that are sent, in the columns of `schema` except the slice, and their first operations.

    These are the operations before row filters.
    """
    came_as = changes.column("operation")
    columns = {name: changes.column(name) for name in CHANGE_COLUMNS}
    columns["operation"] = _OPERATIONS.take(pa.array(becomes, mask=becomes == NOTHING))
    for name, gone in (("old", "insert"), ("new", "delete"), ("unchanged", "delete")):
        columns[name] = _without(columns[name], becomes == _CODES[gone])
    sent = _projected(columns, without_slice(schema), metadata, came_as)
    if (becomes != NOTHING).all():
        return sent, came_as
    is_sent = columns["operation"].is_valid()
    return sent.filter(is_sent), came_as.filter(is_sent)


def _without(values: pa.Array, absent: _Mask) -> pa.Array:
    """The values, with NULL where `absent` is true."""
    if not absent.any():
        return values
    return values.take(pa.array(np.arange(len(values)), mask=absent))


def _projected(
    columns: Mapping[str, pa.Array], schema: pa.Schema, metadata: MetadataColumns, came_as: pa.Array
) -> pa.RecordBatch:
    """The changes in the columns and fields of a schema. An old row has the metadata of a row that ends."""
    arrays = {name: columns[name] for name in schema.names}

    def child(rows: pa.StructArray, side: str, f: pa.Field) -> pa.Array:
        if f.name not in metadata.kinds:
            return field_of(rows, f.name)
        new = side == "new"
        return (
            metadata.values(f.name, columns, len(rows))
            if new
            else metadata.ended_values(f.name, columns, came_as)
        )

    for side in SIDES:
        rows, fields = arrays[side], list(schema.field(side).type)
        children = [child(rows, side, f) for f in fields]
        arrays[side] = pa.StructArray.from_arrays(children, fields=fields, mask=rows.is_null())
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def truncates(places: Sequence[tuple[int, int, datetime | None]], schema: pa.Schema) -> pa.RecordBatch:
    """TRUNCATEs at these order keys and commit times, as changes of that schema except the slice.

    Their other columns are NULL.
    """
    rows = [
        {"commit_lsn": lsn, "ordinal": ordinal, "commit_time": time, "operation": "truncate"}
        for lsn, ordinal, time in places
    ]
    return pa.RecordBatch.from_pylist(rows, without_slice(schema))


def in_slice(changes: pa.RecordBatch, end: int, schema: pa.Schema) -> pa.RecordBatch:
    """Changes with the end of their slice as the first column."""
    ends = pa.array(np.full(changes.num_rows, end, np.int64))
    return pa.RecordBatch.from_arrays([ends, *changes.columns], schema=schema)
