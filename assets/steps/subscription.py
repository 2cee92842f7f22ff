"""Subscriptions, the streams that they read, and the definitions of their replicas.

A replica is the copy of a table in the lake. A slot stream is a replication slot with its change log, the Delta table
with the slot's messages. With `row_filter: pipeline`, all subscriptions of a source share one stream. With
`row_filter: publisher`, each subscription has a stream of its own. `pipelines` makes streams and subscriptions from the
configuration, and the steps use them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta

import pyarrow as pa

from pgsieve.assets.steps.history_choices import HistoryChoices
from pgsieve.decoding.changes.deleted_rows import DELETED, DELETED_ROW_COLUMNS
from pgsieve.decoding.changes.metadata_columns import FLAG_KINDS, find_metadata_column, metadata_type
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, Publication, PublicationError, Table
from pgsieve.decoding.publications.definition import DefinedPublication
from pgsieve.decoding.publications.evolution import (
    ColumnSource,
    Layout,
    SchemaChangedError,
    find_column_sources,
    to_json_field,
)
from pgsieve.decoding.publications.published_tables import ReplicatedTable, find_replicated_tables
from pgsieve.decoding.publications.replica_names import refuse_shared_names, to_snake_case
from pgsieve.decoding.publications.routing import (
    CapturePublication,
    find_leaf_captured_trees,
    list_capture_suffixes,
    plan_capture,
)
from pgsieve.decoding.values.builtin_types import NO_DEFINED_TYPES, DerivedTypesByOid
from pgsieve.decoding.values.quoting import MAX_NAME_BYTES, shorten_name
from pgsieve.decoding.values.types import ColumnType, column_type
from pgsieve.resources.lake.delta.layout import SubscriptionLayout
from pgsieve.resources.lake.spark_writes import find_column_mapping_property
from pgsieve.resources.postgres.advisory_locks import AdvisoryLock
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.source import Source

#: The publication of tables whose row filter fails has the name of the slot with this suffix.
_UNFILTERED_SUFFIX = "_aside"


@dataclass(frozen=True)
class SlotStream:
    """A slot and its change log. `subscriptions` maps each of its subscriptions to the names of its publications.

    - `capture`: the beginning of the names of pgsieve's own publications for reading the slot (capture publications)
    - `filtered`: True if the publisher filters the changes. Such a slot has one subscription, and is read with its
      publications; there are no capture publications.
    - `defined_publications`: the publications that pgsieve.yaml defines
    """

    name: str
    source: Source
    slot: str
    capture: str
    filtered: bool
    subscriptions: Mapping[str, tuple[str, ...]]
    defined_publications: Mapping[str, DefinedPublication] = field(default_factory=dict)
    #: The options of pgoutput for reading the slot, without the publications.
    options: PgoutputOptions = field(default_factory=PgoutputOptions)
    #: True if the slot is synchronized to standbys.
    failover: bool = False

    @property
    def unfiltered_publication(self) -> str:
        """The name of pgsieve's own publication of tables whose row filter raised an error at the publisher.

        It publishes them without the filter, so that the slot can still be read
        (`assets.steps.slot_consumption.past_filters`).
        """
        return (
            shorten_name(self.slot, MAX_NAME_BYTES - len(_UNFILTERED_SUFFIX), self.slot) + _UNFILTERED_SUFFIX
        )

    def hold_lock(self, seconds: float | None = None) -> AbstractContextManager[AdvisoryLock]:
        """Hold the lock for reading the slot within the block.

        A process that also needs the lock of a subscription takes this one first. Waits for the lock, and raises
        LockHeldError after `seconds`.
        """
        return self.source.hold_lock(f"slot {self.slot}", seconds)

    def with_defined_publications(self, catalog: Catalog) -> Catalog:
        """The server's catalog with the publications that pgsieve.yaml defines, except those that cannot be resolved."""
        resolved = {}
        for name, publication in self.defined_publications.items():
            # `publications` raises the error for a subscription to this publication.
            with suppress(PublicationError):
                resolved[name] = publication.resolve(catalog)
        return replace(catalog, publications={**catalog.publications, **resolved})

    def publications(self, catalog: Catalog, subscription: str) -> tuple[Publication, ...]:
        """The publications of one subscription. Raises PublicationError if one is missing or cannot be resolved."""
        for name in self.subscriptions[subscription]:
            if name in self.defined_publications and name not in catalog.publications:
                self.defined_publications[name].resolve(catalog)  # Raises the publication's error.
        return catalog.select_publications(self.subscriptions[subscription])

    def without_missing_publications(self, catalog: Catalog) -> "SlotStream":
        """The stream without the subscriptions to a publication that is missing or cannot be resolved."""
        subscriptions = {}
        for name, publications in self.subscriptions.items():
            with suppress(PublicationError):
                self.publications(catalog, name)  # Raises the error of a publication.
                subscriptions[name] = publications
        return replace(self, subscriptions=subscriptions)

    def planned_capture(self, catalog: Catalog) -> tuple[CapturePublication, ...]:
        """The capture publications that the slot needs now. Empty if the publisher filters."""
        if self.filtered:
            return ()
        return plan_capture(catalog, {name: self.publications(catalog, name) for name in self.subscriptions})

    def captured_leaf_sets(self, catalog: Catalog) -> tuple[frozenset[int], ...]:
        """The leaf partitions of each tree whose leaves are captured instead of its root.

        In the slot, a TRUNCATE of the root of such a tree looks the same as a TRUNCATE of all its leaves. Empty if the
        publisher filters.
        """
        if self.filtered:
            return ()
        return find_leaf_captured_trees(
            catalog, {name: self.publications(catalog, name) for name in self.subscriptions}
        )

    def capture_names(self) -> list[str]:
        """The names that capture publications may have. Empty if the publisher filters."""
        return [] if self.filtered else [self.capture + suffix for suffix in list_capture_suffixes()]

    def slot_publications(self, catalog: Catalog) -> tuple[str, ...]:
        """The publications with which the slot is read.

        If the publisher does not filter, these are the capture publications that are needed now, and those that exist.
        If none is needed now, the result is empty.
        """
        if self.filtered:
            return tuple(dict.fromkeys(p for names in self.subscriptions.values() for p in names))
        # Former capture publications are used, too, because WAL from the time when they were planned needs them.
        existing_names = [name for name in self.capture_names() if name in catalog.publications]
        planned_names = [self.capture + publication.suffix for publication in self.planned_capture(catalog)]
        return tuple(dict.fromkeys([*planned_names, *existing_names])) if planned_names else ()


