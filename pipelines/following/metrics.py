"""Metrics for Prometheus: the state of slots, subscriptions and tables, and the work of `pgsieve run --follow`.

In: - a `StatusReport`, the result of `pgsieve status`
    - the results of each slice (the changes between two positions of a slot)
Out: metrics in Prometheus' text format

docs/monitoring.md lists the metrics. Their names and units follow https://prometheus.io/docs/practices/naming. Values
of rows never become labels.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pgsieve import __version__
from pgsieve.assets.steps.apply.replica_tables import ApplyResult
from pgsieve.assets.steps.records.table_states import SyncState
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.decoding.changes.sent_as import count_by_result
from pgsieve.pipelines.commands.results import UNKNOWN, StatusReport, SubscriptionStatus

_SLOT_LABELS = ("source", "slot")
_TABLE_LABELS = ("subscription", "schema", "table")

#: Scrapes get the same report until it is this old.
_MAX_AGE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _StatusGauge:
    """A gauge whose value is part of the status.

    `read_value` gets the status of a slot or of a subscription, and returns the value. If it returns None, the gauge has no
    sample for that slot or subscription.
    """

    name: str
    help: str
    read_value: Callable[..., float | None]


_SLOT_GAUGES: Sequence[_StatusGauge] = (
    _StatusGauge("pgsieve_source_up", "Whether the source answered.", lambda s: s.problem is None),
    _StatusGauge(
        "pgsieve_slot_exists", "Whether the replication slot exists.", lambda s: _get_if_known(s.exists)
    ),
    _StatusGauge(
        "pgsieve_slot_active", "Whether a process reads the slot.", lambda s: _get_if_known(s.active)
    ),
    _StatusGauge(
        "pgsieve_slot_wal_at_risk",
        "Whether the server may remove, or has removed, WAL that the slot needs (wal_status unreserved or lost).",
        lambda s: None if s.exists == UNKNOWN else s.wal_status in {"unreserved", "lost"},
    ),
    _StatusGauge(
        "pgsieve_slot_lag_bytes",
        "WAL between the LSN that the slot has confirmed and the server's current one.",
        lambda s: s.lag_bytes,
    ),
    _StatusGauge(
        "pgsieve_slot_lag_seconds",
        "How long the oldest commit that the change log lacks has been waiting; 0 if none waits.",
        lambda s: s.lag_seconds,
    ),
    _StatusGauge("pgsieve_slot_retained_wal_bytes", "WAL that the slot retains.", lambda s: s.retained_bytes),
    _StatusGauge(
        "pgsieve_slot_safe_wal_bytes",
        "WAL that may still be written before the slot can be lost; absent if max_slot_wal_keep_size sets no limit.",
        lambda s: s.safe_wal_bytes,
    ),
)

_SUBSCRIPTION_GAUGES: Sequence[_StatusGauge] = (
    _StatusGauge(
        "pgsieve_subscription_up",
        "Whether the whole subscription can be replicated.",
        lambda s: s.problem is None,
    ),
    _StatusGauge("pgsieve_subscription_enabled", "Whether the subscription is enabled.", lambda s: s.enabled),
    _StatusGauge(
        "pgsieve_subscription_seconds_behind",
        "How long the oldest commit that the replicas lack has been waiting; 0 if none waits.",
        lambda s: s.seconds_behind,
    ),
    _StatusGauge(
        "pgsieve_subscription_last_success_timestamp_seconds",
        "The last time at which all changes were applied.",
        lambda s: None if s.last_success is None else datetime.fromisoformat(s.last_success).timestamp(),
    ),
)


def _get_if_known(value: bool | Literal["unknown"]) -> bool | None:
    """The value, or None if the source did not answer and the value is unknown."""
    return None if value == UNKNOWN else value


def _make_gauge_samples(
    status_gauge: _StatusGauge, label_names: Sequence[str], statuses: Iterable[tuple[Sequence[str], object]]
) -> Metric:
    """Make the samples of a gauge.

    `statuses` has the status of each slot or of each subscription, together with the values of its labels.
    """
    family = GaugeMetricFamily(status_gauge.name, status_gauge.help, labels=label_names)
    for label_values, status in statuses:
        if (value := status_gauge.read_value(status)) is not None:
            family.add_metric(label_values, float(value))
    return family


class StatusCollector(Collector):
    """Collects the metrics of a status report.

    A scrape calls `read_status` to get the report, unless the last report is recent (`_MAX_AGE_SECONDS`).
    """

    def __init__(self, read_status: Callable[[], StatusReport]) -> None:
        self._read_status, self._lock = read_status, threading.Lock()
        self._report: tuple[float, StatusReport] | None = None

    def describe(self) -> Iterable[Metric]:
        """Describe no metric in advance, because the report decides which metrics there are."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the samples of all gauges."""
        report = self._read_recent_report()
        slots = [((s.source, s.slot), s) for s in report.slots]
        subscriptions = [((s.name,), s) for s in report.subscriptions]
        yield from (_make_gauge_samples(gauge, _SLOT_LABELS, slots) for gauge in _SLOT_GAUGES)
        yield from (
            _make_gauge_samples(gauge, ("subscription",), subscriptions) for gauge in _SUBSCRIPTION_GAUGES
        )
        yield _count_tables_by_state(report.subscriptions)
        yield from _make_table_gauges(report.subscriptions)

    def _read_recent_report(self) -> StatusReport:
        """The last report; a new one if the last one is too old."""
        with self._lock:
            current_time = time.monotonic()
            if self._report is None or current_time - self._report[0] > _MAX_AGE_SECONDS:
                self._report = (time.monotonic(), self._read_status())
            return self._report[1]


