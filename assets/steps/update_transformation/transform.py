"""UPDATE transformation: slices of the change log -> the transformed changes of each replicated table.

A slice is transformed once per subscription: each table's changes are one Delta commit with the slice's end
as its position. Then one row per table is written to `_transformed`, which the apply reads. Repeating a slice
after a crash repeats the same commits, which Delta leaves out.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.history.copied import CHANGES_PROPERTIES
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observed import aggregated, observation_for, observed
from pgsieve.assets.steps.records.columns import Order
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, explained, is_damage, reason
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.own_versions import of_subscription, refuse_put_back
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed import TableChanges, Transformed
from pgsieve.assets.steps.subscription import Definition, Subscription, defined_types
from pgsieve.assets.steps.update_transformation.changes import (
    CAME_AS,
    MOVES,
    ReadableChanges,
    SentChanges,
    spark_tally,
    written_changes,
)
from pgsieve.assets.steps.update_transformation.first_failure import first_failing_transaction, first_failure
from pgsieve.assets.steps.update_transformation.messages import Messages
from pgsieve.assets.steps.update_transformation.relation_versions import readings_of
from pgsieve.assets.steps.update_transformation.schema_changes import follow_schema_changes
from pgsieve.assets.steps.update_transformation.skip import clear_skip, is_begun
from pgsieve.assets.steps.update_transformation.slice_contents import slices_to_read, summarized_slice
from pgsieve.assets.steps.update_transformation.windows import (
    LostMessagesError,
    TableWork,
    Window,
    Work,
    next_window,
    work_of,
)
from pgsieve.assets.steps.validation.waiting import hold_back, sound_catalog, table_problems, waiting_for
from pgsieve.decoding.changes.columns import ROW_OPERATIONS, SIDES, changes_schema
from pgsieve.decoding.changes.sent_as import SentCounts
from pgsieve.decoding.changes.tally import Tally, count_changes, empty_tally
from pgsieve.decoding.errors import UnsupportedFilterError, UnsupportedTypeError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.committers import ByFiles
from pgsieve.resources.lake.delta.errors import OverrunError, again_after_conflict
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.wal import current_lsn
from pgsieve.resources.work import called


def transform(subscription: Subscription, lake: Lake, log: Log) -> list[TableChanges]:
    """Transform the slices appended since the last time, in order; the replicas follow schema changes first.

    With `disable_on_error` an error disables the subscription before anything of its transaction, or of a
    later one, is written. Raises SubscriptionDisabledError for a subscription that is disabled.
    """
    results: list[TableChanges] = []
    lake.access.begin_writing()
    with subscription.feed.source.exclusively(subscription.name):
        # Where another process has transformed a slice meanwhile, or copied a table, the rest begins anew.
        again_after_conflict(_transform)(subscription, lake, log, results)
    return results


def _transform(subscription: Subscription, lake: Lake, log: Log, results: list[TableChanges]) -> None:
    """Transform the present slices, and add them to the results."""
    skip = SubscriptionRecord(lake, subscription.name).refuse_disabled().skip_lsn
    # Before any state: a process that changes a state writes a version of its own here, so this plan does not
    # outlive it.
    head = lake.records.head(Transformed(lake, subscription.name).path)
    begin, base = head.position or 0, head.version
    cut = Cuts(lake, subscription.name).last()
    refuse_put_back(lake, of_subscription(lake, subscription.name), [cut])
    _set_aside_what_is_behind(subscription, lake, begin, log)
    with subscription.feed.source.connect() as connection:
        present = sound_catalog(connection, subscription, present_catalog(connection))
        lsn = current_lsn(connection)
    if hold_back(subscription, lake, table_problems(subscription, present)):
        return
    if follow_schema_changes(subscription, lake, present, lsn, begin, log):
        # A process that transforms beside this one begins anew, and so does this one.
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
            if reader is not subscription or window.skipped is not None:
                _note_altered(lake, subscription, end, skipping=window.skipped is not None)
            try:
                changes = _transform_slice(reader, lake, work, _Held(begin, cut), base)
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


def _note_altered(lake: Lake, subscription: Subscription, end: int, *, skipping: bool) -> None:
    """Record that rows of a slice may have been decided by publications that are no more, or skipped."""
    contents = summarized_slice(lake, subscription.feed, end)
    truncated = {oid for _, truncate in contents.truncates for oid in truncate.relation_ids}
    changed = contents.changed | truncated

    def altered(state: TableState) -> bool:
        layout = state.definition.layout if state.definition else None
        return skipping or layout is None or layout.is_of_leaves or layout.oid in changed

    TableStates(lake, subscription.name).note_altered(altered)


def _work_without_lost(subscription: Subscription, lake: Lake, window: Window, catalog: Catalog) -> Work:
    """The work of a window; tables whose changes the change log has lost are set aside."""
    while True:
        try:
            return work_of(subscription, lake, window, catalog)
        except LostMessagesError as lost:
            problem = lost.damage.message
            TableStates(lake, subscription.name).append(
                s.with_problem(subscription.name, problem) for s in lost.tables.values()
            )


def _set_aside_what_is_behind(subscription: Subscription, lake: Lake, begin: int, log: Log) -> None:
    """Set aside the tables whose next changes the change log had, and no longer has."""
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


@dataclass(frozen=True)
class _Held:
    """The LSN up to which slices are transformed, and the newest cut, which knows the histories' positions."""

    begin: int
    cut: Cut | None


