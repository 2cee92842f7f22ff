"""Routing and apply: transformed changes -> replica tables, one Delta version a table and slice, then a cut.

Every write to a replica holds the slice's end as its position, so a slice repeated after a crash is left out
by the tables that have it. A table without changes in a slice is not touched. When all tables have a slice,
its end and their Delta versions are written to `_cuts`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.checkpoint import checkpointed
from assets.frames.net_change import after_truncate, net_changes, net_changes_with_moves, net_rows
from assets.frames.schema import CUTS
from assets.frames.schema import field as struct_field
from assets.steps.change_log import durable_position
from assets.steps.subscription import Definition, Subscription
from assets.steps.table_changes import TableChanges, transformed_slices
from assets.steps.table_states import READY, SET_ASIDE, Name, TableState, set_states, table_states
from decoding.lsn import format_lsn
from resources.delta import ExecutorError, Lake, LakeError
from resources.records import quoted

#: Tables applied at the same time.
PARALLEL_TABLES = 4

#: From this size on a MERGE marks rows in deletion vectors; smaller tables are rewritten sooner than marked.
LARGE_BYTES = 64 * 1024 * 1024

Log = Callable[[str], None]


@dataclass(frozen=True)
class Applied:
    """What was done to one replica table: rows by kind, its Delta version, and conflicts seen.

    `missing` counts rows that an UPDATE or DELETE expected and did not find (update_missing and
    delete_missing in PostgreSQL's terms, section 29.8).
    """

    schema: str
    table: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    truncated: bool = False
    missing: int = 0
    version: int = 0
    problem: str | None = None

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table


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
    for end, changes in transformed_slices(lake, subscription, known.lsn if known else 0).items():
        ready = {n: s for n, s in states.items() if s.state == READY}
        todo = [
            c
            for c in changes
            if c.changed and c.name in ready and ready[c.name].lsn < end and (only is None or c.name in only)
        ]
        for applied in _apply_slice(subscription, lake, end, todo, ready):
            result.tables[applied.name] = _sum(result.tables.get(applied.name), applied)
            if applied.problem:
                states[applied.name] = TableState(*applied.name, SET_ASIDE, reason=applied.problem)
                set_states(lake, subscription.name, [states[applied.name]])
            else:
                versions[applied.name] = applied.version
        log(f"applied the slice up to {format_lsn(end)} to {len(todo)} tables of {subscription.name}")
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


def _apply_slice(
    subscription: Subscription,
    lake: Lake,
    end: int,
    todo: Sequence[TableChanges],
    ready: Mapping[Name, TableState],
) -> list[Applied]:
    def one(changes: TableChanges) -> Applied:
        definition = ready[changes.name].definition
        assert definition is not None
        try:
            return _apply_table(subscription, lake, changes, definition)
        except (ExecutorError, LakeError) as error:
            return Applied(changes.schema, changes.table, problem=error.message)

    applied = []
    sizes = {c.name: lake.records.size(lake.replica(subscription.name, *c.name)) for c in todo}
    for large in (False, True):
        chosen = [c for c in todo if (sizes[c.name] >= LARGE_BYTES) == large]
        if chosen:
            with lake.committing(end, vectors=large), ThreadPoolExecutor(PARALLEL_TABLES) as pool:
                applied += list(pool.map(one, chosen))
    return applied


def _apply_table(
    subscription: Subscription, lake: Lake, changes: TableChanges, definition: Definition
) -> Applied:
    path = lake.replica(subscription.name, *changes.name)
    log = lake.current(lake.changes(subscription.name, *changes.name))
    replica = lake.current(path)
    rows = log.where((F.col("slice") == changes.slice) & (F.col("operation") != "truncate"))
    if changes.truncated_at:
        rows = after_truncate(rows, *changes.truncated_at)
    writer = _Writer(lake, path, definition, changes)
    with lake.refusing(path):
        return writer.keyed(rows, replica) if definition.key else writer.keyless(rows, replica)


@dataclass(frozen=True)
class _Writer:
    """Brings the net change of a slice into one replica table, in one commit."""

    lake: Lake
    path: str
    definition: Definition
    changes: TableChanges

    def keyed(self, rows: DataFrame, replica: DataFrame) -> Applied:
        """Apply to a table with a key: append what is surely new, else MERGE."""
        sent, columns = self.changes.sent, self.definition.names
        only_inserts = not (sent["update"] or sent["delete"])
        if only_inserts:
            return self._append(rows.select("new.*"), sent["insert"])
        if self.changes.key_changes:
            base = replica.limit(0) if self.changes.truncated_at else replica
            net = net_changes_with_moves(rows, base, self.definition.key, columns, self.changes.unchanged)
        else:
            net = net_changes(rows, self.definition.key, columns, self.changes.unchanged)
        counted = Observation()
        expecting, upsert = F.col("expected"), F.col("action") == "upsert"
        observed = net.observe(
            counted,
            F.sum(F.when(expecting, 1).otherwise(0)).alias("expected"),
            F.sum(F.when(upsert, 1).otherwise(0)).alias("upserts"),
        )
        # A checkpoint, not a cache: MERGE reads its source twice, and refuses a cached one.
        net = checkpointed(observed)
        expected = counted.get["expected"] or 0
        if not expected or self.changes.truncated_at:
            upserts = net.where(F.col("action") == "upsert").select("row.*")
            return self._append(upserts, counted.get["upserts"] or 0)
        return self._merge(net, expected)

    def _merge(self, net: DataFrame, expected: int) -> Applied:
        view = f"pgsieve_{uuid4().hex}"
        net.createOrReplaceTempView(view)
        key, columns = self.definition.key, self.definition.names

        def new(name: str) -> str:
            column, literal = quoted(name), name.replace("\\", "\\\\").replace("'", "\\'")
            value = f"s.row.{column}"
            if name in self.changes.unchanged:
                value = f"case when array_contains(s.unknown, '{literal}') then t.{column} else {value} end"
            return value

        on = " and ".join(f"t.{quoted(k)} = s.key.{quoted(k)}" for k in key)
        assigned = ", ".join(f"t.{quoted(c)} = {new(c)}" for c in columns)
        listed = ", ".join(quoted(c) for c in columns)
        values = ", ".join(f"s.row.{quoted(c)}" for c in columns)
        result = self.lake.spark.sql(
            f"merge into delta.{quoted(self.path)} t using {view} s on {on}"
            " when matched and s.action = 'delete' then delete"
            f" when matched then update set {assigned}"
            f" when not matched and s.action = 'upsert' then insert ({listed}) values ({values})"
        ).collect()
        self.lake.spark.catalog.dropTempView(view)
        counts = result[0].asDict() if result else {}
        matched = counts.get("num_updated_rows", 0) + counts.get("num_deleted_rows", 0)
        return self._applied(
            inserted=counts.get("num_inserted_rows", 0),
            updated=counts.get("num_updated_rows", 0),
            deleted=counts.get("num_deleted_rows", 0),
            missing=max(0, expected - matched) if result else 0,
        )

    def keyless(self, rows: DataFrame, replica: DataFrame) -> Applied:
        """Apply to a multiset of rows: each change touches exactly one of several equal rows."""
        sent, columns = self.changes.sent, self.definition.names
        if not (sent["update"] or sent["delete"]):
            return self._append(rows.select("new.*"), sent["insert"])
        counted, count = Observation(), F.col("count")
        observed = net_rows(rows, columns).observe(
            counted,
            F.sum(F.when(count > 0, count).otherwise(0)).alias("come"),
            F.sum(F.when(count < 0, -count).otherwise(0)).alias("go"),
        )
        net = checkpointed(observed)
        totals = {name: value or 0 for name, value in counted.get.items()}
        come = _repeated(net.where(F.col("count") > 0), F.col("count"))
        if not totals["go"] or self.changes.truncated_at:
            return self._append(come.select("row.*"), totals["come"])
        return self._replace_rows(net, come, replica, totals["come"], totals["go"])

    def _replace_rows(
        self, net: DataFrame, come: DataFrame, replica: DataFrame, came: int, went: int
    ) -> Applied:
        """Delete all rows equal to one that goes, and put back those that stay, in one MERGE."""
        columns = self.definition.names
        going = net.where(F.col("count") < 0)
        same = [struct_field("row", c).eqNullSafe(F.col(f"b{i}")) for i, c in enumerate(columns)]
        base = replica.select(*(F.col(quoted(c)).alias(f"b{i}") for i, c in enumerate(columns)))
        condition = same[0]
        for equal in same[1:]:
            condition = condition & equal
        held = going.join(base, condition).groupBy("row", "count").agg(F.count(F.lit(1)).alias("held"))
        stay = _repeated(held.where(F.col("held") + F.col("count") > 0), F.col("held") + F.col("count"))
        source = (
            going.select(F.lit("delete").alias("action"), "row")
            .unionByName(stay.select(F.lit("insert").alias("action"), "row"))
            .unionByName(come.select(F.lit("insert").alias("action"), "row"))
        )
        view = f"pgsieve_{uuid4().hex}"
        # Rows that stay are read from the replica itself: read them before the MERGE begins.
        checkpointed(source).createOrReplaceTempView(view)
        on = " and ".join(f"t.{quoted(c)} <=> s.row.{quoted(c)}" for c in columns)
        listed = ", ".join(quoted(c) for c in columns)
        values = ", ".join(f"s.row.{quoted(c)}" for c in columns)
        result = self.lake.spark.sql(
            f"merge into delta.{quoted(self.path)} t using {view} s on s.action = 'delete' and {on}"
            " when matched then delete"
            f" when not matched and s.action = 'insert' then insert ({listed}) values ({values})"
        ).collect()
        self.lake.spark.catalog.dropTempView(view)
        counts = result[0].asDict() if result else {}
        put_back = counts.get("num_inserted_rows", 0) - came
        deleted = counts.get("num_deleted_rows", 0) - put_back
        return self._applied(inserted=came, deleted=deleted, missing=max(0, went - deleted) if result else 0)

    def _append(self, rows: DataFrame, count: int) -> Applied:
        truncated = self.changes.truncated_at is not None
        mode = "overwrite" if truncated else "append"
        if count or truncated:
            frame = rows.select(*(F.col(quoted(c)) for c in self.definition.names))
            self.lake.write(frame, self.path, position=self.changes.slice, overwrite=mode == "overwrite")
        return self._applied(inserted=count)

    def _applied(self, *, inserted: int = 0, updated: int = 0, deleted: int = 0, missing: int = 0) -> Applied:
        return Applied(
            self.changes.schema,
            self.changes.table,
            inserted=inserted,
            updated=updated,
            deleted=deleted,
            truncated=self.changes.truncated_at is not None,
            missing=missing,
            version=self.lake.records.version(self.path),
        )


def _repeated(rows: DataFrame, times: Column) -> DataFrame:
    """Each row as often as `times` says."""
    return rows.select("row", F.explode(F.sequence(F.lit(1), times.cast("int"))).alias("copy")).select("row")
