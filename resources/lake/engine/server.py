"""The process of the engine: starts Spark Connect, records its address, and ends it.

In: the current folder, and a plan with Spark's settings: JSON on standard input, since all users can read
arguments. Out: a record in the folder while Spark serves. The engine ends when Spark ends, on SIGTERM, and when its
folder is gone. An engine that was started for another process ends with that process. Any other engine ends after
an idle time.

    python -P -m pgsieve.resources.lake.engine.server < plan.json
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pgsieve import __version__
from pgsieve.resources.lake.engine.entrance import connect_to_process, open_entrance
from pgsieve.resources.lake.engine.record import EngineFolder, EngineRecord
from pgsieve.resources.lake.java.jvm import JAVA_OPTIONS, environment, submit_command, write_parameters
from pgsieve.resources.processes import end_with_parent

#: Settings of the engine, rather than of a session: it accepts connections only from this machine, and returns
#: unused memory.
SERVER_SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    # Ends sessions that were left open, as by a killed run.
    "spark.connect.session.manager.defaultSessionTimeout": "10m",
    JAVA_OPTIONS: "-XX:+UseG1GC -XX:G1PeriodicGCInterval=60000",
}
_POLL_SECONDS = 0.5
_MAIN = "pgsieve.lake.EngineServer"
#: The jar with this class, and its source, which `make java` compiles.
JAR, SOURCE = (Path(__file__).resolve().parent / name for name in ("pgsieve-engine.jar", "EngineServer.java"))
_START_TIMEOUT_SECONDS = 120.0
_END_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """The parameters of an engine: its fingerprint, its idle time, and the process for which it runs.

    `settings` are Spark's settings.
    """

    fingerprint: str
    idle_seconds: float
    owner: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)


def serve(folder: EngineFolder, plan: Plan) -> int:
    """Serve until the engine ends; return the exit status."""
    serving = folder.lock("serving")
    if serving is None:
        return 0  # Another engine serves already.
    with serving:
        folder.forget()
        token, port = secrets.token_urlsafe(32), _free_port()
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGINT, _end)
        master = plan.settings["spark.master"]
        further_settings = {**SERVER_SETTINGS, "spark.connect.grpc.binding.port": str(port)}
        settings = write_parameters(plan.settings, folder.path, further_settings)
        spark = subprocess.Popen(  # noqa: S603 - Spark's own script; this process has one thread
            [submit_command(master), "--properties-file", str(settings), "--class", _MAIN, str(JAR)],
            env={
                **environment(master),
                "SPARK_CONNECT_AUTHENTICATE_TOKEN": token,
                "PYSPARK_PYTHON": sys.executable,
            },
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        try:
            if not _wait_until_listening(spark, port):
                return 1
            open_entrance(spark.pid, port)
            folder.write(
                EngineRecord(os.getpid(), spark.pid, token, plan.fingerprint, __version__, time.time())
            )
            _wait_for_end(folder, plan, spark)
        finally:
            folder.forget()
            _stop(spark)
    return 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_listening(spark: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until Spark listens; return False if it ends before, or does not listen in time."""
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while spark.poll() is None and time.monotonic() < deadline:
        if connection := connect_to_process(spark.pid, port):
            connection.close()
            return True
        time.sleep(_POLL_SECONDS / 5)
    return False


def _wait_for_end(folder: EngineFolder, plan: Plan, spark: subprocess.Popen[bytes]) -> None:
    """Wait for a reason to end; after that, no process can begin to use the engine."""
    last_use = time.monotonic()
    while spark.poll() is None and _has_folder():
        unused = folder.lock("used")
        if unused is None:
            last_use = time.monotonic()
        else:
            with unused:
                if _is_over(plan, time.monotonic() - last_use):
                    folder.forget()
                    return
        time.sleep(_POLL_SECONDS)


def _has_folder() -> bool:
    """Whether the current folder still exists."""
    try:
        return bool(os.getcwd())  # noqa: PTH109 - Path.cwd does the same if the folder is gone
    except FileNotFoundError:
        return False


def _is_over(plan: Plan, unused_seconds: float) -> bool:
    if plan.owner is not None:
        return not _is_alive(plan.owner)
    return unused_seconds > plan.idle_seconds


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _end(_signal: int, _frame: object) -> None:
    raise SystemExit(0)


def _stop(spark: subprocess.Popen[bytes]) -> None:
    spark.terminate()
    try:
        spark.wait(_END_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        spark.kill()
        spark.wait()


if __name__ == "__main__":
    sys.exit(serve(EngineFolder(Path()), Plan(**json.load(sys.stdin))))
