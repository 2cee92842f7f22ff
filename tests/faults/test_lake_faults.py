"""A lake that lost files, or that others write to, costs at most a copy on request. No row is lost silently."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from pgsieve.resources.failpoints import Failpoint
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import FOUND, REFUSED, output_of, settle, site

pytestmark = pytest.mark.spark


@pytest.mark.drawn
def test_a_lost_answer_to_a_commit_repeats_and_loses_nothing(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: seven commands, each a process, and a Spark Connect server."""
    with site("answers", publisher_server, tmp_path, master) as (pgsieve, database):
        for point in (
            Failpoint.POSITION_RECORDED,
            Failpoint.TABLE_COPIED,
            Failpoint.SLICE_COMMITTED,
            Failpoint.CHANGES_WRITTEN,
            Failpoint.CUT_WRITTEN,
        ):
            assert pgsieve.run(failpoint=f"{point}!") == REFUSED, pgsieve.log
            assert pgsieve.log.count("Input/output error") > 0
            pgsieve.write(database)
        # The replica then has another version than planned. A new plan notices that the replica has all changes.
        assert pgsieve.run(failpoint=f"{Failpoint.REPLICA_COMMITTED}!") == 0, pgsieve.log
        pgsieve.write(database)
        settle(pgsieve, database)


