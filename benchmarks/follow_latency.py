"""Measures the time from a commit to the replica: `python benchmarks/follow_latency.py 120 --filtered`.

In: seconds, and options: `--filtered` publishes with a row filter, `--load 1000` lets pgbench commit so many
other transactions per second. The benchmark commits ten transactions per second, each with an INSERT, an
UPDATE and sometimes a DELETE. Out: the time from COMMIT until the replica's Delta log has a version with the
transaction (median, 95th percentile and worst: in the first minute, after it, and in the last ten seconds);
and the follower's CPU per version, which other work on the machine changes less, and its peak memory. The
follower is a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psycopg
import yaml

from pgsieve.decoding.lsn import parse_lsn
from pgsieve.resources.postgres.embedded import EmbeddedServer

RATE = 10
ROWS = 1000
_POLL_SECONDS = 0.005
_WAIT_SECONDS = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")

#: The time of a transaction's commit, and an LSN before its commit record.
Commit = tuple[float, int]
#: The time at which a version of the replica appeared, and its position.
Version = tuple[float, int]


def main(seconds: int, load: int, *, filtered: bool) -> None:
    """Measure for this many seconds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(Path(folder) / "data", settings={"fsync": "off"}) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as database,
    ):
        database.execute("create table probe (id int primary key, n int, c text)")
        database.execute(f"insert into probe select i, i, 'row ' || i from generate_series(1, {ROWS}) i")
        if filtered:  # An UPDATE has to contain the columns that the filter reads.
            database.execute("alter table probe replica identity full")
        tables = ["probe where (n >= 0 and c like '%row%')" if filtered else "probe"]
        if load:
            _pgbench(server, "--initialize", "--quiet").wait()
            tables += ["pgbench_accounts", "pgbench_branches", "pgbench_tellers"]
        database.execute(f"create publication p for table {', '.join(tables)}")
        command = _command(Path(folder), server.conninfo())
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with (Path(folder) / "log").open("w") as log:
            follower = subprocess.Popen([*command, "--follow"], stdout=log, stderr=log)
        try:
            _wait_until_read(database)
            replica = Path(folder, "lake", "sub", "public", "probe", "_delta_log")
            _measure(server, follower, replica, seconds, load)
        finally:
            follower.terminate()
            follower.wait()


def _command(folder: Path, conninfo: str) -> list[str]:
    content = {
        "lake": "./lake",
        "sources": {"shop": {"conninfo": conninfo}},
        "subscriptions": {"sub": {"source": "shop", "publications": ["p"]}},
    }
    path = folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(content))
    return [sys.executable, "-m", "pgsieve.pipelines.command_line.cli", "-c", str(path), "run"]


def _pgbench(server: EmbeddedServer, *arguments: str) -> subprocess.Popen[bytes]:
    program = server.programs_path / "pgbench"
    return subprocess.Popen([program, *arguments, server.conninfo()], stdout=subprocess.DEVNULL)


def _wait_until_read(database: psycopg.Connection[tuple[object, ...]]) -> None:
    """Wait until the follower streams; earlier commits are read as in a run."""
    until = time.monotonic() + _WAIT_SECONDS
    query = "select count(*) from pg_stat_replication where state = 'streaming'"
    while database.execute(query).fetchone() != (1,):
        if time.monotonic() > until:
            raise TimeoutError("no process reads the slot")
        time.sleep(_POLL_SECONDS)


def _measure(
    server: EmbeddedServer, follower: subprocess.Popen[bytes], replica: Path, seconds: int, load: int
) -> None:
    versions, over = list[Version](), threading.Event()
    watcher = threading.Thread(target=_watch, args=(replica, versions, over))
    watcher.start()
    began, used = time.monotonic(), _cpu_seconds(follower.pid)
    bench = (
        _pgbench(server, "--no-vacuum", "--client=4", f"--rate={load}", f"--time={seconds}") if load else None
    )
    commits = _write(server, began, seconds)
    cpu = _cpu_seconds(follower.pid) - used
    if bench:
        bench.wait()
    until = time.monotonic() + _WAIT_SECONDS
    while (not versions or versions[-1][1] <= commits[-1][1]) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    over.set()
    watcher.join()
    latencies = _latencies(commits, versions)
    _print_latencies("the first minute", latencies[: 60 * RATE])
    if later := latencies[60 * RATE :]:
        _print_latencies("after it", later)
    _print_latencies("the last ten seconds", latencies[-10 * RATE :])
    slices = sum(at <= began + seconds for at, _ in versions)
    print(
        f"{slices} versions of the replica in {seconds} s; CPU {cpu / seconds:.2f} s a second,"
        f" {cpu / max(1, slices):.2f} s a version; at most {_peak(follower.pid):,.0f} MB;"
        f" load average {os.getloadavg()[0]:.1f}"
    )


def _write(server: EmbeddedServer, began: float, seconds: int) -> list[Commit]:
    """Commit ten transactions per second."""
    commits = list[Commit]()
    with psycopg.connect(server.conninfo(), autocommit=True) as database:
        for number in range(seconds * RATE):
            time.sleep(max(0.0, began + number / RATE - time.monotonic()))
            database.execute("begin")
            database.execute("insert into probe values (%s, 0, 'a new row')", [ROWS + 1 + number])
            database.execute("update probe set n = n + 1 where id = %s", [1 + number % (ROWS // 2)])
            if number % RATE == 0:
                database.execute("delete from probe where id = %s", [ROWS + 1 + number - RATE])
            row = database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            database.execute("commit")
            commits.append((time.monotonic(), parse_lsn(row[0])))
    return commits


def _watch(replica: Path, versions: list[Version], over: threading.Event) -> None:
    """Record the time and position of each version of a table as soon as it appears."""
    version = len(list(replica.glob("*.json")))
    while not over.is_set():
        try:
            lines = (replica / f"{version:020d}.json").read_text().splitlines()
        except FileNotFoundError:
            time.sleep(_POLL_SECONDS)
            continue
        position = max(
            (json.loads(line)["txn"]["version"] for line in lines if line.startswith('{"txn"')), default=0
        )
        versions.append((time.monotonic(), max(position, versions[-1][1] if versions else 0)))
        version += 1


def _latencies(commits: Sequence[Commit], versions: Sequence[Version]) -> list[float]:
    """The seconds from each commit to the first version with a later position.

    They are infinite without such a version.
    """
    latencies, seen = list[float](), iter(versions)
    at, position = next(seen, (float("inf"), 0))
    for committed, lsn in commits:
        while position <= lsn and at != float("inf"):
            at, position = next(seen, (float("inf"), position))
        latencies.append(max(0.0, at - committed))
    return latencies


def _print_latencies(when: str, latencies: Sequence[float]) -> None:
    if latencies:
        ordered = sorted(latencies)
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        print(
            f"{when}: median {statistics.median(ordered):.2f} s, 95th percentile {p95:.2f} s, worst {ordered[-1]:.2f} s",
            flush=True,
        )


def _cpu_seconds(pid: int) -> float:
    """The CPU seconds of a process, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _peak(pid: int) -> float:
    """The peak memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=int, nargs="?", default=120)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--filtered", action="store_true")
    options = parser.parse_args()
    main(options.seconds, options.load, filtered=options.filtered)
