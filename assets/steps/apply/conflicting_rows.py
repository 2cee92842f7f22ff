"""INSERTs and key-changing UPDATEs that meet a row of their key, which a unique index refuses (section 29.8).

In: a batch's transformed changes of a table with a key, between two of its TRUNCATEs, and the rows before them. Out:
for each key what has to be looked up (`lookups`), and the changes that conflict (`conflicts`).

    in the replica   changes of one key            PostgreSQL
    no               INSERT                        inserts
    yes              INSERT                        conflict
    any              DELETE, INSERT                inserts
    any              INSERT, INSERT                conflict, whatever comes between but a DELETE or a move away
    yes              UPDATE, INSERT                conflict: an UPDATE neither begins nor ends a row
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.net_change import found_moves, is_move, place_of
from pgsieve.assets.steps.records.columns import field
from pgsieve.resources.lake.delta.records import quoted


def keys_of(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """The changes with nothing of their rows but the key."""

    def side(name: str) -> Column:
        only = F.struct(*(field(name, k).alias(k) for k in key))
        return F.when(F.col(name).isNotNull(), only).alias(name)

    return changes.select(
        *("slice", "commit_lsn", "ordinal", "number", "operation", "unchanged"), side("old"), side("new")
    )


def lookups(changes: DataFrame, key: Sequence[str], slices: Sequence[int]) -> DataFrame:
    """The keys k0, k1, ... at which rows begin: how often (`begins`), and whether the first has to be `absent` before."""
    events = _events(changes, key, slices)
    first, ended = (
        F.min(F.when(F.col("begins"), F.col("place"))),
        F.min(F.when(~F.col("begins"), F.col("place"))),
    )
    grouped = events.groupBy(*_names(key)).agg(
        first.alias("first"),
        ended.alias("ended"),
        F.count(F.when(F.col("begins"), 1)).alias("begins"),
    )
    absent = F.coalesce(F.col("first") < F.col("ended"), F.lit(True))
    return grouped.where("begins > 0").select(*_names(key), "begins", absent.alias("absent"))


def conflicts(
    changes: DataFrame, base: DataFrame | None, key: Sequence[str], slices: Sequence[int], *, moves: bool
) -> DataFrame:
    """The changes that meet a row of their key: k0, k1, ..., commit_lsn, place, and whether it is `inserted`.

    Of several only the first is certain. `base` has the rows before, None is none.
    """
    if moves:
        rows = base if base is not None else _no_rows(changes, key)
        changes, _ = found_moves(changes, rows, key, key, ())
    events, names = _events(changes, key, slices), _names(key)
    if base is not None:
        present = base.select(*(F.col(quoted(k)).alias(n) for k, n in zip(key, names, strict=True)))
        events = events.join(present.distinct().withColumn("present", F.lit(True)), names, "left")
    else:
        events = events.withColumn("present", F.lit(None).cast("boolean"))
    before = F.lag("begins").over(Window.partitionBy(*names).orderBy("place"))
    meets = F.col("begins") & F.coalesce(before, F.col("present"), F.lit(False))
    met = events.withColumn("meets", meets).where("meets")
    return met.select(*names, "commit_lsn", "place", "inserted")


def _events(changes: DataFrame, key: Sequence[str], slices: Sequence[int]) -> DataFrame:
    """Where rows begin and end: a move ends the one of its old key and begins that of its new one."""
    moved = is_move(key)
    begins = changes.where((F.col("operation") == "insert") | moved)
    ends = changes.where((F.col("operation") == "delete") | moved)

    def events(of: DataFrame, side: str, *, begin: bool) -> DataFrame:
        return of.select(
            *(field(side, k).alias(n) for k, n in zip(key, _names(key), strict=True)),
            place_of(slices).alias("place"),
            "commit_lsn",
            (F.col("operation") == "insert").alias("inserted"),
            F.lit(begin).alias("begins"),
        )

    return events(ends, "old", begin=False).unionByName(events(begins, "new", begin=True))


def _names(key: Sequence[str]) -> list[str]:
    return [f"k{i}" for i in range(len(key))]


def _no_rows(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    return changes.select(*(field("new", k).alias(k) for k in key)).limit(0)