@dataclass(frozen=True)
class Subscription:
    """Publications that are replicated into a folder of Delta tables."""

    name: str
    slot_stream: SlotStream
    copy_data: bool = True
    disable_on_error: bool = False
    #: If a commit has been waiting for longer than this, the replicas are reported as stale.
    freshness: timedelta = timedelta(minutes=15)
    types: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    #: The layout of the replicas, except the template of their folders, which the lake has.
    layout: SubscriptionLayout = field(default_factory=SubscriptionLayout)
    #: Which histories of rows are kept, by table.
    histories: HistoryChoices = field(default_factory=HistoryChoices)

    def tables(self, catalog: Catalog) -> dict[tuple[str, str], ReplicatedTable]:
        """The tables that the subscription replicates, by schema and name."""
        return find_replicated_tables(self.slot_stream.publications(catalog, self.name), catalog)

    def definition(self, replicated: ReplicatedTable, catalog: Catalog) -> "Definition":
        """The definition that a copy would give a replica now. Raises PgsieveError if the table cannot be replicated."""
        table = replicated.table
        for relation in (catalog.tables[oid] for oid in {table.oid, *table.leaves} & catalog.tables.keys()):
            if not relation.legible:
                raise PgsieveError(
                    f'table "{relation.qualified_name}": its name, schema or a column has bytes that are no text in'
                    f" {'UTF8' if relation.encoding == 'SQL_ASCII' else relation.encoding}",
                    hint="rename it in a session with client_encoding = SQL_ASCII, or take it out of the publication",
                    sqlstate="22021",
                )
        self.refuse_shared_names(table)
        layout = Layout.from_table(table, catalog)
        columns = tuple(replace(c, name=self.replica_name(c.name)) for c in layout.columns)
        entries = [
            p.find_table_entry(oid)
            for p in self.slot_stream.publications(catalog, self.name)
            for oid in _list_tree_oids(table)
        ]
        if (problem := self.metadata_problem(replicated)) is not None:
            raise problem
        return Definition(
            columns=tuple((name, t.spark_type) for name, t in self.replica_types(replicated).items()),
            metadata=tuple((name, kind) for kind, name in self.metadata(table).items()),
            key=tuple(map(self.replica_name, replicated.key)),
            layout=replace(layout, columns=columns),
            listed=any(entry is not None and entry.columns is not None for entry in entries),
            published=PublicationRecord(replicated.row_filters, replicated.publications),
        )

    def metadata(self, table: Table) -> Mapping[str, str]:
        """Maps each kind of metadata that the replica of a table has to the name of its column."""
        layout = self.layout.find_table_layout((table.schema, table.name))
        names = layout.columns or {}
        deleted_row_names = {
            kind: names.get(kind, name) for kind, name in DELETED_ROW_COLUMNS.items() if layout.keeps_deleted
        }
        return {
            kind: name for kind, name in names.items() if kind not in DELETED_ROW_COLUMNS
        } | deleted_row_names

    def metadata_problem(self, replicated: ReplicatedTable) -> PgsieveError | None:
        """The reason why the replica of a table cannot have the metadata columns; None if it can."""
        name_by_folded_name = {self.replica_name(name).lower(): name for name in replicated.columns}
        metadata = self.metadata(replicated.table)
        for name in metadata.values():
            if name.lower() in name_by_folded_name:
                return PgsieveError(
                    f'table "{replicated.table.qualified_name}" has a column "{name_by_folded_name[name.lower()]}", which is the name of a'
                    f' metadata column of subscription "{self.name}"',
                    hint=f'give it another name in `columns` of the layout of subscription "{self.name}" in pgsieve.yaml',
                    sqlstate="42701",
                )
            name_by_folded_name[name.lower()] = name
        if DELETED in metadata and not replicated.key and {"delete", "truncate"} & replicated.operations:
            return PgsieveError(
                f'table "{replicated.table.qualified_name}" has no key, so an INSERT cannot find the deleted row that it revives',
                hint="give it a key, publish INSERTs of it only, or say `deletes: hard` for it in `tables` of the layout in pgsieve.yaml",
                sqlstate="0A000",
            )
        if metadata and not replicated.key and {"update", "delete"} & replicated.operations:
            return PgsieveError(
                f'table "{replicated.table.qualified_name}" has no key, so an UPDATE or DELETE cannot choose among equal rows'
                " with different metadata",
                hint="give it a key, publish INSERTs of it only, or say `columns: {}` for it in `tables` of the layout in pgsieve.yaml",
                sqlstate="0A000",
            )
        return None

    def replica_name(self, column: str) -> str:
        """The name that a column has in the replica; `column` is its name at the publisher or in the replica."""
        return to_snake_case(column) if self.layout.uses_plain_names else column

    def refuse_shared_names(self, table: Table) -> None:
        """Raise PgsieveError if two columns of a table would have the same name in the replica."""
        if self.layout.uses_plain_names:
            refuse_shared_names(table.qualified_name, (a.name for a in table.attributes))

    def published_names(self, table: Table) -> dict[str, str]:
        """Maps each column of a table's replica to its name at the publisher."""
        return {self.replica_name(a.name): a.name for a in table.attributes}

    def replica_types(self, replicated: ReplicatedTable) -> dict[str, ColumnType]:
        """Maps the columns of a replica to their types: at first the columns of the table, and then the metadata columns."""
        columns = {self.replica_name(name): kind for name, kind in self.column_types(replicated).items()}
        metadata = {name: metadata_type(kind) for kind, name in self.metadata(replicated.table).items()}
        return {**columns, **metadata}

    def column_types(self, replicated: ReplicatedTable) -> dict[str, ColumnType]:
        """Maps the publisher's names of a table's columns to their types in the replica, in the order of the source."""
        attributes = {a.name: a for a in replicated.table.attributes}
        return {
            name: self.column_type(
                replicated.table, name, attributes[name].type_oid, attributes[name].type_modifier
            )
            for name in replicated.columns
        }

    def column_type(
        self,
        table: Table,
        column: str,
        type_oid: int,
        type_modifier: int,
        user_types: DerivedTypesByOid = NO_DEFINED_TYPES,
    ) -> ColumnType:
        """The type of a column in the replica: the one that pgsieve.yaml chooses, or else the default for its type.

        `user_types` are the types that users of the publisher have defined. They are needed for values in binary format.
        """
        return column_type(
            type_oid, type_modifier, self.chosen_type((table.schema, table.name), column), user_types
        )

    def chosen_type(self, table: tuple[str, str], column: str) -> str | None:
        """The Spark type that pgsieve.yaml chooses for a column; `column` is its name at the publisher or in the replica."""
        if not self.layout.uses_plain_names:
            return self.types.get((*table, column))
        replica_name = self.replica_name(column)
        return next(
            (
                spark_type
                for (*name, column_in_file), spark_type in self.types.items()
                if tuple(name) == table and self.replica_name(column_in_file) == replica_name
            ),
            None,
        )


