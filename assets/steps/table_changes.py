"""UPDATE transformation: slices of the change log -> the transformed changes of each replicated table.

A slice is transformed once per subscription: each table's changes are one Delta commit that holds the
slice's end as its position, then one row a table goes to `_transformed`, which is what the next step goes by.
Repeating a slice after a crash repeats the same commits, which Delta leaves out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.changes import (
    changes_schema,
    unfiltered_files,
)
from assets.frames.observed import aggregated, observed
from assets.frames.schema import TRANSFORMED, struct_ddl
from assets.frames.schema import field as struct_field
from assets.steps.failures import TABLE_ERRORS, copy_again, in_transaction, is_damage, reason
from assets.steps.feed_slot import deleted_up_to
from assets.steps.first_failure import first_failing_transaction, first_failure
from assets.steps.relation_versions import OPERATIONS, Reading, count, readings_of
from assets.steps.schema_changes import follow_schema_changes
from assets.steps.skip import clear_skip, is_begun, transformed_up_to
from assets.steps.slice_contents import Order, Part, SliceContents, slices_to_read
from assets.steps.subscription import PARALLEL_TABLES, Definition, Subscription
from assets.steps.subscription_state import disable, refuse_disabled
from assets.steps.table_states import INITIALIZE, SET_ASIDE, Name, TableState, set_states, table_states
from assets.steps.windows import Work, next_window, work_of
from decoding.evolution import SchemaChangedError
from decoding.lsn import format_lsn
from decoding.quoting import quote_qualified
from resources.delta import Lake, column_mapping
from resources.failpoints import Failpoint, reach
from resources.postgres import read_catalog
from resources.slot import current_lsn

#: Statistics of the slice, the order key and the time; those of every value would cost as much as writing.
_CHANGES_PROPERTIES = {"delta.dataSkippingNumIndexedCols": "4"}

Log = Callable[[str], None]


@dataclass(frozen=True)
class TableChanges:
    """A slice's changes of one table, counted before and after the transformation; `size` is the slice's bytes."""

    slice: int
    schema: str
    table: str
    size: int = 0
    received: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    truncates: int = 0
    truncated_at: Order | None = None
    key_changes: int = 0
    unchanged: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table

    @property
    def changed(self) -> bool:
        """Whether there is anything to apply."""
        return bool(self.truncates or any(self.sent.values()))

    def row(self) -> dict[str, object]:
        """The table's row in `_transformed`."""
        lsn, ordinal = self.truncated_at or (None, None)
        return {
            "slice": self.slice,
            "schema": self.schema,
            "table": self.table,
            "bytes": self.size,
            **{f"received_{o}s": self.received.get(o, 0) for o in OPERATIONS},
            **{f"{o}s": self.sent.get(o, 0) for o in OPERATIONS},
            "truncates": self.truncates,
            "truncated_lsn": lsn,
            "truncated_ordinal": ordinal,
            "key_changes": self.key_changes,
            "unchanged": list(self.unchanged),
            "problem": self.problem,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "TableChanges":
        """The changes that a row of `_transformed` tells of."""
        return cls(
            slice=row["slice"],
            schema=row["schema"],
            table=row["table"],
            size=row["bytes"],
            received={o: row[f"received_{o}s"] for o in OPERATIONS},
            sent={o: row[f"{o}s"] for o in OPERATIONS},
            truncates=row["truncates"],
            truncated_at=None
            if row["truncated_lsn"] is None
            else (row["truncated_lsn"], row["truncated_ordinal"]),
            key_changes=row["key_changes"],
            unchanged=tuple(row["unchanged"]),
            problem=row["problem"],
        )


def transform(subscription: Subscription, lake: Lake, log: Log) -> list[TableChanges]:
    """Transform the slices appended since the last time, in order; the replicas follow schema changes first.

    With `disable_on_error` an error disables the subscription before anything of its transaction, or of a later
    one, is written. Raises SubscriptionDisabledError for a subscription that is disabled.
    """
    skip = refuse_disabled(lake, subscription.name).skip_lsn
    begin = transformed_up_to(lake, subscription.name)
    _set_aside_what_is_behind(subscription, lake, begin, log)
    with subscription.feed.source.connect() as connection:
        present = subscription.feed.with_defined(read_catalog(connection))
        lsn = current_lsn(connection)
    follow_schema_changes(subscription, lake, present, lsn, begin, log)
    results: list[TableChanges] = []
    resumed = True  # Only the first can have been begun by a run that died.
    for end, reader, catalog in slices_to_read(lake, subscription, present, after=begin):
        if reader is None:
            _record(lake, subscription, end, [])
            begin, resumed = end, False
        while reader is not None and begin < end:
            window = next_window(skip, begin, end)
            work = work_of(reader, lake, window, catalog)
            failure = first_failure(reader, lake, work) if subscription.disable_on_error else None
            if failure is not None:
                at, problem = failure
                disable(lake, subscription.name, problem)
                log(f"{subscription.name} is disabled: {problem}")
                if at <= begin or is_begun(lake, subscription.name, begin):
                    return results
                window = replace(window, end=at)
                work = work_of(reader, lake, window, catalog)
            try:
                changes = _transform_slice(reader, lake, work, resumed=resumed)
            except TABLE_ERRORS as error:
                if not subscription.disable_on_error:
                    raise
                disable(lake, subscription.name, reason(lake, error))
                return results
            _record(lake, subscription, window.end, changes)
            reach(Failpoint.SLICE_TRANSFORMED)
            log(f"transformed everything up to {format_lsn(window.end)} for {subscription.name}")
            results += changes
            if failure is not None:
                return results
            skip = clear_skip(lake, subscription, skip, window, any(c.changed for c in changes), log)
            begin, resumed = window.end, False
    return results


def _set_aside_what_is_behind(subscription: Subscription, lake: Lake, begin: int, log: Log) -> None:
    """Set aside the tables whose next changes the change log had, and has no more."""
    deleted = deleted_up_to(lake, subscription.feed)
    if begin >= deleted:
        return
    problem = (
        f"its changes are transformed up to {format_lsn(begin)} only, and those up to {format_lsn(deleted)} are deleted"
        " from the change log: the subscription was restored from a backup, or left out of the configuration meanwhile"
    )
    behind = [
        replace(s, state=SET_ASIDE, reason=copy_again(subscription.name, s.name, problem))
        for s in table_states(lake, subscription.name).values()
        if s.applies and s.lsn < deleted
    ]
    set_states(lake, subscription.name, behind)
    for state in behind:
        log(f"{subscription.name}: {quote_qualified(*state.name)} is set aside: {state.reason}")


def _record(lake: Lake, subscription: Subscription, end: int, changes: Sequence[TableChanges]) -> None:
    rows = [c.row() for c in changes] or [{"slice": end}]
    lake.records.append(lake.transformed(subscription.name), pa.Table.from_pylist(rows, TRANSFORMED), end)


def transformed_slices(lake: Lake, subscription: Subscription, after: int) -> dict[int, list[TableChanges]]:
    """The transformed slices that end after an LSN, oldest first, with the tables that each changes."""
    slices: dict[int, list[TableChanges]] = {}
    rows = [row for row in lake.records.rows(lake.transformed(subscription.name)) if row["slice"] > after]
    for row in sorted(rows, key=lambda r: int(r["slice"])):
        tables = slices.setdefault(row["slice"], [])
        if row["table"] is not None:
            tables.append(TableChanges.from_row(row))
    return slices


def _transform_slice(
    subscription: Subscription, lake: Lake, work: Work, *, resumed: bool
) -> list[TableChanges]:
    if not work.tables:
        return []
    contents, messages = work.contents, work.messages
    shared = len(work.tables) > 1 and not lake.writes_small(contents.size)
    if shared:
        messages = messages.persist()

    def one(name: Name) -> TableChanges:
        try:
            return _transform_table(
                subscription,
                lake,
                messages,
                contents,
                work.tables[name],
                work.parts.get(name, []),
                work.emptied.get(name, []),
                resumed=resumed,
            )
        except SchemaChangedError as error:
            return TableChanges(contents.end, *name, problem=f"{INITIALIZE}{error.message}")
        except TABLE_ERRORS as error:
            problem = reason(lake, error)
            if is_damage(error):
                problem = copy_again(subscription.name, name, problem)
            elif subscription.disable_on_error:
                raise
            else:
                problem = in_transaction(problem, first_failing_transaction(subscription, lake, work, name))
            return TableChanges(contents.end, *name, problem=f"{SET_ASIDE}{problem}")

    with ThreadPoolExecutor(PARALLEL_TABLES) as pool:
        changes = list(pool.map(one, work.tables))
    if shared:
        messages.unpersist()
    aside = [
        replace(work.tables[c.name], state=c.problem[0], reason=c.problem[1:]) for c in changes if c.problem
    ]
    set_states(lake, subscription.name, aside)
    return [c if c.problem is None else replace(c, problem=c.problem[1:]) for c in changes]


def _transform_table(
    subscription: Subscription,
    lake: Lake,
    messages: DataFrame,
    contents: SliceContents,
    state: TableState,
    parts: Sequence[Part],
    truncates: Sequence[Order],
    *,
    resumed: bool,
) -> TableChanges:
    definition = state.definition
    assert definition is not None
    since: Order = (state.lsn, -1)
    truncates = [at for at in truncates if at > since]
    readings = readings_of(subscription, messages, parts, since, definition)
    result = TableChanges(
        slice=contents.end,
        schema=state.schema,
        table=state.table,
        size=contents.size,
        truncates=len(truncates),
        truncated_at=max(truncates, default=None),
    )
    if not readings and not truncates:
        return result
    path = lake.changes(subscription.name, state.schema, state.table, definition.history.generation)
    written = resumed and (lake.records.position(path) or 0) >= contents.end
    schema = changes_schema(readings[0].types(definition)) if readings else None
    local = None if lake.writes_small(contents.size) else lake.plain(path, definition.names)
    if (
        local
        and schema
        and not truncates
        and not written
        and all(r.is_unfiltered(definition) for r in readings)
        and local.takes_files(path, schema)
    ):
        return _write_unfiltered(lake, path, result, readings, definition, schema)
    received = [Observation() for _ in readings]
    frames = [r.changes(definition, o) for r, o in zip(readings, received, strict=True)]
    if truncates:
        frames.append(_truncate_rows(lake, truncates, definition))
    # The slice stands first: Delta keeps statistics of the first columns.
    changes = reduce(DataFrame.unionByName, frames).select(
        F.lit(contents.end).cast("bigint").alias("slice"), "*"
    )
    counts = _write_changes(lake, changes, path, definition, contents, written=written)
    return replace(
        result,
        received={o: 0 if written else sum(r.get.get(o) or 0 for r in received) for o in OPERATIONS},
        sent={o: counts[o] or 0 for o in OPERATIONS},
        key_changes=counts["key_changes"] or 0,
        unchanged=tuple(sorted(counts["unchanged"] or ())),
    )


def _write_unfiltered(
    lake: Lake,
    path: str,
    result: TableChanges,
    readings: Sequence[Reading],
    definition: Definition,
    schema: pa.Schema,
) -> TableChanges:
    """Many changes that no row filter has to see: the executors write them as they decode them."""
    frames = [
        unfiltered_files(r.messages, r.columns, result.slice, definition.key, schema, path) for r in readings
    ]
    written = reduce(DataFrame.unionByName, frames)
    files = lake.commit_files(written, path, schema, result.slice, properties=_CHANGES_PROPERTIES)
    reach(Failpoint.CHANGES_WRITTEN)
    tallies = [json.loads(file["tally"]) for file in files]
    counts = {o: sum(t.get(o, 0) for t in tallies) for o in OPERATIONS}
    return replace(
        result,
        received=counts,
        sent=counts,
        key_changes=sum(t["key_changes"] for t in tallies),
        unchanged=tuple(sorted({name for t in tallies for name in t["unchanged"]})),
    )


def _write_changes(
    lake: Lake,
    changes: DataFrame,
    path: str,
    definition: Definition,
    contents: SliceContents,
    *,
    written: bool,
) -> Mapping[str, Any]:
    """Append a table's changes once, and count them: while writing, or from what a run that died has written."""
    counts = [
        *(count(o).alias(o) for o in OPERATIONS),
        F.sum(F.when(_changes_key(definition.key), 1).otherwise(0)).alias("key_changes"),
        F.array_distinct(F.flatten(F.collect_set("unchanged"))).alias("unchanged"),
    ]

    def rows() -> DataFrame:
        return lake.slices_of(path, [contents.end])

    if written:
        return aggregated(rows(), counts)
    counted = Observation()
    lake.write(
        changes.observe(counted, *counts),
        path,
        position=contents.end,
        properties={**column_mapping(definition.names), **_CHANGES_PROPERTIES},
        size=contents.size,
    )
    reach(Failpoint.CHANGES_WRITTEN)
    return observed(counted, counts, rows)


def _changes_key(key: Sequence[str]) -> Column:
    """Whether a change is an UPDATE that moves its row to another key."""
    differs = F.lit(False)
    for name in key:
        differs = differs | ~struct_field("old", name).eqNullSafe(struct_field("new", name))
    return (F.col("operation") == "update") & F.col("old").isNotNull() & differs


def _truncate_rows(lake: Lake, truncates: Sequence[Order], definition: Definition) -> DataFrame:
    struct = struct_ddl(definition.columns)
    schema = (
        "commit_lsn bigint, ordinal bigint, number bigint, commit_time timestamp, operation string, unchanged array<string>,"
        f" old {struct}, new {struct}"
    )
    return lake.spark.createDataFrame(
        [(*at, None, None, "truncate", None, None, None) for at in truncates], schema
    )
