"""A follower lets other processes use the slot in turn: checks, runs and copies while `pgsieve run --follow` runs."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pgsieve.pipelines.following import follower
from tests.faults.killable import REFUSED, start_pgsieve
from tests.fixtures.background import always
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Shop


@contextmanager
def writes(shop: Shop) -> Iterator[None]:
    """In the background, commit a row every few milliseconds."""
    numbers = itertools.count(1000)
    with psycopg.connect(shop.database.info.dsn, autocommit=True) as connection:

        def write() -> None:
            connection.execute("insert into orders values (%s, 0)", [next(numbers)])

        with always(write, 0.02):
            yield


@contextmanager
def following(shop: Shop, log: Path) -> Iterator[None]:
    """A follower as a process, which must end with exit code 0."""
    follower = start_pgsieve(("run", "--follow"), shop.path, log)
    try:
        yield
        assert isinstance(follower.pid, int)
        os.kill(follower.pid, signal.SIGTERM)
        follower.join(60)
        assert follower.exitcode == 0, log.read_text()
    finally:
        follower.kill()


@pytest.mark.drawn
def test_checks_runs_and_copies_get_their_turn_while_a_follower_runs(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long: a follower, and other commands that wait for their turn."""
    monkeypatch.setattr(follower, "_OTHER_FOLLOWER_SECONDS", 0.5)
    log = tmp_path / "follower"
    shop.run()

    def follows(number: int) -> None:
        shop.database.execute("insert into stock values (%s, 0)", [number])
        wait_until(lambda: number in shop.ids("two", "stock"), log.read_text)

    with following(shop, log):
        follows(10)
        with writes(shop):
            for command in (("check",), ("check",), ("run",), ("resync", "two", "public.stock")):
                code, printed = shop.cli(*command)
                assert (code, "differs" in printed) == (0, False), printed
            follows(11)
            code, printed = shop.cli("run", "--follow")
            assert code == REFUSED
            assert "another process is following the slot" in printed
            # Another lake, whose slot would be read with the same capture publications.
            source = shop.written["sources"]["shop"]
            written = shop.path.read_text()
            shop.configure(lake="./other", sources={"shop": {**source, "slot": f"{source['slot']}_other"}})
            code, printed = shop.cli("run", "--follow")
            assert code == REFUSED
            assert "another process is following with the capture publication" in printed
            assert f"a `capture` other than {source['capture']}" in printed
            shop.path.write_text(written)
            follows(12)
    shop.run()
    assert shop.cli("check")[0] == 0
