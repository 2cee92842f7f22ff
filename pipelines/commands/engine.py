"""`pgsieve engine`: starts, stops and describes the warm engine.

The warm engine is a Spark server that keeps running after a run, so that later runs do not wait for the start of Spark.

In: the configuration
Out: an `EngineReport`. Raises PgsieveError if the configuration has no engine, or if the engine does not start.
"""

import os
import sys
import time
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

    `current` says whether it has the settings of the configuration, and `used` whether a process uses it.
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
        resident_bytes=sum(map(_measure_resident_bytes, (record.pid, record.spark_pid))),
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


def _measure_resident_bytes(pid: int) -> int:
    """The resident memory of a process in bytes; 0 if the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
