"""Measures updates that are scattered over a table, by the table's size.

    python benchmarks/scattered_updates.py 1000000 8000000

In: numbers of rows. Out: for each table the median of `--rounds` runs, each a process of its own after
`--updates` updates of evenly spaced keys: wall clock, in brackets processor time with the JVM, and the ratio
to the first table. The tables take turns; their columns are those of `benchmarks/replication.py`. Needs about
0.3 KB of disk per row.

With `--store` the lakes are on a local S3 server, behind a proxy that delays each request by `--wait`
milliseconds, and the requests, downloads and uploads of a run are printed, too. `--rewritten` are values of
`spark.pgsieve.rewrittenBytes`: each table is measured with each of them.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.object_store import run_as_process
from benchmarks.replication import COLUMNS, ROW, SETTINGS
from pgsieve.resources.lake.byte_limits import REWRITTEN_BYTES_SETTING
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.s3_proxy import S3Proxy, s3_proxy
from tests.fixtures.s3_server import BUCKET, S3Server, new_s3_server

#: The number of rows that one statement inserts.
_ROWS_PER_STATEMENT = 1_000_000


def _fill(database: psycopg.Connection, table: str, rows: int) -> None:
    database.execute(f"create table {table} {COLUMNS}")
    for first in range(1, rows + 1, _ROWS_PER_STATEMENT):
        last = min(first + _ROWS_PER_STATEMENT - 1, rows)
        database.execute(f"insert into {table} select {ROW} from generate_series({first}, {last}) i")
    database.execute(f"vacuum (freeze, analyze) {table}")
    database.execute(f"create publication {table} for table {table}")


@dataclass(frozen=True)
class Case:
    """A table with this many rows, and the setting with which it is replicated (None: the default)."""

    rows: int
    rewritten_bytes: int | None

    @property
    def table(self) -> str:
        """The name of the table and of its publication."""
        return f"rows_{self.rows}"

    def __str__(self) -> str:
        """The text in the output."""
        return f"{self.rows:,} rows" + (
            "" if self.rewritten_bytes is None else f", {REWRITTEN_BYTES_SETTING} {self.rewritten_bytes}"
        )

    def configuration(self, folder: Path, server: EmbeddedServer, proxy: S3Proxy | None) -> Path:
        """A pgsieve.yaml with one subscription to the table, on a store behind a proxy or in a folder."""
        name = f"{self.table}_{'default' if self.rewritten_bytes is None else self.rewritten_bytes}".replace(
            "-", "_"
        )
        content: dict[str, object] = {
            "lake": f"s3://{BUCKET}/{name}" if proxy else f"./lake_{name}",
            "sources": {name: {"conninfo": server.conninfo()}},
            "subscriptions": {f"s_{name}": {"source": name, "publications": [self.table]}},
        }
        if proxy:
            content["storage"] = dict(S3Server(proxy.url).storage)
        if self.rewritten_bytes is not None:
            content["spark"] = {"conf": {REWRITTEN_BYTES_SETTING: str(self.rewritten_bytes)}}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path


def _run(path: Path, proxy: S3Proxy | None) -> tuple[float, ...]:
    """A run's seconds and processor seconds.

    On a store, its requests and the megabytes that it downloads and uploads follow.
    """
    if proxy is None:
        return run_as_process(path)
    before = len(proxy.answered), proxy.downloaded, proxy.uploaded
    took = run_as_process(path)
    requests, down, up = len(proxy.answered), proxy.downloaded, proxy.uploaded
    return *took, requests - before[0], (down - before[1]) / 1e6, (up - before[2]) / 1e6


def _format(run: Sequence[float]) -> str:
    shown = f"{run[0]:.2f} s ({run[1]:.2f})"
    if len(run) > 2:
        shown += f", {run[2]:.0f} requests, {run[3]:.1f} MB down, {run[4]:.1f} MB up"
    return shown


def main(options: argparse.Namespace) -> None:
    """Measure tables with these numbers of rows."""
    cases = [
        Case(rows, rewritten_bytes)
        for rows in options.numbers
        for rewritten_bytes in options.rewritten_bytes or [None]
    ]
    measured = defaultdict[Case, list[tuple[float, ...]]](list)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-")))
        proxy = None
        if options.store:
            proxy = stack.enter_context(s3_proxy(stack.enter_context(new_s3_server()).url))
            proxy.delay = options.wait / 1000
        settings = {**SETTINGS, "fsync": "off", "max_replication_slots": "20"}
        server = stack.enter_context(EmbeddedServer(folder / "data", settings=settings))
        database = stack.enter_context(psycopg.connect(server.conninfo(), autocommit=True))
        paths = {case: case.configuration(folder, server, proxy) for case in cases}
        # All tables are filled before there is a slot, which would have to decode their rows.
        for case in {case.rows: case for case in cases}.values():
            _fill(database, case.table, case.rows)
        for case, path in paths.items():
            print(f"{case}: copied in {_format(_run(path, proxy))}", flush=True)
        for number in range(options.rounds):
            for rows in options.numbers:
                step = max(rows // options.updates, 1)
                database.execute(f"update rows_{rows} set qty = qty + 1 where id % {step} = {number % step}")
                for case in (case for case in cases if case.rows == rows):
                    measured[case].append(_run(paths[case], proxy))
                    shown = _format(measured[case][-1])
                    print(f"{case}: {shown}, load average {os.getloadavg()[0]:.1f}", flush=True)
    medians = {case: [*map(statistics.median, zip(*runs, strict=True))] for case, runs in measured.items()}
    first = medians[cases[0]][0]
    for case, median in medians.items():
        print(f"{options.updates:,} updates, {case}: {_format(median)}, {median[0] / first:.2f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", action="store_true", help="the lakes are on S3, not in a folder")
    parser.add_argument("--wait", type=float, default=0.0, help="milliseconds that each request waits")
    parser.add_argument(
        "--rewritten",
        dest="rewritten_bytes",
        type=int,
        nargs="+",
        help=f"values of {REWRITTEN_BYTES_SETTING}",
    )
    main(parser.parse_args())
