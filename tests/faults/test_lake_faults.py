"""A lake that lost something, or that others write to, costs a copy that is asked for at most: never a row in silence."""

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
from tests.faults.killable import FOUND, REFUSED, settled, site, told

pytestmark = pytest.mark.spark


@pytest.mark.drawn
def test_a_lost_answer_to_a_commit_repeats_and_loses_nothing(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """Seven commands, each a process, and a Spark Connect server."""
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
        # A replica has another version than the plan's then: a new plan finds that it lacks nothing.
        assert pgsieve.run(failpoint=f"{Failpoint.REPLICA_COMMITTED}!") == 0, pgsieve.log
        pgsieve.write(database)
        settled(pgsieve, database)


@pytest.mark.drawn
def test_a_damaged_replica_is_set_aside_with_the_command_that_copies_it_again(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """Many commands, each a process, and a Spark Connect server."""
    with site("damaged", publisher_server, tmp_path, master) as (pgsieve, database):
        settled(pgsieve, database)
        journal, savings, checking = (
            pgsieve.replica("accounts", t) for t in ("journal", "savings", "checking")
        )
        orders = pgsieve.replica("filtered", "orders")
        shutil.copytree(journal, tmp_path / "backup")
        pgsieve.write(database)
        settled(pgsieve, database)
        cuts = pgsieve.cuts()

        shutil.rmtree(savings)
        shutil.rmtree(journal)
        shutil.copytree(tmp_path / "backup", journal)
        DeltaTable(str(checking)).restore(0)
        for file in orders.glob("*.parquet"):
            file.unlink()
        pgsieve.write(database)
        output = told(pgsieve, "run", ends=FOUND)
        assert output.count("back to an earlier version; `pgsieve resync accounts public.") == 2
        assert f'"{savings}" is gone; `pgsieve resync accounts public.savings`' in output
        assert f'"{orders}": its file "{orders}/' in output
        assert "`pgsieve resync filtered public.orders`" in output
        assert "set aside" in told(pgsieve, "status", ends=0)
        told(pgsieve, "check", ends=FOUND)

        # From a log that cannot be read, also its history's, a table comes back as well.
        for table in (checking, pgsieve.lake / "accounts" / "_changes" / "public" / "checking"):
            max((table / "_delta_log").glob("*.json")).write_text("{")
        told(pgsieve, "resync", "accounts", ends=0)
        told(pgsieve, "resync", "filtered", "public.orders", ends=0)
        pgsieve.write(database)
        settled(pgsieve, database)
        assert all(cut not in pgsieve.cuts() for cut in cuts), "cuts of versions that are others now"
        pgsieve.write(database)
        settled(pgsieve, database)


@pytest.mark.drawn
def test_what_the_change_log_has_lost_is_told_with_the_command_that_brings_it_back(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """Many commands, each a process."""
    with site("lost", publisher_server, tmp_path, master) as (pgsieve, database):
        settled(pgsieve, database)
        change_log = pgsieve.lake / "_pgsieve" / "lost" / "change_log"
        pgsieve.write(database)
        assert pgsieve.run(failpoint=Failpoint.SLOT_CONFIRMED) == -signal.SIGKILL
        # What opens the lake after a kill has looked whether a power cut left something half written.
        pgsieve.command("status")
        for file in change_log.glob("*.parquet"):
            file.unlink()
        output = told(pgsieve, "run", ends=FOUND)
        assert f'problem: public.journal is set aside: Delta table "{change_log}": its file "' in output
        assert "`pgsieve resync accounts public.journal`" in output
        told(pgsieve, "resync", "accounts", ends=0)
        settled(pgsieve, database)

        pgsieve.write(database)
        assert pgsieve.run(failpoint=Failpoint.SLOT_CONFIRMED) == -signal.SIGKILL
        shutil.rmtree(change_log)
        for command in ("run", "check"):
            output = told(pgsieve, command, ends=REFUSED)
            assert f'the change log "{change_log}" is gone' in output
            assert "`pgsieve resync accounts`" in output
        told(pgsieve, "resync", "accounts", ends=0)
        settled(pgsieve, database)

        max((change_log / "_delta_log").glob("*.json")).write_text("{")
        assert f'the change log "{change_log}" cannot be read' in told(pgsieve, "run", ends=REFUSED)
        assert str(change_log) in told(pgsieve, "status", ends=REFUSED)
        told(pgsieve, "resync", "accounts", ends=0)
        settled(pgsieve, database)


def newest_entry(table: Path) -> Path:
    """The newest entry of a table's log."""
    return max((table / "_delta_log").glob("*.json"))


@pytest.mark.drawn
def test_an_entry_without_actions_or_cut_off_is_damage_and_a_resync_brings_all_back(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """Many commands, each a process."""
    with site("entries", publisher_server, tmp_path, master) as (pgsieve, database):
        settled(pgsieve, database)
        pgsieve.write(database)
        settled(pgsieve, database)
        checking, savings, journal = (
            newest_entry(pgsieve.replica("accounts", t)) for t in ("checking", "savings", "journal")
        )
        checking.write_bytes(b"")
        # It has still a commitInfo, and all that comes before the rows.
        savings.write_bytes(savings.read_bytes().partition(b"\n")[0])
        journal.unlink()
        newest_entry(pgsieve.lake / "filtered" / "_changes" / "public" / "orders").write_bytes(b"")
        pgsieve.write(database)
        output = told(pgsieve, "run", ends=FOUND)
        for table in ("accounts public.checking", "accounts public.savings", "accounts public.journal"):
            assert f"`pgsieve resync {table}`" in output
        assert "`pgsieve resync filtered public.orders`" in output
        for subscription in ("accounts", "filtered"):
            told(pgsieve, "resync", subscription, ends=0)
        settled(pgsieve, database)

        # That the copies were ready is found again.
        newest_entry(pgsieve.lake / "accounts" / "_table_states").unlink()
        pgsieve.write(database)
        settled(pgsieve, database)

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
        told(pgsieve, "run", ends=REFUSED)
        for subscription in ("accounts", "filtered"):
            told(pgsieve, "resync", subscription, ends=0)
        settled(pgsieve, database)


@pytest.mark.long
def test_each_of_pgsieves_own_tables_with_an_empty_entry_stops_a_run_until_it_is_begun_anew(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    with site("each_entry", publisher_server, tmp_path, master) as (pgsieve, database):
        settled(pgsieve, database)
        for log in sorted(
            [*(pgsieve.lake / "_pgsieve").rglob("_delta_log"), *pgsieve.lake.glob("*/_*/_delta_log")]
        ):
            pgsieve.write(database)
            settled(pgsieve, database)
            newest_entry(log.parent).write_bytes(b"")
            pgsieve.write(database)
            told(pgsieve, "run", ends=REFUSED)
            for subscription in ("accounts", "filtered"):
                told(pgsieve, "resync", subscription, ends=0)
            settled(pgsieve, database)


@contextlib.contextmanager
def written_by_others(path: Path) -> Iterator[None]:
    """Within the block others append to a table, delete from it, and compact and vacuum it."""
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.wait(0.5):
            number += 1
            row = pa.table({"id": pa.array([-number], pa.int32()), "amount": pa.array([0], pa.int32())})
            with contextlib.suppress(DeltaError):  # pgsieve was faster
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
def test_rows_of_other_writers_do_not_disturb_an_apply_and_are_found_and_mended_by_the_check(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    with site("others", publisher_server, tmp_path, master) as (pgsieve, database):
        settled(pgsieve, database)
        with written_by_others(pgsieve.replica("accounts", "checking")):
            for _ in range(2):
                pgsieve.write(database)
                assert pgsieve.run() == 0, pgsieve.log
        cuts = pgsieve.cuts()
        totals = [pgsieve.total(cut) for cut in cuts]
        told(pgsieve, "check", ends=FOUND)
        told(pgsieve, "check", "--repair", ends=FOUND)
        told(pgsieve, "check", ends=0)
        assert [pgsieve.total(cut) for cut in cuts] == totals, (
            "a cut names versions, whatever comes after them"
        )
        settled(pgsieve, database)
