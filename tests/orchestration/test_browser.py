"""What a person does in the web interface, in a real browser; the tests go on where the one before them ended. No JVM."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from deltalake import DeltaTable
from playwright.sync_api import Page, expect

from tests.fixtures.browser import PATIENCE_SECONDS, Web, page, web

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["page", "web"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _until(holds: Callable[[], object], web: Web) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, web.log.read_text()[-3000:]
        time.sleep(0.5)


def _rows(web: Web, table: str) -> int:
    path = str(web.replica(table))
    return DeltaTable(path).to_pyarrow_table().num_rows if DeltaTable.is_deltatable(path) else -1


def test_the_graph_shows_the_steps_and_the_replicas(web: Web, page: Page) -> None:
    page.goto(f"{web.address}/locations/pgsieve.pipelines.definitions/asset-groups/sales")
    for asset in ("initial_sync", "table_changes", "customers", "orders"):
        expect(page.get_by_text(asset, exact=True).first).to_be_visible()


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


def test_a_job_applies_what_has_changed(web: Web, page: Page) -> None:
    web.database.execute("insert into orders values (10, 'EMEA'), (11, 'APAC')")
    page.goto(f"{web.address}/locations/pgsieve.pipelines.definitions/jobs/shop_increments")
    page.get_by_role("button", name=re.compile("Materialize all")).click()
    _until(lambda: _rows(web, "orders") == 10, web)
    page.goto(f"{web.address}/assets/sales/public/orders")
    expect(page.get_by_text("Latest materialization").first).to_be_visible()


def test_a_schedule_is_switched_on(web: Web, page: Page) -> None:
    page.goto(f"{web.address}/automation")
    # The row's other label selects it.
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
