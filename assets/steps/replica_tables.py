"""Routing and apply: transformed changes -> replica tables, one Delta version a table and batch, then a cut.

A batch is some slices that follow one another; their net change is applied. Every write to a replica holds the
batch's end as its position, so what is repeated after a crash is left out for the tables that have it. A table
without changes in a batch is not touched. When all tables have a batch, its end and their Delta versions are
written to `_cuts`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.net_change import after_truncate
from assets.frames.schema import CUTS
from assets.steps.change_log import durable_position
from assets.steps.replica_writer import Applied, Pending, ReplicaWriter
from assets.steps.subscription import Definition, Subscription
from assets.steps.table_changes import TableChanges, transformed_slices
from assets.steps.table_states import READY, SET_ASIDE, Name, TableState, set_states, table_states
from decoding.lsn import format_lsn
from resources.delta import ExecutorError, Lake, LakeError

#: Tables applied at the same time.
PARALLEL_TABLES = 4
#: Slices whose net change is applied at once.
BATCH_SLICES = 8

#: From this size on a MERGE marks rows in deletion vectors; smaller tables are rewritten sooner than marked.
LARGE_BYTES = 64 * 1024 * 1024

Log = Callable[[str], None]


@dataclass(frozen=True)
class Cut:
    """An LSN, and the Delta version of each replica table that holds just what committed before it."""

    lsn: int
    tables: Mapping[Name, int]
    version: int | None = None


@dataclass
class ApplyResult:
    """What an apply did to each table, and the cut it ended at; `cut` is None where there is none yet."""

    tables: dict[Name, Applied] = field(default_factory=dict)
    cut: Cut | None = None


def last_cut(lake: Lake, subscription: Subscription) -> Cut | None:
    """The newest cut of a subscription."""
    rows = lake.records.rows(lake.cuts(subscription.name))
    if not rows:
        return None
    newest = max(rows, key=lambda row: (row["lsn"], row["at"]))
    return Cut(int(newest["lsn"]), {_split(qualified): version for qualified, version in newest["tables"]})


def _join(name: Name) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in name)


def _split(qualified: str) -> Name:
    schema, _, table = qualified[1:-1].partition('"."')
    return schema.replace('""', '"'), table.replace('""', '"')


def apply(
    subscription: Subscription, lake: Lake, log: Log, only: Sequence[Name] | None = None
) -> ApplyResult:
    """Apply the transformed slices that the replicas lack, and write a cut where anything changed.

    `only` restricts it to some tables; then no cut is written, as the others stay behind.
    """
    result = ApplyResult(cut=last_cut(lake, subscription))
    known = result.cut
    states = table_states(lake, subscription.name)
    versions: dict[Name, int] = dict(known.tables) if known else {}
    slices = transformed_slices(lake, subscription, known.lsn if known else 0)
    for ends in _batches(list(slices)):
        end = ends[-1]
        ready = {n: s for n, s in states.items() if s.state == READY}
        changes = [c for e in ends for c in slices[e] if c.changed and c.name in ready]
        todo = _todo(lake, subscription, changes, ready, only)
        for applied in _apply_batch(subscription, lake, end, todo, ready):
            result.tables[applied.name] = _sum(result.tables.get(applied.name), applied)
            if applied.problem:
                states[applied.name] = TableState(*applied.name, SET_ASIDE, reason=applied.problem)
                set_states(lake, subscription.name, [states[applied.name]])
            else:
                versions[applied.name] = applied.version
        log(f"applied everything up to {format_lsn(end)} to {len(todo)} tables of {subscription.name}")
        if only is None and all(s.lsn <= end for s in states.values() if s.state == READY):
            _record(lake, subscription, result, end, _versions(lake, subscription, states, versions, known))
            known = result.cut
    if only is None:
        position = durable_position(lake, subscription.feed) or 0
        if all(s.lsn <= position for s in states.values() if s.state == READY):
            _record(
                lake, subscription, result, position, _versions(lake, subscription, states, versions, known)
            )
    return result


def _batches(ends: Sequence[int]) -> list[Sequence[int]]:
    return [ends[i : i + BATCH_SLICES] for i in range(0, len(ends), BATCH_SLICES)]


def _todo(
    lake: Lake,
    subscription: Subscription,
    changes: Sequence[TableChanges],
    ready: Mapping[Name, TableState],
    only: Sequence[Name] | None,
) -> list[Pending]:
    """What each table lacks of the changes."""
    tables: dict[Name, list[TableChanges]] = {}
    for change in changes:
        if ready[change.name].lsn < change.slice and (only is None or change.name in only):
            tables.setdefault(change.name, []).append(change)
    todo = []
    for name, listed in tables.items():
        held = lake.records.position(lake.replica(subscription.name, *name)) or 0
        lacking = [c for c in listed if c.slice > held]
        if lacking:
            todo.append(Pending(lacking))
    return todo


def _versions(
    lake: Lake,
    subscription: Subscription,
    states: Mapping[Name, TableState],
    versions: dict[Name, int],
    known: Cut | None,
) -> dict[Name, int]:
    """The Delta version of each ready table; `versions` has what cuts and applies told, and is brought up to date.

    A table that was copied since the known cut has a version that neither of them told.
    """
    current = {}
    for name, state in states.items():
        if state.state != READY:
            continue
        told = known.tables.get(name) if known else None
        copied = known is None or state.lsn > known.lsn
        if name not in versions or (copied and versions[name] == told):
            versions[name] = lake.records.version(lake.replica(subscription.name, *name))
        current[name] = versions[name]
    return current


def _record(
    lake: Lake, subscription: Subscription, result: ApplyResult, lsn: int, tables: Mapping[Name, int]
) -> None:
    """Write a cut, unless it is the one that stands there already."""
    if not tables or (result.cut and result.cut.tables == tables):
        return
    versions = [(_join(name), version) for name, version in tables.items()]
    row = {"lsn": lsn, "at": datetime.now(UTC), "tables": versions}
    lake.records.append(lake.cuts(subscription.name), pa.Table.from_pylist([row], CUTS))
    result.cut = Cut(lsn, dict(tables))


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
            return _apply_table(subscription, lake, pending, definition, end)
        except (ExecutorError, LakeError) as error:
            return Applied(*pending.name, problem=error.message)

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
    path, log = lake.replica(subscription.name, *pending.name), lake.changes(subscription.name, *pending.name)
    rows = lake.slices_of(log, [c.slice for c in pending.slices]).where(F.col("operation") != "truncate")
    if pending.truncated_at:
        rows = after_truncate(rows, *pending.truncated_at)
    size = lake.records.size(path) + pending.size
    writer = ReplicaWriter(lake, path, definition, pending, end, size)
    with lake.refusing(path):
        return writer.keyed(rows) if definition.key else writer.keyless(rows)