@pytest.mark.drawn
def test_a_damaged_replica_is_set_aside_with_the_command_that_copies_it_again(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: many commands, each a process, and a Spark Connect server."""
    with site("damaged", publisher_server, tmp_path, master) as (pgsieve, database):
        settle(pgsieve, database)
        journal, savings, checking = (
            pgsieve.replica("accounts", t) for t in ("journal", "savings", "checking")
        )
        orders = pgsieve.replica("filtered", "orders")
        shutil.copytree(journal, tmp_path / "backup")
        pgsieve.write(database)
        settle(pgsieve, database)
        cuts = pgsieve.cuts()

        shutil.rmtree(savings)
        shutil.rmtree(journal)
        shutil.copytree(tmp_path / "backup", journal)
        DeltaTable(str(checking)).restore(0)
        for file in orders.glob("*.parquet"):
            file.unlink()
        pgsieve.write(database)
        output = output_of(pgsieve, "run", ends=FOUND)
        assert output.count("back to an earlier version; `pgsieve resync accounts public.") == 2
        assert f'"{savings}" is gone; `pgsieve resync accounts public.savings`' in output
        assert f'"{orders}": its file "{orders}/' in output
        assert "`pgsieve resync filtered public.orders`" in output
        assert "set aside" in output_of(pgsieve, "status", ends=0)
        output_of(pgsieve, "check", ends=FOUND)

        # Also a table comes back whose log, or whose history's log, cannot be read.
        for table in (checking, pgsieve.lake / "accounts" / "_changes" / "public" / "checking"):
            max((table / "_delta_log").glob("*.json")).write_text("{")
        output_of(pgsieve, "resync", "accounts", ends=0)
        output_of(pgsieve, "resync", "filtered", "public.orders", ends=0)
        pgsieve.write(database)
        settle(pgsieve, database)
        assert all(cut not in pgsieve.cuts() for cut in cuts), "a cut names versions that have been replaced"
        pgsieve.write(database)
        settle(pgsieve, database)


@pytest.mark.drawn
def test_a_change_log_that_lost_files_is_reported_with_the_command_that_restores_it(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: many commands, each a process."""
    with site("lost", publisher_server, tmp_path, master) as (pgsieve, database):
        settle(pgsieve, database)
        change_log = pgsieve.lake / "_pgsieve" / "lost" / "change_log"
        pgsieve.write(database)
        assert pgsieve.run(failpoint=Failpoint.SLOT_CONFIRMED) == -signal.SIGKILL
        # The first command after a kill looks for files that a power cut left half written. Let it do so before files are deleted.
        pgsieve.command("status")
        for file in change_log.glob("*.parquet"):
            file.unlink()
        output = output_of(pgsieve, "run", ends=FOUND)
        assert f'problem: public.journal is set aside: Delta table "{change_log}": its file "' in output
        assert "`pgsieve resync accounts public.journal`" in output
        output_of(pgsieve, "resync", "accounts", ends=0)
        settle(pgsieve, database)

        pgsieve.write(database)
        assert pgsieve.run(failpoint=Failpoint.SLOT_CONFIRMED) == -signal.SIGKILL
        shutil.rmtree(change_log)
        for command in ("run", "check"):
            output = output_of(pgsieve, command, ends=REFUSED)
            assert f'the change log "{change_log}" is gone' in output
            assert "`pgsieve resync accounts`" in output
        output_of(pgsieve, "resync", "accounts", ends=0)
        settle(pgsieve, database)

        max((change_log / "_delta_log").glob("*.json")).write_text("{")
        assert f'the change log "{change_log}" cannot be read' in output_of(pgsieve, "run", ends=REFUSED)
        assert str(change_log) in output_of(pgsieve, "status", ends=REFUSED)
        output_of(pgsieve, "resync", "accounts", ends=0)
        settle(pgsieve, database)


def newest_entry(table: Path) -> Path:
    """The newest entry of a Delta table's log."""
    return max((table / "_delta_log").glob("*.json"))


@pytest.mark.drawn
def test_an_empty_or_truncated_log_entry_is_damage_and_a_resync_restores_all(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: many commands, each a process."""
    with site("entries", publisher_server, tmp_path, master) as (pgsieve, database):
        settle(pgsieve, database)
        pgsieve.write(database)
        settle(pgsieve, database)
        checking, savings, journal = (
            newest_entry(pgsieve.replica("accounts", t)) for t in ("checking", "savings", "journal")
        )
        checking.write_bytes(b"")
        # The entry keeps its commitInfo, which comes before the rows.
        savings.write_bytes(savings.read_bytes().partition(b"\n")[0])
        journal.unlink()
        newest_entry(pgsieve.lake / "filtered" / "_changes" / "public" / "orders").write_bytes(b"")
        pgsieve.write(database)
        output = output_of(pgsieve, "run", ends=FOUND)
        for table in ("accounts public.checking", "accounts public.savings", "accounts public.journal"):
            assert f"`pgsieve resync {table}`" in output
        assert "`pgsieve resync filtered public.orders`" in output
        for subscription in ("accounts", "filtered"):
            output_of(pgsieve, "resync", subscription, ends=0)
        settle(pgsieve, database)

        # pgsieve notices again that the copies were ready.
        newest_entry(pgsieve.lake / "accounts" / "_table_states").unlink()
        pgsieve.write(database)
        settle(pgsieve, database)

        own = [
            *(pgsieve.lake / "_pgsieve").rglob("_delta_log"),
            *pgsieve.lake.glob("*/_*/_delta_log"),
        ]
        assert {log.parent.name for log in own} >= {
            "change_log",
            "slices",
            "feed",
            "catalogs",
            "_cuts",
            "_transformed",
        }
        for log in own:
            newest_entry(log.parent).write_bytes(b"")
        pgsieve.write(database)
        output_of(pgsieve, "run", ends=REFUSED)
        for subscription in ("accounts", "filtered"):
            output_of(pgsieve, "resync", subscription, ends=0)
        settle(pgsieve, database)


@pytest.mark.long
def test_an_empty_entry_in_any_of_pgsieves_own_tables_stops_a_run_until_a_resync(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: many commands for each table, each a process."""
    with site("each_entry", publisher_server, tmp_path, master) as (pgsieve, database):
        settle(pgsieve, database)
        for log in sorted(
            [*(pgsieve.lake / "_pgsieve").rglob("_delta_log"), *pgsieve.lake.glob("*/_*/_delta_log")]
        ):
            pgsieve.write(database)
            settle(pgsieve, database)
            newest_entry(log.parent).write_bytes(b"")
            pgsieve.write(database)
            output_of(pgsieve, "run", ends=REFUSED)
            for subscription in ("accounts", "filtered"):
                output_of(pgsieve, "resync", subscription, ends=0)
            settle(pgsieve, database)


@contextlib.contextmanager
def written_by_others(path: Path) -> Iterator[None]:
    """In the block, another writer appends to a table, deletes from it, compacts it and vacuums it."""
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.wait(0.5):
            number += 1
            row = pa.table({"id": pa.array([-number], pa.int32()), "amount": pa.array([0], pa.int32())})
            with contextlib.suppress(DeltaError):  # pgsieve committed first
                write_deltalake(str(path), row, mode="append")
                DeltaTable(str(path)).delete(f"id < 0 and id = {3 - number}")
                DeltaTable(str(path)).optimize.compact()
                DeltaTable(str(path)).vacuum(dry_run=False)

    writer = threading.Thread(target=work)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


@pytest.mark.long
def test_rows_of_other_writers_do_not_disturb_an_apply_and_the_check_repairs_them(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: many commands, each a process."""
    with site("others", publisher_server, tmp_path, master) as (pgsieve, database):
        settle(pgsieve, database)
        with written_by_others(pgsieve.replica("accounts", "checking")):
            for _ in range(2):
                pgsieve.write(database)
                assert pgsieve.run() == 0, pgsieve.log
        cuts = pgsieve.cuts()
        totals = [pgsieve.total(cut) for cut in cuts]
        output_of(pgsieve, "check", ends=FOUND)
        output_of(pgsieve, "check", "--repair", ends=FOUND)
        output_of(pgsieve, "check", ends=0)
        assert [pgsieve.total(cut) for cut in cuts] == totals, "a cut does not name fixed versions"
        settle(pgsieve, database)
