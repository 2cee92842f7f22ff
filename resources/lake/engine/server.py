"""The program of the warm engine's process: starts a Spark Connect server, records its address, and ends it.

In: - the engine's folder, as the current folder
    - a plan with Spark's settings, as JSON on standard input and not as arguments, which all users of the machine can
      read
Out: a record in the folder as long as Spark serves.

The engine ends when Spark ends, on SIGTERM, and when its folder is gone. An engine that was started for one
process ends with that process. Any other engine ends after it was unused for some time.

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
from pgsieve.resources.lake.engine.installed_code import compute_code_digest
from pgsieve.resources.lake.engine.record import EngineFolder, EngineRecord
from pgsieve.resources.lake.java.jvm import (
    JAVA_OPTIONS,
    find_submit_script,
    make_environment,
    write_parameters,
)
from pgsieve.resources.processes import end_with_parent

#: Settings that only the engine has, and not a Spark session in a command's own process. With them the engine accepts
#: connections only from this machine, and returns memory that it does not use to the system.
SERVER_SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    # Ends sessions that were left open, for example by a run that was killed.
    "spark.connect.session.manager.defaultSessionTimeout": "10m",
    JAVA_OPTIONS: "-XX:+UseG1GC -XX:G1PeriodicGCInterval=60000",
}
_POLL_SECONDS = 0.5
_MAIN_CLASS = "pgsieve.lake.EngineServer"
#: The jar that contains this class, and the source of the class, which `make java` compiles.
JAR, SOURCE = (Path(__file__).resolve().parent / name for name in ("pgsieve-engine.jar", "EngineServer.java"))
_START_TIMEOUT_SECONDS = 120.0
_END_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class EnginePlan:
    """The parameters of an engine.

    - `fingerprint`: the digest of its settings
    - `idle_seconds`: how long the engine may be unused before it ends
    - `owner`: the id of the process for which the engine runs; None if it runs for all processes of the user
    - `settings`: the settings of Spark
    """

    fingerprint: str
    idle_seconds: float
    owner: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)


def serve(folder: EngineFolder, plan: EnginePlan) -> int:
    """Serve until the engine ends. Return the exit status."""
    serving_lock = folder.lock("serving")
    # A process that looks whether an engine is serving locks the file, too, for a moment.
    deadline = time.monotonic() + 1
    while serving_lock is None and time.monotonic() < deadline:
        time.sleep(0.01)
        serving_lock = folder.lock("serving")
    if serving_lock is None:
        return 0  # Another engine is serving already.
    with serving_lock:
        folder.remove_record()
        token, port = secrets.token_urlsafe(32), _find_free_port()
        signal.signal(signal.SIGTERM, _handle_end_signal)
        signal.signal(signal.SIGINT, _handle_end_signal)
        master = plan.settings["spark.master"]
        further_settings = {**SERVER_SETTINGS, "spark.connect.grpc.binding.port": str(port)}
        settings_path = write_parameters(plan.settings, folder.path, further_settings)
        spark = subprocess.Popen(  # noqa: S603 - Spark's own script; this process has one thread
            [
                find_submit_script(master),
                "--properties-file",
                str(settings_path),
                "--class",
                _MAIN_CLASS,
                str(JAR),
            ],
            env={
                **make_environment(master),
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
            folder.write_record(
                EngineRecord(
                    os.getpid(),
                    spark.pid,
                    token,
                    plan.fingerprint,
                    __version__,
                    time.time(),
                    compute_code_digest(),
                )
            )
            _wait_for_end(folder, plan, spark)
        finally:
            folder.remove_record()
            _stop_spark(spark)
    return 0


def _find_free_port() -> int:
    """A port of 127.0.0.1 on which no process listens at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_listening(spark: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until Spark listens. Return False if Spark ends before, or does not listen in time."""
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while spark.poll() is None and time.monotonic() < deadline:
        if connection := connect_to_process(spark.pid, port):
            connection.close()
            return True
        time.sleep(_POLL_SECONDS / 5)
    return False


def _wait_for_end(folder: EngineFolder, plan: EnginePlan, spark: subprocess.Popen[bytes]) -> None:
    """Wait for a reason to end: Spark has ended, the folder is gone, the owner has ended, or the engine was unused.

    In the last two cases, this waits until no process uses the engine. Then it removes the record, so that no other process
    begins to use the engine.
    """
    last_use = time.monotonic()
    while spark.poll() is None and _has_folder():
        use_lock = folder.lock("used")
        if use_lock is None:
            last_use = time.monotonic()
        else:
            with use_lock:
                if _is_due_to_end(plan, time.monotonic() - last_use):
                    folder.remove_record()
                    return
        time.sleep(_POLL_SECONDS)


def _has_folder() -> bool:
    """True if the current folder still exists."""
    try:
        return bool(os.getcwd())  # noqa: PTH109 - Path.cwd would only call this function
    except FileNotFoundError:
        return False


def _is_due_to_end(plan: EnginePlan, unused_seconds: float) -> bool:
    """True if the engine's owner has ended or, without an owner, the engine was unused for too long."""
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


def _handle_end_signal(_signal: int, _frame: object) -> None:
    """Handle a signal: end this process."""
    raise SystemExit(0)


def _stop_spark(spark: subprocess.Popen[bytes]) -> None:
    """End the process of Spark."""
    spark.terminate()
    try:
        spark.wait(_END_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        spark.kill()
        spark.wait()


if __name__ == "__main__":
    sys.exit(serve(EngineFolder(Path()), EnginePlan(**json.load(sys.stdin))))
