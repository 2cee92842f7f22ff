"""The capture publications of a source, which decide what its slot delivers.

In: the planned capture and the catalog. Out: publications with exactly the planned tables, created, altered
or dropped; or the SQL that makes them. Raises SourceError if the server refuses.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog, Publication, Table
from pgsieve.decoding.publications.routing import CapturePublication, capture_suffixes
from pgsieve.resources.postgres.awaited import LOCK_SECONDS
from pgsieve.resources.postgres.ddl import EventTriggerError, UndefinedObjectError, execute_ddl
from pgsieve.resources.postgres.errors import LockedTableError, SourceError, SourcePermissionError
from pgsieve.resources.postgres.source import literal, quote

#: The comment on each publication that pgsieve created. It may drop only these publications.
CREATED = "capture publication created by pgsieve"


def ensure_capture(
    connection: psycopg.Connection[Any],
    source: str,
    capture: str,
    planned: Sequence[CapturePublication],
    catalog: Catalog,
) -> tuple[str, ...]:
    """Create or alter the capture publications so that they match the plan; return their names.

    A publication that already is as planned stays untouched, whoever created it. A table is added to one
    publication before it is removed from another, so each table is captured at every position in the WAL. A
    surplus table that is locked is removed by a later call.
    """
    # Flush the commit: pgoutput uses the new publications only for changes after it.
    connection.execute("set synchronous_commit = local")
    for publication in planned:
        name = capture + publication.suffix
        statements = capture_statements(name, publication, catalog, connection.info.server_version)
        if name not in catalog.publications:
            statements.append(f"comment on publication {quote(name)} is {literal(CREATED)}")
        if statements:
            execute_ddl(connection, source, preparing(name), statements)
    wanted = {capture + p.suffix: p.tables for p in planned}
    for name in (n for n in _created(connection, capture) if n in catalog.publications):
        for table in _surplus(catalog.publications[name], wanted.get(name, ()), catalog):
            # On a standby, or without the right, another run has to remove the table. The second of two
            # concurrent runs finds it removed.
            with suppress(EventTriggerError, SourcePermissionError, UndefinedObjectError):
                _take_out(connection, source, name, table)
    return tuple(wanted)


def _surplus(publication: Publication, wanted: Sequence[Table], catalog: Catalog) -> list[Table]:
    """The tables that a publication lists but should not."""
    surplus = {t.oid for t in publication.tables} - {t.oid for t in wanted}
    return [catalog.tables[oid] for oid in sorted(surplus) if oid in catalog.tables]


def _take_out(connection: psycopg.Connection[Any], source: str, name: str, table: Table) -> bool:
    """Remove a table from a capture publication.

    False if it is locked, so that the next run has to remove it.
    """
    taken_out = f"alter publication {quote(name)} drop table {as_listed(table)}"
    try:
        execute_ddl(connection, source, preparing(name), [taken_out], lock_seconds=LOCK_SECONDS)
    except LockedTableError:
        return False
    return True


def capture_statements(
    name: str, planned: CapturePublication, catalog: Catalog, server_version: int
) -> list[str]:
    """The SQL that makes the capture publication as planned; empty if it already is."""
    tables = ", ".join(map(as_listed, planned.tables))
    listed = f" for table {tables}" if tables else ""
    options = (
        f"publish = {literal(', '.join(planned.operations))},"
        f" publish_via_partition_root = {'true' if planned.via_root else 'false'}"
    )
    if server_version >= 180000:
        options += ", publish_generated_columns = stored"
    existing = catalog.publications.get(name)
    if existing is None:
        return [f"create publication {quote(name)}{listed} with ({options})"]
    statements = []
    if existing.operations != set(planned.operations) or existing.via_root != planned.via_root:
        statements.append(f"alter publication {quote(name)} set ({options})")
    plain = {t.oid for t in existing.tables if t.where is None and t.columns is None}
    if existing.all_tables:
        wanted = {oid for t in planned.tables for oid in (t.oid, *t.ancestors)}
        if wanted & existing.excluded:
            left = [
                catalog.tables[oid] for oid in sorted(existing.excluded - wanted) if oid in catalog.tables
            ]
            excepted = f" except (table {', '.join(map(as_listed, left))})" if left else ""
            statements.append(f"alter publication {quote(name)} set all tables{excepted}")
        return statements
    lacking = [t for t in planned.tables if t.oid not in plain]
    if any(existing.listed(t.oid) for t in lacking):
        statements.append(f"alter publication {quote(name)} set table {tables}")
    elif lacking:
        statements.append(f"alter publication {quote(name)} add table {', '.join(map(as_listed, lacking))}")
    return statements


def preparing(name: str) -> str:
    """The action on a capture publication, for messages."""
    return f'prepare the capture publication "{name}"'


def _created(connection: psycopg.Connection[Any], capture: str) -> list[str]:
    """The capture publications of a source that pgsieve created."""
    return created_ones(connection, [capture + suffix for suffix in capture_suffixes()])


def created_ones(connection: psycopg.Connection[Any], names: Sequence[str]) -> list[str]:
    """The given publications that pgsieve created, and so may alter or drop."""
    rows = connection.execute(
        "select pubname from pg_publication where obj_description(oid, 'pg_publication') = %s and pubname = any(%s)",
        [CREATED, list(names)],
    )
    return [name for (name,) in rows]


def foreign_capture(connection: psycopg.Connection[Any], capture: str, catalog: Catalog) -> list[str]:
    """The capture publications of a source that pgsieve did not create, and so leaves unaltered."""
    ours = _created(connection, capture)
    names = (capture + suffix for suffix in capture_suffixes())
    return sorted(name for name in names if name in catalog.publications and name not in ours)


def shrink_capture(
    connection: psycopg.Connection[Any],
    source: str,
    capture: str,
    planned: Sequence[CapturePublication],
    catalog: Catalog,
) -> tuple[list[str], list[str]]:
    """Remove surplus tables from pgsieve's own capture publications, and drop publications that are not planned.

    Returns the altered and the dropped publications. Publications that pgsieve did not create stay as they
    are. A locked table stays until the next run.
    """
    wanted = {capture + p.suffix: p.tables for p in planned}
    altered, dropped = [], []
    for name in _created(connection, capture):
        if name not in wanted:
            execute_ddl(connection, source, preparing(name), [f"drop publication {quote(name)}"])
            dropped.append(name)
        else:
            surplus = _surplus(catalog.publications[name], wanted[name], catalog)
            taken_out = [table for table in surplus if _take_out(connection, source, name, table)]
            altered += [name] if taken_out else []
    return altered, dropped


def as_listed(table: Table) -> str:
    """A table in the syntax of a publication, without the tables that inherit from it."""
    return "only " * (table.kind == "r") + quote(table.schema, table.name)


def drop_publications(connection: psycopg.Connection[Any], source: str, names: Sequence[str]) -> None:
    """Drop publications that were just created, because a later step failed."""
    for name in names:
        with suppress(SourceError, psycopg.Error):
            execute_ddl(connection, source, preparing(name), [f"drop publication if exists {quote(name)}"])
