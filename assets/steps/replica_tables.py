"""Routing and apply: transformed changes -> replica tables, one Delta version a table and batch, then a cut.

A batch is some slices that follow one another; their net change is applied. Every write to a replica holds the
batch's end as its position, so what is repeated after a crash is left out for the tables that have it. A table
without changes in a batch is not touched. When all tables have a batch, its end and their Delta versions are
written to `_cuts`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.net_change import after_truncate
from assets.steps.catalogs import altered_slices
from assets.steps.cuts import Cut, append_cut, last_cut
from assets.steps.damaged_replicas import set_damaged_aside
from assets.steps.failures import TABLE_ERRORS, copy_again, is_damage, reason
from assets.steps.feed_slot import durable_position
from assets.steps.replica_writer import Applied, Pending, ReplicaWriter
from assets.steps.skip import transformed_up_to
from assets.steps.subscription import PARALLEL_TABLES, Definition, Subscription
from assets.steps.subscription_state import disable
from assets.steps.table_changes import TableChanges, transformed_slices
from assets.steps.table_states import READY, SET_ASIDE, Name, TableState, set_states, table_states
from decoding.lsn import format_lsn
from resources.delta import Lake
from resources.failpoints import Failpoint, reach
from resources.lake_errors import again_after_conflict

#: Slices whose net change is applied at once.
BATCH_SLICES = 8

#: From this size on a MERGE marks rows in deletion vectors; smaller tables are rewritten sooner than marked.
LARGE_BYTES = 64 * 1024 * 1024

Log = Callable[[str], None]


@dataclass
class ApplyResult:
    """What an apply did to each table, and the cut it ended at; `cut` is None where there is none yet."""

    tables: dict[Name, Applied] = field(default_factory=dict)
    cut: Cut | None = None


def apply(
    subscription: Subscription, lake: Lake, log: Log, only: Sequence[Name] | None = None
) -> ApplyResult:
    """Apply the transformed slices that the replicas lack, and write a cut where anything changed.

    `only` restricts it to some tables; then no cut is written, as the others stay behind.
    """
    result = ApplyResult(cut=last_cut(lake, subscription))
    known = result.cut
    slices = transformed_slices(lake, subscription, known.lsn if known else 0)
    changed = {c.name for changes in slices.values() for c in changes if c.changed}
    set_damaged_aside(subscription, lake, known, changed)
    states = table_states(lake, subscription.name)
    versions: dict[Name, int] = dict(known.tables) if known else {}
    reached = 0
    for ends in _batches(list(slices)):
        end = ends[-1]
        ready = {n: s for n, s in states.items() if s.applies}
        changes = [c for e in ends for c in slices[e] if c.changed and c.name in ready]
        todo, ahead = _todo(lake, subscription, changes, ready, only)
        for name, position in ahead.items():
            versions[name] = lake.records.version(lake.replica(subscription.name, *name))
            reached = max(reached, position)
        for applied in _apply_batch(subscription, lake, end, todo, ready):
            result.tables[applied.name] = _sum(result.tables.get(applied.name), applied)
            if applied.problem:
                if subscription.disable_on_error and not applied.damaged:
                    disable(lake, subscription.name, applied.problem)
                    continue
                states[applied.name] = replace(states[applied.name], state=SET_ASIDE, reason=applied.problem)
                set_states(lake, subscription.name, [states[applied.name]])
            else:
                versions[applied.name] = applied.version
        if subscription.disable_on_error and any(a.problem and not a.damaged for a in result.tables.values()):
            return result  # Its replicas hold what they held, or the whole batch; no cut tells of it.
        log(f"applied everything up to {format_lsn(end)} to {len(todo)} tables of {subscription.name}")
        copied = max((s.lsn for s in states.values() if s.state == READY), default=0)
        if only is None and max(copied, reached) <= end:
            _record(lake, subscription, result, end, _versions(lake, subscription, states, versions, known))
            known = result.cut
    if only is None:
        position = complete_up_to(lake, subscription)
        copied = max((s.lsn for s in states.values() if s.state == READY), default=0)
        if max(copied, reached) <= position:
            _record(
                lake, subscription, result, position, _versions(lake, subscription, states, versions, known)
            )
    return result


def complete_up_to(lake: Lake, subscription: Subscription) -> int:
    """The LSN before which everything has been transformed: the change log's, unless it holds more slices."""
    feed, transformed = subscription.feed, transformed_up_to(lake, subscription.name)
    durable = durable_position(lake, feed) or 0
    if durable <= transformed:
        return durable
    waiting = lake.records.slices(lake.change_log(feed.name), transformed) or any(
        end > transformed for end in altered_slices(lake, feed, subscription.name, durable)
    )
    return transformed if waiting else durable


def _batches(ends: Sequence[int]) -> list[Sequence[int]]:
    return [ends[i : i + BATCH_SLICES] for i in range(0, len(ends), BATCH_SLICES)]


