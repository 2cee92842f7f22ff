"""Creates and alters the capture publications of a source, which is a database of a publisher.

pgsieve creates capture publications for itself. They select the tables and operations that the slot delivers,
without row filters; pgsieve then evaluates the filters of the user's publications.

In: - the plan: the tables and operations of each capture publication
    - the publisher's catalog
Out: publications that list the planned tables, or the SQL that would make them so. Other tables are removed from them. A
     table stays if it is locked, or if pgsieve may not alter its publication. If pgsieve may not add a table, the table
     is left out.

Raises SourceError if the server refuses a statement, and SourcePermissionError if there is no capture publication, and
pgsieve may not create one.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog, Publication, Table
from pgsieve.decoding.publications.routing import CapturePublication, list_capture_suffixes
from pgsieve.resources.postgres.ddl import EventTriggerError, UndefinedObjectError, execute_ddl
from pgsieve.resources.postgres.errors import LockedTableError, SourceError, SourcePermissionError
from pgsieve.resources.postgres.source import quote, quote_literal
from pgsieve.resources.postgres.waits import LOCK_SECONDS

#: The comment on each publication that pgsieve created. pgsieve drops only publications with this comment.
CREATED_COMMENT = "capture publication created by pgsieve"


@dataclass(frozen=True)
class EnsuredPublications:
    """The names of the capture publications that exist, and the oids of the tables that a lock keeps in them."""

    names: tuple[str, ...]
    locked_oids: frozenset[int]


def ensure_capture_publications(
    connection: psycopg.Connection[Any],
    source: str,
    capture_name: str,
    planned_publications: Sequence[CapturePublication],
    catalog: Catalog,
) -> EnsuredPublications:
    """Create or alter the capture publications so that they match the plan; return those that exist then.

    If pgsieve may not alter or create one of them, for example because another role owns it, it stays as it is. The
    tables that it lacks are not replicated (`find_uncaptured_tables`), and stay in their former publications.

    A publication that already matches is not altered. If a table moves from one publication to another, it is
    first added to the new publication and only then removed from the old one. So at each position in the WAL, at
    least one publication captures the table. If a table that has to be removed is locked, it stays, and a later
    call removes it.
    """
    # Before PostgreSQL 18, pgoutput refuses to decode WAL from before the commit that creates a requested publication. So
    # the caller first reads the WAL up to the flush position without the new publications. That WAL must contain the
    # commits that create them. So each commit waits until it is flushed, even if the role has another setting.
    connection.execute("set synchronous_commit = local")
    has_capture = any(capture_name + suffix in catalog.publications for suffix in list_capture_suffixes())
    existing_names, refused_oids, locked_oids = list[str](), set[int](), set[int]()
    for publication in planned_publications:
        name = capture_name + publication.suffix
        try:
            _ensure_publication(connection, source, name, publication, catalog)
        except SourcePermissionError:
            # Without any capture publication nothing can be read.
            if not has_capture:
                raise
            refused_oids |= {t.oid for t in publication.tables}
            if name not in catalog.publications:
                continue
            if find_own_publications(connection, [name]):
                _add_permitted_tables(connection, source, name, publication, catalog)
        existing_names.append(name)
    planned_tables = {capture_name + p.suffix: p.tables for p in planned_publications}
    for name in (
        n for n in _find_own_capture_publications(connection, capture_name) if n in catalog.publications
    ):
        for table in _find_surplus_tables(catalog.publications[name], planned_tables.get(name, ()), catalog):
            # A standby cannot alter publications, and the role may lack the right to alter this publication. In these cases
            # the table stays, and does no harm. Another run may have removed the table meanwhile.
            with suppress(EventTriggerError, SourcePermissionError, UndefinedObjectError):
                if table.oid not in refused_oids and not _remove_table(connection, source, name, table):
                    locked_oids.add(table.oid)
    return EnsuredPublications(tuple(existing_names), frozenset(locked_oids))


def _ensure_publication(
    connection: psycopg.Connection[Any],
    source: str,
    name: str,
    planned_publication: CapturePublication,
    catalog: Catalog,
) -> None:
    """Create or alter one capture publication. Raises SourceError if the server refuses that."""
    statements = make_capture_statements(name, planned_publication, catalog, connection.info.server_version)
    if name not in catalog.publications:
        statements.append(f"comment on publication {quote(name)} is {quote_literal(CREATED_COMMENT)}")
    if statements:
        execute_ddl(connection, source, describe_preparation(name), statements)


def _add_permitted_tables(
    connection: psycopg.Connection[Any],
    source: str,
    name: str,
    planned_publication: CapturePublication,
    catalog: Catalog,
) -> None:
    """Add one by one the tables that pgsieve may add. The server has refused one statement for all tables."""
    for table in planned_publication.tables:
        if _can_be_added(name, table, catalog):
            with suppress(SourcePermissionError):
                _ensure_publication(
                    connection, source, name, replace(planned_publication, tables=(table,)), catalog
                )


def _can_be_added(name: str, table: Table, catalog: Catalog) -> bool:
    """True if ADD TABLE is enough: the publication exists, and SET TABLE need not remove a row filter or a column list."""
    publication = catalog.publications.get(name)
    entry = None if publication is None else publication.find_table_entry(table.oid)
    return publication is not None and (entry is None or (entry.where is None and entry.columns is None))


def find_unplanned_oids(
    capture_name: str, planned_publications: Sequence[CapturePublication], catalog: Catalog
) -> set[int]:
    """The oids of the tables for which the capture publications differ from the plan, so that changes may be missing.

    A table that is published without need does not count. The exception is a partitioned table in a publication with
    publish_via_partition_root, because the changes of its partitions would be captured as changes of this table.
    """
    planned_oids = {capture_name + p.suffix: {t.oid for t in p.tables} for p in planned_publications}
    unplanned_oids = set[int]()
    for planned_publication in planned_publications:
        name = capture_name + planned_publication.suffix
        publication = catalog.publications.get(name)
        if (
            publication is None
            or publication.operations != set(planned_publication.operations)
            or publication.via_root != planned_publication.via_root
        ):
            unplanned_oids |= planned_oids[name]
        elif publication.all_tables:
            unplanned_oids |= {t.oid for t in planned_publication.tables if not publication.contains(t)}
        else:
            unrestricted_oids = {t.oid for t in publication.tables if t.where is None and t.columns is None}
            unplanned_oids |= planned_oids[name] - unrestricted_oids
    for name in (capture_name + suffix for suffix in list_capture_suffixes()):
        publication = catalog.publications.get(name)
        if publication is not None and publication.via_root:
            roots = (t for t in catalog.tables.values() if t.kind == "p")
            unplanned_oids |= {t.oid for t in roots if publication.contains(t)} - planned_oids.get(
                name, set()
            )
    return unplanned_oids


def make_table_statements(
    capture_name: str,
    planned_publications: Sequence[CapturePublication],
    catalog: Catalog,
    server_version: int,
    replicated_table: Table,
) -> list[str]:
    """The SQL after which the capture publications send all changes of one table as planned."""
    tree_oids = {replicated_table.oid, *replicated_table.ancestors, *replicated_table.leaves}
    statements = []
    for publication in planned_publications:
        tables = tuple(t for t in publication.tables if t.oid in tree_oids)
        if not tables:
            continue
        name = capture_name + publication.suffix
        # CREATE and SET TABLE have to list all tables of the plan, since the publication gets no other tables.
        is_addition = all(_can_be_added(name, table, catalog) for table in tables)
        statements += make_capture_statements(
            name, replace(publication, tables=tables) if is_addition else publication, catalog, server_version
        )
    planned_tables = {capture_name + p.suffix: p.tables for p in planned_publications}
    for name in (capture_name + suffix for suffix in list_capture_suffixes()):
        if name in catalog.publications:
            statements += [
                _make_removal(name, table)
                for table in _find_surplus_tables(
                    catalog.publications[name], planned_tables.get(name, ()), catalog
                )
                if table.oid in tree_oids
            ]
    return statements


def make_root_removals(
    capture_name: str, planned_publications: Sequence[CapturePublication], catalog: Catalog
) -> list[str]:
    """The SQL that removes partitioned tables that are not planned, and would capture the changes of their partitions.

    It has to be executed after the plan's publications exist. Other tables that are not in the plan do no harm.
    """
    planned_tables = {capture_name + p.suffix: p.tables for p in planned_publications}
    publications = (catalog.publications.get(capture_name + suffix) for suffix in list_capture_suffixes())
    return [
        _make_removal(publication.name, table)
        for publication in publications
        if publication is not None and publication.via_root
        for table in _find_surplus_tables(publication, planned_tables.get(publication.name, ()), catalog)
        if table.kind == "p"
    ]


def _find_surplus_tables(
    publication: Publication, planned_tables: Sequence[Table], catalog: Catalog
) -> list[Table]:
    """The tables that a publication lists although the plan does not have them."""
    surplus_oids = {t.oid for t in publication.tables} - {t.oid for t in planned_tables}
    return [catalog.tables[oid] for oid in sorted(surplus_oids) if oid in catalog.tables]


def _remove_table(connection: psycopg.Connection[Any], source: str, name: str, table: Table) -> bool:
    """Remove a table from a capture publication. False if the table is locked, so that a later run must remove it."""
    statements = [_make_removal(name, table)]
    try:
        execute_ddl(
            connection, source, describe_preparation(name), statements, lock_timeout_seconds=LOCK_SECONDS
        )
    except LockedTableError:
        return False
    return True


def _make_removal(name: str, table: Table) -> str:
    return f"alter publication {quote(name)} drop table {format_table_clause(table)}"


def make_capture_statements(
    name: str, planned_publication: CapturePublication, catalog: Catalog, server_version: int
) -> list[str]:
    """The SQL that gives a capture publication the options and all tables of its plan. Empty if it has them already.

    Tables that are not in the plan may stay in the publication. Other functions find and remove them.
    """
    tables = ", ".join(map(format_table_clause, planned_publication.tables))
    table_clauses = f" for table {tables}" if tables else ""
    options = (
        f"publish = {quote_literal(', '.join(planned_publication.operations))},"
        f" publish_via_partition_root = {'true' if planned_publication.via_root else 'false'}"
    )
    if server_version >= 180000:
        options += ", publish_generated_columns = stored"
    existing_publication = catalog.publications.get(name)
    if existing_publication is None:
        return [f"create publication {quote(name)}{table_clauses} with ({options})"]
    statements = []
    if (
        existing_publication.operations != set(planned_publication.operations)
        or existing_publication.via_root != planned_publication.via_root
    ):
        statements.append(f"alter publication {quote(name)} set ({options})")
    unrestricted_oids = {t.oid for t in existing_publication.tables if t.where is None and t.columns is None}
    if existing_publication.all_tables:
        planned_oids = {oid for t in planned_publication.tables for oid in (t.oid, *t.ancestors)}
        if planned_oids & existing_publication.excluded:
            excluded_tables = [
                catalog.tables[oid]
                for oid in sorted(existing_publication.excluded - planned_oids)
                if oid in catalog.tables
            ]
            except_clause = (
                f" except (table {', '.join(map(format_table_clause, excluded_tables))})"
                if excluded_tables
                else ""
            )
            statements.append(f"alter publication {quote(name)} set all tables{except_clause}")
        return statements
    missing_tables = [t for t in planned_publication.tables if t.oid not in unrestricted_oids]
    if any(existing_publication.find_table_entry(t.oid) for t in missing_tables):
        statements.append(f"alter publication {quote(name)} set table {tables}")
    elif missing_tables:
        statements.append(
            f"alter publication {quote(name)} add table {', '.join(map(format_table_clause, missing_tables))}"
        )
    return statements


def describe_preparation(name: str) -> str:
    """What error messages call the work on a capture publication."""
    return f'prepare the capture publication "{name}"'


def _find_own_capture_publications(connection: psycopg.Connection[Any], capture_name: str) -> list[str]:
    """The capture publications of a source that pgsieve itself created."""
    return find_own_publications(connection, [capture_name + suffix for suffix in list_capture_suffixes()])


def find_own_publications(connection: psycopg.Connection[Any], names: Sequence[str]) -> list[str]:
    """Those of the names that belong to publications that pgsieve created. It may alter or drop them."""
    rows = connection.execute(
        "select pubname from pg_publication where obj_description(oid, 'pg_publication') = %s and pubname = any(%s)",
        [CREATED_COMMENT, list(names)],
    )
    return [name for (name,) in rows]


def find_foreign_publications(
    connection: psycopg.Connection[Any], capture_name: str, catalog: Catalog
) -> list[str]:
    """The capture publications of a source that another client created. pgsieve does not alter them."""
    own_names = _find_own_capture_publications(connection, capture_name)
    names = (capture_name + suffix for suffix in list_capture_suffixes())
    return sorted(name for name in names if name in catalog.publications and name not in own_names)


def shrink_capture_publications(
    connection: psycopg.Connection[Any],
    source: str,
    capture_name: str,
    planned_publications: Sequence[CapturePublication],
    catalog: Catalog,
) -> tuple[list[str], list[str]]:
    """Remove tables that are not planned from the capture publications, and drop publications that are not planned.

    Returns the names of the altered and of the dropped publications. Publications that pgsieve did not create are
    not changed. A locked table stays in its publication until the next run.
    """
    planned_tables = {capture_name + p.suffix: p.tables for p in planned_publications}
    altered_names, dropped_names = [], []
    for name in _find_own_capture_publications(connection, capture_name):
        if name not in planned_tables:
            execute_ddl(connection, source, describe_preparation(name), [f"drop publication {quote(name)}"])
            dropped_names.append(name)
        else:
            surplus_tables = _find_surplus_tables(catalog.publications[name], planned_tables[name], catalog)
            removed_tables = [
                table for table in surplus_tables if _remove_table(connection, source, name, table)
            ]
            altered_names += [name] if removed_tables else []
    return altered_names, dropped_names


def format_table_clause(table: Table) -> str:
    """A table as it is written in FOR TABLE of a publication. ONLY excludes the tables that inherit from it."""
    return "only " * (table.kind == "r") + quote(table.schema, table.name)


def drop_publications(connection: psycopg.Connection[Any], source: str, names: Sequence[str]) -> None:
    """Drop publications that were just created, because a later step failed."""
    for name in names:
        with suppress(SourceError, psycopg.Error):
            execute_ddl(
                connection, source, describe_preparation(name), [f"drop publication if exists {quote(name)}"]
            )
