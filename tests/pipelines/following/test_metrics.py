"""Metrics of `status` and of a follower, scraped as Prometheus does. Copies are small and need no JVM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from tests.faults.proxy import Proxy
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Shop

Samples = Mapping[tuple[str, frozenset[str]], float]


def sample(name: str, *labels: str) -> tuple[str, frozenset[str]]:
    """The key of a sample, whatever the order of its labels."""
    return name, frozenset(labels)


def samples(text: str) -> Samples:
    """The samples of a scrape, by name and label values."""
    return {
        sample(each.name, *each.labels.values()): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


@pytest.mark.drawn
def test_status_shows_all_positions_as_metrics_and_as_json(shop: Shop) -> None:
    shop.copy()
    code, text = shop.cli("status", "--prometheus")
    metrics, slot = samples(text), shop.written["sources"]["shop"]["slot"]
    assert code == 0
    assert metrics[sample("pgsieve_source_up", "shop", slot)] == 1
    assert metrics[sample("pgsieve_slot_exists", "shop", slot)] == 1
    assert metrics[sample("pgsieve_slot_lag_seconds", "shop", slot)] == 0
    assert metrics[sample("pgsieve_slot_retained_wal_bytes", "shop", slot)] > 0
    assert metrics[sample("pgsieve_subscription_seconds_behind", "two")] == 0
    assert metrics[sample("pgsieve_tables", "one", "ready")] == 2
    assert metrics[sample("pgsieve_tables", "one", "set aside")] == 0
    assert metrics[sample("pgsieve_table_state", "one", "public", "orders", "ready")] == 1
    assert metrics[sample("pgsieve_table_rows", "one", "public", "orders")] == 3

    # Only Dagster's records have the results of a run without work.
    before = time.time()
    assert not shop.run("two").failures
    two = sample("pgsieve_subscription_last_success_timestamp_seconds", "two")
    assert before - 1 <= samples(shop.cli("status", "--prometheus")[1])[two] <= time.time()
    shop.database.execute("insert into stock select i, i from generate_series(10, 1000) i")
    report = json.loads(shop.cli("status", "--json")[1])
    assert report["slots"][0]["lag_bytes"] > 10_000
    assert report["slots"][0]["retained_bytes"] >= report["slots"][0]["lag_bytes"]
    assert 0 < report["slots"][0]["lag_seconds"] < 60
    assert [0 < s["seconds_behind"] < 60 for s in report["subscriptions"]] == [True, True]
    last = report["subscriptions"][1]["last_success"]
    assert before - 1 <= datetime.fromisoformat(last).timestamp() <= time.time()
    assert last.endswith("Z")


def test_a_missing_source_is_a_metric_and_an_exit_code(shop: Shop) -> None:
    shop.copy()
    source = {**shop.written["sources"]["shop"], "conninfo": "host=127.0.0.1 port=1 dbname=shop"}
    shop.configure(sources={"shop": source})
    code, text = shop.cli("status", "--prometheus")
    assert code == 2
    metrics = samples(text.partition("\nerror:")[0])
    assert metrics[sample("pgsieve_source_up", "shop", source["slot"])] == 0
    assert sample("pgsieve_slot_lag_bytes", "shop", source["slot"]) not in metrics, (
        "an unknown value is shown as a number"
    )


@dataclass
class Follower:
    """`pgsieve run --follow` as a process."""

    process: subprocess.Popen[str]
    log: Path
    url: str

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> Samples:
        return samples(self.get("/metrics")[1])


@contextmanager
def following(shop: Shop, *options: str) -> Iterator[Follower]:
    log = shop.path.parent / "log"
    with log.open("w") as stderr:
        process = _started(shop, stderr, *options)
    try:
        pattern = r"(http://[\d.:]+)/metrics"
        wait_until(
            lambda: bool(re.search(pattern, log.read_text())) or process.poll() is not None, log.read_text, 60
        )
        match = re.search(pattern, log.read_text())
        assert match, log.read_text()
        yield Follower(process, log, match[1])
    finally:
        process.kill()
        process.wait()


def _started(shop: Shop, stderr: IO[str], *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "pgsieve",
        "-c",
        str(shop.path),
        "run",
        "--follow",
        "--metrics-port",
        "0",
    ]
    return subprocess.Popen(
        [*command, *options, "two"], stdout=subprocess.DEVNULL, stderr=stderr, text=True, env=dict(os.environ)
    )


@pytest.mark.drawn
def test_a_follower_counts_what_it_does(shop: Shop) -> None:
    shop.copy()
    slot = shop.written["sources"]["shop"]["slot"]
    row = ("two", "public", "stock")
    with following(shop) as follower:
        shop.database.execute("insert into stock select i, i from generate_series(10, 14) i")
        inserted = sample("pgsieve_changes_total", *row, "insert")
        wait_until(lambda: follower.metrics().get(inserted) == 5, follower.log.read_text, 300)
        metrics = follower.metrics()
        assert metrics[sample("pgsieve_received_changes_total", *row, "insert")] == 5
        assert metrics[sample("pgsieve_conflicts_total", *row, "insert_exists")] == 0
        assert metrics[sample("pgsieve_failures_total", "two")] == 0
        assert metrics[sample("pgsieve_slices_total", "shop", slot)] == 1
        assert metrics[sample("pgsieve_step_duration_seconds_count", "apply")] == 1
        wait_until(
            lambda: follower.metrics()[sample("pgsieve_subscription_seconds_behind", "two")] == 0, str, 60
        )
        follower.process.send_signal(signal.SIGTERM)
        assert follower.process.wait(60) == 0


@pytest.mark.drawn
@pytest.mark.slow
def test_a_follower_ends_if_changes_wait_but_nothing_moves(shop: Shop) -> None:
    """It takes long: two limits of six seconds have to pass."""
    shop.copy()
    slot = shop.written["sources"]["shop"]["slot"]
    with following(shop, "--stall-limit", "6") as follower:
        connected = sample("pgsieve_follower_connected", "shop", slot)
        wait_until(lambda: follower.metrics().get(connected) == 1, follower.log.read_text, 60)
        active = sample("pgsieve_slot_active", "shop", slot)  # a report may be some seconds old
        wait_until(lambda: follower.metrics()[active] == 1, follower.log.read_text, 60)
        metrics = follower.metrics()
        assert metrics[sample("process_resident_memory_bytes")] > 10_000_000
        with pytest.raises(subprocess.TimeoutExpired):  # idle for longer than the limit, but nothing waits
            follower.process.wait(7)
        status, body = follower.get("/healthz")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        assert json.loads(body)["feeds"][0]["state"] == "following"
        assert follower.get("/")[0] == 404

        source = build_project(load_config(shop.path)).subscriptions["two"].slot_stream.source
        with source.hold_lock("two"):
            shop.database.execute("insert into stock values (20, 0)")
            waiting = sample("pgsieve_follower_waiting_seconds", "shop", slot)
            wait_until(lambda: follower.metrics()[waiting] > 0, follower.log.read_text, 30)
            assert follower.process.wait(60) == 2
        log = follower.log.read_text()
        assert 'error: source "shop": following the slot' in log
        assert "has made no progress for" in log
        assert "changes that arrived wait to be applied" in log


@pytest.mark.drawn
@pytest.mark.slow
def test_a_server_that_does_not_answer_makes_a_follower_unhealthy_and_one_that_refuses_does_not(
    shop: Shop,
) -> None:
    """It takes long: the server has to be silent for a minute."""
    shop.copy()
    source = shop.written["sources"]["shop"]
    with Proxy(int(conninfo_to_dict(source["conninfo"])["port"])) as proxy:
        shop.configure(
            sources={"shop": {**source, "conninfo": make_conninfo(source["conninfo"], port=proxy.port)}}
        )
        with following(shop, "--stall-limit", "1") as follower:

            def health() -> tuple[int | str, ...]:
                code, body = follower.get("/healthz")
                answer = json.loads(body)
                return code, answer["status"], *(each["state"] for each in answer["feeds"])

            healthy = (200, "ok", "following")
            wait_until(lambda: health() == healthy, follower.log.read_text, 60)
            proxy.stall()
            silent = (503, "silent", "the server does not answer")
            wait_until(lambda: health() == silent, lambda: f"{health()}", 90)
            proxy.heal()
            shop.database.execute("insert into stock values (20, 0)")
            wait_until(lambda: 20 in shop.ids("two", "stock"), follower.log.read_text, 90)
            wait_until(lambda: health() == healthy, lambda: f"{health()}", 30)


@pytest.mark.drawn
def test_a_port_in_use_and_a_port_without_follow_are_refused(shop: Shop) -> None:
    with following(shop) as follower:
        port = follower.url.rpartition(":")[2]
        code, text = shop.cli("run", "--follow", "--metrics-port", port, "two")
        assert code == 2
        assert f"127.0.0.1:{port} cannot be listened on" in text
    code, text = shop.cli("run", "--metrics-port", "0")
    assert code == 2
    assert "pgsieve status --prometheus" in text
