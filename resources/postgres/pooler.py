"""Recognises connection poolers between pgsieve and a server.

A pooler in transaction mode may run each transaction of a session in another server process. Advisory locks, SET
and temporary tables belong to one server process, and pgsieve needs all three. Replication needs a connection in
replication mode (PostgreSQL documentation, Streaming Replication Protocol), which most poolers do not support.

In: the name of a host, the message of a driver, or two sessions.
Out: the pooler, and whether it shares server processes among sessions.

Raises only the errors of the sessions.
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
    """A kind of pooler, and a hint that tells users how to connect to the server itself."""

    name: str
    hint: str


#: Patterns of the names that providers give to the hosts of their poolers, each with its pooler.
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

_UNKNOWN_POOLER = Pooler(
    "a connection pooler", "name the server itself in conninfo: its own host and port instead of the pooler's"
)
_PGBOUNCER = Pooler("PgBouncer, or a pooler like it", _UNKNOWN_POOLER.hint)

#: Patterns of messages that only poolers send, each with its pooler.
_MESSAGE_PATTERNS: tuple[tuple[str, Pooler], ...] = (
    (r"unsupported startup parameter", _PGBOUNCER),
    (r"pgbouncer", _PGBOUNCER),
    (r"Tenant or user not found|Unsupported or invalid secret format|supavisor", _HOST_PATTERNS[0][1]),
)


def find_pooler(host: str | None, message: str = "") -> Pooler | None:
    """The pooler that the name of a host shows, or else a message; None if neither shows one."""
    for pattern, pooler in _HOST_PATTERNS:
        if re.search(pattern, host or "", re.IGNORECASE):
            return pooler
    return next(
        (pooler for pattern, pooler in _MESSAGE_PATTERNS if re.search(pattern, message, re.IGNORECASE)), None
    )


def name_pooler(host: str | None) -> Pooler:
    """The pooler of a session that certainly goes through one: an unknown one if the host's name does not show which."""
    return find_pooler(host) or _UNKNOWN_POOLER


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """True if the session goes through a pooler.

    The process id that a pooler reports differs from the id of the server process.
    """
    return _read_server_pid(connection) != connection.info.backend_pid


def shares_server_processes(connection: psycopg.Connection[Any], connect: Connect) -> bool:
    """True if the pooler is in transaction mode.

    In this mode, one server process serves several sessions by turns.
    """
    first_pid = _read_server_pid(connection)
    with connect() as second_session, second_session.transaction():
        return _read_server_pid(second_session) == first_pid or _read_server_pid(connection) != first_pid


def _read_server_pid(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])
