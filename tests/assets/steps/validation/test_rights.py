"""Missing privileges of a role are named before anything is created, in PostgreSQL's words. Inherited privileges count."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.assets.steps.validation.rights import find_missing_rights
from pgsieve.decoding.publications.published_tables import find_replicated_tables
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import own_database


@pytest.fixture(scope="module")
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with own_database(publisher_server, "rights") as owner:
        owner.execute('create schema "Odd"; create table "Odd".one (a int primary key)')
        owner.execute('create table "Odd".two (a int primary key); create table public.three (a int, b int)')
        owner.execute("alter table three replica identity full")
        owner.execute('create publication p for table "Odd".one, "Odd".two, three')
        owner.execute("create role auditor; create role reader")
        yield owner
        owner.execute("drop owned by auditor, reader; drop role auditor, reader")


def lacking(owner: psycopg.Connection, role: str) -> list[tuple[str, str | None]]:
    owner.execute(f"set role {role}")
    try:
        catalog = read_catalog(owner)
        tables = find_replicated_tables(catalog.select_publications(["p"]), catalog).values()
        return [(error.message, error.hint) for error in find_missing_rights(owner, tables)]
    finally:
        owner.execute("reset role")


def test_each_missing_privilege_is_named_until_it_is_granted(database: psycopg.Connection) -> None:
    assert lacking(database, "postgres") == []
    before = lacking(database, "auditor")
    assert [message.partition(":")[0] for message, _ in before] == [
        "permission denied to use replication slots",
        'permission denied for schema "Odd"',
        'permission denied for table "Odd".one',
        'permission denied for table "Odd".two',
        "permission denied for table public.three",
    ]
    for _, hint in before:
        assert hint is not None
        database.execute(hint.partition("; at Amazon")[0])
    assert lacking(database, "auditor") == []


def test_privileges_of_a_role_and_of_columns_count(database: psycopg.Connection) -> None:
    database.execute("alter role reader replication; grant pg_read_all_data to reader")
    assert lacking(database, "reader") == []
    database.execute('revoke pg_read_all_data from reader; grant usage on schema "Odd" to reader')
    database.execute('grant select on "Odd".one, "Odd".two to reader; grant select (a) on three to reader')
    assert [message for message, _ in lacking(database, "reader")] == [
        "permission denied for table public.three"
    ]
    database.execute("grant select (b) on three to reader")
    assert lacking(database, "reader") == []
