"""Identifies a database so that a table of the lake can record which database its rows come from.

The identity is the system identifier of the cluster and the OID of the database (catalog pg_database). Renaming
the database does not change its OID.

In: a connection.
Out: a `Database`, which can be written as text and parsed again.

Raises psycopg's errors.
"""

from dataclasses import dataclass
from typing import Any

import psycopg

from pgsieve.resources.postgres.wal import read_system_identifier


@dataclass(frozen=True)
class Database:
    """A database of a cluster. The physical standbys of a cluster have the same databases with the same identity."""

    system_identifier: str
    oid: int

    @classmethod
    def parse(cls, text: str) -> "Database":
        """Parse the text of `str(database)`."""
        cluster, _, oid = text.partition("/")
        return cls(cluster, int(oid))

    def __str__(self) -> str:
        return f"{self.system_identifier}/{self.oid}"


def read_present_database(connection: psycopg.Connection[Any]) -> Database:
    """The database of a connection."""
    row = connection.execute("select oid from pg_database where datname = current_database()").fetchone()
    assert row is not None
    return Database(read_system_identifier(connection), row[0])


def find_database_name(connection: psycopg.Connection[Any], database: Database) -> str | None:
    """The present name of a database of the connection's cluster; None if the database was dropped."""
    row = connection.execute("select datname from pg_database where oid = %s", [database.oid]).fetchone()
    return row and str(row[0])