def _list_tree_oids(table: Table) -> tuple[int, ...]:
    return (table.oid, *table.ancestors, *table.leaves)


@dataclass(frozen=True)
class FormerLayout:
    """A former layout of a replica (see `Definition`), and the column numbers of its key.

    Changes that commit before `until` may have it.
    """

    layout: Layout
    key: frozenset[int]
    until: int


@dataclass(frozen=True)
class History:
    """A table's change history (the Delta table with its changes): the columns that it has had, and its generation.

    `generation` is how often it began anew. `whole` is true if it begins with the rows of the last copy.
    """

    generation: int = 0
    columns: tuple[tuple[str, str], ...] = ()
    whole: bool = False

    def with_columns(self, columns: Iterable[tuple[str, str]]) -> "History":
        """The history with these columns added.

        It begins anew in these cases:
        - A column has another type than before, or another letter case in its name.
        - The former columns need Delta's column mapping and the new ones do not, or the reverse.
        """
        columns = tuple(columns)
        column_by_lower_name = {name.lower(): (name, spark) for name, spark in self.columns}
        is_mapped = bool(find_column_mapping_property(name for name, _ in columns))
        is_same = all(
            column_by_lower_name.get(name.lower(), (name, spark)) == (name, spark) for name, spark in columns
        )
        if self.columns and not (
            is_same and is_mapped == bool(find_column_mapping_property(name for name, _ in self.columns))
        ):
            return History(self.generation + 1, columns, self.whole)
        columns_ever = (*self.columns, *(c for c in columns if c not in self.columns))
        return replace(self, columns=columns_ever)


