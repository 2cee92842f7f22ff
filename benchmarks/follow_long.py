"""Measures whether followed slices become slower after many: `python benchmarks/follow_long.py 1000 100`.

In: the number of slices, and the number after which the follower maintains its tables. Out, for each tenth of
the slices: the time of a slice, from the commit to the replica, and the number and bytes of the lake's files.
Time is compressed: a slice ends at once, the next change follows when the slice is applied, and files that
are usually retained for hours (old versions, logs, applied changes) are deleted at once. So `86400 500` is a
day of one slice per second. All tenths should have the same figures.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psycopg
import yaml

from pgsieve.assets.steps.operations import maintenance
from pgsieve.assets.steps.operations.maintenance import Retention
from pgsieve.assets.steps.slot_consumption import follow as consumption
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.commands.run import run
from pgsieve.pipelines.config.model import Config, load_config
from pgsieve.pipelines.following import follow as following
from pgsieve.pipelines.following import follower
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer

TENTHS = 10


class _NoProgress:
    def start(self, task: str) -> None: ...

    def tell(self, line: str) -> None: ...

    def finish(self, task: str) -> None: ...


def main(slices: int, maintain_after: int) -> None:
    """Follow this many slices."""
    _compress(maintain_after)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(Path(folder) / "data", settings={"fsync": "off"}) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as database,
    ):
        database.execute("create table t (id int primary key, n int)")
        database.execute("create publication p for table t")
        config = _config(Path(folder), server.conninfo())
        run(config, config.select([]), _NoProgress())
        seconds = _follow(config, database, Path(folder) / "lake", slices)
    first, last = (statistics.median(part) for part in (seconds[0], seconds[-1]))
    print(
        f"the last tenth took {last / first:.2f} times as long as the first, load average {os.getloadavg()[0]:.1f}"
    )


def _compress(maintain_after: int) -> None:
    """Set all waits and retentions to zero."""
    consumption.SLICE_SECONDS = 0.0
    follower.MAINTAIN_SLICES = maintain_after
    maintenance.RECORD_RETENTION = timedelta()

    def project_without_retention(config: Config) -> Project:
        return replace(build_project(config), retention=Retention(timedelta(), timedelta(), timedelta()))

    vars(following)["build_project"] = project_without_retention


def _config(folder: Path, conninfo: str) -> Config:
    content = {
        "lake": "./lake",
        "sources": {"shop": {"conninfo": conninfo}},
        "subscriptions": {"sub": {"source": "shop", "publications": ["p"]}},
    }
    path = folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_config(path)


def _follow(
    config: Config, database: psycopg.Connection[tuple[object, ...]], lake: Path, slices: int
) -> list[list[float]]:
    """The seconds of each slice, by tenths; prints each tenth at its end."""
    tenths: list[list[float]] = [[]]
    began = [0.0]

    def change() -> None:
        began[0] = time.perf_counter()
        number = sum(map(len, tenths))
        database.execute(
            "insert into t values (%s, 0) on conflict (id) do update set n = t.n + 1", [number % 1000]
        )

    def print_tenth(_: RunSummary) -> None:
        tenths[-1].append(time.perf_counter() - began[0])
        if len(tenths[-1]) == slices // TENTHS:
            _print_tenths(tenths, lake)
            if len(tenths) == TENTHS:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            tenths.append([])
        change()

    change()
    following.follow(config, config.select([]), _NoProgress(), print_tenth)
    return tenths


def _print_tenths(tenths: Sequence[Sequence[float]], lake: Path) -> None:
    files = [file for file in lake.rglob("*") if file.is_file()]
    print(
        f"{sum(map(len, tenths)):6d} slices: median {statistics.median(tenths[-1]):5.2f} s,"
        f" worst {max(tenths[-1]):5.2f} s; {len(files):5d} files, {sum(f.stat().st_size for f in files) / 1024:7.0f} KiB",
        flush=True,
    )


if __name__ == "__main__":
    main(*([int(number) for number in sys.argv[1:]] or [1000, 100]))
