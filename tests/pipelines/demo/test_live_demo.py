"""The demo that keeps running: its traffic, and everything that it starts and ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

from pgsieve.pipelines.demo import traffic as shop_traffic
from pgsieve.pipelines.demo.traffic import make_tables, write_traffic
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until


def test_every_kind_of_traffic_is_written(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database traffic")
        conninfo = publisher_server.conninfo(dbname="traffic")
        try:
            with psycopg.connect(conninfo, autocommit=True) as connection:
                make_tables(connection)
                values = {"customer": 7, "region": "EMEA", "amount": 12.5}
                assert all(
                    connection.execute(statement, values).rowcount
                    for _, statement in shop_traffic._WEIGHTED_STATEMENTS  # A DELETE or UPDATE without rows would test nothing.
                )
                before = connection.execute("select count(*) from shop.events").fetchone()
                assert before is not None
                with write_traffic(conninfo, 0.01) as written:
                    wait_until(lambda: written() >= 30, lambda: f"{written()} transactions", 60)
                after = connection.execute("select count(*) from shop.events").fetchone()
                assert after is not None
                assert after[0] > before[0]
        finally:
            admin.execute("drop database traffic with (force)")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _descendants(folder: Path) -> list[str]:
    """The processes whose command line or environment names the demo's folder."""
    descendants = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            process_text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in process_text and int(process.name) != os.getpid():
            descendants.append((process / "cmdline").read_text().replace("\0", " "))
    return descendants


@pytest.mark.long
def test_an_early_ctrl_c_on_a_terminal_shows_no_traceback(tmp_path: Path) -> None:
    """It takes long: the demo starts. All processes in the terminal's foreground get the signal, also those of Dagster's steps."""
    folder, shown, ended = tmp_path / "demo", b"", False
    log = folder / "demo.log"
    command = ["pgsieve", "demo", "--ui", "--keep", str(folder), "--port", str(_free_port())]

    def logged() -> str:
        return log.read_text() if log.exists() else ""

    demo, terminal = pty.fork()
    if demo == 0:
        os.execv(sys.executable, [sys.executable, "-m", *command])
    try:
        interrupted = False
        while True:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # Linux reports the end of a terminal's last process by this error.
                ended = True
                break
            # From here on the terminal shows nothing: the output of runs goes to the log, which begins a moment later.
            if not interrupted and b"Ctrl-C" in shown:
                wait_until(lambda: "tables of warehouse at" in logged(), logged, 300)
                interrupted = os.write(terminal, b"\x03") == 1
    finally:
        if not ended:
            os.kill(demo, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(demo, 0)[1])
    assert interrupted, shown.decode()
    assert b"Traceback" not in shown, shown.decode()
    assert b"copied" not in shown, "output hides where to look"
    assert status == 0
    wait_until(lambda: not _descendants(folder), lambda: "\n".join(_descendants(folder)), 60)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_runs_until_a_signal_and_leaves_nothing_behind(
    tmp_path: Path, ending: signal.Signals
) -> None:
    """It takes long: the demo starts two servers, a web interface and a follower."""
    folder, port, log = tmp_path / "demo", _free_port(), tmp_path / "log"
    with log.open("wb") as out:
        demo = subprocess.Popen(
            [sys.executable, "-m", "pgsieve", "demo", "--ui", "--keep", str(folder), "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:

        def is_announced() -> bool:
            assert demo.poll() is None, log.read_text()
            return "Ctrl-C" in log.read_text()

        wait_until(is_announced, log.read_text, 300)
        assert (
            f"http://127.0.0.1:{port}/locations/pgsieve.pipelines.definitions/asset-groups/sales"
            in log.read_text()
        )
        orders = folder / "lake/warehouse/shop/orders"

        def version() -> int:
            return DeltaTable(str(orders)).version() if DeltaTable.is_deltatable(str(orders)) else -1

        wait_until(lambda: version() >= 2, log.read_text, 300)
        assert log.read_text().rstrip().endswith(f"its files stay in {folder}"), "output hides where to look"
        query = {
            "query": "{ assetNodes { assetKey { path } assetMaterializations(limit: 1) { timestamp } } }"
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/graphql",
            json.dumps(query).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            nodes = json.load(answer)["data"]["assetNodes"]
        shown = {"/".join(node["assetKey"]["path"]): node["assetMaterializations"] for node in nodes}
        assert shown["warehouse/shop/orders"]
        assert shown["sales/shop/orders"]
        demo.send_signal(ending)
        assert demo.wait(120) == 0, log.read_text()
        wait_until(lambda: not _descendants(folder), lambda: "\n".join(_descendants(folder)), 60)
    finally:
        demo.kill()
        demo.wait()
