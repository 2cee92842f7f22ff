"""UPDATE transformation: slices of the change log -> the transformed changes of each replicated table.

A slice is transformed once per subscription: each table's changes are one Delta commit that holds the
slice's end as its position, then one row a table goes to `_transformed`, which is what the next step goes by.
Repeating a slice after a crash repeats the same commits, which Delta leaves out.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observed import aggregated, observation_for, observed
from pgsieve.assets.steps.records.columns import ROW_OPERATIONS, Order, struct_ddl
from pgsieve.assets.steps.records.columns import field as struct_field
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, in_transaction, is_damage, reason
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed import TableChanges, Transformed
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.assets.steps.update_transformation import in_process
from pgsieve.assets.steps.update_transformation.by_files import StoredChanges
from pgsieve.assets.steps.update_transformation.decoded_batches import (
    SIDES,
    changes_schema,
    count_changes,
    empty_tally,
)
from pgsieve.assets.steps.update_transformation.first_failure import first_failing_transaction, first_failure
from pgsieve.assets.steps.update_transformation.messages import Messages
from pgsieve.assets.steps.update_transformation.relation_versions import (
    Reading,
    count,
    defined_types,
    readings_of,
    stored_changes,
)
from pgsieve.assets.steps.update_transformation.schema_changes import follow_schema_changes
from pgsieve.assets.steps.update_transformation.skip import clear_skip, is_begun
from pgsieve.assets.steps.update_transformation.slice_contents import (
    Part,
    SliceContents,
    slices_to_read,
)
from pgsieve.assets.steps.update_transformation.windows import (
    LostMessagesError,
    Window,
    Work,
    next_window,
    work_of,
)
from pgsieve.assets.steps.validation.waiting import hold_back, sound_catalog, table_problems, waiting_for
from pgsieve.decoding.errors import UnsupportedFilterError, UnsupportedTypeError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import OverrunError, again_after_conflict
from pgsieve.resources.lake.delta.parquet_files import Tally
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.way import Way, column_mapping
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.wal import current_lsn

_LOGGER = logging.getLogger(__name__)

#: Statistics of the slice, the order key and the time; those of every value would cost as much as writing.
_CHANGES_PROPERTIES = {"delta.dataSkippingNumIndexedCols": "4"}


def transform(subscription: Subscription, lake: Lake, log: Log) -> list[TableChanges]:
    """Transform the slices appended since the last time, in order; the replicas follow schema changes first.

    With `disable_on_error` an error disables the subscription before anything of its transaction, or of a later
    one, is written. Raises SubscriptionDisabledError for a subscription that is disabled.
    """
    results: list[TableChanges] = []
    lake.begin_writing()
    with subscription.feed.source.exclusively(subscription.name):
        # Where another process has transformed a slice meanwhile, or copied a table, what follows begins anew.
        again_after_conflict(_transform)(subscription, lake, log, results)
    return results


def _transform(subscription: Subscription, lake: Lake, log: Log, results: list[TableChanges]) -> None:
    """Transform what is there, and add it to the results."""
    skip = SubscriptionRecord(lake, subscription.name).refuse_disabled().skip_lsn
    # Before any state: who changes one has a version of its own here, so that this plan does not outlive it.
    standing = lake.records.standing(Transformed(lake, subscription.name).path)
    begin, base = standing.position or 0, standing.version
    _set_aside_what_is_behind(subscription, lake, begin, log)
    with subscription.feed.source.connect() as connection:
        present = sound_catalog(connection, subscription, present_catalog(connection))
        lsn = current_lsn(connection)
    problems = table_problems(subscription, present)
    hold_back(subscription, lake, problems)
    if problems and subscription.disable_on_error:
        return
    if follow_schema_changes(subscription, lake, present, lsn, begin, log):
        # Whoever transforms beside this begins anew, and so does this.
        _transform(subscription, lake, log, results)
        return
    for end, reader, catalog in slices_to_read(lake, subscription, present, after=begin):
        if reader is None:
            Transformed(lake, subscription.name).append(end, [], base)
            begin, base = end, base + 1
        while reader is not None and begin < end:
            window = next_window(skip, begin, end)
            work = _work_without_lost(reader, lake, window, catalog)
            failure = first_failure(reader, lake, work) if subscription.disable_on_error else None
            if failure is not None:
                at, problem = failure
                SubscriptionRecord(lake, subscription.name).disable(problem)
                log(f"{subscription.name} is disabled: {problem}")
                if at <= begin or is_begun(lake, subscription.name, begin):
                    return
                window = replace(window, end=at)
                work = _work_without_lost(reader, lake, window, catalog)
            try:
                changes = _transform_slice(reader, lake, work, begin, base)
            except TABLE_ERRORS as error:
                if not subscription.disable_on_error:
                    raise
                SubscriptionRecord(lake, subscription.name).disable(reason(lake, error))
                return
            Transformed(lake, subscription.name).append(window.end, changes, base)
            reach(Failpoint.SLICE_TRANSFORMED)
            log(f"transformed everything up to {format_lsn(window.end)} for {subscription.name}")
            results += changes
            if failure is not None:
                return
            skip = clear_skip(lake, subscription, skip, window, any(c.changed for c in changes), log)
            begin, base = window.end, base + 1


def _work_without_lost(subscription: Subscription, lake: Lake, window: Window, catalog: Catalog) -> Work:
    """What is to be transformed of a window; tables of whose changes the change log has lost files are set aside."""
    while True:
        try:
            return work_of(subscription, lake, window, catalog)
        except LostMessagesError as lost:
            problem = lost.damage.message
            TableStates(lake, subscription.name).append(
                s.with_problem(subscription.name, problem) for s in lost.tables.values()
            )


def _set_aside_what_is_behind(subscription: Subscription, lake: Lake, begin: int, log: Log) -> None:
    """Set aside the tables whose next changes the change log had, and has no more."""
    deleted = FeedRecord(lake, subscription.feed).deleted_up_to()
    if begin >= deleted:
        return
    problem = (
        f"its changes are transformed up to {format_lsn(begin)} only, and those up to {format_lsn(deleted)} are deleted"
        " from the change log: the subscription was restored from a backup, or left out of the configuration meanwhile"
    )
    behind = [
        s.with_problem(subscription.name, problem)
        for s in TableStates(lake, subscription.name).newest().values()
        if s.applies and s.lsn < deleted
    ]
    TableStates(lake, subscription.name).append(behind)
    for state in behind:
        log(f"{subscription.name}: {quote_qualified(*state.name)} is set aside: {state.reason}")


def _transform_slice(
    subscription: Subscription, lake: Lake, work: Work, begin: int, base: int
) -> list[TableChanges]:
    if not work.tables:
        return []
    contents = work.contents
    shared = len(work.tables) > 1 and not lake.is_small(contents.size)
    aside: dict[Name, TableState] = {}

    def failed(name: Name, problem: str, *, is_copied: bool = False) -> TableChanges:
        state = work.tables[name]
        again = replace(state, state=SyncState.INITIALIZE, reason=problem)
        aside[name] = again if is_copied else state.with_problem(subscription.name, problem)
        return TableChanges(contents.end, *name, problem=problem)

    def one(name: Name, messages: Messages) -> TableChanges:
        try:
            return _transform_table(
                subscription,
                lake,
                messages,
                contents,
                work.tables[name],
                work.parts.get(name, []),
                work.emptied.get(name, []),
                begin,
            )
        except (UnsupportedFilterError, UnsupportedTypeError) as error:
            if subscription.disable_on_error:
                raise
            return failed(name, waiting_for(error), is_copied=True)
        except SchemaChangedError as error:
            return failed(name, error.message, is_copied=True)
        except TABLE_ERRORS as error:
            problem = reason(lake, error)
            if not is_damage(error):
                if subscription.disable_on_error:
                    raise
                problem = in_transaction(problem, first_failing_transaction(subscription, lake, work, name))
            return failed(name, problem)

    with work.messages.persisted() if shared else nullcontext(work.messages) as messages:
        changes = lake.side_by_side(partial(one, messages=messages), list(work.tables))
    if aside and lake.records.version(transformed := Transformed(lake, subscription.name).path) != base:
        raise OverrunError(transformed)  # What fails may be what another process has changed.
    TableStates(lake, subscription.name).append(aside.values())
    return changes


def _transform_table(
    subscription: Subscription,
    lake: Lake,
    messages: Messages,
    contents: SliceContents,
    state: TableState,
    parts: Sequence[Part],
    truncates: Sequence[Order],
    begin: int,
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
    schema = changes_schema(
        readings[0].types(definition) if readings else defined_types(subscription, state.name, definition)
    )
    with lake.one_moment():
        position = lake.records.position(path) or 0
        way = lake.way(path, definition.names, contents.size, lambda: schema)
    written = position >= contents.end
    if begin < position < contents.end:
        raise SchemaChangedError(
            f"changes up to {format_lsn(position)} only were written by a run that ended amid a slice"
        )
    if written and (tally := _tally(lake, path, contents.end, definition.key)) is not None:
        return _counted(result, {}, [tally])
    if way is Way.IN_PROCESS:
        few = _few_changes(definition, contents, readings, truncates, schema)
        if few is not None:
            return _write_few(lake, path, result, few, definition.key, position)
        _LOGGER.debug("%s: left to Spark, for its messages or row filters", quote_qualified(*state.name))
    elif way is Way.FILES:
        stored = stored_changes(readings, definition, schema, truncates)
        if stored is not None:
            return _write_stored(lake, path, result, stored, position)
    received = [observation_for(lake) for _ in readings]
    frames = [r.changes(definition, o) for r, o in zip(readings, received, strict=True)]
    if truncates:
        frames.append(_truncate_rows(lake, truncates, definition))
    # The slice stands first: Delta keeps statistics of the first columns.
    changes = reduce(DataFrame.unionByName, frames).select(
        F.lit(contents.end).cast("bigint").alias("slice"), "*"
    )
    counts = _write_changes(lake, changes, path, definition, contents, position)
    return replace(
        result,
        received={o: 0 if written else sum(r.get.get(o) or 0 for r in received) for o in ROW_OPERATIONS},
        sent={o: counts[o] or 0 for o in ROW_OPERATIONS},
        key_changes=counts["key_changes"] or 0,
        unchanged=tuple(sorted(json.loads(counts["unchanged"] or "[]"))),
    )


@dataclass(frozen=True)
class _FewChanges:
    """What a subscription gets of a table in a slice, and how many changes of each operation came."""

    sent: pa.Table
    received: Mapping[str, int]


def _few_changes(
    definition: Definition,
    contents: SliceContents,
    readings: Sequence[Reading],
    truncates: Sequence[Order],
    schema: pa.Schema,
) -> _FewChanges | None:
    """A table's changes, where this process may have them; None where Spark has to."""
    received, changes = Counter[str](), [in_process.truncates(truncates, schema)]
    for reading in readings:
        part = reading.changes_in_process(definition, schema, received)
        if part is None:
            return None
        changes.append(part)
    return _FewChanges(in_process.in_slice(changes, contents.end, schema), received)


