"""A batch's changes as Spark reads them: their keys as `KeyedChanges`, and the rows of the net change as a DataFrame.

In: a change history and a replica that only Spark can read. Out: the keys, from which the driver computes the net
change (`pgsieve.decoding.changes.net_change`), and a DataFrame with the source of a MERGE. Raises Spark's errors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.applied import PendingChanges
from pgsieve.assets.steps.apply.keyed_changes import PLACE_COLUMNS, KeyedChanges, keyed_changes
from pgsieve.assets.steps.apply.keyless_changes import DIGEST_COLUMNS, KeylessChanges
from pgsieve.assets.steps.records.columns import field, living_rows, order
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.digests import WantedDigests, digest_sides
from pgsieve.decoding.changes.merge_source import merge_source
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import quoted
from pgsieve.resources.lake.executors import spark_schema
from pgsieve.resources.lake.lake import Lake

#: The net change of up to this many changes is broadcast to all executors.
BROADCAST_ROWS = 4_000_000
#: Types of keys whose least and greatest value are given to Spark as literals, so that it skips files.
_LITERAL_TYPES = {"tinyint", "smallint", "int", "bigint", "string"}


@dataclass(frozen=True)
class SparkChanges:
    """A batch's changes of one table: `path` is the replica, `log` its change history."""

    lake: Lake
    path: str
    log: str
    definition: Definition
    pending: PendingChanges

    def _stored_changes(self) -> DataFrame:
        """The changes that the copy lacks. A slice that was transformed for an earlier copy may have others."""
        rows = self.lake.read_slices(self.log, self.pending.slice_ends, every=True)
        return rows.where(F.col("commit_lsn") >= self.pending.since)

    def effective_changes(self) -> DataFrame:
        """The changes of rows after the last TRUNCATE; all of them if the replica keeps deleted rows."""
        rows = self._stored_changes().where("operation <> 'truncate'")
        stamp = self._stamp
        if stamp.column is not None:
            now = F.lit(stamp.time.isoformat()).cast("timestamp")
            applied = F.col("new").withField(stamp.column, now)
            rows = rows.withColumn("new", F.when(F.col("new").isNotNull(), applied))
        if self.pending.truncated_at is None or self.definition.soft_delete_columns:
            return rows
        return rows.where(order() > F.struct(*(F.lit(n).cast("bigint") for n in self.pending.truncated_at)))

    def keyed_changes(self) -> KeyedChanges:
        """The changes by key."""
        key = self.definition.key

        def side(name: str) -> Column:
            return F.when(F.col(name).isNotNull(), F.struct(*(field(name, n).alias(n) for n in names))).alias(
                name
            )

        kept = self.definition.soft_delete_columns
        placed = [*PLACE_COLUMNS, "unchanged", *(["commit_time"] if kept else [])]
        names = [*key, *(name for name, _ in kept)]
        changes = self._stored_changes().select(*placed, side("new"), side("old")).toArrow()
        rows = changes.schema.field("new").type
        of_key = pa.schema([rows.field(rows.get_field_index(name)) for name in key])
        unsent, ends = sorted(self.pending.unchanged), self.pending.slice_ends
        keyed = keyed_changes([changes], of_key, unsent, ends, 0, soft_delete_columns=kept)
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
        return KeylessChanges.of(changes.toArrow(), self.pending.slice_ends, 0)

    def count_rows(self, sought: WantedDigests) -> Numbers:
        """The number of the replica's rows of each digest."""
        numbers = np.zeros(len(sought), np.int64)
        if self.pending.truncated_at is not None:
            return numbers
        schema = pa.schema([("place", pa.int64())])

        def matched(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield pa.RecordBatch.from_arrays([pa.array(sought.within(batch)[1])], schema=schema)

        # mapInArrow takes a name with a dot for a path.
        columns = (F.col(quoted(n)).alias(f"c{i}") for i, n in enumerate(self.definition.names))
        rows = self.lake.current(self.path).select(*columns)
        counts = rows.mapInArrow(matched, spark_schema(schema)).groupBy("place").count().toArrow()
        numbers[np.asarray(counts["place"])] = np.asarray(counts["count"])
        return numbers

    def rows_at(self, side: str, places: Numbers, times: Numbers) -> DataFrame:
        """The old or new rows (`side`) of the changes at some places, as the column `row`, each as often as `times` says."""
        names = self.definition.names
        wanted = self.lake.spark.createDataFrame(pa.table({"wanted": places, "times": times}))
        row = F.struct(*(field(side, name).alias(name) for name in names)).alias("row")
        rows = self.effective_changes().where(F.col(side).isNotNull())
        placed = rows.select(place_of(self.pending.slice_ends).alias("place"), row)
        few = len(places) <= BROADCAST_ROWS
        chosen = placed.join(F.broadcast(wanted) if few else wanted, F.col("place") == F.col("wanted"))
        return chosen.select("row", F.explode(F.sequence(F.lit(1), F.col("times").cast("int")))).select("row")

    def present_keys(self, keyed: KeyedChanges) -> Mask:
        """A mask of the keys that the replica has, as in `KeyedChanges.present`."""
        return keyed.present_keys(self._present_keys)

    def living_rows(self) -> DataFrame:
        """The rows of the replica that are not marked as deleted."""
        return living_rows(self.lake.current(self.path), self.definition.deleted_column)

    def _present_keys(self, keys: pa.Table) -> Numbers:
        names = [f"k{i}" for i in range(keys.num_columns)]
        types = dict(self.definition.columns)
        near = self.living_rows().select(
            *(F.col(quoted(k)).alias(n) for n, k in zip(names, keys.column_names, strict=True))
        )
        for name, column in zip(names, keys.column_names, strict=True):
            if types[column] in _LITERAL_TYPES:
                values = sorted({value for value in keys[column].to_pylist() if value is not None})
                if values:
                    near = near.where(F.col(name).between(F.lit(values[0]), F.lit(values[-1])))
        wanted = keys.rename_columns(names).append_column("key", pa.array(np.arange(keys.num_rows)))
        present = self.lake.spark.createDataFrame(wanted).join(near, names, "left_semi").select("key")
        return np.asarray(present.toArrow()["key"]).astype(np.int64)

    def merge_source(self, keyed: KeyedChanges, net: NetChange, merge: Merge) -> DataFrame:
        """The net change as the source of a MERGE; `merge` has its columns.

        The DataFrame `decided` has a row per key, with these columns besides those of `merge`:

        - `last`: the place of the change that has the new row
        - `s0`, `s1`, …: for each column that some change did not send, the place of the change that has its value
        - `b0`, `b1`, …: the former key of a row that was moved; the replica's row of that key has values not sent
        - `e0`, `e1`, …: the metadata of an ended row
        """
        key, columns, unsent = self.definition.key, self.definition.names, sorted(merge.unknown)
        endings = {name: f"e{i}" for i, (name, _) in enumerate(self.definition.soft_delete_columns)}
        of, places = (
            merge_source(net, retain_ended=keyed.ended is not None),
            np.append(keyed.places[keyed.first_effective :], 0),
        )
        metadata = keyed.ended_metadata(of.ended, self._stamp)

        def place(change: Numbers) -> pa.Array:
            return pa.array(places[change], mask=change == NONE)

        bases = pa.array(np.where(of.base == NONE, 0, of.base), mask=of.base == NONE)
        table = pa.table(
            {
                **{k: keyed.keys[name].take(pa.array(of.keys)) for name, k in merge.key.items()},
                **{f"b{i}": keyed.keys[name].take(bases) for i, name in enumerate(key)},
                **{f"s{i}": place(of.sent[name]) for i, name in enumerate(unsent)},
                **{merge.unknown[name]: of.retains_value[name] for name in unsent},
                "last": place(of.last),
                **{e: metadata[name] for name, e in endings.items()},
                "is_ended": of.ended != NONE,
                "action": of.actions,
                "expected": of.expected,
            }
        )
        has_bases = bool((of.base != NONE).any())
        decided = self.lake.spark.createDataFrame(table)
        changes = self.effective_changes().where("new is not null")
        placed = changes.select(place_of(self.pending.slice_ends).alias("place"), "new")
        few = self.pending.count("insert", "update", "delete") <= BROADCAST_ROWS
        rows = placed.join(F.broadcast(decided) if few else decided, F.col("place") == F.col("last"))
        values = {name: field("new", name) for name in columns}
        if has_bases:
            unsent_values = F.struct(*(F.col(quoted(n)).alias(n) for n in unsent)).alias("whole")
            base = self.lake.current(self.path).select(
                *(F.col(quoted(k)).alias(f"r{i}") for i, k in enumerate(key)), unsent_values
            )
            same = [F.col(f"b{i}") == F.col(f"r{i}") for i in range(len(key))]
            rows = rows.join(base, same, "left")
        for i, name in enumerate(unsent):
            sent = placed.select(F.col("place").alias(f"p{i}"), field("new", name).alias(f"sent{i}"))
            rows = rows.join(sent, F.col(f"s{i}") == F.col(f"p{i}"), "left")
            present_value = field("whole", name) if has_bases else F.lit(None)
            values[name] = F.when(F.col(f"s{i}").isNotNull(), F.col(f"sent{i}")).otherwise(present_value)
        for name, e in endings.items():
            values[name] = F.when(F.col("is_ended"), F.col(e)).otherwise(values[name])
        changed = rows.select(
            *merge.key.values(),
            *(values[name].alias(v) for name, v in merge.values.items()),
            *merge.unknown.values(),
            "action",
            "expected",
        )
        ended = {
            v: F.col(endings[name]) if name in endings else F.lit(None) for name, v in merge.values.items()
        }
        ended_only = decided.where("last is null").select(
            *merge.key.values(),
            *(value.cast(changed.schema[v].dataType).alias(v) for v, value in ended.items()),
            *merge.unknown.values(),
            "action",
            "expected",
        )
        source = changed.unionByName(ended_only)
        return (
            source
            if keyed.emptied is None
            else source.unionByName(self._truncated_rows(keyed.emptied, source, merge))
        )

    def _truncated_rows(self, ended: pa.Table, others: DataFrame, merge: Merge) -> DataFrame:
        """The rows of the replica that a TRUNCATE ends, except the keys in `others`; `ended` is their metadata."""
        (metadata,) = self._stamp.apply(ended).to_pylist()
        living = self.living_rows().select(*(F.col(quoted(name)).alias(k) for name, k in merge.key.items()))
        values = {v: F.lit(metadata.get(name)) for name, v in merge.values.items()}
        return living.join(others, list(merge.key.values()), "left_anti").select(
            *merge.key.values(),
            *(value.cast(others.schema[v].dataType).alias(v) for v, value in values.items()),
            *(F.lit(False).alias(u) for u in merge.unknown.values()),
            F.lit("end").alias("action"),
            F.lit(True).alias("expected"),
        )

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self.definition.metadata_column(APPLIED_AT))


def place_of(slices: Sequence[int]) -> Column:
    """The place of a change in the slices that end at `slices`, as in `keyed_changes.places_of`."""
    turn = F.lit(0).cast("bigint")
    for i, end in enumerate(slices[1:], 1):
        turn = F.when(F.col("slice") == end, F.lit(i).cast("bigint")).otherwise(turn)
    return F.shiftleft(turn, 56) + F.col("number")