def _transform_slice(
    subscription: Subscription, lake: Lake, work: Work, held: _Held, base: int
) -> list[TableChanges]:
    if not work.tables:
        return []
    contents = work.contents
    shared = len(work.tables) > 1 and not lake.policy.is_small(contents.size)
    aside: dict[Name, TableState] = {}

    def failed(name: Name, problem: str, *, is_copied: bool = False) -> TableChanges:
        state = work.tables[name]
        again = replace(state, state=SyncState.INITIALIZE, reason=problem)
        aside[name] = again if is_copied else state.with_problem(subscription.name, problem)
        return TableChanges(contents.end, *name, problem=problem)

    def one(name: Name, messages: Messages) -> TableChanges:
        what = f"UPDATE transformation of {name[0]}.{name[1]}, slice {format_lsn(contents.end)}"
        with called(subscription.name, what):
            return attempt(name, messages)

    def attempt(name: Name, messages: Messages) -> TableChanges:
        try:
            return _transform_table(subscription, lake, work.of_table(name, messages), held)
        except (UnsupportedFilterError, UnsupportedTypeError) as error:
            if subscription.disable_on_error:
                raise
            return failed(name, waiting_for(error), is_copied=True)
        except SchemaChangedError as error:
            return failed(name, error.message, is_copied=True)
        except TABLE_ERRORS as error:
            reason(lake, error)  # Raises where the lake itself fails.
            at = None
            if not is_damage(error):
                if subscription.disable_on_error:
                    raise
                at = first_failing_transaction(subscription, lake, work, name)
            return failed(name, explained(lake, error, name, at))

    with work.messages.persisted() if shared else nullcontext(work.messages) as messages:
        changes = lake.in_parallel(partial(one, messages=messages), list(work.tables))
    if aside and lake.records.version(transformed := Transformed(lake, subscription.name).path) != base:
        raise OverrunError(transformed)  # Another process may have changed what failed.
    TableStates(lake, subscription.name).append(aside.values())
    return changes


