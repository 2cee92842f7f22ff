"""`pgsieve demo --ui`: a server with invented traffic, its replicas, and Dagster's web interface.

In: - a folder, or None for a temporary one
    - an address for the web interface
Out: a `LiveDemo`, from which the caller prints which pages to open

A run every few seconds applies the changes, as a schedule would do, and Dagster records each run. The results of the
runs go to a log file, so that the list of pages stays visible. SIGINT and SIGTERM end the demo, with all processes that
it has started. Raises PgsieveError if a process does not start, or ends by itself.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from urllib.error import URLError
from urllib.request import urlopen

import yaml

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import Progress, RunSummary
from pgsieve.pipelines.commands.ui import StopEvent, start_dagster
from pgsieve.pipelines.config.model import Config, load_config
from pgsieve.pipelines.demo.results import LiveDemo
from pgsieve.pipelines.demo.servers import make_demo_folder, start_servers
from pgsieve.pipelines.demo.traffic import make_tables, write_traffic
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo

#: The time between two runs. It is long enough to see a result and click.
RUN_SECONDS = 10.0
#: How long Dagster's processes may take to start. The machine may be busy.
_START_SECONDS = 300.0
_STOP_SECONDS = 20.0

#: A function that opens a log file. It returns a context manager with two values: an object that writes progress into the
#: file, and a function that writes the results of runs there.
RunLogOpener = Callable[[Path], AbstractContextManager[tuple[Progress, Callable[[RunSummary], None]]]]


def run_live_demo(
    folder: Path | None,
    host: str,
    port: int,
    progress: Progress,
    on_ready: Callable[[LiveDemo], None],
    open_run_log: RunLogOpener,
) -> None:
    """Run the demo until a signal ends it. When the web interface answers, `on_ready` is called."""
    demo_folder = make_demo_folder(folder)
    # The demo has Dagster records of its own, so that it does not write into those of the user.
    os.environ.pop("DAGSTER_HOME", None)
    stop_event = StopEvent()
    with ExitStack() as stack:
        stack.enter_context(stop_event.set_by_signals())
        progress.start("start PostgreSQL")
        server = EmbeddedServer(demo_folder / "publisher")
        wait_until_started = stack.enter_context(start_servers(server))
        # These imports take seconds, and the server starts meanwhile.
        from pgsieve.pipelines.commands import engine
        from pgsieve.pipelines.commands.in_process import open_instance
        from pgsieve.pipelines.definitions import register_tables

        wait_until_started()
        with Conninfo(server.conninfo()).connect() as connection:
            make_tables(connection)
        progress.finish("start PostgreSQL")
        config = _write_configuration(demo_folder, server)
        stack.callback(engine.stop, config)
        with open_instance(config) as instance:
            register_tables(config, instance)
        dagster_server = stack.enter_context(
            start_dagster(config, host, port, stop_event=stop_event, log_path=demo_folder / "dagster.log")
        )
        url, log_path = f"http://{host}:{port}", demo_folder / "demo.log"
        progress.start("start Dagster")
        _wait_for_interface(url, dagster_server, stop_event, demo_folder)
        progress.finish("start Dagster")
        if not stop_event.is_set():
            group = f"{url}/locations/pgsieve.pipelines.definitions/asset-groups/sales"
            on_ready(LiveDemo(group, config.path, server.conninfo(), log_path))
        # The first run starts Spark. If it began earlier, Dagster would take longer to start.
        stack.enter_context(write_traffic(server.conninfo()))
        log_progress, show_result = stack.enter_context(open_run_log(log_path))
        arguments = (config, log_progress, show_result, stop_event)
        run_thread = threading.Thread(target=_run_repeatedly, args=arguments, name="runs", daemon=True)
        run_thread.start()
        stack.callback(run_thread.join, _STOP_SECONDS)
        while not stop_event.wait_in_steps(1.0):
            if dagster_server.poll() is not None:
                raise _make_dagster_error(demo_folder)
            if not run_thread.is_alive():
                raise PgsieveError(
                    "the runs of the demo have ended",
                    hint=f"{log_path} shows the reason; start the demo again",
                )
        progress.start("end PostgreSQL and Dagster")
    progress.finish("end PostgreSQL and Dagster")


def _write_configuration(demo_folder: Path, server: EmbeddedServer) -> Config:
    """Write pgsieve.yaml, and load it. One subscription has row filters and column lists, the other has whole tables."""
    from pgsieve.pipelines.demo.demo import SMALL_DATA

    content = {
        "lake": "./lake",
        "spark": {
            "master": "local[2]",
            "engine": "start",
            "conf": {**SMALL_DATA, "spark.driver.memory": "1g"},
        },
        "sources": {"shop": {"conninfo": server.conninfo()}},
        "subscriptions": {
            "sales": {"source": "shop", "publications": ["sales"]},
            "warehouse": {"source": "shop", "publications": ["everything"]},
        },
    }
    path = demo_folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_config(path)


def _run_repeatedly(
    config: Config, progress: Progress, show_result: Callable[[RunSummary], None], stop_event: StopEvent
) -> None:
    """Do a run every few seconds.

    If a run from the web interface is reading the slot, this run fails, and the next one tries again.
    """
    from pgsieve.pipelines.commands.run import run

    while not stop_event.is_set():
        try:
            summary = run(config, config.select([]), progress)
        except PgsieveError as error:
            progress.tell(error.message)
        else:
            if (summary.changed or summary.failures) and not stop_event.is_set():
                show_result(summary)
        stop_event.wait(RUN_SECONDS)


def _wait_for_interface(
    url: str, process: subprocess.Popen[bytes], stop_event: StopEvent, demo_folder: Path
) -> None:
    """Wait until the web interface answers. Raises PgsieveError if Dagster has ended, or takes too long to start."""
    deadline = monotonic() + _START_SECONDS
    while not stop_event.wait_in_steps(0.5):
        if process.poll() is not None or monotonic() > deadline:
            raise _make_dagster_error(demo_folder)
        try:
            with urlopen(f"{url}/server_info", timeout=5) as answer:  # noqa: S310 - our own address
                if answer.status == HTTPStatus.OK:
                    return
        except (URLError, OSError):
            continue


def _make_dagster_error(demo_folder: Path) -> PgsieveError:
    """The error that Dagster has ended or does not start, with the last line of its log."""
    lines = (demo_folder / "dagster.log").read_text(encoding="utf-8", errors="replace").splitlines()
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "nothing in its log")
    return PgsieveError(
        f"Dagster has ended, or does not start: {last_line}",
        hint=f"see {demo_folder / 'dagster.log'}; if the port is taken, choose another --port",
    )
