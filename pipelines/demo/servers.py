"""The demo's servers, and its sessions on them."""

from typing import Any

import psycopg

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo


def session(server: EmbeddedServer, **extra: str) -> psycopg.Connection[Any]:
    """A session of the demo's user, with table names that need no schema."""
    connection = Conninfo(server.conninfo(**extra)).connect()
    connection.execute("set search_path = public")
    return connection


def executed(connection: psycopg.Connection[Any], statements: str) -> None:
    """Execute statements that are separated by semicolons."""
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)
