"""Exclusive work on a subscription, and the message of a process that has to wait."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import wait_until


def test_a_wait_for_another_process_is_reported_after_a_second_with_its_pid(
    publisher_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    source, had = Source("shop", publisher_server.conninfo()), threading.Event()

    def work() -> None:
        with source.hold_lock("sales"):
            had.set()

    with (
        source.hold_lock("sales"),
        psycopg.connect(publisher_server.conninfo(), autocommit=True) as other,
    ):
        with source.hold_lock("other"):
            assert not caplog.messages, "a process waits"
        # The server needs a moment to notice that the other connection is closed.
        query = "select pid from pg_locks where locktype = 'advisory' and granted"
        wait_until(lambda: other.execute(query).rowcount == 1, lambda: "a lock is left")
        [(holder,)] = other.execute(query).fetchall()
        waiting = threading.Thread(target=work)
        waiting.start()
        wait_until(lambda: bool(caplog.messages), lambda: "nothing is told")
        (message,) = caplog.messages
        assert (
            f'waiting for "sales" of source "shop": held by pgsieve (server process {holder}, from '
            in message
        )
        assert not had.is_set()
    waiting.join(30)
    assert had.is_set()


def test_a_lock_is_reentrant_and_released_once(publisher_server: EmbeddedServer) -> None:
    source, other = (
        Source("shop", publisher_server.conninfo()),
        Source("shop", publisher_server.conninfo()),
    )
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as database:
        locks = "select pid from pg_locks where locktype = 'advisory' and granted"
        with source.hold_lock("sales"):
            with other.hold_lock("sales"), source.hold_lock("other"):
                assert database.execute(locks).rowcount == 2
            wait_until(
                lambda: database.execute(locks).rowcount == 1, lambda: "the lock is gone, or the other left"
            )
        wait_until(lambda: database.execute(locks).rowcount == 0, lambda: "a lock is left")


def test_a_lock_that_is_lost_with_its_session_is_no_error(publisher_server: EmbeddedServer) -> None:
    source = Source("shop", publisher_server.conninfo())
    rob = "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
    with (
        psycopg.connect(publisher_server.conninfo(), autocommit=True) as database,
        source.hold_lock("sales"),
    ):
        assert database.execute(rob).rowcount == 1


def test_one_session_takes_all_free_locks_and_others_wait(
    publisher_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    source, elsewhere = (Source("shop", publisher_server.conninfo()) for _ in range(2))
    locks = (
        "select pid, count(*) from pg_locks where locktype = 'advisory' and granted group by pid order by 2"
    )
    names, had = ("a", "b", "c"), threading.Event()

    def wait() -> None:
        with source.share_lock_session(), source.hold_lock("b"):
            had.set()

    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as database:
        with source.share_lock_session(), ExitStack() as stack:
            turns = [stack.enter_context(source.hold_lock(name)) for name in names]
            assert [number for _, number in database.execute(locks)] == [3]
            waiting = threading.Thread(target=wait)
            waiting.start()
            wait_until(turns[1].is_awaited, lambda: "it is not awaited")
            assert not turns[0].is_awaited()
            # After its session ended, later locks use sessions of their own.
            database.execute(
                "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
            )
            assert had.wait(30)
            with source.hold_lock("d"):
                assert [number for _, number in database.execute(locks)] == [1]
            with elsewhere.hold_lock("d"):
                pass
        waiting.join(30)
        wait_until(lambda: database.execute(locks).rowcount == 0, lambda: "a lock is left")
    gone = Source("gone", "host=127.0.0.1 port=1 dbname=x")
    with gone.share_lock_session(), pytest.raises(SourceUnreachableError), gone.hold_lock("a"):
        pass
