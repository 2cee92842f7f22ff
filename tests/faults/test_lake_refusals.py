"""Storage that refuses writes stops a run. No table is set aside, no change is confirmed, and none is lost.

These tests mount file systems and make folders immutable, so they are collected only for root.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import FOUND, REFUSED, output_of, settle, site

pytestmark = pytest.mark.spark


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    """Mount something at a folder, for the block."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *arguments, str(folder)], check=True)
    try:
        yield
    finally:
        # `--lazy` because Spark may still have a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """For the block, a folder in a file system that refuses every write."""
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


@contextlib.contextmanager
def immutable(*folders: Path) -> Iterator[None]:
    """For the block, folders in which not even root can create or remove entries."""
    subprocess.run(["chattr", "+i", *map(str, folders)], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *map(str, folders)], check=True)


def confirmed(database: psycopg.Connection) -> list[tuple[str]]:
    """The confirmed position of each slot."""
    return database.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = current_database()"
    ).fetchall()


@pytest.mark.drawn
def test_a_full_disk_stops_the_run_sets_nothing_aside_and_loses_nothing(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: many runs, each a process, and a Spark Connect server."""
    with (
        mounted(tmp_path / "lake", "-t", "tmpfs", "-o", "size=16m", "tmpfs"),
        site("full_disk", publisher_server, tmp_path, master) as (pgsieve, database),
    ):
        settle(pgsieve, database)
        filler, stops = pgsieve.lake / "filler", 0
        # With less room the disk is full earlier: at once, in the change log, in a history, in a replica.
        for room in (0, 72, 88, 112, 160):
            pgsieve.write(database)
            filler.write_bytes(bytes(shutil.disk_usage(pgsieve.lake).free - room * 1024))
            before, printed = confirmed(database), len(pgsieve.log)
            ended = pgsieve.run()
            assert ended in {0, REFUSED}, pgsieve.log
            if ended == REFUSED:
                stops += 1
                assert "No space left on device" in pgsieve.log[printed:]
            assert room or confirmed(database) == before
            filler.unlink()
        assert stops >= 3
        settle(pgsieve, database)


@pytest.mark.drawn
def test_a_folder_that_refuses_sets_its_table_aside_and_a_lake_that_refuses_stops_the_run(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: many commands, each a process."""
    with site("refusing", publisher_server, tmp_path, master) as (pgsieve, database):
        settle(pgsieve, database)
        journal = pgsieve.replica("accounts", "journal")
        pgsieve.write(database)
        with immutable(journal, journal / "_delta_log"):
            output = output_of(pgsieve, "run", ends=FOUND)
        assert f'public.journal is set aside: Delta table "{journal}": Operation not permitted' in output
        output_of(pgsieve, "resync", "accounts", ends=0)
        settle(pgsieve, database)

        pgsieve.write(database)
        before = confirmed(database)
        with read_only(pgsieve.lake):
            assert "Read-only file system" in output_of(pgsieve, "run", ends=REFUSED)
        assert confirmed(database) == before
        settle(pgsieve, database)

        follower, printed = pgsieve.start("run", "--follow"), len(pgsieve.log)
        pgsieve.wait_for_walsenders(database, 2)
        pgsieve.write(database)
        pgsieve.wait_until_applied()
        with read_only(pgsieve.lake):
            pgsieve.write(database)
            follower.join(120)
            assert follower.exitcode == REFUSED, pgsieve.log[printed:]
        assert "Read-only file system" in pgsieve.log[printed:]
        settle(pgsieve, database)