def _write_few(
    lake: Lake, path: str, result: TableChanges, few: _FewChanges, key: Sequence[str], position: int
) -> TableChanges:
    """Append a table's changes once, and count them."""
    assert lake.local is not None
    with lake.refusing(path):
        lake.local.write(path, few.sent, result.slice, properties=_CHANGES_PROPERTIES, after=position)
    reach(Failpoint.CHANGES_WRITTEN)
    tally = empty_tally()
    for batch in few.sent.to_batches():
        count_changes(batch, key, tally)
    return _counted(result, few.received, [tally])


def _write_stored(
    lake: Lake, path: str, result: TableChanges, changes: StoredChanges, position: int
) -> TableChanges:
    """Many changes: the executors write what the subscription gets of them as they decode them."""
    received: dict[str, int] = {}

    def written() -> pa.Table:
        transformed = changes.transformed(lake.executors, result.slice, path, lake.store)
        received.update(transformed.received)
        return transformed.files

    files = lake.commit_files(
        written, path, changes.schema, result.slice, properties=_CHANGES_PROPERTIES, after=position
    )
    reach(Failpoint.CHANGES_WRITTEN)
    return _counted(result, received, [json.loads(file["tally"]) for file in files])


def _tally(lake: Lake, path: str, end: int, key: Sequence[str]) -> Tally | None:
    """The tally of the changes that a run that died has written of a slice; None where only Spark reads them."""
    groups = lake.slice_groups(path, [end])
    if groups is None:
        return None
    tally = empty_tally()
    with lake.refusing(path):
        for _, read in lake.store.readers(groups):
            rows = read(
                ["slice", "operation", "unchanged", *(f"{side}.{name}" for side in SIDES for name in key)]
            )
            for batch in rows.filter(pc.equal(rows["slice"], end)).to_batches():
                count_changes(batch, key, tally)
    return tally


