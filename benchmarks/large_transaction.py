"""Measures the memory and time of pgsieve's process for one transaction that is larger than memory.

A transaction inserts `--rows` rows of ten columns. `pgsieve run` applies it, and `pgsieve run --follow` with
each setting of `streaming`. Prints the seconds until the replica has the rows, and the process's peak
resident memory (VmHWM of Linux, without Spark's JVM and its workers). Needs about 1 KB of disk per row.

    python benchmarks/large_transaction.py --rows 10000000 [--modes run parallel]
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import yaml
from deltalake import DeltaTable
from replication import COLUMNS, ROW, SETTINGS
from rich.console import Console
from rich.table import Table

from pgsieve.resources.postgres.embedded import EmbeddedServer

MIB = 1024
#: `pgsieve run`, or `pgsieve run --follow` with a setting of `streaming`.
MODES = ["run", "off", "on", "parallel"]


def peak_resident_mib(pid: int) -> int:
    """The peak resident memory of a process so far, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // MIB


def configuration(folder: Path, publisher: EmbeddedServer, name: str, streaming: str) -> Path:
    """A configuration with a lake of its own."""
    path = folder / name / "pgsieve.yaml"
    path.parent.mkdir()
    subscription = {"source": "shop", "publications": ["pub"], "streaming": streaming}
    source = {"conninfo": publisher.conninfo(), "slot": name, "capture": name}
    content = {"lake": "./lake", "sources": {"shop": source}, "subscriptions": {"sub": subscription}}
    path.write_text(yaml.safe_dump(content))
    return path


def is_applied(path: Path, rows: int) -> bool:
    """Whether the replica has this number of rows."""
    return DeltaTable(path.parent / "lake" / "sub" / "public" / "t").count() == rows


def start(path: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start `pgsieve run` as a process."""
    command = [
        sys.executable,
        "-m",
        "pgsieve.pipelines.command_line.cli",
        "run",
        "--config",
        str(path),
        *more,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def measure_process(
    process: subprocess.Popen[bytes], path: Path, rows: int, *, follows: bool
) -> tuple[float, int]:
    """The seconds until the replica has the rows or the process ends, and the process's peak memory."""
    started, greatest = time.monotonic(), 0
    while process.poll() is None:
        greatest = max(greatest, peak_resident_mib(process.pid))
        if is_applied(path, rows):
            break
        time.sleep(0.2)
    seconds = time.monotonic() - started
    if follows:
        process.send_signal(signal.SIGTERM)
    process.wait()
    if not is_applied(path, rows):
        raise SystemExit(
            f"{path}: the process ended with {process.returncode} before the replica had the rows"
        )
    return seconds, greatest


def measure(publisher: EmbeddedServer, folder: Path, rows: int, streaming: str | None) -> tuple[float, int]:
    """Follow with a setting of `streaming`, or run once without a setting."""
    path = configuration(folder, publisher, f"follow_{streaming}" if streaming else "run", streaming or "off")
    follow = ["--follow"] if streaming else []
    insert = f"insert into t select {ROW} from generate_series(1, {rows}) i"
    with psycopg.connect(publisher.conninfo(), autocommit=True) as connection:
        connection.execute("truncate t")
        start(path).wait()  # the copy of the empty table
        process = start(path, *follow) if follow else None
        connection.execute(insert)
        figures = measure_process(process or start(path), path, rows, follows=process is not None)
        connection.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
    shutil.rmtree(path.parent)
    return figures


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args()
    rows = options.rows
    results = Table("pgsieve", "seconds", "MiB", title=f"one transaction of {rows:,} rows")
    with tempfile.TemporaryDirectory(prefix="pgsieve-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "publisher", settings=SETTINGS) as publisher:
            with psycopg.connect(publisher.conninfo(), autocommit=True) as connection:
                connection.execute(f"create table t {COLUMNS}; create publication pub for table t")
            for mode in options.modes:
                seconds, greatest = measure(publisher, folder, rows, None if mode == "run" else mode)
                what = mode if mode == "run" else f"run --follow, streaming: {mode}"
                results.add_row(what, f"{seconds:.1f}", str(greatest))
    Console().print(results)


if __name__ == "__main__":
    main()
