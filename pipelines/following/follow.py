"""`pgsieve run --follow`: applies changes as they arrive, until the process is stopped.

In: the configuration
Out: calls of `on_result` with the results of each slice

A slice is the changes between two positions of a slot. A slot stream is a slot with the subscriptions that read it. For each
stream there is a thread (`follower`) that reads the slot by streaming replication. When the thread has received a slice,
it appends the slice to the change log (the lake's table of the slot's messages), and applies it to the replicas before
it appends the next one.

- SIGTERM and SIGINT end the process. It ends between two transactions; if that would take too long, it ends in the
  middle of its work.
- If a subscription fails, the others go on, and the failed one is left out until the command is started again. If all
  subscriptions of a stream have failed, its slot is no longer read.
- If changes are waiting and a stream makes no progress, the process ends with an error (`watch`). A service manager can
  then start it again.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.pipelines.commands.failures import Failures
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.commands.results import Failure, Progress, RunSummary
from pgsieve.pipelines.commands.run import select_enabled
from pgsieve.pipelines.commands.status import make_brief_status_reader
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.following.follower import FollowContext, Follower, OnResult
from pgsieve.pipelines.following.metrics import FollowMetrics
from pgsieve.pipelines.following.watch import (
    SlotStreamActivity,
    StalledError,
    StopTimeoutError,
    Watch,
    serve_metrics,
)
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.wal import read_current_lsn

#: Python runs the handlers of signals only in the main thread, and only while that thread is awake. The main thread
#: wakes up each time that this many seconds have passed.
_WAKE_UP_SECONDS = 1.0

#: If changes are waiting and a stream makes no progress for this time, it has stalled. Even the largest slice takes
#: less time.
STALL_SECONDS = 1800.0
#: After a stream has stalled, how long the other streams may take to reach the end of a transaction.
_STOP_AFTER_STALL_SECONDS = 10.0
#: After a signal, how long all streams may take to reach the end of a transaction. Kubernetes kills a process 30 seconds
#: after the signal.
STOP_SECONDS = 20.0


def follow(
    config: Config,
    subscription_configs: Sequence[SubscriptionConfig],
    progress: Progress,
    on_result: OnResult,
    *,
    metrics_address: tuple[str, int] | None = None,
    stall_seconds: float | None = STALL_SECONDS,
) -> tuple[Failure, ...]:
    """Follow the selected subscriptions until the process is stopped, or all have failed; returns the failures.

    - `on_result`: gets the results of each slice, and each failure when it happens
    - `metrics_address`: the host and port at which metrics are served, if any
    - `stall_seconds`: after this many seconds without progress a stream has stalled; None if there is no limit

    Raises SubscriptionDisabledError if all subscriptions are disabled; StalledError if a stream has stalled; and
    StopTimeoutError if a stream does not end in time after a signal. After StalledError and StopTimeoutError threads may
    still be running, so the caller has to end the process.
    """
    project = build_project(config)
    metrics = FollowMetrics(make_brief_status_reader(config)) if metrics_address else None
    stream_by_slot = {(s.source.name, s.slot): s for s in project.slot_streams.values()}
    watch = Watch(
        stall_seconds, lambda activity: _is_behind(stream_by_slot[activity.source, activity.slot], activity)
    )

    def report_failure(failure: Failure) -> None:
        if metrics is not None:
            metrics.count_failures(failure.subscriptions)
        on_result(RunSummary((), (failure,)))

    failures = Failures(report_failure)
    selected_subscriptions = [project.subscriptions[s.name] for s in subscription_configs]
    subscriptions = select_enabled(project, selected_subscriptions, failures)
    subscription_names = {subscription.name for subscription in subscriptions}
    with ExitStack() as stack:
        if metrics_address and metrics:
            # The server of the metrics starts before the followers. If its address is not available, nothing is followed.
            port = stack.enter_context(serve_metrics(*metrics_address, metrics.registry, watch))
            progress.tell(f"metrics at http://{metrics_address[0]}:{port}/metrics, health at /healthz")
        instance = stack.enter_context(open_instance(config))
        context = FollowContext(project, instance, progress, on_result, failures, watch, metrics)
        streams = project.find_slot_streams(subscriptions)
        followers = [Follower(context, stream, subscription_names) for stream in streams]
        stop_signal = stack.enter_context(_stop_on_signals(followers))
        # If a stream ran in the main thread, a signal would make Dagster end the run in progress. The threads are daemons:
        # Python does not wait for them at its end, so a thread that has stalled does not keep the process alive.
        threads = [threading.Thread(target=follower.follow, daemon=True) for follower in followers]
        for thread in threads:
            thread.start()
        try:
            while _wait_for_threads(threads, _WAKE_UP_SECONDS):
                watch.check()
                stop_signal.check()
        except StalledError:
            for follower in followers:
                follower.stop()
            _wait_for_threads(threads, _STOP_AFTER_STALL_SECONDS)
            raise
    return failures.group_by_error()


def _wait_for_threads(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Wait for the threads to end, at most this many seconds. Returns true if a thread is still working."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


def _is_behind(slot_stream: SlotStream, activity: SlotStreamActivity) -> bool:
    """True if the server has WAL that the stream has not received."""
    with slot_stream.source.connect() as connection:
        return activity.stream is not None and read_current_lsn(connection) > activity.stream.position


@dataclass
class _StopSignal:
    """The signal that ends the process. `arrived_at` is the time of the signal, or None if there was none."""

    arrived_at: float | None = None

    def check(self) -> None:
        """Raise StopTimeoutError if the streams have not ended in time; they may wait for something that never happens."""
        if self.arrived_at is not None and time.monotonic() - self.arrived_at >= STOP_SECONDS:
            raise StopTimeoutError(
                f"ended after {STOP_SECONDS:g} s in the middle of a slice or a copy; nothing is lost, and the next run continues"
            )


@contextmanager
def _stop_on_signals(followers: Sequence[Follower]) -> Iterator[_StopSignal]:
    """Within the block, SIGTERM and SIGINT stop the followers."""
    stop_signal = _StopSignal()

    def receive_signal(_number: int, _frame: FrameType | None) -> None:
        stop_signal.arrived_at = stop_signal.arrived_at or time.monotonic()
        for follower in followers:
            follower.stop()

    handlers_by_number = {
        signal_number: signal.signal(signal_number, receive_signal)
        for signal_number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop_signal
    finally:
        for signal_number, handler in handlers_by_number.items():
            signal.signal(signal_number, handler)
