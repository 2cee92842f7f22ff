"""Publications that pgsieve.yaml defines, with the checks of CREATE PUBLICATION.

In: the tables, WHERE clauses, column lists and parameters of a publication in pgsieve.yaml, and the publisher's
catalog.

Out: the `Publication` that CREATE PUBLICATION would make on the server, or the errors that it would raise, in
the server's order. Only a server can check a WHERE clause. So the caller passes a function that asks the server.

Source: CreatePublication() in src/backend/commands/publicationcmds.c, pub_collist_validate() in
src/backend/catalog/pg_publication.c.
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
WhereCheck = Callable[[Table, str], PublicationError | None]


@dataclass(frozen=True)
class DefinedTable:
    """A table of a publication that pgsieve.yaml defines."""

    schema: str
    name: str
    where: str | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DefinedPublication:
    """A publication that pgsieve.yaml defines, and that does not exist on the server.

    `via_root` is the parameter publish_via_partition_root. `generated_columns` is publish_generated_columns: 'n' (none)
    or 's' (stored).
    """

    name: str
    tables: tuple[DefinedTable, ...]
    operations: frozenset[str]
    via_root: bool
    generated_columns: str = "n"
    all_tables: bool = False
    #: The schemas and names of the tables that ALL TABLES excludes.
    excluded: tuple[tuple[str, str], ...] = ()
    #: The schemas and names of sequences. pgsieve reads their values itself: PostgreSQL before version 19 cannot
    #: publish sequences, and version 19 can publish only all sequences of a database.
    sequences: tuple[tuple[str, str], ...] = ()
    all_sequences: bool = False

    def resolve(self, catalog: Catalog) -> Publication:
        """Return the publication as the server would make it.

        Raises the first error that CREATE PUBLICATION would raise. The WHERE clauses are not checked here.
        """
        for error in self.list_errors(catalog, lambda _table, _where: None):
            raise error
        table_by_oid: dict[int, PublicationTable] = {}
        for entry, table in self._list_entries(catalog):
            columns = None if entry.columns is None else frozenset(entry.columns)
            table_by_oid.setdefault(table.oid, PublicationTable(table.oid, entry.where, columns))
        return Publication(
            name=self.name,
            operations=self.operations,
            tables=tuple(table_by_oid.values()),
            via_root=self.via_root,
            generated_columns=self.generated_columns,
            all_tables=self.all_tables,
            excluded=frozenset(
                table.oid for name in self.excluded for table in _list_with_children(*name, catalog)
            ),
        )

    def list_missing_tables(self, catalog: Catalog) -> list[tuple[str, str]]:
        """The schema and name of each table that the publication names and the catalog lacks."""
        names = [*((t.schema, t.name) for t in self.tables), *self.excluded]
        return [name for name in names if name not in catalog.table_by_name]

    def list_errors(self, catalog: Catalog, check_where: WhereCheck) -> Iterator[PublicationError]:
        """Yield all errors of CREATE PUBLICATION, in the server's order; the server raises only the first."""
        if self.generated_columns != "n" and catalog.server_version < 180000:
            yield self._make_error('unrecognized publication parameter: "publish_generated_columns"', "42601")
        for schema, name in self.list_missing_tables(catalog):
            yield self._make_error(f'relation "{schema}.{name}" does not exist', "42P01")
        for excluded_table in (
            catalog.table_by_name[name] for name in self.excluded if name in catalog.table_by_name
        ):
            if excluded_table.ancestors:
                yield self._make_error(
                    f'cannot specify relation "{excluded_table.qualified_name}" in the publication EXCEPT clause: This operation is not'
                    " supported for individual partitions.",
                    "22023",
                    "exclude the root of its partition tree, or list the tables that are published",
                )
        entries = list(self._list_entries(catalog))
        yield from self._list_redundancy_errors(entries)
        for entry, table in entries:
            if entry.where is not None:
                yield from self._list_where_errors(table, entry.where, check_where)
        for entry, table in entries:
            if entry.columns is not None and table.kind == "p" and not self.via_root:
                yield self._make_error(
                    f'cannot use column list for relation "{table.qualified_name}" in publication "{self.name}": Column'
                    " lists cannot be specified for partitioned tables when publish_via_partition_root is false.",
                    "22023",
                )
        for entry, table in entries:
            if entry.columns is not None:
                yield from self._list_column_errors(table, entry.columns, catalog.server_version)

    def _list_entries(self, catalog: Catalog) -> Iterator[tuple[DefinedTable, Table]]:
        """Yield each listed table, followed by the tables that inherit from it, as OpenTableList() orders them.

        Each table comes with the entry of pgsieve.yaml that it belongs to.
        """
        for entry in self.tables:
            for table in _list_with_children(entry.schema, entry.name, catalog):
                yield entry, table

    def _list_redundancy_errors(
        self, entries: list[tuple[DefinedTable, Table]]
    ) -> Iterator[PublicationError]:
        """Yield the errors for tables that occur twice and have a WHERE clause or a column list.

        A table can occur again because a table that it inherits from is listed. In that case the server's message
        names another table instead: the one that the server added to the publication last.
        """
        entry_by_oid: dict[int, DefinedTable] = {}
        last_added_name = ""
        for entry, table in entries:
            if table.oid not in entry_by_oid:
                entry_by_oid[table.oid], last_added_name = entry, table.name
                continue
            earlier_entry = entry_by_oid[table.oid]
            is_inherited = (table.schema, table.name) != (entry.schema, entry.name)
            for clause, is_redundant in (
                ("WHERE clauses", (earlier_entry.where or entry.where) is not None),
                ("column lists", (earlier_entry.columns or entry.columns) is not None),
            ):
                if is_redundant:
                    name = last_added_name if is_inherited else table.name
                    yield self._make_error(f'conflicting or redundant {clause} for table "{name}"', "42710")
                    break

    def _list_where_errors(
        self, table: Table, row_filter: str, check_where: WhereCheck
    ) -> Iterator[PublicationError]:
        if table.kind == "p" and not self.via_root:
            yield self._make_error(
                f'cannot use publication WHERE clause for relation "{table.name}": WHERE clause cannot be used for a'
                " partitioned table when publish_via_partition_root is false.",
                "22023",
            )
        elif (error := check_where(table, row_filter)) is not None:
            yield self._make_error(error.message, error.sqlstate, error.hint)

    def _list_column_errors(
        self, table: Table, columns: tuple[str, ...], server_version: int
    ) -> Iterator[PublicationError]:
        # The kind of a generated column is 's' (stored) or 'v' (virtual); '' stands for any other column.
        generated_kind_by_column = {a.name: a.generated for a in table.attributes}
        earlier_names: set[str] = set()
        for column in columns:
            if column in _SYSTEM_COLUMNS:
                yield self._make_error(
                    f'cannot use system column "{column}" in publication column list', "42P10"
                )
            elif column not in generated_kind_by_column:
                yield self._make_error(
                    f'column "{column}" of relation "{table.name}" does not exist',
                    "42703",
                    f"the table has {', '.join(generated_kind_by_column)}",
                )
            elif generated_kind_by_column[column] == "v":
                yield self._make_error(
                    f'cannot use virtual generated column "{column}" in publication column list', "42P10"
                )
            elif generated_kind_by_column[column] and server_version < 180000:
                yield self._make_error(
                    f'cannot use generated column "{column}" in publication column list', "42P10"
                )
            elif column in earlier_names:
                yield self._make_error(f'duplicate column "{column}" in publication column list', "42710")
            earlier_names.add(column)

    def _make_error(self, message: str, sqlstate: str | None, hint: str | None = None) -> PublicationError:
        return PublicationError(
            f'publication "{self.name}": {message}',
            hint=hint or f'correct the publication "{self.name}" in pgsieve.yaml',
            sqlstate=sqlstate,
        )


def _list_with_children(schema: str, name: str, catalog: Catalog) -> Iterator[Table]:
    """Yield a table and all tables that inherit from it, each once; nothing if the catalog lacks the table."""
    table = catalog.table_by_name.get((schema, name))
    pending_tables = [] if table is None else [table]
    yielded_oids: set[int] = set()
    while pending_tables:
        table = pending_tables.pop(0)
        if table.oid not in yielded_oids:
            yielded_oids.add(table.oid)
            yield table
            pending_tables += [catalog.tables[c] for c in table.children if c in catalog.tables]