def _counted(result: TableChanges, received: Mapping[str, int], tallies: Sequence[Tally]) -> TableChanges:
    """The result with how many changes came, and the tallies of those that are sent."""
    return replace(
        result,
        received={o: received.get(o, 0) for o in ROW_OPERATIONS},
        sent={o: sum(tally.get(o, 0) for tally in tallies) for o in ROW_OPERATIONS},
        key_changes=sum(tally["key_changes"] for tally in tallies),
        unchanged=tuple(sorted({name for tally in tallies for name in tally["unchanged"]})),
    )


def _write_changes(
    lake: Lake,
    changes: DataFrame,
    path: str,
    definition: Definition,
    contents: SliceContents,
    position: int,
) -> Mapping[str, Any]:
    """Append a table's changes once, and count them: while writing, or from what a run that died has written."""
    counts = [
        *(count(o).alias(o) for o in ROW_OPERATIONS),
        F.sum(F.when(_changes_key(definition.key), 1).otherwise(0)).alias("key_changes"),
        # As text: Spark 4.0 observes an array as an object of Java's.
        F.to_json(F.array_distinct(F.flatten(F.collect_set("unchanged")))).alias("unchanged"),
    ]

    def rows() -> DataFrame:
        return lake.slices_of(path, [contents.end])

    if position >= contents.end:
        return aggregated(rows(), counts)
    counted = Observation()
    lake.write(
        changes.observe(counted, *counts),
        path,
        position=contents.end,
        properties={**column_mapping(definition.names), **_CHANGES_PROPERTIES},
        size=contents.size,
        after=position,
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
