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

from assets.frames.changes import changes_schema, decoded_changes, transformed_changes, unfiltered_files
from assets.frames.messages import slice_summary
from assets.frames.schema import TRANSFORMED, order, struct_ddl
from assets.frames.schema import field as struct_field
from assets.steps.change_log import record_summary
from assets.steps.initial_sync import table_options
from assets.steps.row_filters import row_filter
from assets.steps.subscription import Definition, Subscription
from assets.steps.table_states import INITIALIZE, READY, SET_ASIDE, Name, TableState, set_states, table_states
from decoding.builtin_types import DefinedTypes
from decoding.errors import PgsieveError
from decoding.lsn import format_lsn
from decoding.messages import Relation, Truncate, decode
from decoding.publication import Catalog, PublishedRelation
from decoding.routing import routes, truncated_tables
from decoding.row_filter import RowFilter
from decoding.tuples import RelationColumns
from decoding.types import ColumnType
from resources.delta import Lake
from resources.postgres import read_catalog

#: Tables transformed at the same time.
PARALLEL_TABLES = 4
#: Statistics of the slice, the order key and the time; those of every value would cost as much as writing.
_CHANGES_PROPERTIES = {"delta.dataSkippingNumIndexedCols": "4"}
OPERATIONS = ("insert", "update", "delete")

Log = Callable[[str], None]
Order = tuple[int, int]


@dataclass(frozen=True)
class RelationVersion:
    """A Relation message, and the order keys between which it describes the relation's tuples."""

    relation: Relation
    begin: Order
    end: Order | None


@dataclass(frozen=True)
class SliceContents:
    """What a slice holds: its bytes, relation versions by relation id, the relations changed, the truncates."""

    end: int
    size: int
    versions: Mapping[int, Sequence[RelationVersion]]
    changed: frozenset[int]
    truncates: Sequence[tuple[Order, Truncate]]


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
    """Transform the slices appended since the last time, in order."""
    path = lake.change_log(subscription.feed.name)
    ends = lake.records.slices(path, after=_transformed_up_to(lake, subscription))
    if not ends:
        return []
    with subscription.feed.source.connect() as connection:
        catalog = subscription.feed.with_defined(read_catalog(connection))
    results = []
    for number, end in enumerate(ends):
        # Only the first slice can have been begun by a run that died.
        changes = _transform_slice(subscription, lake, end, catalog, resumed=number == 0)
        rows = [c.row() for c in changes] or [{"slice": end}]
        lake.records.append(lake.transformed(subscription.name), pa.Table.from_pylist(rows, TRANSFORMED), end)
        log(
            f"transformed the slice up to {format_lsn(end)} for {subscription.name}: {len(changes)} tables changed"
        )
        results += changes
    return results


def transformed_slices(lake: Lake, subscription: Subscription, after: int) -> dict[int, list[TableChanges]]:
    """The transformed slices that end after an LSN, oldest first, with the tables that each changes."""
    slices: dict[int, list[TableChanges]] = {}
    rows = [row for row in lake.records.rows(lake.transformed(subscription.name)) if row["slice"] > after]
    for row in sorted(rows, key=lambda r: int(r["slice"])):
        tables = slices.setdefault(row["slice"], [])
        if row["table"] is not None:
            tables.append(TableChanges.from_row(row))
    return slices


def _transformed_up_to(lake: Lake, subscription: Subscription) -> int:
    return lake.records.position(lake.transformed(subscription.name)) or 0


def read_slice(lake: Lake, subscription: Subscription, end: int) -> SliceContents:
    """What a slice holds: as it was recorded when drained, else (a run died in between) from its messages."""
    recorded = [row for row in lake.records.rows(lake.slices(subscription.feed.name)) if row["slice"] == end]
    if recorded:
        row = recorded[0]
    else:
        messages = lake.slices_of(lake.change_log(subscription.feed.name), [end])
        found = messages.agg(*slice_summary()).first()
        assert found is not None
        row = record_summary(lake, subscription.feed, end, found.asDict())
    versions: dict[int, list[RelationVersion]] = {}
    truncates: list[tuple[Order, Truncate]] = []
    for message in sorted(row["messages"], key=lambda m: (m["commit_lsn"], m["ordinal"])):
        decoded = decode(message["data"])
        begin = (message["commit_lsn"], message["ordinal"])
        if isinstance(decoded, Truncate):
            truncates.append((begin, decoded))
        elif isinstance(decoded, Relation):
            known = versions.setdefault(decoded.relation_id, [])
            if known and known[-1].relation == decoded:
                continue
            if known:
                known[-1] = replace(known[-1], end=begin)
            known.append(RelationVersion(decoded, begin, None))
    return SliceContents(end, row["bytes"], versions, frozenset(row["relations"]), truncates)


@dataclass(frozen=True)
class _Part:
    """The messages of one relation version, what the subscription gets of them, and what users' types are made of."""

    version: RelationVersion
    sent: PublishedRelation
    defined: DefinedTypes


