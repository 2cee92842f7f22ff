"""`pgsieve run --follow`: repeats the steps of a run, as changes arrive, until it is stopped.

In: the configuration. Out: the results of each slice (the changes between two positions of a slot), by a callback.
A thread for each feed (a slot with its subscriptions) reads the slot by streaming replication. It applies the
changes of a slice before it appends the next slice to the change log.

- SIGTERM and SIGINT end the process at a commit boundary; if a step takes too long for that, within the step.
- A subscription that fails is left out until the command is started again. The others go on. A feed whose
  subscriptions have all failed is not read any more.
- After a transient error of the server or the network, a feed that was followed once is followed again.
- Copies are runs of Dagster. Slices are reported to Dagster every few minutes (`follow_report`).
- After every few hundred slices the changed tables are maintained, as each slice adds a few files and commits.
- A table is registered in Spark's catalog after its copy. If its name is taken, the follower reports it and goes
  on.
- If changes wait and a feed makes no progress, the process ends with an error, so that its supervisor starts
  it again (`watch`).
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from types import FrameType

import dagster as dg

from pgsieve.assets.dagster_names import Name
from pgsieve.assets.runless_events import report_cut
from pgsieve.assets.steps.checks.freshness import Freshness
from pgsieve.assets.steps.log import no_log
from pgsieve.assets.steps.operations.maintenance import maintain_feed, maintain_subscription
from pgsieve.assets.steps.records.failures import is_transient
from pgsieve.assets.steps.slot_consumption.follow import StreamedFeed
from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.failures import Failures, Item, Result
from pgsieve.pipelines.commands.in_process import NAMING, instance
from pgsieve.pipelines.commands.materializer import Materializer
from pgsieve.pipelines.commands.results import Failure, Progress, RunSummary
from pgsieve.pipelines.commands.run import apply_together, enabled_subscriptions, summaries
from pgsieve.pipelines.commands.status import brief_status
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.following.follow_report import FollowReport
from pgsieve.pipelines.following.metrics import FollowMetrics
from pgsieve.pipelines.following.watch import (
    FeedActivity,
    StalledError,
    StopTimeoutError,
    Watch,
    serve_metrics,
)
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.lake.delta.errors import SparkLostError
from pgsieve.resources.postgres.foreign_servers import verify_foreign_servers
from pgsieve.resources.postgres.session_pool import pool_sessions
from pgsieve.resources.postgres.waits import are_transactions_open
from pgsieve.resources.postgres.wal import current_lsn
from pgsieve.resources.tracing import span

OnResult = Callable[[RunSummary], None]

#: The time between two wake-ups of the main thread, in which Python runs the handlers of signals.
_WAKE_UP_SECONDS = 1.0
#: The pause after a transient error; it doubles with each error, until a slice is applied.
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.5, 30.0

#: How long to wait for the end of another follower of the same slot.
_OTHER_FOLLOWER_SECONDS = 10.0

#: The time between two checks whether a cut must be reported; less if `freshness` is short.
_CUT_SECONDS = 60.0

#: The time between two checks whether the transactions that a copy waits for have ended.
_OPEN_TRANSACTIONS_SECONDS = 2.0
#: The time between two requests to a foreign server that a copy waits for.
_FOREIGN_SECONDS = 60.0

#: Tables are maintained after this many slices.
MAINTAIN_SLICES = 500

_logger = logging.getLogger(__name__)


#: How long a feed may make no progress while changes wait; the largest slice takes less.
STALL_SECONDS = 1800.0
#: How long the other feeds may take to reach a commit boundary after one has stalled.
_GRACE_SECONDS = 10.0
#: How long all feeds may take to reach a commit boundary after a signal. Kubernetes kills after 30 seconds.
STOP_SECONDS = 20.0


def follow(
    config: Config,
    selected: Sequence[SubscriptionConfig],
    progress: Progress,
    on_result: OnResult,
    *,
    metrics_at: tuple[str, int] | None = None,
    stall_limit: float | None = STALL_SECONDS,
) -> tuple[Failure, ...]:
    """Follow the selected subscriptions until stopped, or until all have failed; returns the failures.

    `on_result` gets the results of each slice, and each failure when it happens. `metrics_at` is a host and a port
    for metrics. `stall_limit` is in seconds; None is no limit. Raises SubscriptionDisabledError if every
    subscription is disabled, StalledError if a feed has stalled, and StopTimeoutError if a feed does not end in
    time after a signal. After the last two, threads may still be running, so the caller has to end the
    process.
    """
    project = build_project(config)
    # The metrics server starts before the feeds, so that an unavailable address is refused before any work.
    metrics = FollowMetrics(brief_status(config)) if metrics_at else None
    feeds_by_slot = {(f.source.name, f.slot): f for f in project.feeds.values()}
    watch = Watch(
        stall_limit, lambda activity: _is_behind(feeds_by_slot[activity.source, activity.slot], activity)
    )

    def fail(failure: Failure) -> None:
        if metrics is not None:
            metrics.count_failures(failure.subscriptions)
        on_result(RunSummary((), (failure,)))

    failures = Failures(fail)
    subscriptions = enabled_subscriptions(
        project, [project.subscriptions[s.name] for s in selected], failures
    )
    feeds, names = project.feeds_of(subscriptions), {s.name for s in subscriptions}
    with ExitStack() as stack:
        if metrics_at and metrics:
            port = stack.enter_context(serve_metrics(*metrics_at, metrics.registry, watch))
            progress.tell(f"metrics at http://{metrics_at[0]}:{port}/metrics, health at /healthz")
        dagster = stack.enter_context(instance(config))
        context = _Context(project, dagster, progress, on_result, failures, watch, metrics)
        followers = [_Follower(context, feed, names) for feed in feeds]
        stop_signal = stack.enter_context(_stop_on_signals(followers))
        # Feeds do not run in the main thread, where Dagster would end a run in progress on the signal. The
        # threads are daemons, so that a stalled one does not keep the process from ending.
        threads = [threading.Thread(target=follower.follow, daemon=True) for follower in followers]
        for thread in threads:
            thread.start()
        try:
            while _are_working(threads, _WAKE_UP_SECONDS):
                watch.check()
                stop_signal.check()
        except StalledError:
            for follower in followers:
                follower.stop()
            _are_working(threads, _GRACE_SECONDS)
            raise
    return failures.grouped()


def _are_working(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Wait this many seconds for the threads to end; returns whether one still works."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


def _is_behind(feed: Feed, activity: FeedActivity) -> bool:
    """Whether the server has WAL that the feed has not received."""
    with feed.source.connect() as connection:
        return activity.stream is not None and current_lsn(connection) > activity.stream.position


@dataclass
class _StopSignal:
    """The signal that ends the process: `arrived_at` is its time, None before a signal."""

    arrived_at: float | None = None

    def check(self) -> None:
        """Raise StopTimeoutError if the feeds have not ended in time, as they may wait for ever."""
        if self.arrived_at is not None and time.monotonic() - self.arrived_at >= STOP_SECONDS:
            raise StopTimeoutError(
                f"ended after {STOP_SECONDS:g} s in the middle of a slice or a copy; nothing is lost, and the next run continues"
            )


@contextmanager
def _stop_on_signals(followers: Sequence["_Follower"]) -> Iterator[_StopSignal]:
    stop_signal = _StopSignal()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stop_signal.arrived_at = stop_signal.arrived_at or time.monotonic()
        for follower in followers:
            follower.stop()

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop_signal
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class _Context:
    """The objects that all followers share: the project, Dagster's instance, and the receivers of results."""

    project: Project
    dagster: dg.DagsterInstance
    progress: Progress
    on_result: OnResult
    failures: Failures
    watch: Watch
    metrics: FollowMetrics | None


