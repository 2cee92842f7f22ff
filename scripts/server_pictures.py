"""Shows servers that run with pgsieve, for pictures: the jobs of a Spark cluster, and the alerts of Prometheus.

In: a page of a browser. Out: the page shows the server during the block, while pgsieve follows made-up traffic.
Needs Java, and Debian's `prometheus`.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg
import pyspark
import yaml
from deltalake import DeltaTable
from playwright.sync_api import Page

from pgsieve.pipelines.demo.demo import SMALL_DATA
from pgsieve.pipelines.demo.traffic import make_tables, write_traffic
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_SECONDS = 300.0
_THREADS = MappingProxyType({"master": "threads[2]"})
#: Inserts a value that does not fit the replica's decimal, so that the table is set aside.
UNFIT = "insert into shop.orders (customer, region, amount) values (1, 'EMEA', 'NaN')"


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; raise TimeoutError after `_TIMEOUT_SECONDS`."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.2)  # A run without changes takes less than a second.


def _answer(url: str) -> str:
    """A server's answer; '' if it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own address
            return str(answer.read().decode())
    except OSError:
        return ""


@contextmanager
def _run_process(command: list[str], log: Path, environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a process during the block, in the folder of its log."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=log.parent)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _run_follower(
    folder: Path, *options: str, spark: Mapping[str, Any] = _THREADS
) -> Iterator[psycopg.Connection[Any]]:
    """Run `pgsieve run --follow` for the demo's tables during the block, with traffic; yield a session of their owner.

    `lake` in the folder is the lake.
    """
    with (
        EmbeddedServer(folder / "publisher") as server,
        Conninfo(server.conninfo()).connect() as connection,
    ):
        make_tables(connection)
        config = {
            "lake": "./lake",
            "spark": dict(spark),
            "sources": {"shop": {"conninfo": server.conninfo()}},
            "subscriptions": {"sales": {"source": "shop", "publications": ["sales"]}},
        }
        path = folder / "pgsieve.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "pgsieve", "-c", str(path), "run", "--follow", *options]
        with _run_process(command, folder / "log"), write_traffic(server.conninfo()):
            yield connection


@contextmanager
def spark_jobs(page: Page) -> Iterator[None]:
    """Show the jobs of an application on a standalone cluster, which deploy/spark starts."""
    home, port, web, ui = Path(pyspark.__file__).parent, free_port(), free_port(), free_port()
    environ = {"SPARK_HOME": str(home), "SPARK_PORT": str(port), "SPARK_WEB_PORT": str(web)}
    conf = {
        **SMALL_DATA,
        # Even the smallest tables go to executors.
        "spark.pgsieve.smallBytes": "-1",
        "spark.pyspark.python": sys.executable,
        "spark.ui.enabled": "true",
        "spark.ui.port": str(ui),
    }
    with tempfile.TemporaryDirectory() as parent:
        script = [str(ROOT / "deploy/spark/standalone-cluster.sh"), "127.0.0.1", "2"]
        cluster = _run_process(
            script, Path(parent, "cluster.log"), {**os.environ, **environ, "CORES": "1", "SPARK_MEMORY": "1g"}
        )
        # Jobs show the paths of source files. pgsieve is imported from this folder, so that pictures show no path of
        # this machine.
        Path(parent, "pgsieve").symlink_to(ROOT / "src/pgsieve")
        with cluster:
            wait_until(lambda: bool(_answer(f"http://127.0.0.1:{web}")))
            with _run_follower(Path(parent), spark={"master": f"spark://127.0.0.1:{port}", "conf": conf}):
                wait_until(lambda: "shop.orders up to" in _answer(f"http://127.0.0.1:{ui}/jobs/"))
                page.goto(f"http://127.0.0.1:{ui}/jobs/")
                page.locator("#completed").evaluate("element => element.scrollIntoView({block: 'start'})")
                yield


@contextmanager
def alerts(page: Page) -> Iterator[None]:
    """Show Prometheus with the rules of docs/monitoring, while a table is set aside."""
    program = shutil.which("prometheus")
    if program is None:
        raise FileNotFoundError("no Prometheus is installed: apt-get install prometheus")
    metrics, web = free_port(), free_port()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [
                {"job_name": "pgsieve", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(ROOT / "docs/monitoring/alerts.yaml", folder)
        server = [
            program,
            # The page shows this name.
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=tsdb",
            f"--web.listen-address=127.0.0.1:{web}",
        ]
        follower = _run_follower(folder, "--metrics-port", str(metrics))
        with _run_process(server, folder / "prometheus.log"), follower as shop:
            wait_until(lambda: DeltaTable.is_deltatable(str(folder / "lake/sales/shop/orders")))
            shop.execute(UNFIT)
            wait_until(lambda: "PgsieveTableSetAside" in _answer(f"http://127.0.0.1:{web}/api/v1/alerts"))
            page.set_viewport_size({"width": 1400, "height": 790})
            page.goto(f"http://127.0.0.1:{web}/classic/alerts")
            page.get_by_text("Show annotations").click()
            page.get_by_text("PgsieveTableSetAside").first.click()
            yield
