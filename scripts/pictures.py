"""Makes the pictures of docs/images from running programs: `make pictures`.

Needs a Chromium (Debian's package). The script starts `pgsieve demo --ui` in a temporary folder, and takes
pictures with a headless Chromium: the lineage, a replica with its plots, a failed check and a failed run. It also
takes pictures of other servers (`scripts/server_pictures.py`), and records `pgsieve demo` in a terminal
(`scripts/recording.py`). With arguments, it makes only the pictures of these names.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import yaml
from deltalake import DeltaTable
from playwright.sync_api import Page, expect, sync_playwright

from pgsieve.pipelines.demo.live_demo import RUN_SECONDS
from scripts.recording import record
from scripts.server_pictures import UNFIT, alerts, free_port, spark_jobs, wait_until

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
LOCATION = "pgsieve.pipelines.definitions"
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: How long a page, the demo, or one of its runs may take.
_TIMEOUT_SECONDS = 300.0
#: The number of the demo's runs before the first picture, as plots need several.
_MIN_RUNS = 8
_WEBP_QUALITY = 82


@dataclass(frozen=True)
class Demo:
    """A running demo: its folder, and the address of its web interface."""

    folder: Path
    address: str

    def query(self, query: str) -> Any:
        """The data that Dagster's GraphQL server returns for a query."""
        request = urllib.request.Request(  # noqa: S310 - our own address
            f"{self.address}/graphql",
            json.dumps({"query": query}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def runs(self, status: str) -> list[str]:
        """The identifiers of the runs with a status, newest first."""
        answer = self.query(
            f"{{ runsOrError(filter: {{statuses: [{status}]}}) {{ ... on Runs {{ results {{ id }} }} }} }}"
        )
        return [run["id"] for run in answer["runsOrError"]["results"]]

    def is_running(self) -> bool:
        """Whether a run is in progress."""
        return bool(self.runs("STARTED"))

    def publisher(self) -> psycopg.Connection[Any]:
        """A session of the publisher's owner."""
        config = yaml.safe_load((self.folder / "pgsieve.yaml").read_text())
        return psycopg.connect(config["sources"]["shop"]["conninfo"])

    def materializations(self, key: str) -> int:
        """The number of an asset's materialisations, at most a hundred."""
        path = json.dumps(key.split("/"))
        answer = self.query(
            f"{{ assetOrError(assetKey: {{path: {path}}})"
            " { ... on Asset { assetMaterializations(limit: 100) { timestamp } } } }"
        )
        return len(answer["assetOrError"].get("assetMaterializations", []))


@contextmanager
def live_demo() -> Iterator[Demo]:
    """Run `pgsieve demo --ui` during the block, which begins once its web interface is ready."""
    port = free_port()
    with tempfile.TemporaryDirectory() as parent:
        folder, log = Path(parent, "demo"), Path(parent, "log")
        command = [
            sys.executable,
            "-m",
            "pgsieve",
            "demo",
            "--ui",
            "--keep",
            str(folder),
            "--port",
            str(port),
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

        def is_ready() -> bool:
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            return "Ctrl-C" in log.read_text()

        try:
            wait_until(is_ready)
            yield Demo(folder, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(120)


@contextmanager
def browser() -> Iterator[Page]:
    """Open a page in a headless Chromium, in a high resolution, without Dagster's navigation."""
    program = next((path for name in _CHROMIUM if (path := shutil.which(name))), None)
    if program is None:
        raise FileNotFoundError("no Chromium is installed: apt-get install chromium")
    arguments = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=arguments)
        context = running.new_context(viewport={"width": 1400, "height": 800}, device_scale_factor=1.5)
        context.add_init_script("localStorage.setItem('dagster-nav-collapsed', 'true')")
        page = context.new_page()
        page.set_default_timeout(_TIMEOUT_SECONDS * 1000)
        expect.set_options(timeout=_TIMEOUT_SECONDS * 1000)
        yield page
        context.close()
        running.close()


def save(page: Page, name: str, height: float | None = None) -> None:
    """Write a picture of the page, or of its upper part."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(2000)  # The page may still draw lines and load figures.
    session = page.context.new_cdp_session(page)
    options: dict[str, Any] = {"format": "webp", "quality": _WEBP_QUALITY}
    if height is not None and page.viewport_size is not None:
        options["clip"] = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height, "scale": 1}
    shot = session.send("Page.captureScreenshot", options)
    (IMAGES / f"{name}.webp").write_bytes(b64decode(shot["data"]))


@contextmanager
def quiet(demo: Demo) -> Iterator[None]:
    """Block the demo's writer until the end of the block, and wait until all changes are applied."""
    with demo.publisher() as session:
        session.execute("lock table shop.customers, shop.orders, shop.events in exclusive mode")
        time.sleep(2 * RUN_SECONDS)
        wait_until(lambda: not demo.is_running())
        yield


def execute_all(page: Page) -> None:
    """Execute all checks of the page's asset, and wait for their results."""
    page.get_by_role("button", name="Execute all").first.click()
    expect(page.get_by_text("In Progress").first).to_be_visible()
    for state in ("Not Evaluated", "In Progress"):
        expect(page.get_by_text(state)).to_have_count(0)


def run_everything(page: Page, demo: Demo) -> None:
    """Run maintenance and all checks once, so that each box of the graph has a result."""
    config = demo.folder / "pgsieve.yaml"
    subprocess.run([sys.executable, "-m", "pgsieve", "maintain", "-c", str(config)], check=True)
    for table in ("orders", "customers"):
        page.goto(f"{demo.address}/assets/sales/shop/{table}?view=checks")
        execute_all(page)


def lineage(page: Page, demo: Demo) -> None:
    """Picture the graph of a subscription: source tables, steps, replicas, cut."""
    page.set_viewport_size({"width": 1400, "height": 720})
    with quiet(demo):
        run_everything(page, demo)
        wait_until(lambda: not demo.is_running())
        page.goto(
            f"{demo.address}/assets/sales/shop/orders?view=lineage&lineageScope=neighbors&lineageDepth=5"
        )
        page.get_by_text("table_changes", exact=True).first.wait_for()
        # The picture is taken between two runs: during a run some assets are "unsynced".
        wait_until(demo.is_running)
        for state in ("Materializing", "Unsynced"):
            expect(page.get_by_text(state)).to_have_count(0)
        save(page, "lineage")


def replica(page: Page, demo: Demo) -> None:
    """Picture a replica's page, with plots of each run's changes."""
    page.set_viewport_size({"width": 1400, "height": 1050})
    with quiet(demo):
        page.goto(f"{demo.address}/assets/sales/shop/orders")
        page.get_by_text("Plots", exact=True).click()
        page.get_by_text("lag in seconds").first.wait_for()
        page.get_by_text("Metadata", exact=True).first.evaluate("element => element.scrollIntoView()")
        save(page, "replica")


def failed_check(page: Page, demo: Demo) -> None:
    """Picture a failed check, after another writer has deleted a row of the replica."""
    page.set_viewport_size({"width": 1400, "height": 670})
    orders = DeltaTable(str(demo.folder / "lake/sales/shop/orders"))
    # The demo's writer deletes the oldest rows, so the newest one is used.
    last = max(orders.to_pyarrow_table(columns=["id"])["id"].to_pylist())
    orders.delete(f"id = {last}")
    page.goto(f"{demo.address}/assets/sales/shop/orders?view=checks&checkDetail=subscriber_consistency")
    with quiet(demo):
        execute_all(page)
        page.get_by_text("Failed").first.wait_for()
        save(page, "failed-check")


def failed_run(page: Page, demo: Demo) -> None:
    """Picture a failed run, which sets a table aside and shows the remedy."""
    page.set_viewport_size({"width": 1400, "height": 760})
    with demo.publisher() as session:
        session.execute(UNFIT)
    wait_until(lambda: bool(demo.runs("FAILURE")))
    page.goto(f"{demo.address}/runs/{demo.runs('FAILURE')[0]}")
    failure = page.get_by_text("STEP_FAILURE", exact=True).first
    failure.wait_for()
    failure.evaluate("element => element.scrollIntoView({block: 'start'})")
    # The picture ends before the traceback, which is of Dagster's own code.
    trace = page.get_by_text("Stack Trace:").first.bounding_box()
    save(page, "failed-run", trace and trace["y"] - 8)


#: The functions that picture the demo, by name; the last ones damage it.
PICTURES: dict[str, Callable[[Page, Demo], None]] = {
    "lineage": lineage,
    "replica": replica,
    "failed-check": failed_check,
    "failed-run": failed_run,
}
#: The functions that show other servers' pages, by name.
SERVER_PAGES: dict[str, Callable[[Page], AbstractContextManager[None]]] = {
    "spark-jobs": spark_jobs,
    "alerts": alerts,
}


def main() -> None:
    """Make the pictures of these names, or all; the first argument is the program termtosvg."""
    termtosvg, *names = sys.argv[1:]
    names = names or [*PICTURES, *SERVER_PAGES, "demo"]
    IMAGES.mkdir(parents=True, exist_ok=True)
    if "demo" in names:
        record(IMAGES / "demo", termtosvg)
    for name, show in SERVER_PAGES.items():
        if name in names:
            with browser() as page, show(page):
                save(page, name)
    chosen = [draw for name, draw in PICTURES.items() if name in names]
    if not chosen:
        return
    with live_demo() as demo, browser() as page:
        wait_until(lambda: demo.materializations("sales/shop/orders") >= _MIN_RUNS)
        for draw in chosen:
            draw(page, demo)


if __name__ == "__main__":
    main()
