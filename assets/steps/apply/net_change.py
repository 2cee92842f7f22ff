"""Apply: the changes of one replica table in a batch -> the net change of each row.

In: transformed changes (`pgsieve.assets.steps.update_transformation.changes`). Out, for a table with a key, one row a key:
`action`, the new `row` and `known`, the names of the columns that `row` has a value for:

- upsert: the row exists afterwards with these values (it was inserted in the slice);
- update: if the row exists it gets these values; a missing row stays missing (section 29.8, update_missing);
- delete: the row does not exist afterwards.

`expected` says whether the row is expected in the replica before the slice. Tables without a key: `equal_rows`.

Where UPDATEs move rows from one key to another, a key is held by one row after the other, each time for a tenure:

    change                  key 1                       key 2
    (in the replica)        a tenure of origin          a tenure of origin
                            "replica" begins            "replica" begins
    UPDATE of 1, b sent     knows b
    DELETE of 2                                         ended
    UPDATE of 1 to 2, with  ended; `went` is ---------> another begins; its `came` is
      c sent                this UPDATE's order key     the same, so it inherits b
    INSERT of 1             another begins, of origin
                            "insert": knows all of it
    net change              upsert of what was          upsert of b, c and the rest of
                            inserted, else NULL         the replica's row of key 1 (`base`)

Only what a tenure was sent, or inherits, is in its row: nothing of the tenures before it under the same key.
"""

from collections.abc import Collection, Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.checkpoint import checkpointed
from pgsieve.assets.steps.records.columns import field, order
from pgsieve.resources.lake.records import quoted


def _key(struct: str, key: Sequence[str]) -> Column:
    return F.struct(*(field(struct, name).alias(name) for name in key))


def _latest(value: Column, at: Column) -> Column:
    return F.max_by(value, at)


def after_truncate(changes: DataFrame, commit_lsn: int, ordinal: int) -> DataFrame:
    """The changes after the slice's last TRUNCATE of the table; those before it have no effect."""
    at = F.struct(F.lit(commit_lsn).cast("bigint"), F.lit(ordinal).cast("bigint"))
    return changes.where(order() > at)


def decided_changes(
    changes: DataFrame, key: Sequence[str], unsent: Collection[str], slices: Sequence[int]
) -> DataFrame:
    """What becomes of each key, for slices in which no UPDATE changes a key; `changed_rows` adds the rows.

    Only integers are aggregated, so that Spark does it by hashing: columns k0, k1, ... of the key, `action`,
    `expected`, `last` (the place of the change that has the row), and for the n-th of the columns `unsent`,
    which some change left out as unchanged, `sent_n`: the place of the last change that has its value.
    """
    operation, place = F.col("operation"), place_of(slices)
    # An operation's place and kind as one integer; the kinds by their place in the tuple.
    kinds = ("insert", "update", "delete")
    kind = F.when(operation == kinds[0], 0).when(operation == kinds[1], 1).otherwise(2)
    events = changes.select(
        *(
            F.when(operation == "delete", field("old", name)).otherwise(field("new", name)).alias(f"k{i}")
            for i, name in enumerate(key)
        ),
        place.alias("place"),
        (F.shiftleft(place, 2) + kind).alias("event"),
        operation.alias("operation"),
        *(
            F.when((operation != "delete") & ~_is_unsent(name), place).alias(f"sent_{i}")
            for i, name in enumerate(sorted(unsent))
        ),
    )
    aggregated = events.groupBy(*(f"k{i}" for i in range(len(key)))).agg(
        F.min("event").alias("first"),
        F.max("event").alias("latest"),
        F.max(F.when(operation == "insert", F.col("place"))).alias("inserted"),
        F.max(F.when(operation == "delete", F.col("place"))).alias("deleted"),
        *(F.max(f"sent_{i}").alias(f"sent_{i}") for i in range(len(unsent))),
    )
    alive = F.coalesce(F.col("inserted") > F.col("deleted"), F.col("inserted").isNotNull())
    # What was sent before the last INSERT was another row's, whichever batch that row was deleted in.
    anew = F.coalesce(F.col("inserted"), F.lit(0).cast("bigint"))
    action = (
        F.when(F.col("latest") % 4 == kinds.index("delete"), "delete")
        .when(alive, "upsert")
        .when(F.col("deleted").isNotNull(), "delete")
        .otherwise("update")
    )
    return aggregated.select(
        *(f"k{i}" for i in range(len(key))),
        action.alias("action"),
        (F.col("first") % 4 != kinds.index("insert")).alias("expected"),
        F.shiftright("latest", 2).alias("last"),
        *(
            F.when(F.col(f"sent_{i}") >= anew, F.col(f"sent_{i}")).alias(f"sent_{i}")
            for i in range(len(unsent))
        ),
    )


