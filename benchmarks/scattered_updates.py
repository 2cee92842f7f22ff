"""What updates cost that are scattered over a table, by its size: `python benchmarks/scattered_updates.py 1000000 8000000`.

In: numbers of rows. Out: for each table the median of `--rounds` runs as processes of their own, each after so many
`--updates` at keys that lie evenly apart: wall clock, in brackets processor time with the JVM, and the ratio to the first
table. The tables take turns, and are those of `benchmarks/replication.py`. Needs about 0.3 KB of disk a row.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import psycopg
from object_store import run_as_process
from replication import COLUMNS, ROW, SETTINGS, configuration

from pgsieve.resources.postgres.embedded import EmbeddedServer

#: Rows that one statement inserts.
_STATEMENT = 1_000_000


def _fill(database: psycopg.Connection, table: str, rows: int) -> None:
    database.execute(f"create table {table} {COLUMNS}")
    for first in range(1, rows + 1, _STATEMENT):
        last = min(first + _STATEMENT - 1, rows)
        database.execute(f"insert into {table} select {ROW} from generate_series({first}, {last}) i")
    database.execute(f"vacuum (freeze, analyze) {table}")
    database.execute(f"create publication {table} for table {table}")


def main(numbers: list[int], updates: int, rounds: int) -> None:
    """Measure tables of so many rows."""
    measured: dict[int, list[tuple[float, float]]] = {rows: [] for rows in numbers}
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as folder,
        EmbeddedServer(Path(folder) / "data", settings={**SETTINGS, "fsync": "off"}) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as database,
    ):
        paths = {rows: configuration(Path(folder), server, f"rows_{rows}") for rows in numbers}
        # Before there is a slot, which would have the filling of the others decoded.
        for rows in numbers:
            _fill(database, f"rows_{rows}", rows)
        for rows, path in paths.items():
            seconds, _ = run_as_process(path)
            print(f"{rows:,} rows: copied in {seconds:.1f} s", flush=True)
        for number in range(rounds):
            for rows, path in paths.items():
                step = max(rows // updates, 1)
                database.execute(f"update rows_{rows} set qty = qty + 1 where id % {step} = {number % step}")
                measured[rows].append(run_as_process(path))
                seconds, processor = measured[rows][-1]
                print(
                    f"{rows:,} rows: {seconds:.1f} s ({processor:.1f}), load average {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    first = statistics.median(seconds for seconds, _ in measured[numbers[0]])
    for rows, runs in measured.items():
        seconds, processor = (statistics.median(values) for values in zip(*runs, strict=True))
        print(
            f"{updates:,} updates of {rows:,} rows: {seconds:.2f} s ({processor:.2f}), {seconds / first:.2f}x"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.numbers, arguments.updates, arguments.rounds)
