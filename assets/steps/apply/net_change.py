"""Apply: the changes of one replica table in a batch -> the net change of each row.

In: transformed changes (`pgsieve.assets.steps.update_transformation.changes`). Out, for a table with a key: one row
per key, with its `action`, the new `row`, and `unknown`, the names of the columns whose value stays the replica's.

- upsert: the row exists afterwards, with these values.
- update: if the replica has the row, it gets these values. A missing row stays missing (section 29.8,
  update_missing).
- delete: the row does not exist afterwards.

`expected` says whether the replica is expected to have the row before the batch. `equal_rows` is for tables without
a key.

A batch without a move takes `decided_changes` and `changed_rows`. One in which UPDATEs move rows from one key to
another takes `net_changes_with_moves`, which computes tenures: `tenures` draws them and holds their rules.
"""

from collections.abc import Collection, Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.tenures import (
    ACTIONS,
    BEGINS,
    ENDS,
    ORIGIN_OF_FIRST,
    ORIGIN_OF_LATER,
    ORIGINS,
)
from pgsieve.assets.steps.checkpoint import checkpointed
from pgsieve.assets.steps.records.columns import field, order
from pgsieve.resources.lake.delta.records import quoted


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
    `expected`, `last` (the place of the change that has the row), `begins` and `absent` as those of
    `conflicting_rows.lookups`, and for the n-th of the columns `unsent`, which some change left out as unchanged,
    `sent_n`: the place of the last change that has its value.
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
        F.count(F.when(operation == "insert", 1)).alias("begins"),
        F.min(F.when(operation == "insert", F.col("place"))).alias("begun"),
        F.min(F.when(operation == "delete", F.col("place"))).alias("ended"),
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
        "begins",
        ((F.col("begins") > 0) & F.coalesce(F.col("begun") < F.col("ended"), F.lit(True))).alias("absent"),
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
    """The net change of each key, for a batch in which UPDATEs move rows from one key to another.

    A tenure that begins with a move inherits from the one that the row came from: whether the row exists, and the
    columns that were not sent. A move that finds no row does nothing, so its new key stays with the row that had it.
    """
    _, begun = found_moves(changes, replica, key, columns, unsent)
    resolved = _inherit(begun, columns)
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
    """The changes with a DELETE of the old key for each move that finds no row, and their tenures.

    A move that finds no row may leave none for the next one, so this is repeated until every move finds its row.
    """
    present = replica.select(F.struct(*(F.col(quoted(k)).alias(k) for k in key)).alias("key"))
    current = checkpointed(tenures(changes, key, columns, unsent))
    while (without_row := _moves_without_row(current, present)).limit(1).count():
        changes = _deletes_instead(changes, without_row)
        current = checkpointed(tenures(changes, key, columns, unsent))
    return changes, current


def _moves_without_row(current: DataFrame, present: DataFrame) -> DataFrame:
    """The places (`went`) of the moves that find no row under their old key, whatever other moves find."""
    left = current.where("went is not null")
    missing = left.where(F.col("origin") == ORIGIN_OF_FIRST).join(present, "key", "left_anti")
    return missing.select("went").unionByName(left.where(F.col("origin") == ORIGIN_OF_LATER).select("went"))


def _deletes_instead(changes: DataFrame, moves: DataFrame) -> DataFrame:
    """The changes with these moves as DELETEs of the old key, which do as much and are counted as missing a row."""
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


