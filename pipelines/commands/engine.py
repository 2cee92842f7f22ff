"""`pgsieve engine`: starts, stops and describes the warm engine.

The warm engine is a Spark server that keeps running after a run, so that later runs do not wait for the start of Spark.

In: the configuration
Out: an `EngineReport`. Raises PgsieveError if the configuration has no engine, or if the engine does not start.
"""

import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import EngineReport, Progress
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.engine import control
from pgsieve.resources.lake.engine.record import EngineFolder
from pgsieve.resources.lake.session import SparkEngine


def start(config: Config, progress: Progress) -> EngineReport:
    """Start the engine, unless it is already running, and wait until runs can use it."""
    engine = _find_engine(config)
    task = "start the engine"
    engine.fetch_jars()
    progress.start(task)
    control.start(engine.folder, engine.settings, timedelta(seconds=engine.engine_idle))
    progress.finish(task)
    return status(config)


def status(config: Config) -> EngineReport:
    """Describe the engine: whether it serves, its address, uptime and memory.

    The memory includes that of Spark's Python workers. `current` says whether it has the settings of the configuration, and `used` whether a process uses it.
    """
    engine = _find_engine(config)
    record = engine.folder.read_record()
    if record is None:
        return EngineReport(False)
    return EngineReport(
        serving=True,
        address=engine.folder.address,
        pid=record.pid,
        version=record.version,
        current=record.fingerprint == control.compute_fingerprint(engine.settings),
        used=control.is_used(engine.folder),
        seconds=int(time.time() - record.since),
        resident_bytes=_measure_resident_bytes({record.pid, record.spark_pid}),
    )


def stop(config: Config) -> bool:
    """End the engine; returns true if one was running.

    This also works if the configuration says `engine: off` by now.
    """
    return control.stop(EngineFolder(config.state_folder / "engine"))


def start_with_this_process(config: Config) -> None:
    """Start an engine that ends when this process ends.

    Errors are ignored, because runs that find no engine start a Spark of their own.
    """
    engine = build_project(config).lake.engine
    if engine.can_use_engine:
        with suppress(PgsieveError, OSError):
            engine.launch(owner_pid=os.getpid())


def _find_engine(config: Config) -> SparkEngine:
    """The engine of a configuration. Raises PgsieveError if the configuration cannot have a warm engine."""
    engine = build_project(config).lake.engine
    if not engine.can_use_engine:
        is_local = engine.spark_master.startswith("local")
        problem = "`spark.engine` is off" if is_local else f"`spark.master` is {engine.master}"
        if sys.platform != "linux":
            problem = "it needs Linux"
        raise PgsieveError(
            f"{config.path.name} has no warm engine: {problem}",
            hint="the engine is for a local master: leave `spark.master` out, and set `spark.engine` to `use` or `start`",
        )
    return engine


def _measure_resident_bytes(pids: Collection[int]) -> int:
    """The resident memory in bytes of some processes, and of the Python workers of Spark that descend from them.

    Memory that n of these processes share counts once in all (`Pss` in the Linux manual page proc_pid_smaps(5)). A
    process about which the system does not tell counts nothing.
    """
    resident_bytes, seen, waiting = 0, set[int](), list(pids)
    while waiting:
        if (pid := waiting.pop()) in seen:
            continue
        seen.add(pid)
        with suppress(OSError, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            resident_bytes += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
            for thread in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (thread / "children").read_text(encoding="ascii").split())
    return resident_bytes