def _transform_table(subscription: Subscription, lake: Lake, table: TableWork, held: _Held) -> TableChanges:
    contents, state, definition = table.contents, table.state, table.state.definition
    assert definition is not None
    since: Order = (state.lsn, -1)
    truncates = [at for at in table.truncates if at > since]
    readings = readings_of(subscription, table.messages, table.parts, since, definition)
    result = TableChanges(
        slice=contents.end,
        schema=state.schema,
        table=state.table,
        size=contents.size,
        truncates=len(truncates),
        truncated_at=max((at[:2] for at in truncates), default=None),
        through=tuple(sorted({p for part in table.parts if part.is_after(since) for p in part.partitions})),
    )
    if not readings and not truncates:
        return result
    path = lake.paths.changes(subscription.name, state.schema, state.table, definition.history.generation)
    schema = (
        readings[0].transformation.schema
        if readings
        else changes_schema(defined_types(subscription, state.name, definition))
    )
    with lake.consistent_read():
        position = lake.records.position(path) or 0
        committer = lake.policy.file_committer(path, schema)
    if held.cut is not None:
        held.cut.refuse_earlier_history(path, state, position)
    # The copied rows of a whole history have the position of the copy.
    if max(held.begin, state.lsn) < position < contents.end:
        raise SchemaChangedError(
            f"changes up to {format_lsn(position)} only were written by a run that ended amid a slice"
        )
    changes = SentChanges(readings, truncates, contents.end, definition.key, schema)
    if position >= contents.end:
        # Written by a run that died: what became of all that came is counted once more.
        sent_as = changes.attempted(lake, definition.columns, result.size)
        return _counted(result, sent_as, [_tally(lake, path, contents.end, definition.key)])
    readable = changes.readable
    if isinstance(committer, ByFiles) and readable is not None:
        return _write_files(lake, committer, path, result, readable, position)
    return _write_by_spark(lake, path, result, changes, definition, position)


def _write_files(
    lake: Lake, committer: ByFiles, path: str, result: TableChanges, changes: ReadableChanges, position: int
) -> TableChanges:
    """Let the runner for this many bytes write files of a table's changes, and commit them once."""
    sent_as: SentCounts = {}

    def written() -> pa.Table:
        nonlocal sent_as
        made = changes.written(lake.policy.runner(result.size), path, lake.store)
        sent_as = made.sent_as
        return made.files

    commit = Commit(result.slice, after=position, properties=CHANGES_PROPERTIES)
    files = committer.commit(written, path, changes.schema, commit)
    reach(Failpoint.CHANGES_WRITTEN)
    return _counted(result, sent_as, [json.loads(file["tally"]) for file in files])


def _write_by_spark(
    lake: Lake,
    path: str,
    result: TableChanges,
    changes: SentChanges,
    definition: Definition,
    position: int,
) -> TableChanges:
    """Let Spark write a table's changes once, and count them meanwhile."""
    counted, tally = observation_for(lake), spark_tally()
    made = changes.frame(lake, definition.columns)
    commit = Commit(result.slice, after=position, properties=CHANGES_PROPERTIES)
    lake.write(made.rows.observe(counted, *tally).drop(MOVES, CAME_AS), path, commit, size=result.size)
    reach(Failpoint.CHANGES_WRITTEN)
    counts = observed(
        counted, tally, lambda: written_changes(lake.slices_of(path, [result.slice]), definition.key)
    )
    return _counted(result, made.sent_as(), [_tally_of(counts)])


def _tally(lake: Lake, path: str, end: int, key: Sequence[str]) -> Tally:
    """The tally of a slice's changes that an interrupted run has written."""
    stored = lake.stored_slices(path, [end])
    if stored is None:
        return _tally_of(aggregated(written_changes(lake.slices_of(path, [end]), key), spark_tally()))
    tally = empty_tally()
    with lake.access.refusing(path):
        for _, read in lake.store.readers(stored.groups):
            rows = read(
                ["slice", "operation", "unchanged", *(f"{side}.{name}" for side in SIDES for name in key)]
            )
            for batch in rows.filter(pc.equal(rows["slice"], end)).to_batches():
                count_changes(batch, key, tally)
    return tally


def _tally_of(counts: Mapping[str, Any]) -> Tally:
    """Spark's counts in the form of `count_changes`."""
    return {**counts, "unchanged": json.loads(counts["unchanged"] or "[]")}


def _counted(result: TableChanges, sent_as: SentCounts, tallies: Sequence[Tally]) -> TableChanges:
    """The result with what became of the changes that came, and the tallies of those that are sent."""
    return replace(
        result,
        sent_as=sent_as,
        sent={o: sum(tally.get(o, 0) for tally in tallies) for o in ROW_OPERATIONS},
        key_changes=sum(tally["key_changes"] for tally in tallies),
        unchanged=tuple(sorted({name for tally in tallies for name in tally["unchanged"]})),
    )