def _transform_slice(
    subscription: Subscription, lake: Lake, end: int, catalog: Catalog, *, resumed: bool
) -> list[TableChanges]:
    contents = read_slice(lake, subscription, end)
    states = table_states(lake, subscription.name)
    ready = {n: s for n, s in states.items() if s.state == READY and s.lsn < end}
    parts = _parts(subscription, contents, catalog)
    emptied = _truncates(subscription, contents, catalog)
    names = sorted((parts.keys() | emptied.keys()) & ready.keys())
    if not names:
        return []
    messages = lake.slices_of(lake.change_log(subscription.feed.name), [end])
    shared = len(names) > 1 and not lake.writes_small(contents.size)
    if shared:
        messages = messages.persist()

    def one(name: Name) -> TableChanges:
        try:
            return _transform_table(
                subscription,
                lake,
                messages,
                contents,
                ready[name],
                parts.get(name, []),
                emptied.get(name, []),
                resumed=resumed,
            )
        except SchemaChangedError as error:
            return TableChanges(end, *name, problem=f"{INITIALIZE}{error.message}")
        except PgsieveError as error:
            return TableChanges(end, *name, problem=f"{SET_ASIDE}{error.message}")

    with ThreadPoolExecutor(PARALLEL_TABLES) as pool:
        changes = list(pool.map(one, names))
    if shared:
        messages.unpersist()
    aside = [TableState(c.schema, c.table, c.problem[0], reason=c.problem[1:]) for c in changes if c.problem]
    set_states(lake, subscription.name, aside)
    return [c if c.problem is None else replace(c, problem=c.problem[1:]) for c in changes]


class SchemaChangedError(PgsieveError):
    """The stream's columns are no longer the replica's: the table has to be copied again."""


def _parts(subscription: Subscription, contents: SliceContents, catalog: Catalog) -> dict[Name, list[_Part]]:
    """For each replica table the relation versions that carry changes for it."""
    publications = subscription.feed.publications(catalog, subscription.name)
    by_id = {} if subscription.feed.filtered else routes(catalog, publications)
    parts: dict[Name, list[_Part]] = {}
    for relation_id, versions in contents.versions.items():
        if relation_id not in contents.changed:
            continue
        for version in versions:
            sent = (
                _as_published(version.relation, catalog)
                if subscription.feed.filtered
                else by_id.get(relation_id)
            )
            if sent is not None:
                name = (sent.publish_as.schema, sent.publish_as.name)
                parts.setdefault(name, []).append(_Part(version, sent, catalog.types))
    return parts


def _as_published(relation: Relation, catalog: Catalog) -> PublishedRelation | None:
    """Where the publisher filtered, everything that arrives is sent, under the name it arrives with."""
    table = catalog.by_name.get((relation.namespace or "pg_catalog", relation.name))
    if table is None:
        return None
    return PublishedRelation(
        relation=table,
        publish_as=table,
        operations=frozenset(OPERATIONS) | {"truncate"},
        filters=dict.fromkeys(OPERATIONS, None),
        columns=tuple(c.name for c in relation.columns),
        publications=(),
    )


def _truncates(
    subscription: Subscription, contents: SliceContents, catalog: Catalog
) -> dict[Name, list[Order]]:
    """For each replica table the order keys of the TRUNCATEs that empty it."""
    emptied: dict[Name, list[Order]] = {}
    publications = subscription.feed.publications(catalog, subscription.name)
    for at, truncate in contents.truncates:
        if subscription.feed.filtered:
            tables = [catalog.tables[oid] for oid in truncate.relation_ids if oid in catalog.tables]
        else:
            tables = truncated_tables(truncate.relation_ids, catalog, publications)
        for table in tables:
            emptied.setdefault((table.schema, table.name), []).append(at)
    return emptied


def _transform_table(
    subscription: Subscription,
    lake: Lake,
    messages: DataFrame,
    contents: SliceContents,
    state: TableState,
    parts: Sequence[_Part],
    truncates: Sequence[Order],
    *,
    resumed: bool,
) -> TableChanges:
    definition = state.definition
    assert definition is not None
    since: Order = (state.lsn, -1)
    truncates = [at for at in truncates if at > since]
    readings = [
        _reading(subscription, messages, part, since, definition)
        for part in parts
        if part.version.end is None or part.version.end > since
    ]
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
    path = lake.changes(subscription.name, state.schema, state.table)
    written = resumed and (lake.records.position(path) or 0) >= contents.end
    schema = changes_schema((n, t.arrow) for n, t in readings[0].types(definition)) if readings else None
    local = None if lake.writes_small(contents.size) or table_options(definition.names) else lake.local
    if (
        local
        and schema
        and not truncates
        and not written
        and all(r.is_unfiltered(definition) for r in readings)
        and local.has_schema(path, schema)
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
        received={o: 0 if written else sum(r.get[o] or 0 for r in received) for o in OPERATIONS},
        sent={o: counts[o] or 0 for o in OPERATIONS},
        key_changes=counts["key_changes"] or 0,
        unchanged=tuple(sorted(counts["unchanged"] or ())),
    )


