"""Sessions of a role with a limit of connections: the server counts a session until its process has ended."""

from __future__ import annotations

from collections.abc import Callable
from threading import Timer

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo


def _connect(conninfo: Conninfo) -> None:
    conninfo.connect().close()


def _connect_adbc(conninfo: Conninfo) -> None:
    with conninfo.connect_adbc() as session:
        session.rollback()


@pytest.fixture
def role_of_one_session(publisher_server: EmbeddedServer) -> Conninfo:
    """The conninfo of a role that may have one session. Superusers have no such limit."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS one_session")
        connection.execute("CREATE ROLE one_session LOGIN CONNECTION LIMIT 1")
    return Conninfo(publisher_server.conninfo(user="one_session"))


@pytest.mark.parametrize("connect", [_connect, _connect_adbc])
def test_a_session_that_still_ends_refuses_no_new_session(
    role_of_one_session: Conninfo, connect: Callable[[Conninfo], None]
) -> None:
    ending = psycopg.connect(role_of_one_session.text)
    timer = Timer(0.3, ending.close)
    timer.start()
    connect(role_of_one_session)
    timer.join()


@pytest.mark.parametrize("connect", [_connect, _connect_adbc])
def test_a_session_that_stays_refuses_a_new_session(
    role_of_one_session: Conninfo, connect: Callable[[Conninfo], None]
) -> None:
    with (
        psycopg.connect(role_of_one_session.text),
        pytest.raises(Exception, match='too many connections for role "one_session"'),
    ):
        connect(role_of_one_session)
