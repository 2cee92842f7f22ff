"""A real Prometheus scrapes a follower: every query of the dashboard has data, and every alert of docs/monitoring fires.

Thresholds and waiting times are short here; otherwise the rules are the file's. No JVM.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import TEST_SETTINGS, new_server
from tests.fixtures.spark_servers import free_port
from tests.test_monitoring import ALERTS, DASHBOARD, expressions

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

#: The values that Grafana inserts for its variables.
VARIABLES = {"$source": ".*", "$subscription": ".*", "$__rate_interval": "20s"}
#: Thresholds that are reached within seconds. The thresholds of all other rules already are.
SOONER = {"> 10 * 1024 * 1024 * 1024": "> 1", "> 900": "> 1", "> 3600": "> 5"}


@dataclass(frozen=True)
class Prometheus:
    """A server that scrapes the follower."""

    address: str

    def ask(self, path: str, **parameters: str) -> Any:
        """The answer of its API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.address}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """The numeric values of all series of an expression."""
        values = [float(series["value"][1]) for series in self.ask("query", query=expression)["result"]]
        return [value for value in values if not math.isnan(value)]

    def rules(self) -> dict[str, dict[str, Any]]:
        """The rules by name: their health, and their alerts."""
        return {rule["name"]: rule for group in self.ask("rules")["groups"] for rule in group["rules"]}

    def firing(self) -> set[str]:
        """The names of the firing alerts."""
        return {name for name, rule in self.rules().items() if rule["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """A new Prometheus, which scrapes and evaluates every second."""
    program = shutil.which("prometheus")
    assert program is not None, "no Prometheus is installed: apt-get install prometheus"
    rules = yaml.safe_load(ALERTS.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
        for written, sooner in SOONER.items():
            rule["expr"] = rule["expr"].replace(written, sooner)
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    scraped = [{"job_name": "pgsieve", "static_configs": [{"targets": [target]}]}]
    written = {"global": every, "rule_files": ["alerts.yaml"], "scrape_configs": scraped}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(written))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/tsdb",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


def until(holds: Callable[[], object], state_of_servers: Callable[[], object], seconds: float = 90) -> None:
    """Wait until `holds` is true. A server that does not answer yet is no error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, state_of_servers()
        time.sleep(0.5)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server that drops the WAL of slots that are not read."""
    with new_server(18, {**TEST_SETTINGS, "max_slot_wal_keep_size": "64MB"}) as running:
        yield running


def configured(folder: Path, conninfo: str) -> Path:
    """One subscription per trouble, with a publication and a table of its name. Two of them have their own slot."""
    own: dict[str, dict[str, Any]] = {
        "well": {},
        "conflict": {},
        "disabled": {"row_filter": "publisher", "disable_on_error": True},
        "dropped": {"row_filter": "publisher"},
        "unpublished": {},
    }
    written = {
        "lake": "./lake",
        "spark": {"engine": "off"},
        "sources": {"shop": {"conninfo": conninfo}},
        "subscriptions": {
            name: {"source": "shop", "publications": [name], **more} for name, more in own.items()
        },
    }
    path = folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(written))
    return path


def test_every_query_has_data_and_every_alert_fires(server: EmbeddedServer, tmp_path: Path) -> None:
    """It takes long: each alert fires only after its time, and a Prometheus scrapes every second."""
    path, port = configured(tmp_path, server.conninfo()), free_port()
    pgsieve = [sys.executable, "-m", "pgsieve", "-c", str(path)]
    names = list(yaml.safe_load(path.read_text())["subscriptions"])
    with (
        psycopg.connect(server.conninfo(), autocommit=True) as database,
        prometheus(tmp_path, f"127.0.0.1:{port}") as watching,
    ):
        for name in names:
            database.execute(f"create table {name} (id int primary key, n int)")
            database.execute(f"insert into {name} select i, i from generate_series(1, 5) i")
            database.execute(f"create publication {name} for table {name}")
        until(lambda: watching.firing() == {"PgsieveAbsent"}, lambda: "nothing is absent")
        assert {rule["health"] for rule in watching.rules().values()} == {"ok"}
        subprocess.run([*pgsieve, "run"], check=True, capture_output=True)
        with (tmp_path / "log").open("w") as log:
            follower = subprocess.Popen(
                [*pgsieve, "run", "--follow", "--metrics-port", str(port)], stdout=log, stderr=log
            )

        def state_of_servers() -> str:
            return f"{watching.firing()}\n{(tmp_path / 'log').read_text()[-3000:]}"

        try:
            connected = "pgsieve_follower_connected == 1"
            until(lambda: len(watching.values(connected)) == 3, state_of_servers)
            watched(watching, database, tmp_path, state_of_servers)
            troubled(watching, server, database, tmp_path, state_of_servers)
        finally:
            follower.terminate()
            assert follower.wait(60) is not None


def watched(
    watching: Prometheus, database: psycopg.Connection, folder: Path, state_of_servers: Callable[[], str]
) -> None:
    """Assert that every query of the dashboard has a value, while changes arrive and a table is set aside."""
    foreign = pa.table({"id": pa.array([99], pa.int32()), "n": pa.array([0], pa.int32())})
    for name in ("conflict", "disabled"):
        replica = str(folder / "lake" / name / "public" / name)
        write_deltalake(DeltaTable(replica), foreign, mode="append")
        database.execute(f"insert into {name} values (99, 1)")
    # The follower has no JVM here, so metrics of the JVM are missing.
    unanswered = {
        substituted(query)
        for query in expressions(json.loads(DASHBOARD.read_text()))
        if "pgsieve_jvm" not in query
    }
    assert len(unanswered) > 15

    def all_answered() -> bool:
        database.execute("insert into well select max(id) + 1, 1 from well")
        unanswered.difference_update([query for query in unanswered if is_answered(watching, query)])
        return not unanswered

    until(all_answered, lambda: f"{unanswered}\n{state_of_servers()}")


def substituted(query: str) -> str:
    """A query in the form that Grafana sends."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    return query


def is_answered(watching: Prometheus, query: str) -> bool:
    """Whether the query has a value. For a variable of the dashboard: whether it has a choice."""
    if match := re.fullmatch(r"label_values\((\w+), (\w+)\)", query):
        return any(series.get(match[2]) for series in watching.ask("series", **{"match[]": match[1]}))
    return bool(watching.values(query))


def troubled(
    watching: Prometheus,
    server: EmbeddedServer,
    database: psycopg.Connection,
    folder: Path,
    state_of_servers: Callable[[], str],
) -> None:
    """Assert that every alert fires at its trouble, and that its text names the object."""
    until(
        lambda: (
            {"PgsieveConflicts", "PgsieveTableSetAside", "PgsieveSubscriptionDisabled"} <= watching.firing()
        ),
        state_of_servers,
    )
    database.execute("drop publication unpublished")
    slot = "select slot_name, active_pid from pg_replication_slots where slot_name like '%%dropped'"
    name, pid = database.execute(slot).fetchone() or ("", 0)
    database.execute("select pg_terminate_backend(%s, 5000)", [pid])
    database.execute("select pg_drop_replication_slot(%s)", [name])
    seen = watching.firing()

    def all_but_the_source() -> bool:
        # A slot that is not read is lost after 64 MB of WAL.
        database.execute("insert into well select max(id) + 1, 1 from well")
        database.execute("select pg_switch_wal()")
        database.execute("checkpoint")
        seen.update(watching.firing())
        return seen >= watching.rules().keys() - {"PgsieveAbsent", "PgsieveSourceDown"}

    until(all_but_the_source, lambda: f"{watching.rules().keys() - seen}\n{state_of_servers()}")
    server.stop(immediate=True)
    until(lambda: "PgsieveSourceDown" in watching.firing(), state_of_servers)
    for rule in watching.rules().values():
        assert rule["health"] == "ok", rule
        for alert in rule["alerts"]:
            for text in alert["annotations"].values():
                assert not re.search(r"\{\{|<no value>|<error|%!", text), text