class _Follower:
    """Follows one feed for the subscriptions that read it."""

    #: Only one feed is copied, applied or maintained at a time, as the Spark session's settings identify the
    #: writer.
    _turn = threading.Lock()

    def __init__(self, context: _Context, feed: Feed, names: Container[str]) -> None:
        self._project, self._feed, self._dagster = context.project, feed, context.dagster
        self._progress, self._on_result, self._failures = (
            context.progress,
            context.on_result,
            context.failures,
        )
        self._subscriptions = [s for s in self._project.subscriptions_of(feed) if s.name in names]
        self._stopped = threading.Event()
        self._stream: StreamedFeed | None = None
        self._report = FollowReport(self._project, feed, self._subscriptions, self._dagster, self._progress)
        self._slices, self._written = 0, {s.name: set[Name]() for s in self._subscriptions}
        #: By subscription, the tables whose copy waits; see `Materializer`.
        self._waiting_tables = {s.name: dict[Name, tuple[str, ...]]() for s in self._subscriptions}
        self._has_followed, self._pause = False, _MIN_PAUSE_SECONDS
        self._activity, self._metrics = FeedActivity(feed.source.name, feed.slot), context.metrics
        context.watch.add(self._activity)
        if (metrics := context.metrics) is not None:
            activity = self._activity
            metrics.add_feed(
                activity.source,
                activity.slot,
                lambda: activity.is_connected,
                lambda: activity.waiting_seconds,
            )
            for subscription in self._subscriptions:
                metrics.add_subscription(subscription.name)

    def stop(self) -> None:
        """End at the next commit boundary."""
        self._stopped.set()
        if (stream := self._stream) is not None:
            stream.stop()

    def follow(self) -> None:
        """Follow until stopped, or until all subscriptions have failed."""
        threading.Thread(target=self._report_cuts, daemon=True).start()
        try:
            with pool_sessions():
                self._follow_with_retries()
        finally:
            self._activity.has_ended = True

    def _follow_with_retries(self) -> None:
        with (
            self._failures.catch(*(s.name for s in self._subscriptions)),
            # Between two slices, the lock of the slot is free for other processes. Without this second lock,
            # two followers would take turns for ever.
            self._feed.source.hold_lock(f"following the slot {self._feed.slot}", _OTHER_FOLLOWER_SECONDS),
        ):
            while not self._stopped.is_set() and self._has_subscriptions():
                try:
                    self._follow()
                except PgsieveError as fault:
                    if not self._can_retry(fault):
                        raise
                    self._progress.tell(f"{fault.message}; tried again in {self._pause:g} s")
                    self._stopped.wait(self._pause)
                    self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)

    def _follow(self) -> None:
        """Copy tables that need it, then apply slice by slice until a table needs a copy again."""
        with self._turn:
            materializers = self._materializers()
            for each in materializers:
                is_open = {ids: self._are_open(ids) for ids in set(each.waiting_tables.values())}
                each.retry([name for name, ids in each.waiting_tables.items() if not is_open[ids]])
            self._for_each(materializers, Materializer.copy)
            apply_together(materializers, self._failures, unless=self._can_retry)
            self._report_results(materializers)
            self._register(materializers)
        if self._has_subscriptions():
            try:
                self._read()
            finally:
                self._send_report()

    def _register(self, materializers: Sequence[Materializer]) -> None:
        """Register new replicas in Spark's catalog; after a failure, the next copy or maintenance tries again."""
        for materializer in materializers:
            if materializer.name in self._failures:
                continue
            try:
                materializer.register()
            except PgsieveError as error:
                self._on_result(RunSummary((), (Failure((materializer.name,), error),)))

    def _can_retry(self, error: Exception) -> bool:
        """Whether the feed is followed again after this error.

        A feed that has never been followed is not, as its configuration may be wrong; nor is any after a loss of Spark.
        """
        return self._has_followed and is_transient(error) and not isinstance(error, SparkLostError)

    def _for_each(self, items: Sequence[Item], step: Callable[[Item], Result]) -> list[Result]:
        """As `Failures.for_each`; raises a transient error."""
        return self._failures.for_each(items, step, unless=self._can_retry)

    def _has_subscriptions(self) -> bool:
        return any(s.name not in self._failures for s in self._subscriptions)

    def _read(self) -> None:
        """Append and apply slices until a table has to be copied, or no subscription is left."""
        with (
            StreamedFeed(self._feed, self._project.lake.open(), self._note_progress) as stream,
            self._activity.reading(stream),
        ):
            self._stream = stream
            self._has_followed = True
            threading.Thread(target=self._stop_once_copies_can_start, args=[stream], daemon=True).start()
            if self._stopped.is_set():
                return
            for _ in stream.slices():
                with self._turn:
                    if self._apply(stream) or not self._has_subscriptions():
                        return
                    self._slices += 1
                    if self._slices >= MAINTAIN_SLICES:
                        with self._activity.exempt():
                            self._maintain()

    def _stop_once_copies_can_start(self, stream: StreamedFeed) -> None:
        """End the stream once a copy no longer has to wait; `_follow` then copies the table."""
        awaiting = list(chain.from_iterable(tables.items() for tables in self._waiting_tables.values()))
        transactions = {ids for _, ids in awaiting if ids}
        foreign, asked_at = {name for name, ids in awaiting if not ids}, time.monotonic()
        while awaiting and self._stream is stream and not self._stopped.wait(_OPEN_TRANSACTIONS_SECONDS):
            is_over = not all(map(self._are_open, transactions))
            if foreign and time.monotonic() - asked_at >= _FOREIGN_SECONDS:
                is_over, asked_at = is_over or any(map(self._can_answer, foreign)), time.monotonic()
            if is_over:
                stream.stop()
                return

    def _are_open(self, transactions: tuple[str, ...]) -> bool:
        """Whether some of these transactions are still open; true if the server does not answer."""
        with suppress(PgsieveError):  # The stream gets the same error.
            return are_transactions_open(self._feed.source, transactions)
        return True

    def _can_answer(self, name: Name) -> bool:
        """Whether the foreign servers that have rows of a table answer now."""
        with suppress(PgsieveError):
            verify_foreign_servers(self._feed.source, name)
            return True
        return False

    def _note_progress(self, _: str) -> None:
        """Record that the stream makes progress."""
        self._activity.note_progress()

    def _apply(self, stream: StreamedFeed) -> bool:
        """Append and apply the next slice; returns whether a table has to be copied."""
        task = f"follow {self._feed.slot}"
        self._progress.start(task)
        try:
            with (
                self._activity.applying(),
                span("slice", source=self._activity.source, slot=self._activity.slot),
            ):
                with self._time_step("append"), span("append"):
                    drain_result = stream.append()
                if self._metrics is not None:
                    self._metrics.count_slices(
                        self._activity.source, self._activity.slot, drain_result.slices
                    )
                self._report.add_slice(drain_result, self._send_report)
                self._activity.note_progress()
                materializers = self._materializers()
                self._for_each(materializers, self._apply_slice)
                self._pause = _MIN_PAUSE_SECONDS
        finally:
            self._progress.finish(task)
        self._report_results(materializers)
        return any(self._for_each(materializers, Materializer.has_to_copy))

    def _apply_slice(self, materializer: Materializer) -> None:
        with self._time_step("apply"):
            results = materializer.apply_slice()
        self._activity.note_progress()
        if results is not None:
            if self._metrics is not None:
                self._metrics.count_changes(materializer.name, *results)
            self._report.add_changes(materializer.name, *results)
            self._written[materializer.name] |= results[1].tables.keys()

    def _time_step(self, step: str) -> AbstractContextManager[None]:
        return nullcontext() if self._metrics is None else self._metrics.time_step(step)

    def _maintain(self) -> None:
        """Maintain the tables that have changed since the last maintenance.

        After a failure, the next attempt is after as many slices again.
        """
        lake, retention = self._project.lake.open(), self._project.retention
        self._slices = 0
        try:
            for subscription in self._subscriptions:
                written = self._written[subscription.name]
                maintain_subscription(subscription, lake, retention, no_log, written)
                written.clear()
            maintain_feed(self._feed, lake, self._project.subscriptions_of(self._feed), retention, no_log)
        except Exception:
            _logger.exception("maintenance of the followed tables has failed; it is tried again later")
        self._register(self._materializers())

    def _send_report(self) -> None:
        with self._turn:
            self._report.send()

    def _report_cuts(self) -> None:
        """Report unchanged cuts to Dagster now and then; new cuts are in the report of the slices."""
        soonest = min((s.freshness.total_seconds() / 8 for s in self._subscriptions), default=_CUT_SECONDS)
        while not self._stopped.wait(min(_CUT_SECONDS, soonest)) and not self._activity.has_ended:
            with self._turn:
                stream = self._stream
                if stream is None or not self._activity.is_connected or self._report.is_waiting:
                    continue
                freshness = Freshness(self._activity.waiting_seconds, stream.position)
                for subscription in self._subscriptions:
                    if subscription.name in self._failures:
                        continue
                    try:
                        lake = self._project.lake.open()
                        report_cut(self._dagster, subscription, lake, NAMING, freshness)
                    except Exception:
                        _logger.exception("the cut of %s could not be reported to Dagster", subscription.name)

    def _materializers(self) -> list[Materializer]:
        return self._for_each(
            self._subscriptions,
            lambda s: Materializer(
                self._project, s, self._dagster, self._progress, self._waiting_tables[s.name]
            ),
        )

    def _report_results(self, materializers: Sequence[Materializer]) -> None:
        results = summaries(materializers, self._failures)
        if notable := tuple(each for each in results if each.changed or each.problems or each.warnings):
            self._on_result(RunSummary(notable))
