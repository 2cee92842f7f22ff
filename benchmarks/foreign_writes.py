"""Measures the WAL that a slot retains during an hour without published changes.

A database writes `--megabytes` of WAL per minute, half of it to a table that is not published, half of it to a
table whose row filter rejects all rows. The slot is read by a run every five minutes, or followed, in both
row_filter modes. Prints, every five minutes, the WAL that the slot retains (from restart_lsn on) and the WAL
that is not confirmed. A minute takes `--seconds`; four times in it the server logs its running transactions,
which lets restart_lsn advance.

    python benchmarks/foreign_writes.py --megabytes 20 --seconds 0.5
    python benchmarks/foreign_writes.py --megabytes 10 --seconds 60 --minutes 15 --reader "run --follow"
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
from replication import SETTINGS
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.follow import FollowedSlotStream
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source

MIB = 1024 * 1024
WRITE = "insert into {} select 0, repeat('x', 1000) from generate_series(1, %s)"
RETAINED = (
    "select (pg_current_wal_insert_lsn() - restart_lsn)::bigint, (pg_current_wal_insert_lsn() - confirmed_flush_lsn)::bigint"
    " from pg_replication_slots where slot_name = %s"
)


def quiet(_: str) -> None:
    """A log without output."""


@contextmanager
def run_every_five_minutes(slot_stream: SlotStream, lake: Lake) -> Iterator[Callable[[int], None]]:
    """`pgsieve run` on a schedule."""

    def minute(number: int) -> None:
        if number % 5 == 0:
            drain_slot(slot_stream, lake, [Subscription("sub", slot_stream)], quiet)

    minute(0)
    yield minute


@contextmanager
def follow_continuously(slot_stream: SlotStream, lake: Lake) -> Iterator[Callable[[int], None]]:
    """`pgsieve run --follow`."""
    with FollowedSlotStream(slot_stream, lake, quiet) as streamed, ThreadPoolExecutor(1) as pool:

        def follow() -> None:
            for _ in streamed.read_slice_ends():
                streamed.append_due_slice()

        following = pool.submit(follow)
        yield lambda _: None
        streamed.stop()
        following.result()


READERS = {"run": run_every_five_minutes, "run --follow": follow_continuously}


def measure(
    server: EmbeddedServer, folder: Path, filtered: bool, reader: str, options: argparse.Namespace
) -> list[str]:
    """The retained MiB, and in brackets those that are not confirmed, every five minutes."""
    name = f"{'publisher' if filtered else 'pipeline'}_{reader.replace(' --', '_')}"
    slot_stream = SlotStream(name, Source("shop", server.conninfo()), name, name, filtered, {"sub": ("p",)})
    lake = Lake(str(folder / name), lambda: None)  # type: ignore[arg-type, return-value]
    figures = []
    with (
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
        READERS[reader](slot_stream, lake) as minute,
    ):
        for number in range(1, options.minutes + 1):
            for _ in range(4):
                started = time.monotonic()
                for table in ("foreign_rows", "filtered_rows"):
                    connection.execute(WRITE.format(table), [options.megabytes * 1000 // 8])
                connection.execute("select pg_log_standby_snapshot()")
                time.sleep(max(0, options.seconds / 4 - (time.monotonic() - started)))
            minute(number)
            if number % 5 == 0:
                row = connection.execute(RETAINED, [name]).fetchone()
                assert row is not None
                figures.append(f"{row[0] / MIB:.1f} ({row[1] / MIB:.1f})")
        connection.execute("truncate foreign_rows, filtered_rows")
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("select pg_drop_replication_slot(%s)", [name])
    return figures


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--reader", choices=READERS, action="append")
    options = parser.parse_args()
    minutes = map(str, range(5, options.minutes + 1, 5))
    results = Table("minute", *minutes, title="MiB retained (not confirmed)")
    with tempfile.TemporaryDirectory(prefix="pgsieve-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "publisher", settings=SETTINGS) as server:
            with psycopg.connect(server.conninfo(), autocommit=True) as connection:
                connection.execute("create table foreign_rows (a int, b text)")
                connection.execute("create table filtered_rows (a int, b text)")
                connection.execute(
                    "create publication p for table filtered_rows where (a > 0) with (publish = 'insert')"
                )
            for filtered in (False, True):
                for reader in options.reader or READERS:
                    figures = measure(server, folder, filtered, reader, options)
                    results.add_row(f"{'publisher' if filtered else 'pipeline'}, {reader}", *figures)
    Console(width=160).print(results)


if __name__ == "__main__":
    main()
