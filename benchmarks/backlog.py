"""Measures whether the memory of a run grows with the backlog of a slot.

`--changes` rows are inserted in transactions of 10,000, and wait in the slot. This process drains them into
the change log, as a run does, in slices of `--slice` MB of WAL. Prints the process's resident memory after
every tenth of the slices, and its peak. With `--long` an older transaction stays open, so that the server
decodes from its begin for each batch. `--ahead 1` reads slice by slice.

    python benchmarks/backlog.py --changes 20000000 --slice 64
    python benchmarks/backlog.py --changes 2000000 --slice 16 --long --ahead 1
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import psycopg
from replication import SETTINGS
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.slot_consumption import backlog
from pgsieve.assets.steps.slot_consumption import reading as change_log
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source

MIB = 1024 * 1024
TRANSACTION = 10_000


def resident_mib() -> int:
    """The current resident memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) // 1024


def fill(connection: psycopg.Connection, changes: int) -> None:
    """Insert the rows, which then wait in the slot."""
    connection.execute(
        "create procedure fill(transactions int, size int) language plpgsql as $$ begin for n in 1..transactions loop"
        " insert into t select n, i, md5(i::text) from generate_series(1, size) i; commit; end loop; end $$"
    )
    connection.execute("call fill(%s, %s)", [changes // TRANSACTION, TRANSACTION])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--changes", type=int, default=20_000_000)
    parser.add_argument("--slice", type=int, default=64)
    parser.add_argument("--ahead", type=int, default=backlog.MAX_SLICES)
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    backlog.MAX_SLICES = options.ahead
    change_log.SLICE_BYTES = options.slice * MIB
    samples: list[tuple[float, int]] = []
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-") as name,
        EmbeddedServer(Path(name) / "publisher", settings=SETTINGS) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
        psycopg.connect(server.conninfo()) as long,
    ):
        connection.execute("create table t (a int, b int, c text); create publication p for table t")
        slot_stream = SlotStream(
            "shop", Source("shop", server.conninfo()), "shop", "shop", False, {"sub": ("p",)}
        )
        lake = Lake(f"{name}/lake", lambda: None)  # type: ignore[arg-type, return-value]
        drain_slot(slot_stream, lake, [], lambda _: None)
        if options.long:
            long.execute("insert into t values (0, 0, 'long')")
        fill(connection, options.changes)
        started = time.monotonic()
        drained = drain_slot(
            slot_stream, lake, [], lambda _: samples.append((time.monotonic() - started, resident_mib()))
        )
    results = Table(
        "slice", "seconds", "MiB", title=f"{options.changes:,} changes in {drained.slices} slices"
    )
    step = max(1, len(samples) // 10)
    for number in range(step - 1, len(samples), step):
        seconds, memory = samples[number]
        results.add_row(str(number + 1), f"{seconds:.1f}", str(memory))
    results.add_row("greatest", "", str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
    results.caption = f"{options.ahead} slices ahead" + (", with a long transaction" if options.long else "")
    Console().print(results)


if __name__ == "__main__":
    main()
