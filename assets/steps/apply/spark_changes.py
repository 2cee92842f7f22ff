"""Reads a batch's changes by Spark: their keys as `KeyedChanges`, and the rows of the net change as a DataFrame.

It is for replicas that only Spark can write, by a MERGE. In: the change history (the Delta table with all changes) and
the replica. A batch is the changes that are applied to a replica in one commit; their net change
is what they do together. The place of a change is a number that orders the changes of a batch. Out: the changes by key,
from which the driver computes the net change (`pgsieve.decoding.changes.net_change`), and a DataFrame as the source of
a MERGE. Spark joins rows only by numbers, not by keys. Functions on Arrow batches choose the rows and compare keys, so
keys are equal by the same rules as in the other engines. Raises Spark's errors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.keyless_changes import DIGESTED_CHANGE_SCHEMA, KeylessChanges
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.apply.table_result import PendingChanges
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes
from pgsieve.assets.steps.records.columns import format_struct_ddl, get_struct_field
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.digests import WantedDigests, digest_sides
from pgsieve.decoding.changes.extent import PLACE_COLUMNS
from pgsieve.decoding.changes.keys import PresentKeys, SoughtKeys, is_orderable
from pgsieve.decoding.changes.merge_source import make_merge_source
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp, mask_living_rows
from pgsieve.decoding.changes.net_change import NetChange
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.runners import to_arrow_schema, to_spark_schema

#: The net change of up to this many changes is broadcast to all executors.
BROADCAST_ROWS = 4_000_000


@dataclass(frozen=True)
class SparkChanges:
    """A batch's changes of one table.

    `path` is the replica. `read_changes` returns all changes of the batch's slices, in the columns of a change history.
    """

    lake: Lake
    path: str
    read_changes: Callable[[], DataFrame]
    definition: Definition
    pending: PendingChanges

    @classmethod
    def of_history(
        cls, lake: Lake, path: str, changes_path: str, definition: Definition, pending: PendingChanges
    ) -> "SparkChanges":
        """The changes in a change history at `changes_path`."""
        read_changes = partial(lake.read_slices, changes_path, pending.slice_ends, must_exist=True)
        return cls(lake, path, read_changes, definition, pending)

    @cached_property
    def _stamp(self) -> Stamp:
        """Sets the time at which rows are applied, the same in all rows of the batch."""
        return Stamp(self.definition.metadata_column(APPLIED_AT))

    def read_inserts(self) -> DataFrame:
        """Read the new rows of the INSERTs after the last TRUNCATE."""
        selection = RowSelection(self.pending.extent, self._stamp)
        return self._read_placed_rows(selection, "new").select("row.*")

    def read_keyed_changes(self) -> KeyedChanges:
        """Read the changes by key."""
        key = self.definition.key

        def select_side(name: str) -> Column:
            fields = F.struct(*(get_struct_field(name, n).alias(n) for n in names))
            return F.when(F.col(name).isNotNull(), fields).alias(name)

        soft_delete_columns = self.definition.soft_delete_columns
        columns = [*PLACE_COLUMNS, "unchanged", *(["commit_time"] if soft_delete_columns else [])]
        names = [*key, *(name for name, _ in soft_delete_columns)]
        changes = self.read_changes().select(*columns, select_side("new"), select_side("old")).toArrow()
        row_type = changes.schema.field("new").type
        key_schema = pa.schema([row_type.field(row_type.get_field_index(name)) for name in key])
        keyed_changes = make_keyed_changes(
            [changes],
            key_schema,
            sorted(self.pending.unsent_columns),
            self.pending.extent,
            soft_delete_columns=soft_delete_columns,
        )
        assert keyed_changes is not None
        return keyed_changes

    def read_keyless_changes(self) -> KeylessChanges:
        """Read the changes of a table without a key."""
        names = [name for name, _ in self.definition.table_columns]

        def replace_by_digests(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return (digest_sides(batch, names) for batch in batches)

        changes = (
            self.read_changes()
            .select(*DIGESTED_CHANGE_SCHEMA.names)
            .mapInArrow(replace_by_digests, to_spark_schema(DIGESTED_CHANGE_SCHEMA))
        )
        return KeylessChanges.from_digests(changes.toArrow(), self.pending.extent)

    def count_rows(self, sought: WantedDigests) -> Numbers:
        """For each digest (a hash of a whole row) in `sought`, count the replica's rows that have it."""
        row_counts = np.zeros(len(sought), np.int64)
        if self.pending.truncated_at is not None:
            return row_counts
        schema = pa.schema([("digest_index", pa.int64())])

        def match_digests(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield pa.RecordBatch.from_arrays([pa.array(sought.find_rows(batch)[1])], schema=schema)

        # mapInArrow would take a name with a dot for a path into a struct.
        columns = (
            F.col(quote_name(name)).alias(f"c{number}")
            for number, (name, _) in enumerate(self.definition.table_columns)
        )
        rows = self.lake.read_table(self.path).select(*columns)
        digest_indices = rows.mapInArrow(match_digests, to_spark_schema(schema))
        counts = digest_indices.groupBy("digest_index").count().toArrow()
        row_counts[np.asarray(counts["digest_index"])] = np.asarray(counts["count"])
        return row_counts

    def read_rows(self, side: str, places: Numbers, copy_counts: Numbers) -> DataFrame:
        """Read the old or new rows of the changes at some places, as the column `row`.

        `side` is `old` or `new`. `copy_counts` has for each place how often its row is repeated.
        """
        order = np.argsort(places)
        stamp = self._stamp if side == "new" else Stamp(None)
        selection = RowSelection(self.pending.extent, stamp, places[order], side=side)
        return self._read_placed_rows(selection, side, copy_counts[order]).select("row")

    def _read_placed_rows(
        self, selection: RowSelection, side: str, copy_counts: Numbers | None = None
    ) -> DataFrame:
        """Read the selected rows as the column `row`, with the places of their changes as the column `place`.

        `copy_counts` has for each chosen place how often its row is repeated; None for once.
        """
        result_ddl = f"place bigint, row {format_struct_ddl(self.definition.columns)}"
        schema = to_arrow_schema(self.lake.spark.createDataFrame([], result_ddl).schema)
        select_rows = partial(_select_by_place, selection, schema, copy_counts)
        return self.read_changes().select(*PLACE_COLUMNS, side).mapInArrow(select_rows, result_ddl)

    def find_present_keys(self, keyed_changes: KeyedChanges) -> PresentKeys:
        """Find the rows of the replica that have one of the keys to look up (`KeyedChanges.sought_keys`)."""
        return keyed_changes.find_present_keys(self._look_up_keys)

    def _look_up_keys(self, keys: pa.Table) -> PresentKeys:
        rows = self._read_replica_rows(keys, np.arange(keys.num_rows), ()).toArrow()
        present_keys = conform(
            rows.select(_make_labels("k", keys.column_names)).rename_columns(keys.column_names), keys.schema
        )
        return PresentKeys(
            np.asarray(rows["number"]).astype(np.int64), present_keys, np.asarray(rows["lives"])
        )

    def _read_replica_rows(self, keys: pa.Table, numbers: Numbers, value_columns: Sequence[str]) -> DataFrame:
        """Read the rows of the replica that have one of `keys`.

        Out: - `number`: the element of `numbers` for the row's key
             - `lives`: False for a row that is deleted but kept
             - k0, k1, …: the columns of the key
             - v0, v1, …: the columns `value_columns`
        """
        rows = self._read_candidate_rows(keys, value_columns)
        fields = {row_field.name: row_field for row_field in rows.schema}
        columns = [*_make_labels("k", keys.column_names), *_make_labels("v", value_columns)]
        first_fields = to_spark_schema(pa.schema([("number", pa.int64()), ("lives", pa.bool_())]))
        schema = StructType([*first_fields, *(fields[name] for name in columns)])
        return rows.mapInArrow(_KeySearch.from_keys(keys, numbers, columns).select_rows_of_keys, schema)

    def _read_candidate_rows(
        self, keys: pa.Table, value_columns: Sequence[str] = (), *, is_bounded: bool = True
    ) -> DataFrame:
        """Read the rows of the replica that may have one of `keys`; all its rows if `is_bounded` is False.

        Out: the columns k0, k1, … (the key), v0, v1, … (the columns `value_columns`), and `deleted` if deleted rows are
        kept.
        """
        names = keys.column_names
        columns = [
            F.col(quote_name(name)).alias(k) for name, k in zip(names, _make_labels("k", names), strict=True)
        ]
        columns += [
            F.col(quote_name(name)).alias(v)
            for name, v in zip(value_columns, _make_labels("v", value_columns), strict=True)
        ]
        if (deleted_column := self.definition.deleted_column) is not None:
            columns.append(F.col(quote_name(deleted_column)).alias(_DELETED_COLUMN))
        rows = self.lake.read_table(self.path).select(*columns)
        # `_KeySearch` compares the keys. These conditions only let Spark skip files by their statistics.
        for name, k in zip(names, _make_labels("k", names), strict=True) if is_bounded else ():
            if is_orderable(keys[name].type):
                bounds = pc.min_max(keys[name])
                if bounds["min"].is_valid:
                    rows = rows.where(
                        F.col(k).between(_make_literal(bounds["min"]), _make_literal(bounds["max"]))
                    )
        return rows

    def make_merge_source(
        self, keyed_changes: KeyedChanges, present_keys: PresentKeys, net_change: NetChange, merge: Merge
    ) -> DataFrame:
        """Make the source of a MERGE: the net change, in the columns of `merge`.

        It is computed from a DataFrame `decided_keys` with a row per key of the net change. It has columns of `merge`, and:
        - `last`: the place of the change that has the key's new row
        - `s0`, `s1`, …: for each column that some change did not send, the place of the change that sent its value
        - `base`: if some values were sent by no change, the number of the key whose row in the replica has them
        - `is_ended`, `e0`, `e1`, …: whether the row is deleted but kept, and its metadata
        """
        unsent_columns, labels = sorted(merge.unsent_flag_by_column), _label_metadata_columns(self.definition)
        decisions = make_merge_source(net_change, retain_ended=keyed_changes.end_metadata is not None)
        stored_keys = present_keys.take_stored_keys(keyed_changes.keys)
        places = np.append(keyed_changes.effective_places, 0)
        metadata = keyed_changes.make_ended_metadata(decisions.end_changes, self._stamp)

        def find_places(changes: Numbers) -> pa.Array:
            return pa.array(places[changes], mask=changes == NONE)

        table = pa.table(
            {
                **{
                    k: stored_keys[name].take(pa.array(decisions.keys))
                    for name, k in merge.key_source_by_column.items()
                },
                "base": pa.array(decisions.base_keys, mask=decisions.base_keys == NONE),
                **{
                    f"s{i}": find_places(decisions.changes_by_column[name])
                    for i, name in enumerate(unsent_columns)
                },
                **{
                    merge.unsent_flag_by_column[name]: decisions.retains_value_by_column[name]
                    for name in unsent_columns
                },
                "last": find_places(decisions.last_changes),
                **{e: metadata[name] for name, e in labels.items()},
                "is_ended": decisions.end_changes != NONE,
                "action": decisions.actions,
            }
        )
        decided_keys = self.lake.spark.createDataFrame(table)
        value_changes = np.concatenate([decisions.last_changes, *decisions.changes_by_column.values()])
        former_key_numbers = np.unique(decisions.base_keys[decisions.base_keys != NONE])
        value_places = np.unique(places[value_changes[value_changes != NONE]])
        upserts = self._make_upserts(
            decided_keys, value_places, keyed_changes.keys, former_key_numbers, merge
        )
        source = upserts.unionByName(self._make_ended_rows(decided_keys, upserts, merge))
        if keyed_changes.truncated_metadata is None:
            return source
        source_keys = keyed_changes.keys.take(pa.array(decisions.keys))
        return source.unionByName(
            self._make_truncated_rows(keyed_changes.truncated_metadata, source_keys, source, merge)
        )

    def _make_ended_rows(self, decided_keys: DataFrame, upserts: DataFrame, merge: Merge) -> DataFrame:
        """Make the rows of the source for keys without a new row.

        They change only the metadata of ended rows (deleted rows that are kept).
        """
        labels = _label_metadata_columns(self.definition)
        ended_values = {
            v: F.col(labels[name]) if name in labels else F.lit(None)
            for name, v in merge.value_source_by_column.items()
        }
        return decided_keys.where("last is null").select(
            *merge.key_source_by_column.values(),
            *(value.cast(upserts.schema[v].dataType).alias(v) for v, value in ended_values.items()),
            *merge.unsent_flag_by_column.values(),
            "action",
        )

    def _make_upserts(
        self,
        decided_keys: DataFrame,
        places: Numbers,
        keys: pa.Table,
        former_key_numbers: Numbers,
        merge: Merge,
    ) -> DataFrame:
        """Add the values of new rows to `decided_keys`, and leave out the keys without a new row.

        `places` are the places of the changes that have the values. A value that no change sent is in the replica,
        under the key that the row had there. `former_key_numbers` are the numbers of these keys.
        """
        unsent_columns, labels = sorted(merge.unsent_flag_by_column), _label_metadata_columns(self.definition)
        placed_rows = self._read_placed_rows(RowSelection(self.pending.extent, self._stamp, places), "new")
        is_small = self.pending.count("insert", "update", "delete") <= BROADCAST_ROWS
        rows = placed_rows.join(
            F.broadcast(decided_keys) if is_small else decided_keys, F.col("place") == F.col("last")
        )
        value_by_column = {name: get_struct_field("row", name) for name in self.definition.names}
        if len(former_key_numbers):
            former_rows = self._read_replica_rows(
                keys.take(pa.array(former_key_numbers)), former_key_numbers, unsent_columns
            )
            # `number`, and the replica's value of each column that some change did not send (wv0, wv1, …).
            former_rows = former_rows.select(
                "number", *(F.col(v).alias(f"w{v}") for v in _make_labels("v", unsent_columns))
            )
            rows = rows.join(former_rows, F.col("base") == F.col("number"), "left")
        for i, name in enumerate(unsent_columns):
            sent_values = placed_rows.select(
                F.col("place").alias(f"p{i}"), get_struct_field("row", name).alias(f"sent{i}")
            )
            rows = rows.join(sent_values, F.col(f"s{i}") == F.col(f"p{i}"), "left")
            replica_value = F.col(f"wv{i}") if len(former_key_numbers) else F.lit(None)
            value_by_column[name] = F.when(F.col(f"s{i}").isNotNull(), F.col(f"sent{i}")).otherwise(
                replica_value
            )
        for name, e in labels.items():
            value_by_column[name] = F.when(F.col("is_ended"), F.col(e)).otherwise(value_by_column[name])
        return rows.select(
            *merge.key_source_by_column.values(),
            *(value_by_column[name].alias(v) for name, v in merge.value_source_by_column.items()),
            *merge.unsent_flag_by_column.values(),
            "action",
        )

    def _make_truncated_rows(
        self, truncated_metadata: pa.Table, keys: pa.Table, source: DataFrame, merge: Merge
    ) -> DataFrame:
        """Read the living rows of the replica that a TRUNCATE ends, and set the metadata `truncated_metadata` in them.

        Rows with one of `keys` are left out, as `source` has them already.
        """
        (metadata,) = self._stamp.set_time(truncated_metadata).to_pylist()
        rows = self._read_candidate_rows(keys, is_bounded=False)
        columns = _make_labels("k", keys.column_names)
        schema = StructType([row_field for row_field in rows.schema if row_field.name in columns])
        living_rows = rows.mapInArrow(
            _KeySearch.from_keys(keys, np.arange(keys.num_rows), columns).select_other_living_rows, schema
        )
        value_by_label = {v: F.lit(metadata.get(name)) for name, v in merge.value_source_by_column.items()}
        return living_rows.select(
            *(
                F.col(k).alias(merge.key_source_by_column[name])
                for name, k in zip(keys.column_names, columns, strict=True)
            ),
            *(value.cast(source.schema[v].dataType).alias(v) for v, value in value_by_label.items()),
            *(F.lit(False).alias(u) for u in merge.unsent_flag_by_column.values()),
            F.lit("end").alias("action"),
        )


#: The column that says whether a row of the replica is deleted.
_DELETED_COLUMN = "deleted"


@dataclass(frozen=True)
class _KeySearch:
    """Finds rows of a replica by their keys, batch by batch. It is sent to executors.

    The batches have the columns of `SparkChanges._read_candidate_rows`. `key_numbers` are the numbers of the sought keys.
    `columns` are the names of the columns to return.
    """

    sought_keys: SoughtKeys
    key_numbers: Numbers
    columns: Sequence[str]

    @classmethod
    def from_keys(cls, keys: pa.Table, key_numbers: Numbers, columns: Sequence[str]) -> "_KeySearch":
        """Make a search for keys with these numbers."""
        labelled_keys = keys.rename_columns(_make_labels("k", keys.column_names))
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


def _make_literal(bound: pa.Scalar) -> Column:
    """Make the column expression of a bound, the least or greatest of the keys.

    Dates and times are given to Spark as numbers, as they may be out of the range of Python's types.
    """
    if pa.types.is_date(bound.type):
        return F.date_from_unix_date(F.lit(bound.cast(pa.int32()).as_py()))
    if pa.types.is_timestamp(bound.type):
        time = F.timestamp_micros(F.lit(bound.cast(pa.int64()).as_py()))
        return time if bound.type.tz else time.cast("timestamp_ntz")
    return F.lit(bound.as_py())


def _mask_living_rows(rows: pa.RecordBatch) -> pa.BooleanArray:
    return mask_living_rows(rows, _DELETED_COLUMN if _DELETED_COLUMN in rows.schema.names else None)


def _select_by_place(
    selection: RowSelection, schema: pa.Schema, copy_counts: Numbers | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Select rows of batches of changes, with the places of the changes.

    `copy_counts` has for each place in `selection.places` how often its row is repeated; None for once.
    """
    row_type = schema.field("row").type
    for batch in batches:
        if (placed_rows := selection.read_placed_rows(_make_reader(batch), row_type)) is None:
            continue
        places, rows = placed_rows
        if copy_counts is not None and selection.places is not None:
            copied_indices = np.repeat(
                np.arange(len(places)), copy_counts[np.searchsorted(selection.places, places)]
            )
            places, rows = places[copied_indices], rows.take(pa.array(copied_indices))
        row_array = pa.StructArray.from_arrays(rows.columns, fields=list(row_type))
        yield pa.RecordBatch.from_arrays([pa.array(places), row_array], schema=schema)


def _make_reader(batch: pa.RecordBatch) -> Callable[[Sequence[str]], pa.Table]:
    rows = pa.Table.from_batches([batch])
    return lambda names: rows.select(list(names))


def _make_labels(letter: str, names: Sequence[str]) -> list[str]:
    """Make names such as k0, k1, … for columns: mapInArrow would take a name with a dot for a path."""
    return [f"{letter}{number}" for number in range(len(names))]


def _label_metadata_columns(definition: Definition) -> dict[str, str]:
    """Map each metadata column to the column (e0, e1, …) of the decided keys that has its value in ended rows."""
    return {name: f"e{i}" for i, (name, _) in enumerate(definition.soft_delete_columns)}