def _count_tables_by_state(subscriptions: Iterable[SubscriptionStatus]) -> Metric:
    """The number of tables in each state.

    States without tables are listed, too, with the number 0. Otherwise an alert would have no value to compare.
    """
    family = GaugeMetricFamily(
        "pgsieve_tables", "Tables of the subscription in this sync state.", labels=("subscription", "state")
    )
    for subscription in subscriptions:
        states = [table.state for table in subscription.tables]
        for state in SyncState:
            family.add_metric((subscription.name, state.meaning), states.count(state.meaning))
    return family


def _make_table_gauges(subscriptions: Iterable[SubscriptionStatus]) -> Iterator[Metric]:
    """Yields two gauges about each table: its state, and the number of rows of its replica."""
    state_family = GaugeMetricFamily(
        "pgsieve_table_state", "1 for the table's current sync state.", labels=(*_TABLE_LABELS, "state")
    )
    rows_family = GaugeMetricFamily("pgsieve_table_rows", "Rows of the replica.", labels=_TABLE_LABELS)
    for subscription in subscriptions:
        for table in subscription.tables:
            labels = (subscription.name, table.schema, table.name)
            state_family.add_metric((*labels, table.state), 1)
            if table.rows is not None:
                rows_family.add_metric(labels, table.rows)
    yield state_family
    yield rows_family


