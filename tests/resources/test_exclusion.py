"""Who works on a subscription alone, and what another process says that has to wait."""

from __future__ import annotations

import threading

import psycopg
import pytest

from resources.embedded import EmbeddedServer
from resources.postgres import Source
from tests.fixtures.oracle import wait_until


def test_a_wait_for_another_process_is_told_after_a_second_with_who_it_is(
    publisher_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    source, had = Source("shop", publisher_server.conninfo()), threading.Event()

    def work() -> None:
        with source.exclusively("sales"):
            had.set()

    with source.exclusively("sales"), psycopg.connect(publisher_server.conninfo(), autocommit=True) as other:
        with source.exclusively("other"):
            assert not caplog.messages, "nobody waits"
        # The server takes a moment to notice that the other one's connection is gone.
        held = "select pid from pg_locks where locktype = 'advisory' and granted"
        wait_until(lambda: other.execute(held).rowcount == 1, lambda: "a lock is left")
        [(holder,)] = other.execute(held).fetchall()
        waiting = threading.Thread(target=work)
        waiting.start()
        wait_until(lambda: bool(caplog.messages), lambda: "nothing is told")
        (told,) = caplog.messages
        assert (
            f'waiting for "sales" of source "shop": held by pgsieve (server process {holder}, from ' in told
        )
        assert not had.is_set()
    waiting.join(30)
    assert had.is_set()
