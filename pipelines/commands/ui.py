"""Runs Dagster's web server and daemon with pgsieve's definitions.

In: the configuration and an address
Out: the processes of `dagster dev` and their children, such as the processes of runs. They are in another session
     (setsid), and end with the block that started them.

Raises PgsieveError if the folder of Dagster's records cannot be made.
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

#: The settings of Dagster in a folder that pgsieve makes. They turn off telemetry, and the offer of a newsletter.
_INSTANCE_SETTINGS = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
#: The settings that earlier versions of pgsieve wrote. A file with exactly this text is replaced.
_OLD_INSTANCE_SETTINGS = "telemetry:\n  enabled: false\n"
#: How long a run in progress may take to end. systemd kills a service after 90 seconds, and Kubernetes after 30
#: seconds.
_STOP_SECONDS = 20.0
#: How long processes may take to disappear after they were killed.
_KILL_SECONDS = 5.0


def find_dagster_home(
    config: Config, environ: Mapping[str, str] = os.environ, *, creates_folder: bool = True
) -> Path:
    """The folder of Dagster's records: the folder that DAGSTER_HOME names, or else `.pgsieve/dagster` beside pgsieve.yaml.

    With `creates_folder`, the folder beside pgsieve.yaml is created with its settings. Nothing is created in the folder
    of DAGSTER_HOME.
    """
    configured_home = environ.get("DAGSTER_HOME")
    if configured_home:
        return Path(configured_home).expanduser().absolute()
    home = config.state_folder / "dagster"
    if not creates_folder:
        return home
    settings_path = home / "dagster.yaml"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not settings_path.exists() or settings_path.read_text(encoding="utf-8") == _OLD_INSTANCE_SETTINGS:
            settings_path.write_text(_INSTANCE_SETTINGS, encoding="utf-8")
    except OSError as error:
        raise PgsieveError(
            f"{home} cannot be made: {error.strerror}",
            hint="set DAGSTER_HOME to a folder that can be written",
        ) from error
    return home


def make_server_command(host: str, port: int) -> list[str]:
    """The command that starts the server.

    With `-d`, Dagster imports the installed pgsieve, even if the current folder has a module of the same name. A
    warning that recommends `dg dev` is ignored, because `dg dev` works only in the folder of a Dagster project.
    """
    return [
        *(sys.executable, "-W", "ignore::FutureWarning", "-m", "dagster", "dev"),
        *("-m", "pgsieve.pipelines.definitions", "-d", str(Path(pgsieve.__file__).parents[1])),
        *("-h", host, "-p", str(port)),
    ]


def make_server_environment(config: Config, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables of the server, with the paths of this configuration file and of Dagster's records."""
    return {
        **environ,
        FILE_VARIABLE: str(config.path),
        "DAGSTER_HOME": str(find_dagster_home(config, environ)),
    }


class StopEvent(threading.Event):
    """An event that is set by SIGINT, SIGTERM, or SIGHUP (the terminal was closed). A second signal sets `kill_event`."""

    def __init__(self) -> None:
        super().__init__()
        self.kill_event = threading.Event()

    @contextmanager
    def set_by_signals(self) -> Iterator[None]:
        """Within the block, the signals set the event."""

        def receive_signal(_number: int, _frame: FrameType | None) -> None:
            (self.kill_event if self.is_set() else self).set()

        handlers_by_number = {
            signal_number: signal.signal(signal_number, receive_signal)
            for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for signal_number, handler in handlers_by_number.items():
                signal.signal(signal_number, handler)

    def wait_in_steps(self, seconds: float) -> bool:
        """Wait until the event is set, but at most for this time; returns true if it is set.

        Python runs handlers of signals only in the main thread, and only when it is awake. So this method waits in
        short steps.
        """
        deadline = time.monotonic() + seconds
        while not self.is_set() and time.monotonic() < deadline:
            self.wait(min(0.5, max(0.0, deadline - time.monotonic())))
        return self.is_set()


@contextmanager
def start_dagster(
    config: Config, host: str, port: int, *options: str, stop_event: StopEvent, log_path: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Within the block, run Dagster's web server and its daemon. At the end of the block, they and their runs are ended.

    A run in progress is interrupted, which loses nothing. Processes that do not end in time are killed. If
    `stop_event.kill_event` is set, they are killed without a delay. The output of the processes goes to the file
    `log_path`, or by default to where this process writes its own.
    """
    with ExitStack() as stack:
        output = stack.enter_context(log_path.open("wb")) if log_path else None
        process = subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
            [*make_server_command(host, port), *options],
            env=make_server_environment(config),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C in a terminal reaches only the processes of the terminal's session. Since Dagster's processes are in
            # another session, only this process gets the signal. It then ends Dagster's processes itself.
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - one call of the system, which needs no lock
        )
    try:
        yield process
    finally:
        _end_session(process, stop_event)


def _end_session(process: subprocess.Popen[bytes], stop_event: StopEvent) -> None:
    """End a process, and all other processes of its session."""
    # Dagster handles SIGTERM as SIGINT. But before Dagster has set its handlers, SIGINT would print a traceback.
    for signal_number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
            while time.monotonic() < deadline and not (
                signal_number == signal.SIGTERM and stop_event.kill_event.is_set()
            ):
                _reap_group(process.pid)
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    process.wait()


def _reap_group(process_group: int) -> None:
    """Collect the exit codes of processes in a group that have ended.

    In a container without an init process, orphans become children of this process. Without the call they would stay in
    the table of processes, and would look alive.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-process_group, os.WNOHANG)[0]:
            pass


def serve(config: Config, host: str, port: int, *options: str) -> int:
    """Run the server until it ends by itself or by a signal; returns the exit code of this process.

    `options` are options for `dagster dev`.
    """
    stop_event = StopEvent()
    with (
        stop_event.set_by_signals(),
        start_dagster(config, host, port, *options, stop_event=stop_event) as process,
    ):
        while process.poll() is None and not stop_event.wait_in_steps(1.0):
            pass
        return 0 if stop_event.is_set() else process.returncode
