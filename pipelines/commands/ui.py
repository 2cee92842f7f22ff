"""Dagster's web server and daemon on pgsieve's definitions, as one command.

In: the configuration, an address. `dagster dev` and all of its child processes, including runs, are in a
session of their own, and end with the block that started them. Raises PgsieveError when Dagster's folder
cannot be made.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import pgsieve
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import FILE_VARIABLE, Config
from pgsieve.resources.processes import end_with_parent

#: Dagster's own settings for a folder that pgsieve makes: no telemetry, and no offer of a newsletter.
_INSTANCE_SETTINGS = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
#: The same settings as earlier versions of pgsieve wrote them.
_FORMER_SETTINGS = "telemetry:\n  enabled: false\n"
#: How long a run in progress may take to end; less than service managers wait before they kill (systemd: 90
#: s, Kubernetes: 30 s).
_STOP_SECONDS = 20.0
#: How long the system may take to remove killed processes.
_KILLED_SECONDS = 5.0


def dagster_home(config: Config, environ: Mapping[str, str] = os.environ, *, make: bool = True) -> Path:
    """Folder of Dagster's records: DAGSTER_HOME, else `.pgsieve/dagster` beside the configuration file.

    pgsieve's own folder is made with its settings, unless `make` is false; one that DAGSTER_HOME names is
    left as it is.
    """
    configured = environ.get("DAGSTER_HOME")
    if configured:
        return Path(configured).expanduser().absolute()
    home = config.state_folder / "dagster"
    if not make:
        return home
    settings = home / "dagster.yaml"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not settings.exists() or settings.read_text(encoding="utf-8") == _FORMER_SETTINGS:
            settings.write_text(_INSTANCE_SETTINGS, encoding="utf-8")
    except OSError as error:
        raise PgsieveError(
            f"{home} cannot be made: {error.strerror}",
            hint="set DAGSTER_HOME to a folder that can be written",
        ) from error
    return home


def command(host: str, port: int) -> list[str]:
    """Arguments of the server.

    `-d` makes Dagster import pgsieve from where it is installed, not from what the current folder happens to
    have under the same name. The warning that is switched off recommends `dg dev`, which works inside a
    project folder only.
    """
    return [
        *(sys.executable, "-W", "ignore::FutureWarning", "-m", "dagster", "dev"),
        *("-m", "pgsieve.pipelines.definitions", "-d", str(Path(pgsieve.__file__).parents[1])),
        *("-h", host, "-p", str(port)),
    ]


def environment(config: Config, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of the server: the definitions read the same file, and Dagster has its records in one place."""
    return {**environ, FILE_VARIABLE: str(config.path), "DAGSTER_HOME": str(dagster_home(config, environ))}


class Stop(threading.Event):
    """Set by SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends; a further signal sets `at_once`."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = threading.Event()

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Handle the signals within the block."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            (self.at_once if self.is_set() else self).set()

        before = {
            number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait_awake(self, seconds: float) -> bool:
        """Wait in the main thread, which has to be awake for a signal's handler; returns whether it was set."""
        until = time.monotonic() + seconds
        while not self.is_set() and time.monotonic() < until:
            self.wait(min(0.5, max(0.0, until - time.monotonic())))
        return self.is_set()


@contextmanager
def dagster(
    config: Config, host: str, port: int, *options: str, stop: Stop, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Dagster's web server, its daemon, and their runs, all of which end with the block.

    A run in progress is interrupted; it loses nothing. Processes that have not ended after some time, or with
    `at_once` immediately, are killed. Their output goes to `log`, or to this process's.
    """
    with ExitStack() as opened:
        output = opened.enter_context(log.open("wb")) if log else None
        process = subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
            [*command(host, port), *options],
            env=environment(config),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C in a terminal reaches only this process, which ends them in order.
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - one call of the system, which needs no lock
        )
    try:
        yield process
    finally:
        _end_session(process, stop)


def _end_session(process: subprocess.Popen[bytes], stop: Stop) -> None:
    """End a process, and all others of its session."""
    for number, seconds in ((signal.SIGINT, _STOP_SECONDS), (signal.SIGKILL, _KILLED_SECONDS)):
        until = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < until and not (number == signal.SIGINT and stop.at_once.is_set()):
                _reap(process.pid)
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    process.wait()


def _reap(group: int) -> None:
    """Collect ended processes of a group: in a container without an init process all of them are this one's children."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def serve(config: Config, host: str, port: int, *options: str) -> int:
    """Run the server, with more options of its own, until it ends or SIGINT, SIGTERM or SIGHUP ends it.

    Returns its exit code.
    """
    stop = Stop()
    with stop.by_signals(), dagster(config, host, port, *options, stop=stop) as process:
        while process.poll() is None and not stop.wait_awake(1.0):
            pass
        return 0 if stop.is_set() else process.returncode