@dataclass(frozen=True)
class PublicationRecord:
    """The publications of a table when it was copied: their names and row filters.

    A row was copied if it matched one of `row_filters`; None means no filter. `at` is the publisher's time at which the
    snapshot was requested (ISO 8601); None if it was not recorded.
    """

    row_filters: tuple[str, ...] | None
    publications: tuple[str, ...]
    at: str | None = field(default=None, compare=False)

    @property
    def time(self) -> datetime | None:
        """When the snapshot was requested."""
        return None if self.at is None else datetime.fromisoformat(self.at)


@dataclass(frozen=True)
class Definition:
    """The columns of a replica with their Spark types, its key, and the layout of the table.

    The layout is the catalog's facts about each column and its type, and about the table's files.

    - `listed`: true if a publication has a column list for the table
    - `former`: the layout before the last change of the definition, as long as changes with that layout may arrive
    - `published`: the publications of the copy. As in PostgreSQL, altering a row filter does not copy anything.
    - `unaltered`: true if since the copy `published` stayed the same, and no change was skipped or left out. In that
      case the replica has exactly the rows that a new copy would have.
    - `metadata`: the names and kinds of the metadata columns, which are the last of `columns`
    """

    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...]
    layout: Layout
    listed: bool = False
    metadata: tuple[tuple[str, str], ...] = ()
    former: FormerLayout | None = field(default=None, compare=False)
    history: History = field(default_factory=History, compare=False)
    published: PublicationRecord | None = field(default=None, compare=False)
    unaltered: bool = field(default=False, compare=False)

    @classmethod
    def from_json(cls, text: str) -> "Definition":
        """The definition that `to_json` wrote."""
        document = json.loads(text)
        former, record = document["former"], document["published"]
        return cls(
            columns=_make_pairs(document["columns"]),
            key=tuple(document["key"]),
            layout=Layout.from_json(document["layout"]),
            listed=document["listed"],
            metadata=_make_pairs(document.get("metadata", ())),
            former=former
            and FormerLayout(Layout.from_json(former["layout"]), frozenset(former["key"]), former["until"]),
            history=History(
                document["history"]["generation"],
                _make_pairs(document["history"]["columns"]),
                document["history"].get("whole", False),
            ),
            published=record
            and PublicationRecord(
                None if record["row_filters"] is None else tuple(record["row_filters"]),
                tuple(record["publications"]),
                record.get("at"),
            ),
            # Earlier versions of pgsieve did not record this.
            unaltered=document.get("unaltered", False),
        )

    def to_json(self) -> str:
        """The definition as text."""
        document = asdict(self, dict_factory=lambda fields: dict(map(to_json_field, fields)))
        if not self.metadata:
            del document["metadata"]
        return json.dumps(document, default=sorted)

    @property
    def table_columns(self) -> tuple[tuple[str, str], ...]:
        """The columns without the metadata columns."""
        return self.columns[: len(self.columns) - len(self.metadata)]

    def metadata_column(self, kind: str) -> str | None:
        """The name of the column with this kind of metadata; None if there is none."""
        return find_metadata_column(self.metadata, kind)

    @property
    def deleted_column(self) -> str | None:
        """The column that marks deleted rows; None if deleted rows are removed from the replica."""
        return self.metadata_column(DELETED)

    @property
    def soft_delete_columns(self) -> tuple[tuple[str, str], ...]:
        """The metadata columns of a replica that keeps deleted rows (`deletes: soft`) and has a key; otherwise none."""
        return self.metadata if self.key and self.deleted_column else ()

    @property
    def names(self) -> tuple[str, ...]:
        """The column names."""
        return tuple(name for name, _ in self.columns)

    @property
    def key_numbers(self) -> frozenset[int]:
        """The column numbers (attnum) of the key."""
        return frozenset(c.number for c in self.layout.columns if c.name in self.key)


