"""Whether the memory of a run grows with what waits for it: many slices of a slot, drained one after the other.

`--changes` rows are inserted in transactions of 10,000 and wait in the slot; they are drained into the change log in
slices of `--slice` MB of WAL, as a run does it in this process. Prints the process's resident memory after every slice
of a tenth, and its greatest.

    python benchmarks/backlog.py --changes 20000000 --slice 64
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

from assets.steps import change_log
from assets.steps.change_log import drain
from assets.steps.subscription import Feed
from resources.delta import Lake
from resources.embedded import EmbeddedServer
from resources.postgres import Source

MIB = 1024 * 1024
TRANSACTION = 10_000


def resident() -> int:
    """The resident memory of this process now, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) // 1024


def fill(connection: psycopg.Connection, changes: int) -> None:
    """Let changes wait in the slot."""
    connection.execute(
        "create procedure fill(transactions int, size int) language plpgsql as $$ begin for n in 1..transactions loop"
        " insert into t select n, i, md5(i::text) from generate_series(1, size) i; commit; end loop; end $$"
    )
    connection.execute("call fill(%s, %s)", [changes // TRANSACTION, TRANSACTION])


def main() -> None:
    """Measure and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--changes", type=int, default=20_000_000)
    arguments.add_argument("--slice", type=int, default=64)
    given = arguments.parse_args()
    change_log.SLICE_BYTES = given.slice * MIB
    samples: list[tuple[float, int]] = []
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-") as name,
        EmbeddedServer(Path(name) / "publisher", settings=SETTINGS) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
    ):
        connection.execute("create table t (a int, b int, c text); create publication p for table t")
        feed = Feed("shop", Source("shop", server.conninfo()), "shop", "shop", False, {"sub": ("p",)})
        lake = Lake(f"{name}/lake", lambda: None)  # type: ignore[arg-type, return-value]
        drain(feed, lake, [], lambda _: None)
        fill(connection, given.changes)
        begun = time.monotonic()
        drained = drain(feed, lake, [], lambda _: samples.append((time.monotonic() - begun, resident())))
    results = Table("slice", "seconds", "MiB", title=f"{given.changes:,} changes in {drained.slices} slices")
    step = max(1, len(samples) // 10)
    for number in range(step - 1, len(samples), step):
        seconds, memory = samples[number]
        results.add_row(str(number + 1), f"{seconds:.1f}", str(memory))
    results.add_row("greatest", "", str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
    Console().print(results)


if __name__ == "__main__":
    main()
