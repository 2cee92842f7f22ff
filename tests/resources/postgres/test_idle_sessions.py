"""Sessions of ADBC that the chunks of a copy and of a check use again."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import adbc_driver_manager
import psycopg
import pytest

from pgsieve.resources.postgres import idle_sessions
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import wait_until


@pytest.fixture
def conninfo(publisher_server: EmbeddedServer) -> Conninfo:
    return Source("shop", publisher_server.conninfo()).make_executor_conninfo()


@pytest.fixture
def kept(conninfo: Conninfo) -> Iterator[Conninfo]:
    with conninfo.keep_adbc_sessions() as kept:
        yield kept


@pytest.fixture
def admin(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        yield admin


def _value(conninfo: Conninfo, query: str = "select pg_backend_pid()") -> object:
    with conninfo.connect_adbc() as session, session.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchone()[0]


def test_a_session_is_used_again_in_the_block_and_closed_after_it(
    conninfo: Conninfo, admin: psycopg.Connection[tuple[object, ...]]
) -> None:
    assert _value(conninfo) != _value(conninfo)
    with conninfo.keep_adbc_sessions() as kept:
        pid = _value(kept)
        with kept.connect_adbc() as session, session.cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            assert cursor.fetchone() == (pid,)
            assert _value(kept) != pid
        assert _value(kept) == pid
        assert _value(conninfo) != pid
    _wait_for_end(admin, pid)


def test_a_session_that_is_returned_after_the_block_is_closed(
    conninfo: Conninfo, admin: psycopg.Connection[tuple[object, ...]]
) -> None:
    with conninfo.keep_adbc_sessions() as kept:
        late = kept.connect_adbc()
        with late.__enter__().cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            (pid,) = cursor.fetchone()
    late.__exit__(None, None, None)
    _wait_for_end(admin, pid)


def _wait_for_end(admin: psycopg.Connection[tuple[object, ...]], pid: object) -> None:
    wait_until(
        lambda: not admin.execute("select from pg_stat_activity where pid = %s", [pid]).fetchall(),
        lambda: "the session is still there",
    )


def test_a_reused_session_is_like_a_new_one(kept: Conninfo) -> None:
    with kept.connect_adbc() as session, session.cursor() as cursor:
        cursor.execute("set transaction isolation level serializable")
        cursor.execute("set search_path = public")
        cursor.execute("set lock_timeout = 1")
        cursor.execute("create temporary table left_behind ()")
        cursor.execute("select pg_backend_pid()")
        pid = cursor.fetchone()[0]
    assert _value(kept) == pid
    for query, value in {
        "select current_setting('search_path')": "pg_catalog, pg_temp",
        "select current_setting('lock_timeout')": "0",
        "select current_setting('client_encoding')": "UTF8",
        "select current_setting('transaction_isolation')": "read committed",
        "select to_regclass('left_behind')::text": None,
    }.items():
        assert _value(kept, query) == value


def test_an_idle_session_holds_neither_a_lock_nor_a_snapshot(
    kept: Conninfo, admin: psycopg.Connection[tuple[object, ...]]
) -> None:
    admin.execute("create table public.read_by_chunks (id int)")
    try:
        pid = _value(kept, "select pg_backend_pid() from public.read_by_chunks right join (select) on true")
        assert not admin.execute(
            "select from pg_locks where pid = %s and relation is not null", [pid]
        ).fetchall()
    finally:
        admin.execute("drop table public.read_by_chunks")


@pytest.mark.parametrize("seconds", [10.0, 0.0])
def test_a_session_that_was_ended_or_idle_for_too_long_is_not_used(
    kept: Conninfo,
    admin: psycopg.Connection[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    monkeypatch.setattr(idle_sessions, "MAX_IDLE_SECONDS", seconds)
    pid = _value(kept)
    if seconds:
        admin.execute("select pg_terminate_backend(%s, 10000)", [pid])
    assert _value(kept) != pid


def test_a_session_in_which_something_failed_is_not_used_again(kept: Conninfo) -> None:
    pid = _value(kept)
    with pytest.raises(adbc_driver_manager.Error, match="division by zero"):
        _value(kept, "select 1 / 0")
    assert _value(kept) != pid


def test_an_executor_gets_no_session_of_this_process_and_keeps_none(
    kept: Conninfo, admin: psycopg.Connection[tuple[object, ...]]
) -> None:
    pid = _value(kept)
    of_executor = pickle.loads(pickle.dumps(kept))
    assert of_executor == kept
    own_pid = _value(of_executor)
    assert own_pid != pid
    _wait_for_end(admin, own_pid)
    assert _value(kept) == pid