def _make_pairs(read: Iterable[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, spark) for name, spark in read)


def planned_sources(former: Definition, present: Definition) -> tuple[ColumnSource, ...]:
    """Find how each present column gets its values from the former columns of a replica.

    Raises SchemaChangedError if the table has to be copied again.
    """
    if bool(find_column_mapping_property(former.names)) != bool(find_column_mapping_property(present.names)):
        raise SchemaChangedError("a column got or lost a name that Parquet forbids")
    sources = find_column_sources(
        former.layout,
        present.layout,
        dict(former.table_columns),
        dict(present.table_columns),
        has_column_list=former.listed or present.listed,
    )
    if not former.key and present.key and present.layout.is_partitioned:
        raise SchemaChangedError("it is partitioned, and got a key")
    if all(source.former_column is None for source in sources) and present != former:
        raise SchemaChangedError("none of its former columns is left")
    if former.soft_delete_columns and not present.soft_delete_columns:
        raise SchemaChangedError("deleted rows are no longer kept")
    if present.soft_delete_columns and former.key_numbers != present.key_numbers:
        raise SchemaChangedError("its key changed, and rows that were deleted may share the new one")
    # A column that marks rows, for example deleted ones, is false in all rows if the replica did not have it so far.
    false_by_flag_kind = dict.fromkeys((kind for _, kind in present.metadata if kind in FLAG_KINDS), "f")
    metadata = (
        ColumnSource(name, source, None if source else false_by_flag_kind.get(kind))
        for name, kind in present.metadata
        for source in (former.metadata_column(kind),)
    )
    return (*sources, *metadata)


def arrow_types(
    subscription: Subscription, table: tuple[str, str], definition: Definition
) -> list[tuple[str, pa.DataType]]:
    """The columns of a replica, each with the Arrow type in which its values arrive."""
    types = []
    for name, _ in definition.table_columns:
        column = definition.layout.find_column_by_name(name)
        assert column is not None
        chosen_type = subscription.chosen_type(table, name)
        types.append((name, column_type(column.type_oid, column.type_modifier, chosen_type).arrow_type))
    return [*types, *metadata_arrow_types(definition)]


def metadata_arrow_types(definition: Definition) -> list[tuple[str, pa.DataType]]:
    """The metadata columns of a replica, each with its Arrow type."""
    return [(name, metadata_type(kind).arrow_type) for name, kind in definition.metadata]
