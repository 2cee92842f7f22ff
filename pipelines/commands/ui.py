"""Runs Dagster's web server and daemon with pgsieve's definitions.

In: the configuration, an address. Out: `dagster dev` and its child processes, including runs, in a session
(setsid) that ends with the block that started it. Raises PgsieveError if Dagster's folder cannot be made.
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

#: Dagster's settings in a folder that pgsieve makes: no telemetry, and no offer of a newsletter.
_INSTANCE_SETTINGS = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
#: The settings that earlier versions of pgsieve wrote.
_OLD_INSTANCE_SETTINGS = "telemetry:\n  enabled: false\n"
#: How long a run in progress may take to end. systemd kills a service after 90 s, Kubernetes after 30 s.
_STOP_SECONDS = 20.0
#: How long killed processes may take to disappear.
_KILL_SECONDS = 5.0


def dagster_home(config: Config, environ: Mapping[str, str] = os.environ, *, make: bool = True) -> Path:
    """The folder of Dagster's records: DAGSTER_HOME, else `.pgsieve/dagster` beside the configuration file.

    With `make`, the folder beside the configuration file is made, with settings; that of DAGSTER_HOME stays as
    it is.
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
        if not settings.exists() or settings.read_text(encoding="utf-8") == _OLD_INSTANCE_SETTINGS:
            settings.write_text(_INSTANCE_SETTINGS, encoding="utf-8")
    except OSError as error:
        raise PgsieveError(
            f"{home} cannot be made: {error.strerror}",
            hint="set DAGSTER_HOME to a folder that can be written",
        ) from error
    return home


def server_command(host: str, port: int) -> list[str]:
    """The command that starts the server.

    `-d` makes Dagster import the installed pgsieve, even if the current folder has a module of this name. The
    ignored warning recommends `dg dev`, which works only inside a project folder.
    """
    return [
        *(sys.executable, "-W", "ignore::FutureWarning", "-m", "dagster", "dev"),
        *("-m", "pgsieve.pipelines.definitions", "-d", str(Path(pgsieve.__file__).parents[1])),
        *("-h", host, "-p", str(port)),
    ]


def environment(config: Config, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The server's environment, with the paths of this configuration file and of Dagster's records."""
    return {**environ, FILE_VARIABLE: str(config.path), "DAGSTER_HOME": str(dagster_home(config, environ))}


class Stop(threading.Event):
    """An event that SIGINT, SIGTERM or SIGHUP (a closed terminal) sets; a second signal sets `at_once`."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = threading.Event()

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Handle the signals within the block."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            (self.at_once if self.is_set() else self).set()

        handlers = {
            number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def wait_awake(self, seconds: float) -> bool:
        """Wait until the event is set, or for these seconds; returns whether it is set.

        It waits in short steps, as Python runs handlers of signals only in an awake main thread.
        """
        until = time.monotonic() + seconds
        while not self.is_set() and time.monotonic() < until:
            self.wait(min(0.5, max(0.0, until - time.monotonic())))
        return self.is_set()


@contextmanager
def start_dagster(
    config: Config, host: str, port: int, *options: str, stop: Stop, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Dagster's web server, its daemon, and their runs; all of them end with the block.

    A run in progress is interrupted, which loses nothing. Processes that do not end in time are killed; after
    `stop.at_once`, immediately. Their output goes to the file `log`, by default to that of this process.
    """
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        process = subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
            [*server_command(host, port), *options],
            env=environment(config),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C in a terminal then reaches only this process, which ends the others in order.
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - one call of the system, which needs no lock
        )
    try:
        yield process
    finally:
        _end_session(process, stop)


def _end_session(process: subprocess.Popen[bytes], stop: Stop) -> None:
    """End a process, and all others of its session."""
    for number, seconds in ((signal.SIGINT, _STOP_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        until = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < until and not (number == signal.SIGINT and stop.at_once.is_set()):
                _reap(process.pid)
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    process.wait()


def _reap(group: int) -> None:
    """Collect ended processes of a group: in a container without init, they are this process's children."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def serve(config: Config, host: str, port: int, *options: str) -> int:
    """Run the server until it ends or a signal ends it; returns the exit code.

    `options` are those of `dagster dev`.
    """
    stop = Stop()
    with stop.by_signals(), start_dagster(config, host, port, *options, stop=stop) as process:
        while process.poll() is None and not stop.wait_awake(1.0):
            pass
        return 0 if stop.is_set() else process.returncode
