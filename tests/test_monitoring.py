"""docs/monitoring: every metric in its alerts, its dashboard and its tables is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pgsieve.assets.steps.apply.replica_tables import ApplyResult
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.decoding.changes.sent_as import ChangeKind
from pgsieve.pipelines.commands.results import SlotStatus, StatusReport, SubscriptionStatus, TableStatus
from pgsieve.pipelines.following.metrics import FollowMetrics

DOCS = Path(__file__).parents[1] / "docs"
ALERTS, DASHBOARD = DOCS / "monitoring/alerts.yaml", DOCS / "monitoring/grafana-dashboard.json"


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every sample of a follower, by name, with its labels."""
    table = TableStatus("public", "orders", "ready", None, "0/1", 1, rows=1)
    slot = SlotStatus(
        "shop", None, "pgsieve_shop", exists=True, active=True, wal_status="reserved", confirmed_lsn="0/1",
        lag_bytes=1, change_log_lsn="0/1", lag_seconds=1.0, retained_bytes=1, safe_wal_bytes=1,
    )  # fmt: skip
    sales = SubscriptionStatus(
        "sales", "shop", "pipeline", (table,), seconds_behind=1.0, last_success="2026-11-23T08:40:11Z"
    )
    metrics = FollowMetrics(lambda: StatusReport((slot,), (sales,)))
    metrics.add_slot_stream("shop", "pgsieve_shop", lambda: True, lambda: 0.0)
    name = ("public", "orders")
    metrics.count_changes(
        "sales",
        [TableChanges(1, *name, sent_as={ChangeKind("public.orders", None, "insert", "insert"): 1})],
        ApplyResult({name: TableResult(*name)}),
    )
    metrics.count_failures(["sales"])
    with metrics.time_step("apply"):
        pass
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def named(text: str) -> set[str]:
    """The metrics that a text names, without those of the JVM, which exist only once it runs."""
    names = re.findall(r"\b(?:pgsieve_jvm_)?process_\w+|\bpgsieve_[a-z_]+", text)
    return {name.removeprefix("pgsieve_jvm_") for name in names}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    return queries + variables


def test_alerts_and_dashboard_name_exported_metrics_and_labels(
    exported: dict[str, set[str]],
) -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    texts = [rule["expr"] for rule in rules] + expressions(json.loads(DASHBOARD.read_text()))
    assert len(texts) > 30
    for text in texts:
        names = named(text)
        assert names, text
        assert names <= exported.keys(), text
        labels = set(re.findall(r"(\w+)!?=~?\"", text)) | {
            label for listed in re.findall(r"(?:by|on) ?\((.*?)\)", text) for label in listed.split(", ")
        }
        assert labels <= {"job"}.union(*(exported[name] for name in names)), text
    for rule in rules:
        labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert labels <= set().union(*(exported[name] for name in named(rule["expr"]))), rule["alert"]


def test_every_expression_is_promql() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    queries = [
        query for query in expressions(json.loads(DASHBOARD.read_text())) if "label_values" not in query
    ]
    for text in [rule["expr"] for rule in rules] + queries:
        assert promql_parser.parse(text.replace("$__rate_interval", "1m")), text


def test_the_table_of_metrics_is_complete(exported: dict[str, set[str]]) -> None:
    table = "\n".join(line for line in (DOCS / "monitoring.md").read_text().splitlines() if line[:3] == "| `")
    documented = named(table) - {"pgsieve_shop"}
    ours = {
        name
        for name in exported
        # Metrics of a JVM exist only if an earlier test has started one.
        if name.startswith("pgsieve_")
        and not name.startswith("pgsieve_jvm_")
        and not name.endswith(("_created", "_sum"))
    }
    assert {name for name in documented if name.startswith("pgsieve_")} == ours
    assert {name for name in documented if name.startswith("process_")} <= exported.keys()


def test_panels_do_not_overlap_and_have_different_ids() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in panels)
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} == set(range(24))