def _todo(
    lake: Lake,
    subscription: Subscription,
    changes: Sequence[TableChanges],
    ready: Mapping[Name, TableState],
    only: Sequence[Name] | None,
) -> tuple[list[Pending], dict[Name, int]]:
    """What each table lacks of the changes, and how far those are that have some of them already.

    A run that died or was restricted to some tables leaves such tables: no cut tells of their versions.
    """
    tables: dict[Name, list[TableChanges]] = {}
    for change in changes:
        if ready[change.name].lsn < change.slice:
            tables.setdefault(change.name, []).append(change)
    todo, ahead = [], {}
    for name, listed in tables.items():
        held = lake.records.position(lake.replica(subscription.name, *name)) or 0
        if listed[0].slice <= held:
            ahead[name] = held
        lacking = [c for c in listed if c.slice > held]
        if lacking and (only is None or name in only):
            todo.append(Pending(lacking))
    return todo, ahead


def applied_up_to(lake: Lake, subscription: Subscription) -> int:
    """The LSN before which no slice has anything that a replica lacks, as the Delta tables tell.

    At least the newest cut's; beyond it as long as nothing is to be applied.
    """
    cut = last_cut(lake, subscription)
    upto = cut.lsn if cut else 0
    ready = {n: s for n, s in table_states(lake, subscription.name).items() if s.applies}
    for end, changes in transformed_slices(lake, subscription, upto).items():
        todo, _ = _todo(
            lake, subscription, [c for c in changes if c.changed and c.name in ready], ready, None
        )
        if todo:
            break
        upto = end
    return upto


def _versions(
    lake: Lake,
    subscription: Subscription,
    states: Mapping[Name, TableState],
    versions: dict[Name, int],
    known: Cut | None,
) -> dict[Name, int]:
    """The Delta version of each ready table; `versions` has what cuts and applies told, and is brought up to date.

    A table that was copied, or followed its definition, since the known cut has a version that neither of them told.
    """
    current = {}
    for name, state in states.items():
        if state.state != READY:
            continue
        told = known.tables.get(name) if known else None
        newer = known is None or state.at is None or state.at > known.at
        if name not in versions or (newer and versions[name] == told):
            versions[name] = lake.records.version(lake.replica(subscription.name, *name))
        current[name] = versions[name]
    return current


def _record(
    lake: Lake, subscription: Subscription, result: ApplyResult, lsn: int, tables: Mapping[Name, int]
) -> None:
    """Write a cut, unless it is the one that stands there already."""
    if not tables or (result.cut and result.cut.tables == tables):
        return
    result.cut = Cut(lsn, dict(tables), datetime.now(UTC))
    append_cut(lake, subscription.name, result.cut)
    reach(Failpoint.CUT_WRITTEN)


def renew_cut(lake: Lake, subscription: Subscription, versions: Mapping[Name, int]) -> None:
    """Write the newest cut again where some tables hold its LSN in another Delta version."""
    if (cut := last_cut(lake, subscription)) is not None:
        held = {name: versions.get(name, version) for name, version in cut.tables.items()}
        _record(lake, subscription, ApplyResult(cut=cut), cut.lsn, held)


def _sum(before: Applied | None, now: Applied) -> Applied:
    if before is None:
        return now
    return Applied(
        now.schema,
        now.table,
        inserted=before.inserted + now.inserted,
        updated=before.updated + now.updated,
        deleted=before.deleted + now.deleted,
        truncated=before.truncated or now.truncated,
        missing=before.missing + now.missing,
        version=now.version,
        problem=now.problem or before.problem,
        damaged=now.damaged or before.damaged,
    )


def _apply_batch(
    subscription: Subscription,
    lake: Lake,
    end: int,
    todo: Sequence[Pending],
    ready: Mapping[Name, TableState],
) -> list[Applied]:
    def one(pending: Pending) -> Applied:
        definition = ready[pending.name].definition
        assert definition is not None
        try:
            return again_after_conflict(_apply_table)(subscription, lake, pending, definition, end)
        except TABLE_ERRORS as error:
            problem, lost = reason(lake, error), is_damage(error)
            if lost:
                problem = copy_again(subscription.name, pending.name, problem)
            return Applied(*pending.name, problem=problem, damaged=lost)

    if not todo:
        return []
    applied = []
    sizes = {p.name: lake.records.size(lake.replica(subscription.name, *p.name)) for p in todo}
    for large in (False, True):
        chosen = [p for p in todo if (sizes[p.name] >= LARGE_BYTES) == large]
        if large:
            for pending in chosen:
                lake.enable_deletion_vectors(lake.replica(subscription.name, *pending.name))
        if chosen:
            with lake.committing(end, vectors=large), ThreadPoolExecutor(PARALLEL_TABLES) as pool:
                applied += list(pool.map(one, chosen))
    return applied


def _apply_table(
    subscription: Subscription, lake: Lake, pending: Pending, definition: Definition, end: int
) -> Applied:
    path = lake.replica(subscription.name, *pending.name)
    log = lake.changes(subscription.name, *pending.name, definition.history.generation)
    rows = lake.slices_of(log, [c.slice for c in pending.slices], every=True).where(
        F.col("operation") != "truncate"
    )
    if pending.truncated_at:
        rows = after_truncate(rows, *pending.truncated_at)
    size = lake.records.size(path) + pending.size
    writer = ReplicaWriter(lake, path, definition, pending, end, size)
    with lake.refusing(path):
        applied = writer.keyed(rows) if definition.key else writer.keyless(rows)
        reach(Failpoint.REPLICA_COMMITTED)
    return applied