def _write_unfiltered(
    lake: Lake,
    path: str,
    result: TableChanges,
    readings: Sequence["_Reading"],
    definition: Definition,
    schema: pa.Schema,
) -> TableChanges:
    """Many changes that no row filter has to see: the executors write them as they decode them."""
    frames = [
        unfiltered_files(r.messages, r.columns, result.slice, definition.key, schema, path) for r in readings
    ]
    written = reduce(DataFrame.unionByName, frames)
    files = lake.commit_files(written, path, schema, result.slice, properties=_CHANGES_PROPERTIES)
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
        *(_count(o).alias(o) for o in OPERATIONS),
        F.sum(F.when(_changes_key(definition.key), 1).otherwise(0)).alias("key_changes"),
        F.array_distinct(F.flatten(F.collect_set("unchanged"))).alias("unchanged"),
    ]
    if written:
        row = lake.slices_of(path, [contents.end]).agg(*counts).first()
        assert row is not None
        return row.asDict()
    counted = Observation()
    lake.write(
        changes.observe(counted, *counts),
        path,
        position=contents.end,
        properties={**table_options(definition.names), **_CHANGES_PROPERTIES},
        size=contents.size,
    )
    return counted.get


def _count(operation: str) -> Column:
    return F.sum(F.when(F.col("operation") == operation, 1).otherwise(0))


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


@dataclass(frozen=True)
class _Reading:
    """The messages of one relation version, their columns, and what the subscription gets of them."""

    messages: DataFrame
    columns: RelationColumns
    operations: frozenset[str]
    filters: Mapping[str, Sequence[RowFilter] | None]
    sent_columns: Sequence[str]

    def types(self, definition: Definition) -> list[tuple[str, ColumnType]]:
        """The replica's columns with the types that they arrive with."""
        arriving = dict(zip(self.columns.names, self.columns.types, strict=True))
        return [(name, arriving[name]) for name in definition.names]

    def is_unfiltered(self, definition: Definition) -> bool:
        """Whether every change is sent as it is, its columns in the replica's order."""
        kept = [name for name in self.columns.names if name in self.sent_columns]
        return (
            all(texts is None for texts in self.filters.values())
            and {*OPERATIONS} <= self.operations
            and kept == list(definition.names)
        )

    def changes(self, definition: Definition, received: Observation) -> DataFrame:
        """What the subscription gets, `received` counting what came."""
        used = {name for fs in self.filters.values() for f in fs or () for name in f.columns}
        decoded = decoded_changes(self.messages, self.columns, {*self.sent_columns, *used}, definition.key)
        decoded = decoded.observe(received, *(_count(operation).alias(operation) for operation in OPERATIONS))
        return transformed_changes(decoded, self.filters, self.operations, definition.names)


def _reading(
    subscription: Subscription, messages: DataFrame, part: _Part, since: Order, definition: Definition
) -> _Reading:
    relation, sent = part.version.relation, part.sent
    qualified = sent.publish_as.qualified
    types = tuple(
        subscription.column_type(sent.publish_as, c.name, c.type_oid, c.type_modifier, part.defined)
        for c in relation.columns
    )
    columns = RelationColumns(tuple(c.name for c in relation.columns), types)
    arriving = {name: t.spark for name, t in zip(columns.names, columns.types, strict=True)}
    if {n: arriving.get(n) for n in sent.columns} != dict(definition.columns):
        raise SchemaChangedError(
            f'table "{qualified}": its columns changed on the publisher; it is copied again by the next run'
        )
    changing = {"update", "delete"} & sent.operations
    identity = (
        {c.name for c in relation.columns if c.is_key}
        if subscription.feed.filtered
        else set(sent.relation.identity)
    )
    if definition.key and changing and not set(definition.key) <= identity:
        raise PgsieveError(
            f'table "{qualified}": publisher did not send replica identity column expected by the replica'
            f" ({', '.join(sorted(set(definition.key) - identity))})",
            hint="give the table and its partitions the same replica identity, then copy it again",
            sqlstate="55000",
        )
    filters = {
        operation: None if texts is None else [row_filter(sent, text) for text in texts]
        for operation, texts in sent.filters.items()
    }
    begin = max(part.version.begin, since)
    mine = messages.where((F.col("relation_id") == relation.relation_id) & F.col("kind").isin("I", "U", "D"))
    mine = mine.where(order() > _at(begin))
    if part.version.end is not None:
        mine = mine.where(order() < _at(part.version.end))
    return _Reading(mine, columns, frozenset(sent.operations), filters, sent.columns)


def _at(at: Order) -> Column:
    return F.struct(
        F.lit(at[0]).cast("bigint").alias("commit_lsn"), F.lit(at[1]).cast("bigint").alias("ordinal")
    )