def format_status_metrics(report: StatusReport) -> bytes:
    """Write a status report, and the version of pgsieve, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: report))
    _add_build_gauge(registry)
    return bytes(generate_latest(registry))


def _add_build_gauge(registry: CollectorRegistry) -> None:
    build = Gauge("pgsieve_build_info", "1; the label is the version.", ("version",), registry=registry)
    build.labels(__version__).set(1)


class FollowMetrics:
    """The metrics of a process that follows slots: counts of its work, and the status, which scrapes read."""

    def __init__(self, read_status: Callable[[], StatusReport]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StatusCollector(read_status))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        # Metrics of the Java process in which Spark runs. They have no samples before Spark has started.
        ProcessCollector("pgsieve_jvm", pid=_find_jvm_pid, registry=self.registry)
        _add_build_gauge(self.registry)
        self._connected_gauge = Gauge(
            "pgsieve_follower_connected",
            "Whether this process reads the slot.",
            _SLOT_LABELS,
            registry=self.registry,
        )
        self._waiting_gauge = Gauge(
            "pgsieve_follower_waiting_seconds",
            "How long changes that arrived have been waiting for this process to apply them; 0 if none wait.",
            _SLOT_LABELS,
            registry=self.registry,
        )
        self._slices_counter = Counter(
            "pgsieve_slices",
            "Slices that were appended to the change log.",
            _SLOT_LABELS,
            registry=self.registry,
        )
        self._changes_counter = Counter(
            "pgsieve_changes",
            "Rows of the replica that changes inserted, updated or deleted, by kind; each truncate of the table counts once.",
            (*_TABLE_LABELS, "kind"),
            registry=self.registry,
        )
        self._received_counter = Counter(
            "pgsieve_received_changes",
            "Changes that the publisher sent for the table, before row filters.",
            (*_TABLE_LABELS, "kind"),
            registry=self.registry,
        )
        self._updates_counter = Counter(
            "pgsieve_transformed_updates",
            "UPDATEs that the publisher sent for the table, by the operation that the row filter turned them into.",
            (*_TABLE_LABELS, "sent_as"),
            registry=self.registry,
        )
        self._conflicts_counter = Counter(
            "pgsieve_conflicts",
            "Changes whose key already had a row, or that found no row, as in pg_stat_subscription_stats.",
            (*_TABLE_LABELS, "conflict"),
            registry=self.registry,
        )
        self._steps_summary = Summary(
            "pgsieve_step_duration_seconds", "How long each step took.", ("step",), registry=self.registry
        )
        self._failures_counter = Counter(
            "pgsieve_failures",
            "Errors that ended the work for a subscription.",
            ("subscription",),
            registry=self.registry,
        )

    def add_slot_stream(
        self, source: str, slot: str, is_connected: Callable[[], bool], measure_wait: Callable[[], float]
    ) -> None:
        """Add a stream, a slot with the subscriptions that read it.

        Each scrape calls `is_connected`, which says whether this process reads the slot; and `measure_wait`, which returns for
        how many seconds received changes have been waiting.
        """
        self._connected_gauge.labels(source, slot).set_function(lambda: float(is_connected()))
        self._waiting_gauge.labels(source, slot).set_function(measure_wait)
        self._slices_counter.labels(source, slot)

    def add_subscription(self, subscription: str) -> None:
        """Add a subscription, with 0 errors.

        Prometheus' function `increase` ignores the first value of a counter. Without the 0 it would miss the first
        error.
        """
        self._failures_counter.labels(subscription)

    def count_slices(self, source: str, slot: str, slices: int) -> None:
        """Add to the number of slices that were appended to the change log (the table of the slot's messages)."""
        self._slices_counter.labels(source, slot).inc(slices)

    def count_changes(self, subscription: str, changes: Sequence[TableChanges], result: ApplyResult) -> None:
        """Count the changes of a slice that was applied to the tables of a subscription."""
        for change in changes:
            for kind, count in change.received_counts_by_operation.items():
                self._received_counter.labels(subscription, *change.name, kind).inc(count)
            for operation, count in count_by_result(change.sent_as).items():
                self._updates_counter.labels(subscription, *change.name, operation or "nothing").inc(count)
        for name, table_result in result.tables.items():
            counts_by_kind = {
                "insert": table_result.inserted,
                "update": table_result.updated,
                "delete": table_result.deleted,
                "truncate": int(table_result.truncated),
            }
            for kind, count in counts_by_kind.items():
                self._changes_counter.labels(subscription, *name, kind).inc(count)
            counts_by_conflict = {
                "insert_exists": table_result.insert_exists,
                "update_exists": table_result.update_exists,
                "missing": table_result.missing,
            }
            for conflict, count in counts_by_conflict.items():
                self._conflicts_counter.labels(subscription, *name, conflict).inc(count)

    def count_failures(self, subscriptions: Iterable[str]) -> None:
        """Count an error that ended the work for these subscriptions."""
        for subscription in subscriptions:
            self._failures_counter.labels(subscription).inc()

    @contextmanager
    def time_step(self, step: str) -> Iterator[None]:
        """Measure how long the block takes."""
        with self._steps_summary.labels(step).time():
            yield


def _find_jvm_pid() -> str:
    """The process id of the Java process that this process has started; "none" if there is none."""
    try:
        for entry in Path("/proc/self/task").iterdir():
            for child in (entry / "children").read_text(encoding="ascii").split():
                if Path(f"/proc/{child}/exe").readlink().name == "java":
                    return child
    except OSError:  # A child or a thread has just ended, or the system is not Linux.
        pass
    return "none"