def changed_rows(
    decided: DataFrame,
    changes: DataFrame,
    key: Sequence[str],
    columns: Sequence[str],
    unsent: Collection[str],
    slices: Sequence[int],
    *,
    few: bool,
) -> DataFrame:
    """The net change of each key, from what `decided_changes` says of the same changes.

    `few` says that the keys fit into the memory of each executor: then no row is shuffled.
    """
    placed = changes.where("new is not null").select(place_of(slices).alias("place"), "new")
    hint = F.broadcast if few else lambda frame: frame
    kept = placed.join(hint(decided.where("action <> 'delete'")), F.col("place") == F.col("last"))
    values = {name: field("new", name) for name in columns}
    for i, name in enumerate(sorted(unsent)):
        sent = placed.select(F.col("place").alias(f"place_{i}"), field("new", name).alias(f"value_{i}"))
        kept = kept.join(hint(sent), F.col(f"sent_{i}") == F.col(f"place_{i}"), "left")
        values[name] = F.col(f"value_{i}")
    never = F.array(*(F.when(F.col(f"sent_{i}").isNull(), F.lit(n)) for i, n in enumerate(sorted(unsent))))
    row = F.struct(*(value.alias(name) for name, value in values.items()))
    keys = F.struct(*(F.col(f"k{i}").alias(name) for i, name in enumerate(key))).alias("key")
    unknown = _kept(F.array_compact(never)) if unsent else F.lit(None).cast("array<string>")
    changed = kept.select(keys, "action", row.alias("row"), unknown.alias("unknown"), "expected")
    gone = decided.where("action = 'delete'").select(
        keys,
        "action",
        F.lit(None).cast(changed.schema["row"].dataType).alias("row"),
        F.lit(None).cast("array<string>").alias("unknown"),
        "expected",
    )
    return changed.unionByName(gone)


def place_of(slices: Sequence[int]) -> Column:
    """Where a change stands in the slices, as one integer: the slice's turn, then the number in the slice."""
    turn = F.lit(0).cast("bigint")
    for i, end in enumerate(slices[1:], 1):
        turn = F.when(F.col("slice") == end, F.lit(i).cast("bigint")).otherwise(turn)
    return F.shiftleft(turn, 56) + F.col("number")


def _kept(unknown: Column) -> Column:
    """The columns that keep the replica's value: an INSERT's are NULL where nobody sent them, as in PostgreSQL."""
    return F.when(F.col("action") == "update", unknown).otherwise(F.array().cast("array<string>"))


def _is_unsent(name: str) -> Column:
    return F.coalesce(F.array_contains("unchanged", name), F.lit(False))


