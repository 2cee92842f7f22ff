"""Actions of a person in the web interface, in a real browser. The tests continue each other, in order. They need no JVM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING

import psutil
import pytest
from dagster import DagsterInstance, DagsterRunStatus
from deltalake import DeltaTable
from playwright.sync_api import Page, expect

from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from tests.fixtures import commands
from tests.fixtures.browser import PATIENCE_SECONDS, Web, page, served, web

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pgsieve.resources.postgres.embedded import EmbeddedServer

__all__ = ["page", "web"]

pytestmark = [pytest.mark.slow, pytest.mark.drawn("together"), pytest.mark.timeout(900)]


def _until(holds: Callable[[], object], web: Web) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, web.log.read_text()[-3000:]
        time.sleep(0.5)


def _rows(web: Web, table: str) -> int:
    path = str(web.replica(table))
    return DeltaTable(path).to_pyarrow_table().num_rows if DeltaTable.is_deltatable(path) else -1


def _run(web: Web) -> None:
    """Run pgsieve: for tables that were never copied, Dagster would ask for a confirmation."""
    environ = {**os.environ, "DAGSTER_HOME": ""}  # the records of `pgsieve ui`
    done = commands.run("run", "-c", str(web.path), environment=environ)
    assert done.returncode == 0, done.stderr


def test_the_graph_shows_the_steps_and_the_replicas(web: Web, page: Page) -> None:
    for group, assets in {
        "sales": ("customers", "orders", "cut"),
        "shop_replication": ("change_log", "initial_sync", "table_changes", "maintenance"),
    }.items():
        page.goto(f"{web.address}/locations/pgsieve.pipelines.definitions/asset-groups/{group}")
        for asset in assets:
            expect(page.get_by_text(asset, exact=True).first).to_be_visible()
    page.wait_for_load_state("networkidle")
    expect(page.get_by_text("Join the Dagster community")).to_have_count(0)  # Dagster's newsletter


def test_chosen_tables_are_copied(web: Web, page: Page) -> None:
    page.goto(f"{web.address}/assets/sales/initial_sync?view=partitions")
    page.get_by_role("button", name="Materialize").first.click()
    page.get_by_text("Select a partition or create one").click()
    page.locator(':text("public.orders"):visible').last.click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Launch").last.click()
    _until(lambda: _rows(web, "orders") == 9, web)
    assert _rows(web, "customers") == -1
    page.goto(f"{web.address}/assets/sales/initial_sync?view=partitions")
    expect(page.get_by_text("Materialized (1)")).to_be_visible()


def test_a_job_applies_changes(web: Web, page: Page) -> None:
    # Dagster asks for a confirmation while a table of the cut has no record.
    _run(web)
    web.database.execute("insert into orders values (10, 'EMEA'), (11, 'APAC')")
    page.goto(f"{web.address}/locations/pgsieve.pipelines.definitions/jobs/shop_increments")
    page.get_by_role("button", name=re.compile("Materialize all")).click()
    _until(lambda: _rows(web, "orders") == 10, web)
    page.goto(f"{web.address}/assets/sales/public/orders")
    expect(page.get_by_text("Latest materialization").first).to_be_visible()


def _runs(web: Web) -> list[str]:
    """The ids of Dagster's runs, newest first."""
    query = {"query": "{ runsOrError { ... on Runs { results { id } } } }"}
    request = urllib.request.Request(
        f"{web.address}/graphql", json.dumps(query).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [run["id"] for run in json.load(answer)["data"]["runsOrError"]["results"]]


def _materialize_all(web: Web, page: Page) -> str:
    """Run the job of increments. Return the id of its run."""
    before = _runs(web)
    page.goto(f"{web.address}/locations/pgsieve.pipelines.definitions/jobs/shop_increments")
    page.get_by_role("button", name=re.compile("Materialize all")).click()
    _until(lambda: _runs(web) != before, web)
    return _runs(web)[0]


@pytest.mark.long
def test_a_run_that_is_cancelled_loses_nothing(web: Web, page: Page) -> None:
    """It takes long: two runs. The run is cancelled while its changes wait: they are confirmed, but in no replica."""
    config = load_config(web.path)
    _run(web)
    before = _rows(web, "orders")
    source = build_project(config).subscriptions["sales"].slot_stream.source
    with source.hold_lock("sales"):
        web.database.execute("insert into orders values (112, 'EMEA')")
        run = _materialize_all(web, page)
        page.goto(f"{web.address}/runs/{run}")
        page.get_by_text(re.compile("waiting for .*sales")).first.wait_for()
        page.get_by_role("button", name="Terminate").click()
        page.get_by_role("dialog").get_by_role("button", name=re.compile("^Terminate")).click()
        expect(page.get_by_text("Canceled").first).to_be_visible()
    assert _rows(web, "orders") == before
    web.database.execute("insert into orders values (113, 'EMEA')")
    _materialize_all(web, page)
    _until(lambda: _rows(web, "orders") == before + 2, web)


@pytest.mark.long
def test_a_run_that_fails_says_what_to_do(web: Web, page: Page) -> None:
    closed = "update pg_database set datallowconn = {} where datname = current_database()"
    web.database.execute(closed.format("false"))
    try:
        run = _materialize_all(web, page)
        page.goto(f"{web.address}/runs/{run}")
        expect(page.get_by_text("Failure").first).to_be_visible()
    finally:
        web.database.execute(closed.format("true"))
    expect(page.get_by_text(re.compile("is not currently accepting connections")).first).to_be_visible()
    expect(page.get_by_text("what to do").first).to_be_visible()
    expect(page.get_by_text(re.compile("check host, port, dbname")).first).to_be_visible()


def test_a_table_that_is_set_aside_is_red_and_the_others_are_not(web: Web, page: Page) -> None:
    """It takes half a minute: two runs of Dagster, and the pages of both tables."""
    _run(web)
    states = TableStates(build_project(load_config(web.path)).lake.open(), "sales")
    ready = states.read_newest()["public", "customers"]
    states.append([ready.with_problem("sales", "a value")])
    web.database.execute("insert into orders values (200, 'EMEA')")
    run = _materialize_all(web, page)
    page.goto(f"{web.address}/runs/{run}")
    expect(page.get_by_text("Failure").first).to_be_visible()
    red = page.get_by_text(re.compile(r"^\s*Failed in"))
    for table in ("customers", "orders"):
        page.goto(f"{web.address}/assets/sales/public/{table}")
        expect(page.get_by_text("Latest materialization").first).to_be_visible()
        page.wait_for_load_state("networkidle")
        if table == "customers":
            expect(red.first).to_be_visible()
        else:
            expect(red).to_have_count(0)
    page.goto(f"{web.address}/assets/sales/public/customers?view=checks&checkDetail=sync_state")
    # Dagster shows the command as code.
    reason = page.locator("p", has_text=re.compile("a value; *pgsieve resync sales public.customers"))
    expect(reason.first).to_be_visible()
    # After a copy that Dagster starts, the table is well again.
    states.append([ready])
    _run(web)


def test_comments_of_the_publisher_describe_tables_and_columns(web: Web, page: Page) -> None:
    """On the pages of a table and of its replica; a column's once the replica is materialised."""
    _run(web)
    for asset in ("shop/tables/public/orders", "sales/public/orders"):
        page.goto(f"{web.address}/assets/{asset}?view=overview")
        expect(page.get_by_text("Orders of the shop", exact=True).first).to_be_visible()
    expect(page.get_by_text("Where it was sold").first).to_be_visible()


def test_a_schedule_is_switched_on(web: Web, page: Page) -> None:
    page.goto(f"{web.address}/automation")
    # The row's other label selects the row.
    switch = page.locator('[data-index]:has-text("shop_increments_schedule") label[class*="formatSwitch"]')
    expect(switch.locator("input")).to_be_enabled()
    switch.click()
    expect(switch.locator("input")).to_be_checked()
    page.reload()
    expect(switch.locator("input")).to_be_checked()
    switch.click()
    expect(switch.locator("input")).not_to_be_checked()


def test_a_check_that_fails_is_red_and_says_why(web: Web, page: Page) -> None:
    DeltaTable(str(web.replica("orders"))).delete("id = 3")
    page.goto(f"{web.address}/assets/sales/public/orders?view=checks&checkDetail=subscriber_consistency")
    page.locator("button", has_text=re.compile(r"^\s*Execute\s*$")).first.click()
    expect(page.get_by_text("differing rows").first).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("differing rows")).first).to_contain_text("1")
    expect(page.get_by_text("Failed").first).to_be_visible()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_in_progress_and_the_next_one_continues(
    publisher_server: EmbeddedServer, page: Page, tmp_path: Path, number: signal.Signals
) -> None:
    """It takes long: a web interface of its own starts, with a code server and a run."""
    with served(publisher_server, tmp_path, f"browser_{number.name.lower()}") as web:
        _run(web)
        source = build_project(load_config(web.path)).subscriptions["sales"].slot_stream.source
        with source.hold_lock("sales"):
            web.database.execute("insert into orders values (112, 'EMEA')")
            run = _materialize_all(web, page)
            page.goto(f"{web.address}/runs/{run}")
            page.get_by_text(re.compile("waiting for .*sales")).first.wait_for()
            children = psutil.Process(web.process.pid).children(recursive=True)
            web.process.send_signal(number)
            assert web.process.wait(PATIENCE_SECONDS) == 0
            assert not psutil.wait_procs(children, timeout=0)[1]
        with DagsterInstance.from_config(str(web.path.parent / ".pgsieve" / "dagster")) as dagster:
            record = dagster.get_run_by_id(run)
        assert record is not None
        assert record.status in {DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED}
        _run(web)
        assert _rows(web, "orders") == 10


def test_ctrl_c_ends_the_server_and_its_children(web: Web) -> None:
    children = psutil.Process(web.process.pid).children(recursive=True)
    assert children
    web.process.send_signal(signal.SIGINT)
    try:
        web.process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(web.log.read_text()[-3000:])
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_SECONDS)
    assert not alive
