"""`pgsieve demo --ui`: a server with made-up traffic, its replicas, and Dagster's web interface, until it is stopped.

In: a folder, or none for a temporary one; an address for the web interface. Out: whatever `ready` is given: what to open
and to click; and a log of what each run did, so that this stays in sight. A run every few seconds applies what was written,
as a schedule would; Dagster records it, so that its pages are alive. SIGINT and SIGTERM end it, with everything that it
started. Raises PgsieveError where something does not start.
"""

import os
import signal
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
from pgsieve.pipelines.commands.results import LiveDemo, Progress, RunSummary
from pgsieve.pipelines.commands.ui import Stop, dagster
from pgsieve.pipelines.config.model import Config, load_config
from pgsieve.pipelines.demo.servers import new_folder, starting
from pgsieve.pipelines.demo.traffic import make_tables, traffic
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo

#: The time between two runs: a person can see one end, and click between them.
RUN_SECONDS = 10.0
#: Dagster's processes take up to this long to start, on a busy machine.
_START_SECONDS = 300.0
_STOP_SECONDS = 20.0

#: Makes a log file: the progress of runs goes there, and what each did.
RunLog = Callable[[Path], AbstractContextManager[tuple[Progress, Callable[[RunSummary], None]]]]


def live_demo(
    folder: Path | None,
    host: str,
    port: int,
    progress: Progress,
    ready: Callable[[LiveDemo], None],
    logged: RunLog,
) -> None:
    """Run the demo until a signal ends it; `ready` is called once a person can look, what runs say is `logged`."""
    home = new_folder(folder)
    # The demo has its own records, wherever else this user has Dagster's.
    os.environ.pop("DAGSTER_HOME", None)
    stop = Stop()
    with ExitStack() as opened:
        opened.enter_context(stop.by_signals())
        progress.start("start PostgreSQL")
        server = EmbeddedServer(home / "publisher")
        started = opened.enter_context(starting(server))
        # They take seconds to import, as long as the server takes to start.
        from pgsieve.pipelines.commands import engine
        from pgsieve.pipelines.commands.in_process import instance
        from pgsieve.pipelines.definitions import register_tables

        started()
        with Conninfo(server.conninfo()).connect() as connection:
            make_tables(connection)
        progress.finish("start PostgreSQL")
        config = _configuration(home, server)
        opened.callback(engine.stop, config)
        with instance(config) as records:
            register_tables(config, records)
        dagster_server = opened.enter_context(
            dagster(config, host, port, stop=stop, log=home / "dagster.log")
        )
        url, log = f"http://{host}:{port}", home / "demo.log"
        progress.start("start Dagster")
        _wait_for(url, dagster_server, stop, home)
        progress.finish("start Dagster")
        if not stop.is_set():
            group = f"{url}/locations/pgsieve.pipelines.definitions/asset-groups/sales"
            ready(LiveDemo(group, config.path, server.conninfo(), log))
        # Not before: the first run starts Spark, and all would wait for the processor.
        opened.enter_context(traffic(server.conninfo()))
        log_line, show = opened.enter_context(logged(log))
        runs = threading.Thread(target=_runs, args=(config, log_line, show, stop), name="runs", daemon=True)
        runs.start()
        opened.callback(runs.join, _STOP_SECONDS)
        while not stop.wait_awake(1.0):
            if dagster_server.poll() is not None:
                raise _ended(home)
            if not runs.is_alive():
                raise PgsieveError("the runs of the demo have ended", hint=f"{log} says why; start it again")
        progress.start("end PostgreSQL and Dagster")
    progress.finish("end PostgreSQL and Dagster")


def _configuration(home: Path, server: EmbeddedServer) -> Config:
    """Write pgsieve.yaml: one subscription of filtered rows and chosen columns, one of everything."""
    from pgsieve.pipelines.demo.demo import SMALL_DATA

    written = {
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
    path = home / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    return load_config(path)


def _runs(config: Config, progress: Progress, show: Callable[[RunSummary], None], stop: Stop) -> None:
    """A run every few seconds.

    One that cannot read the slot, because of a run of the web interface, is tried again.
    """
    from pgsieve.pipelines.commands.run import run

    # Ctrl-C in a terminal reaches all processes of this group. Those that Dagster starts for a step (tail,
    # and watch_orphans, which would show a traceback) inherit the mask of this thread, and end with their
    # step.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    while not stop.is_set():
        try:
            summary = run(config, config.selected([]), progress)
        except PgsieveError as error:
            progress.tell(error.message)
        else:
            if (summary.changed or summary.failures) and not stop.is_set():
                show(summary)
        stop.wait(RUN_SECONDS)


def _wait_for(url: str, process: subprocess.Popen[bytes], stop: Stop, home: Path) -> None:
    until = monotonic() + _START_SECONDS
    while not stop.wait_awake(0.5):
        if process.poll() is not None or monotonic() > until:
            raise _ended(home)
        try:
            with urlopen(f"{url}/server_info", timeout=5) as answer:  # noqa: S310 - our own address
                if answer.status == HTTPStatus.OK:
                    return
        except (URLError, OSError):
            continue


def _ended(home: Path) -> PgsieveError:
    lines = (home / "dagster.log").read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing in its log")
    return PgsieveError(
        f"Dagster has ended, or does not start: {last}",
        hint=f"see {home / 'dagster.log'}; if the port is taken, choose another --port",
    )
