"""A server or a network that misbehaves costs at most time: pgsieve continues by itself, or says what to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import REFUSED, settle, site
from tests.faults.proxy import Proxy
from tests.fixtures.servers import TEST_SETTINGS, new_server

pytestmark = pytest.mark.spark


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    """A server for one test, because the test mistreats it."""
    with new_server(postgres_version, {**TEST_SETTINGS, "wal_sender_timeout": "1s"}) as running:
        yield running


def ended(process) -> int:
    """End a follower, and return its exit code. If it does not end, its log shows where it hangs."""
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGUSR1)
        process.join(5)
        process.kill()
    return process.exitcode


@pytest.mark.drawn
def test_a_connection_cut_in_the_middle_of_a_message_loses_nothing(
    server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: seven runs, each a process, and a Spark Connect server."""
    with (
        Proxy(server.port) as proxy,
        site("cut", server, tmp_path, master, port=proxy.port) as (pgsieve, database),
    ):
        assert pgsieve.run() == 0, pgsieve.log
        for cut_after in (1_000, 7_777, 20_001):
            pgsieve.write(database, 40)
            proxy.cut_after = cut_after
            assert pgsieve.run() == REFUSED, pgsieve.log
            proxy.heal()
            settle(pgsieve, database)


@pytest.mark.long
def test_following_survives_connections_that_are_cut_again_and_again(
    server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a follower reconnects again and again, and a Spark Connect server starts."""
    with (
        Proxy(server.port) as proxy,
        site("recut", server, tmp_path, master, port=proxy.port) as (pgsieve, database),
    ):
        assert pgsieve.run() == 0, pgsieve.log
        process = pgsieve.start("run", "--follow")
        pgsieve.wait_for_walsenders(database, 2)
        proxy.cut_after = 30_000
        for _ in range(10):
            pgsieve.write(database, 30)
            time.sleep(0.3)
        proxy.heal()
        pgsieve.wait_until_applied()
        assert proxy.cuts > 1
        assert ended(process) == 0, pgsieve.log
        settle(pgsieve, database)


@pytest.mark.drawn
def test_following_survives_a_restart_and_an_immediate_shutdown_of_the_server(
    server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a follower waits for a server that restarts twice, and a Spark Connect server starts."""
    with site("restarted", server, tmp_path, master) as (pgsieve, _):
        assert pgsieve.run() == 0, pgsieve.log
        process = pgsieve.start("run", "--follow")
        for immediate in (False, True):
            with pgsieve.connect() as before:
                pgsieve.wait_for_walsenders(before, 2)
                pgsieve.write(before)
            server.stop(immediate=immediate)
            time.sleep(1)
            server.start()
            with pgsieve.connect() as again:
                pgsieve.write(again)
        pgsieve.wait_until_applied()
        assert ended(process) == 0, pgsieve.log
        with pgsieve.connect() as again:
            settle(pgsieve, again)


@pytest.mark.drawn
def test_following_continues_however_often_its_sessions_are_terminated(
    server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a follower begins again after each terminated session, and a Spark Connect server starts."""
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'pgsieve' AND backend_type = 'client backend'"
    )
    with site("terminated", server, tmp_path, master) as (pgsieve, database):
        assert pgsieve.run() == 0, pgsieve.log
        process = pgsieve.start("run", "--follow")
        pgsieve.wait_for_walsenders(database, 2)
        printed, terminated = len(pgsieve.log), 0
        while "; tried again in " not in pgsieve.log[printed:]:
            assert process.is_alive(), pgsieve.log[printed:]
            pgsieve.write(database)
            terminated += len(database.execute(end).fetchall())
        assert terminated
        pgsieve.wait_until_applied()
        assert ended(process) == 0, pgsieve.log
        settle(pgsieve, database)


@pytest.mark.drawn
def test_a_run_during_an_immediate_shutdown_is_refused_and_the_next_one_continues(
    server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: several runs, each a process, a server that recovers, and a Spark Connect server."""
    with site("shutdown", server, tmp_path, master) as (pgsieve, database):
        assert pgsieve.run() == 0, pgsieve.log
        pgsieve.write(database, 200)
        process = pgsieve.start("run")
        time.sleep(1.5)
        server.stop(immediate=True)
        process.join(120)
        assert process.exitcode in {0, REFUSED}, pgsieve.log
        assert pgsieve.run() == REFUSED
        assert "no connection" in pgsieve.log
        server.start()
        with pgsieve.connect() as again:
            settle(pgsieve, again)


@pytest.mark.long
def test_a_slow_network_and_a_sender_timeout_shorter_than_a_batch_lose_nothing(
    server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a follower reads through a slow network, and a Spark Connect server starts."""
    with (
        Proxy(server.port) as proxy,
        site("slow", server, tmp_path, master, port=proxy.port) as (pgsieve, database),
    ):
        assert pgsieve.run() == 0, pgsieve.log
        proxy.delay, proxy.piece = 0.02, 1_500
        pgsieve.write(database, 300)
        process = pgsieve.start("run", "--follow")
        pgsieve.wait_until_applied()
        proxy.stall()
        pgsieve.write(database)
        time.sleep(3)  # longer than wal_sender_timeout, so the server closes the connection
        proxy.heal()
        pgsieve.wait_until_applied()
        assert ended(process) == 0, pgsieve.log
        settle(pgsieve, database)
