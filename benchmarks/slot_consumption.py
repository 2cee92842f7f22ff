"""Measures slot consumption, compared with reading the slot and dropping the messages.

The changes of the catch-up in `benchmarks/replication.py` (1,000,000 inserts and 500,000 updates at the
default size) wait in `--rounds` slots, and in one more. In each round, one session peeks at the extra slot and
drops the messages, and another slot is drained into a change log and confirmed. The order of the two
alternates. Prints the seconds of both, their ratio, and the medians.

    python benchmarks/slot_consumption.py --rounds 12
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import psycopg
from replication import COLUMNS, SETTINGS, changes, quiet
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.slot_consumption.appending import make_peek_options
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import peek_query, read_messages
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn


def peek(slot_stream: SlotStream, upto: int) -> float:
    """The seconds in which one session reads the slot's changes and drops them."""
    started = time.monotonic()
    with slot_stream.source.connect() as connection:
        query = peek_query(
            slot_stream.slot, upto, make_peek_options(slot_stream, ["p"]), connection.info.server_version
        )
    for _ in read_messages(slot_stream.source.make_executor_conninfo(), query):
        pass
    return time.monotonic() - started


def consume(slot_stream: SlotStream, lake: Lake) -> float:
    """The seconds in which the slot's changes are appended to the change log and confirmed."""
    started = time.monotonic()
    drain_slot(slot_stream, lake, [], quiet)
    return time.monotonic() - started


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    pairs: list[tuple[float, float]] = []
    results = Table("peek", "drain", "peek / drain", title="slot consumption, in seconds")
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-") as folder,
        EmbeddedServer(
            Path(folder) / "publisher",
            settings={**SETTINGS, "max_replication_slots": str(options.rounds + 4)},
        ) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
    ):
        connection.execute(f"create table t {COLUMNS}; create publication p for table t")
        lake = Lake(f"{folder}/lake", lambda: None)  # type: ignore[arg-type, return-value]
        slot_streams = [
            SlotStream(name, Source("shop", server.conninfo()), name, name, True, {"sub": ("p",)})
            for name in ("peeked", *(f"drained_{number}" for number in range(options.rounds)))
        ]
        for slot_stream in slot_streams:
            drain_slot(slot_stream, lake, [], quiet)
        changes(connection, "t", options.rows, 0)
        upto = read_current_lsn(connection)
        whole, *others = slot_streams
        for number, slot_stream in enumerate(others):
            if number % 2:
                drained, peeked = consume(slot_stream, lake), peek(whole, upto)
            else:
                peeked, drained = peek(whole, upto), consume(slot_stream, lake)
            pairs.append((peeked, drained))
    for peeked, drained in pairs:
        results.add_row(f"{peeked:.2f}", f"{drained:.2f}", f"{peeked / drained:.2f}")
    results.add_section()
    medians = (median(column) for column in (*zip(*pairs, strict=True), [p / d for p, d in pairs]))
    results.add_row(*(f"{each:.2f}" for each in medians))
    Console().print(results)


if __name__ == "__main__":
    main()