def net_changes_with_moves(
    changes: DataFrame,
    replica: DataFrame,
    key: Sequence[str],
    columns: Sequence[str],
    unsent: Collection[str],
) -> DataFrame:
    """The net change of each key, for a slice in which UPDATEs move rows from one key to another.

    A key is held by one row after the other; each such holding is a tenure that an INSERT, a move or
    the replica's own row begins. A tenure that begins with a move inherits from the one the row came
    from: whether it exists, and the columns that were not sent. Inheritance is resolved by pointer
    doubling, so a chain of n moves takes log2(n) joins, whatever the number of rows. A move that finds no row
    does nothing, so its new key is still of the row that had it.
    """
    _, tenures = found_moves(changes, replica, key, columns, unsent)
    resolved = _inherit(tenures, columns)
    last = resolved.where("is_last")
    # A tenure that goes back to a row of the replica under another key needs that row.
    needs = last.where((F.col("action") == "update") & ~F.col("base").eqNullSafe(F.col("key")))
    base = replica.select(F.struct(*(F.col(quoted(k)).alias(k) for k in key)).alias("base"), _whole(columns))
    moved = needs.join(base, "base", "left").select(
        "key",
        F.when(F.col("whole").isNull(), "delete").otherwise("upsert").alias("action"),
        F.struct(
            *(
                F.when(F.array_contains("unknown", name), field("whole", name))
                .otherwise(field("row", name))
                .alias(name)
                for name in columns
            )
        ).alias("row"),
        F.array().cast("array<string>").alias("unknown"),
        "expected",
    )
    kept = last.where((F.col("action") != "update") | F.col("base").eqNullSafe(F.col("key")))
    kept = kept.select("key", "action", "row", _kept(F.col("unknown")).alias("unknown"), "expected")
    return kept.unionByName(moved)


def found_moves(
    changes: DataFrame,
    replica: DataFrame,
    key: Sequence[str],
    columns: Sequence[str],
    unsent: Collection[str],
) -> tuple[DataFrame, DataFrame]:
    """The changes with a DELETE of the old key for each move that finds no row, and their tenures."""
    held = replica.select(F.struct(*(F.col(quoted(k)).alias(k) for k in key)).alias("key"))
    tenures = checkpointed(_tenures(changes, key, columns, unsent))
    while (without_row := _moves_without_row(tenures, held)).limit(1).count():
        changes = _deletes_instead(changes, without_row)
        tenures = checkpointed(_tenures(changes, key, columns, unsent))
    return changes, tenures


def _moves_without_row(tenures: DataFrame, held: DataFrame) -> DataFrame:
    """Where the moves are (`went`) that find no row under their old key, whatever other moves find."""
    left = tenures.where("went is not null")
    missing = left.where("origin = 'replica'").join(held, "key", "left_anti")
    return missing.select("went").unionByName(left.where("origin = 'nothing'").select("went"))


def _deletes_instead(changes: DataFrame, moves: DataFrame) -> DataFrame:
    """Take these moves for a DELETE of the old key, which does as much, and is counted as missing its row."""
    moved = moves.select(F.col("went.*"), F.lit(True).alias("moved"))
    joined = changes.join(moved, ["commit_lsn", "ordinal"], "left")
    operation = F.when(F.col("moved"), "delete").otherwise(F.col("operation"))
    return checkpointed(joined.withColumn("operation", operation).select(*changes.columns))


def _whole(columns: Sequence[str]) -> Column:
    return F.struct(*(F.col(quoted(name)).alias(name) for name in columns)).alias("whole")


def is_move(key: Sequence[str]) -> Column:
    """Whether a change is an UPDATE from one key to another."""
    differs = ~_key("old", key).eqNullSafe(_key("new", key))
    return F.coalesce((F.col("operation") == "update") & F.col("old").isNotNull() & differs, F.lit(False))


