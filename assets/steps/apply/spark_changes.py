"""Reads a batch's changes by Spark: their keys as `KeyedChanges`, and the rows of the net change as a DataFrame.

It is for replicas that only Spark can write, by a MERGE. In: the change history (the Delta table with all changes) and
the replica. A batch is the changes that are applied to a replica in one commit; their net change
is what they do together. The place of a change is a number that orders the changes of a batch. Out: the changes by key,
from which the driver computes the net change (`pgsieve.decoding.changes.net_change`), and a DataFrame as the source of
a MERGE. Spark joins rows only by numbers, not by keys. Functions on Arrow batches choose the rows and compare keys, so
keys are equal by the same rules as in the other engines (`spark_tasks`). Raises Spark's errors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StringType, StructField, StructType

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.keyless_changes import DIGESTED_CHANGE_SCHEMA, KeylessChanges
from pgsieve.assets.steps.apply.merge_rows import ChangesToMerge, MergeRows
from pgsieve.assets.steps.apply.merging import merge_by_spark
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.apply.spark_tasks import (
    DELETED_COLUMN,
    JoinedColumn,
    KeySearch,
    RowFunction,
    convert_rows,
    make_labels,
    select_by_place,
    select_incomplete_rows,
)
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableBatch
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes
from pgsieve.assets.steps.checkpoint import checkpoint
from pgsieve.assets.steps.records.columns import format_struct_ddl, get_struct_field
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.decoding.changes.digests import WantedDigests, digest_sides
from pgsieve.decoding.changes.extent import PLACE_COLUMNS
from pgsieve.decoding.changes.keys import PresentKeys, is_orderable
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.decoding.changes.net_rows import NetRows
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.merge import Clauses, Merge
from pgsieve.resources.lake.delta.records import Commit, quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.runners import to_arrow_schema, to_spark_schema


@dataclass(frozen=True)
class SparkChanges(ChangesToMerge[DataFrame]):
    """A batch's changes of one table.

    `path` is the replica. `read_changes` returns all changes of the batch's slices, in the columns of a change history.
    `can_mark_rows` says whether a MERGE may mark rows in deletion vectors, if the replica has them.
    """

    lake: Lake
    path: str
    read_changes: Callable[[], DataFrame]
    definition: Definition
    pending: PendingChanges
    can_mark_rows: bool = False

    @classmethod
    def of_history(cls, batch: TableBatch, *, can_mark_rows: bool = False) -> "SparkChanges":
        """The changes in a change history."""
        lake, path, ends = batch.lake, batch.changes_path, batch.pending.slice_ends

        def read_changes() -> DataFrame:
            return lake.find_slices(path, ends, must_exist=True).read_frame(lake.spark)

        return cls(lake, batch.path, read_changes, batch.definition, batch.pending, can_mark_rows)

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
        return make_keyed_changes(
            [changes],
            key_schema,
            sorted(self.pending.unsent_columns),
            self.pending.extent,
            soft_delete_columns=soft_delete_columns,
        )

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
        select_rows = partial(select_by_place, selection, schema, copy_counts)
        return self.read_changes().select(*PLACE_COLUMNS, side).mapInArrow(select_rows, result_ddl)

    def find_present_keys(self, keyed_changes: KeyedChanges) -> PresentKeys:
        """Find the rows of the replica that have one of the keys to look up (`KeyedChanges.sought_keys`)."""
        return keyed_changes.find_present_keys(self._look_up_keys)

    def _look_up_keys(self, keys: pa.Table) -> PresentKeys:
        rows = self._read_replica_rows(keys, np.arange(keys.num_rows), ()).toArrow()
        present_keys = conform(
            rows.select(make_labels("k", keys.column_names)).rename_columns(keys.column_names), keys.schema
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
        columns = [*make_labels("k", keys.column_names), *make_labels("v", value_columns)]
        first_fields = to_spark_schema(pa.schema([("number", pa.int64()), ("lives", pa.bool_())]))
        schema = StructType([*first_fields, *(fields[name] for name in columns)])
        return rows.mapInArrow(KeySearch.from_keys(keys, numbers, columns).select_rows_of_keys, schema)

    def _read_candidate_rows(
        self, keys: pa.Table, value_columns: Sequence[str] = (), *, is_bounded: bool = True
    ) -> DataFrame:
        """Read the rows of the replica that may have one of `keys`; all its rows if `is_bounded` is False.

        Out: the columns k0, k1, … (the key), v0, v1, … (the columns `value_columns`), and `deleted` if deleted rows are
        kept.
        """
        names = keys.column_names
        columns = [
            F.col(quote_name(name)).alias(k) for name, k in zip(names, make_labels("k", names), strict=True)
        ]
        columns += [
            F.col(quote_name(name)).alias(v)
            for name, v in zip(value_columns, make_labels("v", value_columns), strict=True)
        ]
        if (deleted_column := self.definition.deleted_column) is not None:
            columns.append(F.col(quote_name(deleted_column)).alias(DELETED_COLUMN))
        rows = self.lake.read_table(self.path).select(*columns)
        # `KeySearch` compares the keys. These conditions only let Spark skip files by their statistics.
        for name, k in zip(names, make_labels("k", names), strict=True) if is_bounded else ():
            if is_orderable(keys[name].type):
                bounds = pc.min_max(keys[name])
                if bounds["min"].is_valid:
                    rows = rows.where(
                        F.col(k).between(_make_literal(bounds["min"]), _make_literal(bounds["max"]))
                    )
        return rows

    def merge(self, merge_rows: MergeRows, keyed_changes: KeyedChanges, commit: Commit) -> bool:
        """Merge a net change into the replica. Returns False if the replica has the position of the commit already."""
        source = self._make_source(merge_rows, keyed_changes)
        return bool(self.run_merge(source, merge_rows.merge.make_clauses(quote_name), commit))

    def run_merge(self, source: DataFrame, clauses: Clauses, commit: Commit) -> Mapping[str, int]:
        """Merge a source into the replica, as `merge_by_spark` does."""
        return merge_by_spark(
            self.lake, self.path, checkpoint(source), clauses, commit, can_mark_rows=self.can_mark_rows
        )

    def append(self, rows: DataFrame, commit: Commit) -> None:
        """Append rows to the replica, or overwrite the replica with them."""
        replica_columns = rows.select(*(F.col(quote_name(name)) for name in self.definition.names))
        size_bytes = self.lake.records.size_bytes(self.path) + self.pending.size_bytes
        self.lake.write(replica_columns, self.path, commit, byte_count=size_bytes)

    def count(self, rows: DataFrame) -> int:
        """Count rows."""
        return rows.count()

    def read_new_rows(self, merge_rows: MergeRows, keyed_changes: KeyedChanges) -> DataFrame:
        """Read the new rows of a net change, in the columns of the replica."""
        return self._map_new_rows(merge_rows, keyed_changes, lambda rows, _: rows, self._row_type)

    def _make_source(self, merge_rows: MergeRows, keyed_changes: KeyedChanges) -> DataFrame:
        """Make the source of a MERGE."""
        merge, types = merge_rows.merge, {row_field.name: row_field.dataType for row_field in self._row_type}
        type_by_label = {k: types[name] for name, k in merge.key_source_by_column.items()}
        type_by_label |= {v: types[name] for name, v in merge.value_source_by_column.items()}
        schema = StructType([StructField(label, label_type) for label, label_type in type_by_label.items()])
        source = self._map_new_rows(
            merge_rows, keyed_changes, merge_rows.make_source, schema.add("action", StringType())
        )
        if merge_rows.other_rows.num_rows:
            rows = self.lake.spark.createDataFrame(merge_rows.other_rows)
            columns = (
                F.col(name).cast(type_by_label.get(name, StringType())).alias(name) for name in rows.columns
            )
            source = source.unionByName(rows.select(*columns), allowMissingColumns=True)
        if keyed_changes.truncated_metadata is None:
            return source
        source_keys = keyed_changes.keys.take(pa.array(merge_rows.key_numbers))
        truncated_rows = self._make_truncated_rows(
            keyed_changes.truncated_metadata, source_keys, source, merge
        )
        return source.unionByName(truncated_rows)

    def _map_new_rows(
        self, merge_rows: MergeRows, keyed_changes: KeyedChanges, convert: RowFunction, schema: StructType
    ) -> DataFrame:
        """Read the new rows, complete them, and convert them to `schema` by a function of rows and places."""
        new_rows = merge_rows.new_rows
        is_incomplete = np.zeros(len(new_rows), np.bool_)
        for places in new_rows.sent_places.values():
            is_incomplete |= places != new_rows.places
        frames, arrow_schema = list[DataFrame](), to_arrow_schema(schema)
        if not is_incomplete.all() or not len(new_rows):
            selection = self._select(merge_rows, new_rows.places[~is_incomplete])
            convert_complete_rows = partial(convert_rows, merge_rows, convert, arrow_schema, ())
            frames.append(self._read_placed_rows(selection, "new").mapInArrow(convert_complete_rows, schema))
        if is_incomplete.any():
            rows, columns = self._read_incomplete_rows(
                merge_rows, keyed_changes, new_rows.take(np.flatnonzero(is_incomplete))
            )
            convert_completed_rows = partial(convert_rows, merge_rows, convert, arrow_schema, columns)
            frames.append(rows.mapInArrow(convert_completed_rows, schema))
        return reduce(lambda left, right: left.unionByName(right), frames)

    def _read_incomplete_rows(
        self, merge_rows: MergeRows, keyed_changes: KeyedChanges, rows: NetRows
    ) -> tuple[DataFrame, Sequence[JoinedColumn]]:
        """Read rows, and join the values that their changes did not send. Returns the columns with these values, too.

        A value is joined by the place of the change that sent it (`p0`, `p1`, …), or by the number of the key under which
        the replica has it (`base`).
        """
        row_ddl = format_struct_ddl(self.definition.columns)
        numbers = [*(f"p{i}" for i in range(len(rows.sent_places))), "base"]
        ddl = f"place bigint, {', '.join(f'{name} bigint' for name in numbers)}, row {row_ddl}"
        schema = to_arrow_schema(self.lake.spark.createDataFrame([], ddl).schema)
        select_rows = partial(select_incomplete_rows, self._select(merge_rows, rows.places), rows, schema)
        frame = self.read_changes().select(*PLACE_COLUMNS, "new").mapInArrow(select_rows, ddl)
        columns, base_keys = list[JoinedColumn](), list[Numbers]()
        for i, name in enumerate(rows.sent_places):
            _, sources = rows.find_column_sources(name)
            base_keys.append(sources.needed_base_rows)
            if len(sources.needed_changes):
                sent_rows = self._read_placed_rows(self._select(merge_rows, sources.needed_changes), "new")
                sent_values = sent_rows.select(
                    F.col("place").alias(f"q{i}"), get_struct_field("row", name).alias(f"sent{i}")
                )
                frame = frame.join(sent_values, F.col(f"p{i}") == F.col(f"q{i}"), "left")
            has_base = bool(len(sources.needed_base_rows))
            columns.append(
                JoinedColumn(
                    name,
                    f"p{i}",
                    f"sent{i}" if len(sources.needed_changes) else None,
                    f"v{i}" if has_base else None,
                )
            )
        needed_keys = np.unique(np.concatenate(base_keys))
        if len(needed_keys):
            former_rows = self._read_replica_rows(
                keyed_changes.keys.take(pa.array(needed_keys)), needed_keys, list(rows.sent_places)
            )
            former_rows = former_rows.select("number", *(c.base_values for c in columns if c.base_values))
            frame = frame.join(former_rows, F.col("base") == F.col("number"), "left")
        return frame, columns

    def _select(self, merge_rows: MergeRows, places: Numbers) -> RowSelection:
        """Select the new rows of the changes at these places."""
        return RowSelection(self.pending.extent, self._stamp, places, completions=merge_rows.ended_metadata)

    @cached_property
    def _row_type(self) -> StructType:
        """The replica's columns, as a type of Spark."""
        ddl = f"row {format_struct_ddl(self.definition.columns)}"
        row_type = self.lake.spark.createDataFrame([], ddl).schema["row"].dataType
        assert isinstance(row_type, StructType)
        return row_type

    @property
    def row_schema(self) -> pa.Schema:
        """The replica's columns."""
        return to_arrow_schema(self._row_type)

    def _make_truncated_rows(
        self, truncated_metadata: pa.Table, keys: pa.Table, source: DataFrame, merge: Merge
    ) -> DataFrame:
        """Read the living rows of the replica that a TRUNCATE ends, and set the metadata `truncated_metadata` in them.

        Rows with one of `keys` are left out, as `source` has them already.
        """
        (metadata,) = self._stamp.set_time(truncated_metadata).to_pylist()
        rows = self._read_candidate_rows(keys, is_bounded=False)
        columns = make_labels("k", keys.column_names)
        schema = StructType([row_field for row_field in rows.schema if row_field.name in columns])
        living_rows = rows.mapInArrow(
            KeySearch.from_keys(keys, np.arange(keys.num_rows), columns).select_other_living_rows, schema
        )
        value_by_label = {v: F.lit(metadata.get(name)) for name, v in merge.value_source_by_column.items()}
        return living_rows.select(
            *(
                F.col(k).alias(merge.key_source_by_column[name])
                for name, k in zip(keys.column_names, columns, strict=True)
            ),
            *(value.cast(source.schema[v].dataType).alias(v) for v, value in value_by_label.items()),
            F.lit("end").alias("action"),
        )


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
