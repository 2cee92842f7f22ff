"""Sessions that a command uses again."""

from __future__ import annotations

from contextlib import ExitStack

import psycopg
import pytest

from pgsieve.resources.postgres import session_pool
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.session_pool import pool_sessions
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import wait_until

_PID = "select pg_backend_pid()"


@pytest.fixture
def source(publisher_server: EmbeddedServer) -> Source:
    return Source("shop", publisher_server.conninfo())


def _pid(source: Source) -> int:
    with source.connect() as session:
        (row,) = session.execute(_PID).fetchall()
        return int(row[0])


def _wait_for_statement_timeout(admin: psycopg.Connection[tuple[str]], value: str) -> None:
    wait_until(
        lambda: admin.execute("show statement_timeout").fetchall() == [(value,)],
        lambda: "the server has not read its settings again",
    )


def test_a_session_is_used_again_in_the_block_and_closed_after_it(source: Source) -> None:
    assert _pid(source) != _pid(source)
    with pool_sessions():
        pid = _pid(source)
        assert _pid(source) == pid
        with source.connect() as session:
            assert _pid(source) != pid
            assert session.execute(_PID).fetchall() == [(pid,)]
    assert session.closed
    assert _pid(source) != pid


def test_a_reused_session_is_like_a_new_one(source: Source) -> None:
    with pool_sessions():
        with source.connect() as session:
            session.execute("set search_path = public")
            session.execute("set lock_timeout = 1")
            session.execute("set timezone = 'Asia/Tokyo'")
        with source.connect() as session:
            for name, value in {
                "search_path": "pg_catalog, pg_temp",
                "lock_timeout": "0",
                "timezone": "UTC",
            }.items():
                assert session.execute(f"show {name}").fetchall() == [(value,)]


def test_only_the_users_own_timeouts_count_in_a_reused_session(
    publisher_server: EmbeddedServer,
) -> None:
    """The server gets other timeouts while the session waits for its next use."""
    source = Source("shop", f"{publisher_server.conninfo()} options='-c lock_timeout=5000'")
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    shown = (
        "select pg_backend_pid(), current_setting('lock_timeout'), current_setting('statement_timeout'),"
        " current_setting('idle_in_transaction_session_timeout')"
    )
    with pool_sessions(), psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        pid = _pid(source)
        try:
            for name in names:
                admin.execute(f"alter system set {name} = '7min'")
            admin.execute("select pg_reload_conf()")
            _wait_for_statement_timeout(admin, "7min")
            with source.connect() as session:
                assert session.execute(shown).fetchall() == [(pid, "5s", "0", "0")]
        finally:
            for name in names:
                admin.execute(f"alter system reset {name}")
            admin.execute("select pg_reload_conf()")
            _wait_for_statement_timeout(admin, "0")


def test_a_lock_ends_with_its_block_though_its_session_is_kept(source: Source) -> None:
    other = Source("shop", source._conninfo)
    with pool_sessions():
        with source.hold_lock("sales"):
            pass
        with source.connect() as session:
            assert session.execute("select from pg_locks where locktype = 'advisory'").rowcount == 0
    with other.hold_lock("sales", 1.0):
        pass


@pytest.mark.parametrize("idle_seconds", [10.0, 0.0])
def test_a_session_that_was_ended_or_idle_for_too_long_is_not_used(
    source: Source, publisher_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, idle_seconds: float
) -> None:
    monkeypatch.setattr(session_pool, "IDLE_SECONDS", idle_seconds)
    with pool_sessions(), psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        pid = _pid(source)
        if idle_seconds:
            admin.execute("select pg_terminate_backend(%s, 10000)", [pid])
        assert _pid(source) != pid


def test_a_session_in_which_something_failed_is_not_used_again(source: Source) -> None:
    with pool_sessions():
        pid = _pid(source)
        with pytest.raises(SourceError), source.connect() as session:
            session.execute("select 1 / 0")
        assert _pid(source) != pid


def test_few_sessions_stay_idle(source: Source) -> None:
    with pool_sessions(), ExitStack() as opened:
        sessions = [opened.enter_context(source.connect()) for _ in range(session_pool.MAX_IDLE_SESSIONS + 2)]
        opened.close()
        assert [session.closed for session in sessions].count(False) == session_pool.MAX_IDLE_SESSIONS


def test_a_walsender_is_not_used_again(source: Source) -> None:
    with pool_sessions():
        with source.connect(replication="database", cursor_factory=psycopg.ClientCursor) as walsender:
            walsender.execute("IDENTIFY_SYSTEM")
        assert walsender.closed