def _tenures(
    changes: DataFrame, key: Sequence[str], columns: Sequence[str], unsent: Collection[str]
) -> DataFrame:
    """One row a tenure: key, number, how it began (`origin`), how it ended, and the columns it knows.

    `came` and `went` are the order keys of the moves that began and ended it.
    """
    old, new = _key("old", key), _key("new", key)
    base = changes.withColumn("is_move", is_move(key))
    stays = base.where(~F.col("is_move")).select(
        F.when(F.col("operation") == "delete", old).otherwise(new).alias("key"),
        F.struct("commit_lsn", "ordinal", F.lit(0).alias("part")).alias("at"),
        F.col("operation").alias("event"),
        "new",
        "unchanged",
    )
    moves = base.where("is_move")
    leaves = moves.select(
        old.alias("key"),
        F.struct("commit_lsn", "ordinal", F.lit(0).alias("part")).alias("at"),
        F.lit("leave").alias("event"),
        F.lit(None).cast(changes.schema["new"].dataType).alias("new"),
        "unchanged",
    )
    arrives = moves.select(
        new.alias("key"),
        F.struct("commit_lsn", "ordinal", F.lit(1).alias("part")).alias("at"),
        F.lit("arrive").alias("event"),
        "new",
        "unchanged",
    )
    begins = F.col("event").isin("insert", "arrive").cast("int")
    ends = F.col("event").isin("delete", "leave").cast("int")
    in_key = Window.partitionBy("key").orderBy("at")
    events = stays.unionByName(leaves).unionByName(arrives)
    numbered = events.withColumn(
        "tenure",
        F.sum(begins).over(in_key)
        + F.coalesce(F.sum(ends).over(in_key.rowsBetween(Window.unboundedPreceding, -1)), F.lit(0)),
    )
    writes = ~F.col("event").isin("delete", "leave")
    values = {
        name: F.when(writes & ~_is_unsent(name), F.col("at"))
        if name in unsent
        else F.when(writes, F.col("at"))
        for name in columns
    }
    grouped = numbered.groupBy("key", "tenure").agg(
        F.min_by("event", "at").alias("first"),
        F.max_by("event", "at").alias("last"),
        F.min("at").alias("first_at"),
        F.max("at").alias("last_at"),
        F.struct(*(_latest(field("new", n), at).alias(n) for n, at in values.items())).alias("row"),
        F.array_compact(F.array(*(F.when(F.max(at).isNull(), F.lit(n)) for n, at in values.items()))).alias(
            "unknown"
        ),
    )
    by_key = Window.partitionBy("key")
    earliest = F.min(F.col("tenure")).over(by_key)
    first_of_key = F.first("first").over(by_key.orderBy("tenure"))
    return grouped.select(
        "key",
        "tenure",
        "row",
        "unknown",
        F.when(F.col("first") == "insert", "insert")
        .when(F.col("first") == "arrive", "arrive")
        .when((F.col("tenure") == 0) & (earliest == 0), "replica")
        .otherwise("nothing")
        .alias("origin"),
        F.col("last").isin("delete", "leave").alias("ended"),
        F.when(F.col("first") == "arrive", F.struct("first_at.commit_lsn", "first_at.ordinal")).alias("came"),
        F.when(F.col("last") == "leave", F.struct("last_at.commit_lsn", "last_at.ordinal")).alias("went"),
        (F.col("tenure") == F.max("tenure").over(by_key)).alias("is_last"),
        (~first_of_key.isin("insert", "arrive")).alias("expected"),
    )


def _inherit(tenures: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Follow every tenure that began with a move back to where the row came from."""
    pending = tenures.withColumn("base", F.when(F.col("origin") == "replica", F.col("key")))
    while pending.where("came is not null").limit(1).count():
        parents = pending.where("went is not null").select(
            F.col("went").alias("came"),
            F.col("came").alias("parent_came"),
            F.col("row").alias("parent_row"),
            F.col("unknown").alias("parent_unknown"),
            F.col("origin").alias("parent_origin"),
            F.col("base").alias("parent_base"),
        )
        joined = pending.join(parents, "came", "left")
        inherits = F.col("came").isNotNull()
        row = F.struct(
            *(
                F.when(inherits & F.array_contains("unknown", n), field("parent_row", n))
                .otherwise(field("row", n))
                .alias(n)
                for n in columns
            )
        )
        resolved = joined.select(
            "key",
            "tenure",
            row.alias("row"),
            F.when(inherits, F.array_intersect("unknown", "parent_unknown"))
            .otherwise(F.col("unknown"))
            .alias("unknown"),
            F.when(inherits, F.col("parent_origin")).otherwise(F.col("origin")).alias("origin"),
            "ended",
            F.when(inherits, F.col("parent_came")).alias("came"),
            "went",
            "is_last",
            "expected",
            F.when(inherits, F.col("parent_base")).otherwise(F.col("base")).alias("base"),
        )
        pending = checkpointed(resolved)
    action = (
        F.when(F.col("ended") | (F.col("origin") == "nothing"), "delete")
        .when(F.col("origin") == "insert", "upsert")
        .otherwise("update")
    )
    return pending.withColumn("action", action)
