"""Recognises connection poolers between pgsieve and a server.

In: a host's name, a driver's message, or two sessions. Out: the pooler, and whether it shares server processes
among sessions. Raises only the errors of the sessions.

A pooler in transaction mode may give each transaction another server process. Advisory locks, SET and
temporary tables belong to a process, and pgsieve needs all three. Replication needs a connection in
replication mode (PostgreSQL documentation, Streaming Replication Protocol), which most poolers do not
support.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import psycopg

Connect = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]


@dataclass(frozen=True, slots=True)
class Pooler:
    """A kind of pooler, and the hint for a user whose connection goes through it."""

    name: str
    hint: str


#: Poolers by patterns of the host's name, which the provider chooses.
_HOST_PATTERNS: tuple[tuple[str, Pooler], ...] = (
    (
        r"\.pooler\.supabase\.com$",
        Pooler(
            "Supabase's pooler (Supavisor)",
            "use the direct connection, db.<project>.supabase.co and the user postgres; where this network has no IPv6,"
            " the project needs Supabase's IPv4 add-on",
        ),
    ),
    (
        r"-pooler\..*neon\.tech$",
        Pooler("Neon's pooler", "use the endpoint's own host: the same name without `-pooler`"),
    ),
    (
        r"\.proxy-[^.]+\..*rds\.amazonaws\.com$",
        Pooler("RDS Proxy", "use the endpoint of the instance, or of the cluster's writer"),
    ),
)

_UNKNOWN = Pooler(
    "a connection pooler", "name the server itself in conninfo: its own host and port instead of the pooler's"
)
_PGBOUNCER = Pooler("PgBouncer, or a pooler like it", _UNKNOWN.hint)

#: Poolers by patterns of messages that only poolers send.
_MESSAGE_PATTERNS: tuple[tuple[str, Pooler], ...] = (
    (r"unsupported startup parameter", _PGBOUNCER),
    (r"pgbouncer", _PGBOUNCER),
    (r"Tenant or user not found|Unsupported or invalid secret format|supavisor", _HOST_PATTERNS[0][1]),
)


def pooler_at(host: str | None, text: str = "") -> Pooler | None:
    """The pooler that a host's name or a message indicates, or None."""
    for pattern, pooler in _HOST_PATTERNS:
        if re.search(pattern, host or "", re.IGNORECASE):
            return pooler
    return next(
        (pooler for pattern, pooler in _MESSAGE_PATTERNS if re.search(pattern, text, re.IGNORECASE)), None
    )


def some_pooler(host: str | None) -> Pooler:
    """The pooler of a session that goes through one: by the host's name, or an unknown one."""
    return pooler_at(host) or _UNKNOWN


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether the session goes through a pooler, which reports another process id than the server."""
    return _server_pid(connection) != connection.info.backend_pid


def shares_processes(connection: psycopg.Connection[Any], connect: Connect) -> bool:
    """Whether the pooler is in transaction mode, in which two sessions share or exchange their server processes."""
    first_pid = _server_pid(connection)
    with connect() as second_session, second_session.transaction():
        return _server_pid(second_session) == first_pid or _server_pid(connection) != first_pid


def _server_pid(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])
