"""A batch's changes as Spark reads them: their keys as `KeyedChanges`, and the rows of the net change as a DataFrame.

In: the change history and the replica, if only Spark can read them. Out: the changes by key, from which the driver
computes the net change (`pgsieve.decoding.changes.net_change`), and a DataFrame as the source of a MERGE. Functions on
Arrow batches choose the rows and compare keys, so that keys are equal by the same rules as elsewhere. Spark joins rows
only by numbers. Raises Spark's errors.
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

from pgsieve.assets.steps.apply.chosen_rows import ChosenRows
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges, keyed_changes
from pgsieve.assets.steps.apply.keyless_changes import DIGEST_COLUMNS, KeylessChanges
from pgsieve.assets.steps.apply.table_result import PendingChanges
from pgsieve.assets.steps.records.columns import struct_field, write_struct_ddl
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.digests import WantedDigests, digest_sides
from pgsieve.decoding.changes.extent import PLACE_COLUMNS
from pgsieve.decoding.changes.keys import PresentKeys, SoughtKeys, has_bounds
from pgsieve.decoding.changes.merge_source import merge_source
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp, mask_living_rows
from pgsieve.decoding.changes.net_change import NONE, NetChange, Numbers
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.executors import arrow_schema, spark_schema
from pgsieve.resources.lake.lake import Lake

#: The net change of up to this many changes is broadcast to all executors.
BROADCAST_ROWS = 4_000_000


@dataclass(frozen=True)
class SparkChanges:
    """A batch's changes of one table: `path` is the replica, `log` its change history."""

    lake: Lake
    path: str
    log: str
    definition: Definition
    pending: PendingChanges

    @cached_property
    def _stamp(self) -> Stamp:
        """Sets the time of the apply, which is the same in all rows of the batch."""
        return Stamp(self.definition.metadata_column(APPLIED_AT))

    def _stored_changes(self) -> DataFrame:
        return self.lake.read_slices(self.log, self.pending.slice_ends, must_exist=True)

    def inserted(self) -> DataFrame:
        """The rows of the effective INSERTs."""
        chosen = ChosenRows(self.pending.extent, self._stamp)
        return self._placed(chosen, "new").select("row.*")

    def keyed_changes(self) -> KeyedChanges:
        """The changes by key."""
        key = self.definition.key

        def side(name: str) -> Column:
            fields = F.struct(*(struct_field(name, n).alias(n) for n in names))
            return F.when(F.col(name).isNotNull(), fields).alias(name)

        soft_delete_columns = self.definition.soft_delete_columns
        columns = [*PLACE_COLUMNS, "unchanged", *(["commit_time"] if soft_delete_columns else [])]
        names = [*key, *(name for name, _ in soft_delete_columns)]
        changes = self._stored_changes().select(*columns, side("new"), side("old")).toArrow()
        rows = changes.schema.field("new").type
        key_schema = pa.schema([rows.field(rows.get_field_index(name)) for name in key])
        keyed = keyed_changes(
            [changes],
            key_schema,
            sorted(self.pending.unchanged),
            self.pending.extent,
            soft_delete_columns=soft_delete_columns,
        )
        assert keyed is not None
        return keyed

    def keyless_changes(self) -> KeylessChanges:
        """The changes of a table without a key."""
        names = self.definition.names

        def digests(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return (digest_sides(batch, names) for batch in batches)

        changes = (
            self._stored_changes()
            .select(*DIGEST_COLUMNS.names)
            .mapInArrow(digests, spark_schema(DIGEST_COLUMNS))
        )
        return KeylessChanges.of(changes.toArrow(), self.pending.extent)

    def count_rows(self, sought: WantedDigests) -> Numbers:
        """For each digest in `sought`, the number of the replica's rows that have it."""
        numbers = np.zeros(len(sought), np.int64)
        if self.pending.truncated_at is not None:
            return numbers
        schema = pa.schema([("place", pa.int64())])

        def match_digests(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield pa.RecordBatch.from_arrays([pa.array(sought.within(batch)[1])], schema=schema)

        # mapInArrow takes a name with a dot for a path.
        columns = (
            F.col(quote_name(name)).alias(f"c{number}") for number, name in enumerate(self.definition.names)
        )
        rows = self.lake.read_table(self.path).select(*columns)
        counts = rows.mapInArrow(match_digests, spark_schema(schema)).groupBy("place").count().toArrow()
        numbers[np.asarray(counts["place"])] = np.asarray(counts["count"])
        return numbers

    def rows_at(self, side: str, places: Numbers, times: Numbers) -> DataFrame:
        """The old or new rows of the changes at some places, as the column `row`.

        `side` is `old` or `new`. `times` has for each place how often its row is repeated.
        """
        order = np.argsort(places)
        stamp = self._stamp if side == "new" else Stamp(None)
        chosen = ChosenRows(self.pending.extent, stamp, places[order], side=side)
        return self._placed(chosen, side, times[order]).select("row")

    def _placed(self, chosen: ChosenRows, side: str, times: Numbers | None = None) -> DataFrame:
        """The chosen rows as the column `row`, with the places of their changes as the column `place`.

        `times` has for each chosen place how often its row is repeated; None for once.
        """
        row = f"place bigint, row {write_struct_ddl(self.definition.columns)}"
        schema = arrow_schema(self.lake.spark.createDataFrame([], row).schema)
        place_rows = partial(_select_by_place, chosen, schema, times)
        return self._stored_changes().select(*PLACE_COLUMNS, side).mapInArrow(place_rows, row)

    def present(self, keyed: KeyedChanges) -> PresentKeys:
        """The rows of the replica that have one of the keys to look up (`KeyedChanges.sought`)."""
        return keyed.present(self._present_keys)

    def _present_keys(self, keys: pa.Table) -> PresentKeys:
        rows = self._with_keys(keys, np.arange(keys.num_rows), ()).toArrow()
        present_keys = conform(
            rows.select(_labels("k", keys.column_names)).rename_columns(keys.column_names), keys.schema
        )
        return PresentKeys(
            np.asarray(rows["number"]).astype(np.int64), present_keys, np.asarray(rows["lives"])
        )

    def _with_keys(self, keys: pa.Table, numbers: Numbers, values: Sequence[str]) -> DataFrame:
        """The rows of the replica that have one of `keys`.

        Out: the columns `number` (the key's element of `numbers`), `lives` (False for a deleted row that is kept), k0, k1,
        … (the key) and v0, v1, … (the columns `values`).
        """
        rows = self._replica(keys, values)
        fields = {row_field.name: row_field for row_field in rows.schema}
        columns = [*_labels("k", keys.column_names), *_labels("v", values)]
        first_fields = spark_schema(pa.schema([("number", pa.int64()), ("lives", pa.bool_())]))
        schema = StructType([*first_fields, *(fields[name] for name in columns)])
        return rows.mapInArrow(_KeyedRows.of(keys, numbers, columns).present, schema)

    def _replica(self, keys: pa.Table, values: Sequence[str] = (), *, bounded: bool = True) -> DataFrame:
        """The rows of the replica that may have one of `keys`; all its rows if `bounded` is False.

        Out: the columns k0, k1, … (the key), v0, v1, … (the columns `values`), and `deleted` if deleted rows are kept.
        """
        names = keys.column_names
        columns = [
            F.col(quote_name(name)).alias(k) for name, k in zip(names, _labels("k", names), strict=True)
        ]
        columns += [
            F.col(quote_name(name)).alias(v) for name, v in zip(values, _labels("v", values), strict=True)
        ]
        if (deleted_column := self.definition.deleted_column) is not None:
            columns.append(F.col(quote_name(deleted_column)).alias(_DELETED))
        rows = self.lake.read_table(self.path).select(*columns)
        # `_KeyedRows` compares the keys. These conditions only let Spark skip files by their statistics.
        for name, k in zip(names, _labels("k", names), strict=True) if bounded else ():
            if has_bounds(keys[name].type):
                bounds = pc.min_max(keys[name])
                if bounds["min"].is_valid:
                    rows = rows.where(F.col(k).between(_literal(bounds["min"]), _literal(bounds["max"])))
        return rows

    def merge_source(
        self, keyed: KeyedChanges, present: PresentKeys, net: NetChange, merge: Merge
    ) -> DataFrame:
        """The net change as the source of a MERGE, with the columns of `merge`.

        It is computed from a DataFrame `decided`, which has a row per key of the net change and these further columns:
        - `last`: the place of the change that has the key's new row
        - `s0`, `s1`, …: for each column that some change did not send, the place of the change that sent its value
        - `base`: the number of the key whose row in the replica has the values that no change sent
        - `e0`, `e1`, …: the metadata of a row that has ended
        """
        unsent, endings = sorted(merge.unsent_flag_by_column), _endings(self.definition)
        merged, present_keys = (
            merge_source(net, retain_ended=keyed.end_metadata is not None),
            present.stored_keys(keyed.keys),
        )
        places = np.append(keyed.places[keyed.first_effective :], 0)
        metadata = keyed.ended_metadata(merged.ended, self._stamp)

        def place(change: Numbers) -> pa.Array:
            return pa.array(places[change], mask=change == NONE)

        table = pa.table(
            {
                **{
                    k: present_keys[name].take(pa.array(merged.keys))
                    for name, k in merge.key_source_by_column.items()
                },
                "base": pa.array(merged.base, mask=merged.base == NONE),
                **{f"s{i}": place(merged.sent[name]) for i, name in enumerate(unsent)},
                **{merge.unsent_flag_by_column[name]: merged.retains_value[name] for name in unsent},
                "last": place(merged.last),
                **{e: metadata[name] for name, e in endings.items()},
                "is_ended": merged.ended != NONE,
                "action": merged.actions,
            }
        )
        decided = self.lake.spark.createDataFrame(table)
        sent = np.concatenate([merged.last, *merged.sent.values()])
        bases = np.unique(merged.base[merged.base != NONE])
        changed = self._changed(decided, np.unique(places[sent[sent != NONE]]), keyed.keys, bases, merge)
        ended_values = {
            v: F.col(endings[name]) if name in endings else F.lit(None)
            for name, v in merge.value_source_by_column.items()
        }
        ended_only = decided.where("last is null").select(
            *merge.key_source_by_column.values(),
            *(value.cast(changed.schema[v].dataType).alias(v) for v, value in ended_values.items()),
            *merge.unsent_flag_by_column.values(),
            "action",
        )
        source = changed.unionByName(ended_only)
        if keyed.truncated_metadata is None:
            return source
        replaced_keys = keyed.keys.take(pa.array(merged.keys))
        return source.unionByName(
            self._truncated_rows(keyed.truncated_metadata, replaced_keys, source, merge)
        )

    def _changed(
        self, decided: DataFrame, places: Numbers, keys: pa.Table, bases: Numbers, merge: Merge
    ) -> DataFrame:
        """The decided keys that have a new row, with the values of the row.

        `places` are the places of the changes that have the values. `bases` are the numbers of the keys whose rows in the
        replica have values that no change sent.
        """
        unsent, endings = sorted(merge.unsent_flag_by_column), _endings(self.definition)
        placed = self._placed(ChosenRows(self.pending.extent, self._stamp, places), "new")
        is_small = self.pending.count("insert", "update", "delete") <= BROADCAST_ROWS
        rows = placed.join(F.broadcast(decided) if is_small else decided, F.col("place") == F.col("last"))
        values = {name: struct_field("row", name) for name in self.definition.names}
        if len(bases):
            base = self._with_keys(keys.take(pa.array(bases)), bases, unsent)
            base = base.select("number", *(F.col(v).alias(f"w{v}") for v in _labels("v", unsent)))
            rows = rows.join(base, F.col("base") == F.col("number"), "left")
        for i, name in enumerate(unsent):
            sent_values = placed.select(
                F.col("place").alias(f"p{i}"), struct_field("row", name).alias(f"sent{i}")
            )
            rows = rows.join(sent_values, F.col(f"s{i}") == F.col(f"p{i}"), "left")
            replica_value = F.col(f"wv{i}") if len(bases) else F.lit(None)
            values[name] = F.when(F.col(f"s{i}").isNotNull(), F.col(f"sent{i}")).otherwise(replica_value)
        for name, e in endings.items():
            values[name] = F.when(F.col("is_ended"), F.col(e)).otherwise(values[name])
        return rows.select(
            *merge.key_source_by_column.values(),
            *(values[name].alias(v) for name, v in merge.value_source_by_column.items()),
            *merge.unsent_flag_by_column.values(),
            "action",
        )

    def _truncated_rows(self, ended: pa.Table, keys: pa.Table, source: DataFrame, merge: Merge) -> DataFrame:
        """The living rows of the replica that a TRUNCATE ends, with the metadata `ended`.

        Rows with one of `keys` are left out, as `source` has them already.
        """
        (metadata,) = self._stamp.apply(ended).to_pylist()
        rows = self._replica(keys, bounded=False)
        columns = _labels("k", keys.column_names)
        schema = StructType([row_field for row_field in rows.schema if row_field.name in columns])
        living = rows.mapInArrow(_KeyedRows.of(keys, np.arange(keys.num_rows), columns).others, schema)
        values = {v: F.lit(metadata.get(name)) for name, v in merge.value_source_by_column.items()}
        return living.select(
            *(
                F.col(k).alias(merge.key_source_by_column[name])
                for name, k in zip(keys.column_names, columns, strict=True)
            ),
            *(value.cast(source.schema[v].dataType).alias(v) for v, value in values.items()),
            *(F.lit(False).alias(u) for u in merge.unsent_flag_by_column.values()),
            F.lit("end").alias("action"),
        )


#: The column that says whether a row of the replica is deleted.
_DELETED = "deleted"


@dataclass(frozen=True)
class _KeyedRows:
    """Finds rows of a replica by their keys, batch by batch. It is sent to executors.

    The batches have the columns of `SparkChanges._replica`. `numbers` are the numbers of the sought keys. `shown` are the
    names of the columns to return.
    """

    sought: SoughtKeys
    numbers: Numbers
    shown: Sequence[str]

    @classmethod
    def of(cls, keys: pa.Table, numbers: Numbers, shown: Sequence[str]) -> "_KeyedRows":
        """The search for keys with these numbers."""
        labelled_keys = keys.rename_columns(_labels("k", keys.column_names))
        return cls(SoughtKeys.of(labelled_keys), numbers, shown)

    def present(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows with one of the keys: the key's number, whether the row lives, and the columns `shown`."""
        for batch in batches:
            row, key = self._within(batch)
            present_rows = batch.take(pa.array(row))
            columns = [
                pa.array(self.numbers[key]),
                _mask_living_rows(present_rows),
                *(present_rows.column(n) for n in self.shown),
            ]
            yield pa.RecordBatch.from_arrays(columns, ["number", "lives", *self.shown])

    def others(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The living rows with none of the keys."""
        for batch in batches:
            living = np.array(_mask_living_rows(batch))
            living[self._within(batch)[0]] = False
            yield batch.filter(pa.array(living)).select(list(self.shown))

    def _within(self, batch: pa.RecordBatch) -> tuple[Numbers, Numbers]:
        keys = self.sought.keys
        rows = pa.Table.from_batches([batch]).select(keys.column_names)
        return self.sought.within(conform(rows, keys.schema))


def _literal(bound: pa.Scalar) -> Column:
    """The column expression of a bound.

    Dates and times are given to Spark as numbers, as they may be out of the range of Python's types.
    """
    if pa.types.is_date(bound.type):
        return F.date_from_unix_date(F.lit(bound.cast(pa.int32()).as_py()))
    if pa.types.is_timestamp(bound.type):
        time = F.timestamp_micros(F.lit(bound.cast(pa.int64()).as_py()))
        return time if bound.type.tz else time.cast("timestamp_ntz")
    return F.lit(bound.as_py())


def _mask_living_rows(rows: pa.RecordBatch) -> pa.BooleanArray:
    return mask_living_rows(rows, _DELETED if _DELETED in rows.schema.names else None)


def _select_by_place(
    chosen: ChosenRows, schema: pa.Schema, times: Numbers | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The chosen rows of batches of changes, with their places.

    `times` has for each place in `chosen.kept` how often its row is repeated; None for once.
    """
    kind = schema.field("row").type
    for batch in batches:
        if (placed := chosen.placed(_reader(batch), kind)) is None:
            continue
        places, rows = placed
        if times is not None and chosen.kept is not None:
            copies = np.repeat(np.arange(len(places)), times[np.searchsorted(chosen.kept, places)])
            places, rows = places[copies], rows.take(pa.array(copies))
        row = pa.StructArray.from_arrays(rows.columns, fields=list(kind))
        yield pa.RecordBatch.from_arrays([pa.array(places), row], schema=schema)


def _reader(batch: pa.RecordBatch) -> Callable[[Sequence[str]], pa.Table]:
    rows = pa.Table.from_batches([batch])
    return lambda names: rows.select(list(names))


def _labels(letter: str, names: Sequence[str]) -> list[str]:
    """Names such as k0, k1, … for columns: mapInArrow would take a name with a dot for a path."""
    return [f"{letter}{number}" for number in range(len(names))]


def _endings(definition: Definition) -> dict[str, str]:
    """Maps each metadata column to the column (e0, e1, …) of the decided keys that has its value in ended rows."""
    return {name: f"e{i}" for i, (name, _) in enumerate(definition.soft_delete_columns)}