def tenures(
    changes: DataFrame, key: Sequence[str], columns: Sequence[str], unsent: Collection[str]
) -> DataFrame:
    """One row per tenure: key, number, how it began (`origin`), how it ended, and the columns it knows.

    `came` and `went` are the order keys of the moves that began and ended it.
    """
    in_key = Window.partitionBy("key").orderBy("at")
    before = in_key.rowsBetween(Window.unboundedPreceding, -1)
    event = F.col("event")
    begun = F.sum(event.isin(*BEGINS).cast("int")).over(in_key)
    ended = F.coalesce(F.sum(event.isin(*ENDS).cast("int")).over(before), F.lit(0))
    numbered = _events(changes, key).withColumn("tenure", begun + ended)
    grouped = _with_values(numbered, columns, unsent)

    by_key = Window.partitionBy("key")
    first_of_key = F.first("first").over(by_key.orderBy("tenure"))
    origin = F.when(F.col("tenure") == 0, ORIGIN_OF_FIRST).otherwise(ORIGIN_OF_LATER)
    for begins, name in ORIGINS.items():
        origin = F.when(F.col("first") == begins, name).otherwise(origin)
    return grouped.select(
        "key",
        "tenure",
        "row",
        "unknown",
        origin.alias("origin"),
        F.col("last").isin(*ENDS).alias("ended"),
        F.when(F.col("first") == "arrive", F.struct("first_at.commit_lsn", "first_at.ordinal")).alias("came"),
        F.when(F.col("last") == "leave", F.struct("last_at.commit_lsn", "last_at.ordinal")).alias("went"),
        (F.col("tenure") == F.max("tenure").over(by_key)).alias("is_last"),
        (~first_of_key.isin(*BEGINS)).alias("expected"),
    )


def _events(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """What happens to each key, in the order of `at`. A move is two events: the row leaves, then arrives."""
    old, new = _key("old", key), _key("new", key)
    marked = changes.withColumn("is_move", is_move(key))
    moves = marked.where("is_move")

    def at(part: int) -> Column:
        return F.struct("commit_lsn", "ordinal", F.lit(part).alias("part")).alias("at")

    stays = marked.where(~F.col("is_move")).select(
        F.when(F.col("operation") == "delete", old).otherwise(new).alias("key"),
        at(0),
        F.col("operation").alias("event"),
        "new",
        "unchanged",
    )
    nothing = F.lit(None).cast(changes.schema["new"].dataType).alias("new")
    leaves = moves.select(old.alias("key"), at(0), F.lit("leave").alias("event"), nothing, "unchanged")
    arrives = moves.select(new.alias("key"), at(1), F.lit("arrive").alias("event"), "new", "unchanged")
    return stays.unionByName(leaves).unionByName(arrives)


def _with_values(numbered: DataFrame, columns: Sequence[str], unsent: Collection[str]) -> DataFrame:
    """One row per key and tenure: its first and its last event, and of each column the value that was sent last."""
    writes = ~F.col("event").isin(*ENDS)
    sent_at = {
        name: F.when(writes & ~_is_unsent(name), F.col("at"))
        if name in unsent
        else F.when(writes, F.col("at"))
        for name in columns
    }
    row = F.struct(*(_latest(field("new", name), at).alias(name) for name, at in sent_at.items()))
    never_sent = F.array(*(F.when(F.max(at).isNull(), F.lit(name)) for name, at in sent_at.items()))
    return numbered.groupBy("key", "tenure").agg(
        F.min_by("event", "at").alias("first"),
        F.max_by("event", "at").alias("last"),
        F.min("at").alias("first_at"),
        F.max("at").alias("last_at"),
        row.alias("row"),
        F.array_compact(never_sent).alias("unknown"),
    )


def _inherit(begun: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Each tenure with what it inherits, and `base`: the key that the replica has its row under, if it has it.

    Chains of moves are followed by pointer doubling. In each round every tenure takes over what its parent has so
    far, and then points to the parent of its parent (`came`). So n moves of one row take log2(n) joins, whatever
    the number of rows. A row that moved from tenure a to b, c, d and e, and where each tenure points:

        round    b       c                 d                 e
        0        a       b                 c                 d
        1        done    a, having b's     b, having c's     c, having d's
        2                done              done              a, having d's, c's and b's
        3                                                    done
    """
    pending = begun.withColumn("base", F.when(F.col("origin") == ORIGIN_OF_FIRST, F.col("key")))
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
    action = F.lit(None).cast("string")
    for (origin, ended), name in ACTIONS.items():
        action = F.when((F.col("origin") == origin) & (F.col("ended") == ended), name).otherwise(action)
    return pending.withColumn("action", action)
