"""The functions of Arrow batches that Spark's tasks call for a MERGE: they find rows by keys, and select and complete new rows.

The place of a change is a number that orders the changes of a batch, the changes that one commit applies. In: batches of
changes, of rows of the replica, or of new rows with joined values. Out: batches. Raises Arrow's errors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.merge_rows import MergeRows
from pgsieve.assets.steps.apply.row_selection import RowSelection, make_reader
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.keys import SoughtKeys
from pgsieve.decoding.changes.metadata_columns import mask_living_rows
from pgsieve.decoding.changes.net_rows import NetRows
from pgsieve.decoding.changes.value_sources import NumberedValues
from pgsieve.resources.lake.delta.conforming import conform

#: Converts rows; the numbers are the places of the rows' changes.
RowFunction = Callable[[pa.RecordBatch, Numbers], pa.RecordBatch]
#: The column that says whether a row of the replica is deleted.
DELETED_COLUMN = "deleted"


@dataclass(frozen=True)
class KeySearch:
    """Finds rows of a replica by their keys, batch by batch. It is sent to executors.

    The batches have the columns k0, k1, … (the key) and, if deleted rows are kept, `DELETED_COLUMN`. `key_numbers` are the
    numbers of the sought keys. `columns` are the names of the columns to return.
    """

    sought_keys: SoughtKeys
    key_numbers: Numbers
    columns: Sequence[str]

    @classmethod
    def from_keys(cls, keys: pa.Table, key_numbers: Numbers, columns: Sequence[str]) -> "KeySearch":
        """Make a search for keys with these numbers."""
        labelled_keys = keys.rename_columns(make_labels("k", keys.column_names))
        return cls(SoughtKeys.from_keys(labelled_keys), key_numbers, columns)

    def select_rows_of_keys(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Select the rows with one of the keys: the key's number, whether the row lives, and `columns`."""
        for batch in batches:
            row_indices, key_indices = self._find_rows(batch)
            present_rows = batch.take(pa.array(row_indices))
            arrays = [
                pa.array(self.key_numbers[key_indices]),
                _mask_living_rows(present_rows),
                *(present_rows.column(n) for n in self.columns),
            ]
            yield pa.RecordBatch.from_arrays(arrays, ["number", "lives", *self.columns])

    def select_other_living_rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Select the living rows with none of the keys."""
        for batch in batches:
            is_selected = np.array(_mask_living_rows(batch))
            is_selected[self._find_rows(batch)[0]] = False
            yield batch.filter(pa.array(is_selected)).select(list(self.columns))

    def _find_rows(self, batch: pa.RecordBatch) -> tuple[Numbers, Numbers]:
        keys = self.sought_keys.keys
        rows = pa.Table.from_batches([batch]).select(keys.column_names)
        return self.sought_keys.find_rows(conform(rows, keys.schema))


def _mask_living_rows(rows: pa.RecordBatch) -> pa.BooleanArray:
    return mask_living_rows(rows, DELETED_COLUMN if DELETED_COLUMN in rows.schema.names else None)


def select_by_place(
    selection: RowSelection, schema: pa.Schema, copy_counts: Numbers | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Select rows of batches of changes, with the places of the changes.

    `copy_counts` has for each place in `selection.places` how often its row is repeated; None for once.
    """
    row_type = schema.field("row").type
    for batch in batches:
        if (
            placed_rows := selection.read_placed_rows(make_reader(pa.Table.from_batches([batch])), row_type)
        ) is None:
            continue
        places, rows = placed_rows
        if copy_counts is not None and selection.places is not None:
            copied_indices = np.repeat(
                np.arange(len(places)), copy_counts[np.searchsorted(selection.places, places)]
            )
            places, rows = places[copied_indices], rows.take(pa.array(copied_indices))
        row_array = pa.StructArray.from_arrays(rows.columns, fields=list(row_type))
        yield pa.RecordBatch.from_arrays([pa.array(places), row_array], schema=schema)


@dataclass(frozen=True)
class JoinedColumn:
    """The columns of a joined DataFrame that have the values of one column (`name`) of the replica.

    - `places`: the column with the places of the changes that sent the values
    - `sent_values`: the column with the values of these changes; None if there is none
    - `base_values`: the column with the values of the replica's rows; None if there is none
    """

    name: str
    places: str
    sent_values: str | None
    base_values: str | None


def select_incomplete_rows(
    selection: RowSelection, rows: NetRows, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Select rows of batches of changes, with the numbers by which the values are joined that the changes did not send."""
    row_type, base_keys = schema.field("row").type, np.where(rows.is_unsent, rows.base_keys, NONE)
    for batch in batches:
        placed_rows = selection.read_placed_rows(make_reader(pa.Table.from_batches([batch])), row_type)
        if placed_rows is None:
            continue
        places, row_batch = placed_rows
        indexes = np.searchsorted(rows.places, places)
        # A place that joins nothing is NULL, as NULL equals no number.
        numbers = [
            np.where(sent_places[indexes] == places, NONE, sent_places[indexes])
            for sent_places in rows.sent_places.values()
        ]
        numbers.append(base_keys[indexes])
        row_array = pa.StructArray.from_arrays(row_batch.columns, fields=list(row_type))
        yield pa.RecordBatch.from_arrays(
            [pa.array(places), *(pa.array(each, mask=each == NONE) for each in numbers), row_array],
            schema=schema,
        )


def convert_rows(
    merge_rows: MergeRows,
    convert: RowFunction,
    schema: pa.Schema,
    columns: Sequence[JoinedColumn],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Complete new rows with the values in `columns`, and convert them."""
    for batch in batches:
        places, rows = np.asarray(batch["place"]), pa.RecordBatch.from_struct_array(batch["row"])
        if columns:
            sent_values, base_values = dict[str, NumberedValues](), dict[str, NumberedValues]()
            for column in columns:
                value_type = rows.schema.field(column.name).type
                sent_values[column.name] = _collect(batch, value_type, column.places, column.sent_values)
                base_values[column.name] = _collect(batch, value_type, "base", column.base_values)
            rows = merge_rows.complete(rows, places, sent_values, base_values)
        yield from conform(pa.Table.from_batches([convert(rows, places)]), schema).to_batches()


def _collect(
    batch: pa.RecordBatch, value_type: pa.DataType, number_column: str, value_column: str | None
) -> NumberedValues:
    """Collect the values of a column under the numbers in another column; none without `value_column`."""
    parts = (
        []
        if value_column is None
        else [(np.asarray(batch[number_column].fill_null(NONE)), batch[value_column])]
    )
    return NumberedValues.collect(value_type, parts)


def make_labels(letter: str, names: Sequence[str]) -> list[str]:
    """Make names such as k0, k1, … for columns: mapInArrow would take a name with a dot for a path."""
    return [f"{letter}{number}" for number in range(len(names))]
