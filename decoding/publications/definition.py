"""Publications that pgsieve.yaml defines, checked by the rules of CREATE PUBLICATION.

In: tables, WHERE, column lists and parameters as a user wrote them, and the publisher's catalog. Out: a
`Publication` like the server's own, or each reason why CREATE PUBLICATION refuses it, in the order in which
the server checks (CreatePublication() in src/backend/commands/publicationcmds.c, pub_collist_validate() in
src/backend/catalog/pg_publication.c). Only a server knows whether a WHERE is allowed, so the caller asks the
server and passes its verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pgsieve.decoding.publications.catalog import (
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    Table,
)

_SYSTEM_COLUMNS: Final = frozenset({"tableoid", "ctid", "xmin", "xmax", "cmin", "cmax"})

#: Returns the server's error for a WHERE over a table, or None if the server accepts it.
Verdict = Callable[[Table, str], PublicationError | None]


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
    generated_columns: str = "n"
    all_tables: bool = False
    #: The tables that ALL TABLES leaves out, by schema and name.
    excluded: tuple[tuple[str, str], ...] = ()
    #: Sequences by schema and name; PostgreSQL itself publishes sequences only since version 19, and only all
    #: of them.
    sequences: tuple[tuple[str, str], ...] = ()
    all_sequences: bool = False

    def resolve(self, catalog: Catalog) -> Publication:
        """The publication over the catalog's tables; raises PublicationError as CREATE PUBLICATION does."""
        for problem in self.problems(catalog, lambda _table, _where: None):
            raise problem
        entries: dict[int, PublicationTable] = {}
        for defined, table in self._listed(catalog):
            columns = None if defined.columns is None else frozenset(defined.columns)
            entries.setdefault(table.oid, PublicationTable(table.oid, defined.where, columns))
        return Publication(
            name=self.name,
            operations=self.operations,
            tables=tuple(entries.values()),
            via_root=self.via_root,
            generated_columns=self.generated_columns,
            all_tables=self.all_tables,
            excluded=frozenset(
                table.oid for name in self.excluded for table in _with_children(*name, catalog)
            ),
        )

    def missing(self, catalog: Catalog) -> list[tuple[str, str]]:
        """The tables that the catalog does not have: they do not exist, or cannot be published."""
        named = [*((t.schema, t.name) for t in self.tables), *self.excluded]
        return [name for name in named if name not in catalog.by_name]

    def problems(self, catalog: Catalog, verdict: Verdict) -> Iterator[PublicationError]:
        """Everything that CREATE PUBLICATION would refuse; the first problem is the one that it reports."""
        if self.generated_columns != "n" and catalog.server_version < 180000:
            yield self._refusal('unrecognized publication parameter: "publish_generated_columns"', "42601")
        for schema, name in self.missing(catalog):
            yield self._refusal(f'relation "{schema}.{name}" does not exist', "42P01")
        for excluded in (catalog.by_name[name] for name in self.excluded if name in catalog.by_name):
            if excluded.ancestors:
                yield self._refusal(
                    f'cannot specify relation "{excluded.qualified}" in the publication EXCEPT clause: This operation is not'
                    " supported for individual partitions.",
                    "22023",
                    "exclude the root of its partition tree, or list the tables that are published",
                )
        entries = list(self._listed(catalog))
        yield from self._redundant(entries)
        for defined, table in entries:
            if defined.where is not None:
                yield from self._where_problems(table, defined.where, verdict)
        for defined, table in entries:
            if defined.columns is not None and table.kind == "p" and not self.via_root:
                yield self._refusal(
                    f'cannot use column list for relation "{table.qualified}" in publication "{self.name}": Column'
                    " lists cannot be specified for partitioned tables when publish_via_partition_root is false.",
                    "22023",
                )
        for defined, table in entries:
            if defined.columns is not None:
                yield from self._column_problems(table, defined.columns, catalog.server_version)

    def _listed(self, catalog: Catalog) -> Iterator[tuple[DefinedTable, Table]]:
        """The tables in order, each followed by those that inherit from it, as OpenTableList() adds them."""
        for defined in self.tables:
            for table in _with_children(defined.schema, defined.name, catalog):
                yield defined, table

    def _redundant(self, entries: list[tuple[DefinedTable, Table]]) -> Iterator[PublicationError]:
        """The errors for tables that are listed twice.

        If the second entry comes by inheritance, the server names the table that it added last.
        """
        first: dict[int, DefinedTable] = {}
        added = ""
        for defined, table in entries:
            if table.oid not in first:
                first[table.oid], added = defined, table.name
                continue
            earlier = first[table.oid]
            inherits = (table.schema, table.name) != (defined.schema, defined.name)
            for clause, redundant in (
                ("WHERE clauses", (earlier.where or defined.where) is not None),
                ("column lists", (earlier.columns or defined.columns) is not None),
            ):
                if redundant:
                    name = added if inherits else table.name
                    yield self._refusal(f'conflicting or redundant {clause} for table "{name}"', "42710")
                    break

    def _where_problems(self, table: Table, where: str, verdict: Verdict) -> Iterator[PublicationError]:
        if table.kind == "p" and not self.via_root:
            yield self._refusal(
                f'cannot use publication WHERE clause for relation "{table.name}": WHERE clause cannot be used for a'
                " partitioned table when publish_via_partition_root is false.",
                "22023",
            )
        elif (refused := verdict(table, where)) is not None:
            yield self._refusal(refused.message, refused.sqlstate, refused.hint)

    def _column_problems(
        self, table: Table, columns: tuple[str, ...], server_version: int
    ) -> Iterator[PublicationError]:
        generated = {a.name: a.generated for a in table.attributes}
        seen: set[str] = set()
        for column in columns:
            if column in _SYSTEM_COLUMNS:
                yield self._refusal(
                    f'cannot use system column "{column}" in publication column list', "42P10"
                )
            elif column not in generated:
                yield self._refusal(
                    f'column "{column}" of relation "{table.name}" does not exist',
                    "42703",
                    f"the table has {', '.join(generated)}",
                )
            elif generated[column] == "v":
                yield self._refusal(
                    f'cannot use virtual generated column "{column}" in publication column list', "42P10"
                )
            elif generated[column] and server_version < 180000:
                yield self._refusal(
                    f'cannot use generated column "{column}" in publication column list', "42P10"
                )
            elif column in seen:
                yield self._refusal(f'duplicate column "{column}" in publication column list', "42710")
            seen.add(column)

    def _refusal(self, message: str, sqlstate: str | None, hint: str | None = None) -> PublicationError:
        return PublicationError(
            f'publication "{self.name}": {message}',
            hint=hint or f'correct the publication "{self.name}" in pgsieve.yaml',
            sqlstate=sqlstate,
        )


def _with_children(schema: str, name: str, catalog: Catalog) -> Iterator[Table]:
    """A table and the tables that inherit from it, each once."""
    table = catalog.by_name.get((schema, name))
    pending = [] if table is None else [table]
    seen: set[int] = set()
    while pending:
        table = pending.pop(0)
        if table.oid not in seen:
            seen.add(table.oid)
            yield table
            pending += [catalog.tables[c] for c in table.children if c in catalog.tables]
