"""What is replicated: subscriptions and the feeds they read.

A feed is one replication slot and its change log: the source's, shared by all its subscriptions with
`row_filter: pipeline`, or a subscription's own with `row_filter: publisher`. Made from the configuration by
`pipelines`, used by the steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from decoding.builtin_types import NONE_DEFINED, DefinedTypes
from decoding.publication import (
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    ReplicatedTable,
    Table,
    replicated_tables,
)
from decoding.routing import CapturePublication, plan_capture
from decoding.types import ColumnType, column_type
from resources.pgoutput import PgoutputOptions
from resources.postgres import Source


@dataclass(frozen=True)
class DefinedTable:
    """A table of a publication that pgsieve.yaml defines."""

    schema: str
    name: str
    where: str | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DefinedPublication:
    """A publication that pgsieve.yaml defines instead of the server."""

    name: str
    tables: tuple[DefinedTable, ...]
    operations: frozenset[str]
    via_root: bool

    def resolve(self, catalog: Catalog) -> Publication:
        """The publication over the catalog's tables; raises PublicationError as CREATE PUBLICATION does."""
        entries = []
        for defined in self.tables:
            table = catalog.by_name.get((defined.schema, defined.name))
            if table is None:
                raise PublicationError(
                    f'publication "{self.name}": relation "{defined.schema}.{defined.name}" does not exist',
                    hint="correct the table's name in pgsieve.yaml, or create the table",
                    sqlstate="42P01",
                )
            known = {a.name for a in table.attributes}
            for column in defined.columns or ():
                if column not in known:
                    raise PublicationError(
                        f'publication "{self.name}": column "{column}" of relation "{table.qualified}" does not exist',
                        hint=f"the table has {', '.join(sorted(known))}",
                        sqlstate="42703",
                    )
            if table.kind == "p" and not self.via_root and (defined.where or defined.columns):
                what = "WHERE clause" if defined.where else "column list"
                raise PublicationError(
                    f'publication "{self.name}": cannot use publication {what} for relation "{table.qualified}"',
                    hint=f"{what} cannot be used for a partitioned table when publish_via_partition_root is false",
                    sqlstate="22023",
                )
            columns = None if defined.columns is None else frozenset(defined.columns)
            entries.append(PublicationTable(table.oid, defined.where, columns))
        return Publication(
            name=self.name, operations=self.operations, tables=tuple(entries), via_root=self.via_root
        )


@dataclass(frozen=True)
class Feed:
    """One slot and its change log; `subscriptions` are the publications of each that reads it."""

    name: str
    source: Source
    slot: str
    capture: str
    filtered: bool
    subscriptions: Mapping[str, tuple[str, ...]]
    defined: Mapping[str, DefinedPublication] = field(default_factory=dict)
    #: How the slot is read; the publications are chosen when it is.
    options: PgoutputOptions = field(default_factory=PgoutputOptions)

    def with_defined(self, catalog: Catalog) -> Catalog:
        """The catalog with the publications of pgsieve.yaml beside those of the server."""
        own = {name: defined.resolve(catalog) for name, defined in self.defined.items()}
        return replace(catalog, publications={**catalog.publications, **own})

    def publications(self, catalog: Catalog, subscription: str) -> tuple[Publication, ...]:
        """The publications of one subscription; raises PublicationError where one is missing."""
        return catalog.select(self.subscriptions[subscription])

    def planned_capture(self, catalog: Catalog) -> tuple[CapturePublication, ...]:
        """What the slot has to capture; nothing of pgsieve's own where the publisher filters."""
        if self.filtered:
            return ()
        return plan_capture(catalog, {name: self.publications(catalog, name) for name in self.subscriptions})


@dataclass(frozen=True)
class Subscription:
    """A list of publications replicated into a folder of Delta tables."""

    name: str
    feed: Feed
    copy_data: bool = True
    types: Mapping[tuple[str, str, str], str] = field(default_factory=dict)

    def tables(self, catalog: Catalog) -> dict[tuple[str, str], ReplicatedTable]:
        """The tables this subscription replicates, by (schema, name)."""
        return replicated_tables(self.feed.publications(catalog, self.name), catalog)

    def column_types(self, replicated: ReplicatedTable) -> dict[str, ColumnType]:
        """The replica's columns and types, in the source's column order."""
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
        defined: DefinedTypes = NONE_DEFINED,
    ) -> ColumnType:
        """The replica's type of one column: the mapping's, or the user's override.

        `defined` are the catalog's types, for values that come in binary format.
        """
        return column_type(type_oid, type_modifier, self.override(table, column), defined)

    def override(self, table: Table, column: str) -> str | None:
        """The Spark type that the user chose for a column."""
        return self.types.get((table.schema, table.name, column))


@dataclass(frozen=True)
class Definition:
    """A replica's columns with their Spark types, and its key; a table whose definition changes is copied again."""

    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...]

    @classmethod
    def of(cls, columns: Mapping[str, ColumnType], key: Sequence[str]) -> "Definition":
        """The definition of a replica with these column types."""
        return cls(tuple((name, t.spark) for name, t in columns.items()), tuple(key))

    @classmethod
    def from_json(cls, text: str) -> "Definition":
        """The definition that `to_json` wrote."""
        read = json.loads(text)
        return cls(tuple((name, spark) for name, spark in read["columns"]), tuple(read["key"]))

    def to_json(self) -> str:
        """The definition as text."""
        return json.dumps({"columns": self.columns, "key": self.key})

    @property
    def names(self) -> tuple[str, ...]:
        """The column names."""
        return tuple(name for name, _ in self.columns)
