"""The thread that follows one slot stream, for the subscriptions that the user has selected.

In: what all followers share, the stream, and the names of the subscriptions
Out: calls of `on_result` with the results of each slice

- If an error of the server or the network may go away (a transient error), the stream is followed again. But if the
  process has not followed it even once, the error ends the work.
- Copies of tables are Dagster runs. The slices are reported to Dagster every few minutes (`follow_report`).
- After a few hundred slices the changed tables are maintained (small files are compacted, and old versions
  deleted), because each slice adds a few files and commits.
- After a copy the replica is registered in Spark's catalog. If that fails, for example because its name is already
  taken, the follower reports it, and goes on.

A failure ends the work of its subscription, and is recorded. Nothing is raised.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain

import dagster as dg

from pgsieve.assets.runless_events import report_cut
from pgsieve.assets.steps.checks.freshness import Freshness
from pgsieve.assets.steps.log import no_log
from pgsieve.assets.steps.operations.maintenance import maintain_slot_stream, maintain_subscription
from pgsieve.assets.steps.records.failures import is_transient
from pgsieve.assets.steps.slot_consumption.follow import FollowedSlotStream
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.failures import Failures, Item, Result
from pgsieve.pipelines.commands.in_process import DEFAULT_NAMES
from pgsieve.pipelines.commands.materializer import Materializer
from pgsieve.pipelines.commands.results import Failure, Progress, RunSummary
from pgsieve.pipelines.commands.run import summarize_runs, transform_and_apply
from pgsieve.pipelines.following.follow_report import FollowReport
from pgsieve.pipelines.following.metrics import FollowMetrics
from pgsieve.pipelines.following.watch import (
    SlotStreamActivity,
    Watch,
)
from pgsieve.pipelines.project import Project
from pgsieve.resources.lake.delta.errors import SparkLostError
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.postgres.errors import LockHeldError
from pgsieve.resources.postgres.foreign_servers import verify_foreign_servers
from pgsieve.resources.postgres.session_pool import pool_sessions
from pgsieve.resources.postgres.waits import are_transactions_open
from pgsieve.resources.tracing import span

OnResult = Callable[[RunSummary], None]


#: The shortest and the longest pause after a transient error. The pause doubles with each error, and is short again
#: after a slice was applied.
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.5, 30.0

#: If another process follows the same slot, how long to wait for its end.
_OTHER_FOLLOWER_SECONDS = 10.0


#: A cut is an LSN, and for each replica the Delta version that equals the publisher's table at this LSN. This is the time
#: between two checks whether a cut has to be reported to Dagster. It is shorter if a subscription's `freshness` is short.
_CUT_SECONDS = 60.0


#: A copy may have to wait for transactions of other sessions. This is the time between two checks whether they have
#: ended.
_OPEN_TRANSACTIONS_SECONDS = 2.0


#: A copy may have to wait for a foreign server that does not answer. This is the time between two requests to it.
_FOREIGN_SECONDS = 60.0


#: The changed tables are maintained after this many slices.
MAINTAIN_SLICES = 500

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FollowContext:
    """What all followers share: the project, the Dagster instance, and the objects that receive results."""

    project: Project
    instance: dg.DagsterInstance
    progress: Progress
    on_result: OnResult
    failures: Failures
    watch: Watch
    metrics: FollowMetrics | None


class Follower:
    """Follows one stream, for the subscriptions of the stream that the user has selected."""

    #: Only one stream is copied, applied or maintained at a time. All streams share one Spark session, and the position
    #: (an LSN) of a commit is a setting of the session.
    _turn_lock = threading.Lock()

    def __init__(
        self, context: FollowContext, slot_stream: SlotStream, subscription_names: Container[str]
    ) -> None:
        self._project, self._slot_stream, self._instance = context.project, slot_stream, context.instance
        self._progress = context.progress
        self._on_result = context.on_result
        self._failures = context.failures
        self._subscriptions = [
            s for s in self._project.find_subscriptions(slot_stream) if s.name in subscription_names
        ]
        self._stop_event = threading.Event()
        self._stream: FollowedSlotStream | None = None
        self._report = FollowReport(
            self._project, slot_stream, self._subscriptions, self._instance, self._progress
        )
        self._slice_count = 0
        self._changed_tables_by_subscription = {s.name: set[TableName]() for s in self._subscriptions}
        #: Maps each subscription to its tables whose copy has to wait, each with the ids of the transactions for which it
        #: waits. There are no ids if it waits for a foreign server (`Materializer.waiting_tables`).
        self._waiting_tables_by_subscription = {
            s.name: dict[TableName, tuple[str, ...]]() for s in self._subscriptions
        }
        self._has_read_slot, self._pause_seconds = False, _MIN_PAUSE_SECONDS
        self._activity, self._metrics = (
            SlotStreamActivity(slot_stream.source.name, slot_stream.slot),
            context.metrics,
        )
        context.watch.add(self._activity)
        if (metrics := context.metrics) is not None:
            activity = self._activity
            metrics.add_slot_stream(
                activity.source,
                activity.slot,
                lambda: activity.is_connected,
                lambda: activity.waiting_seconds,
            )
            for subscription in self._subscriptions:
                metrics.add_subscription(subscription.name)

    def stop(self) -> None:
        """Stop following at the end of the present transaction."""
        self._stop_event.set()
        if (stream := self._stream) is not None:
            stream.stop()

    def follow(self) -> None:
        """Follow the stream until the process is stopped, or all subscriptions have failed."""
        threading.Thread(target=self._report_cuts, daemon=True).start()
        try:
            with pool_sessions():
                self._follow_with_retries()
        finally:
            self._activity.has_ended = True

    def _follow_with_retries(self) -> None:
        """Follow the stream, and follow it again after a transient error."""
        with (
            self._failures.catch(*(s.name for s in self._subscriptions)),
            # Between two slices the lock of the slot is free, so that other commands can read the slot. Without this
            # second lock, two followers of the same slot would take turns for ever.
            self._slot_stream.source.hold_lock(
                f"following the slot {self._slot_stream.slot}", _OTHER_FOLLOWER_SECONDS
            ),
            self._hold_capture(),
        ):
            while not self._stop_event.is_set() and self._has_subscriptions():
                try:
                    self._copy_and_follow()
                except PgsieveError as error:
                    if not self._can_retry(error):
                        raise
                    self._activity.note_error(error)
                    self._progress.tell(f"{error.message}; tried again in {self._pause_seconds:g} s")
                    self._stop_event.wait(self._pause_seconds)
                    self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)

    @contextmanager
    def _hold_capture(self) -> Iterator[None]:
        """Within the block, no other process follows with these capture publications. Raises LockHeldError if one does.

        It reads another slot, for another lake. Each would alter the publications for its own tables. The other's stream
        would then end, and begin again with publications that it has altered, for ever.
        """
        if self._slot_stream.filtered:
            yield
            return
        capture = self._slot_stream.capture
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    self._slot_stream.source.hold_lock(
                        f"following with the capture publication {capture}", _OTHER_FOLLOWER_SECONDS
                    )
                )
            except LockHeldError as error:
                hint = f"stop it, or give the source in one of the two configurations a `capture` other than {capture}"
                raise LockHeldError(error.message, hint=hint, sqlstate=error.sqlstate) from None
            yield

    def _copy_and_follow(self) -> None:
        """Copy the tables that need it, and then apply slice by slice until a table needs a copy again."""
        with self._turn_lock:
            materializers = self._make_materializers()
            for materializer in materializers:
                open_id_tuples = set(filter(self._are_open, set(materializer.waiting_tables.values())))
                materializer.retry(
                    [
                        name
                        for name, transaction_ids in materializer.waiting_tables.items()
                        if transaction_ids not in open_id_tuples
                    ]
                )
            self._for_each(materializers, Materializer.copy)
            transform_and_apply(materializers, self._failures, is_fatal=self._can_retry)
            self._report_results(materializers)
            self._register(materializers)
        if self._has_subscriptions():
            try:
                self._follow_slot()
            finally:
                self._send_report()

    def _register(self, materializers: Sequence[Materializer]) -> None:
        """Register new replicas in Spark's catalog.

        After a failure, the next copy and the next maintenance try it again.
        """
        for materializer in materializers:
            if materializer.name in self._failures:
                continue
            try:
                materializer.register()
            except PgsieveError as error:
                self._on_result(RunSummary((), (Failure((materializer.name,), error),)))

    def _can_retry(self, error: Exception) -> bool:
        """True if the stream is followed again after this error.

        A stream that was never followed since the start is not followed again, because its configuration may be wrong.
        After a loss of Spark, no stream is followed again.
        """
        return self._has_read_slot and is_transient(error) and not isinstance(error, SparkLostError)

    def _for_each(self, items: Sequence[Item], step: Callable[[Item], Result]) -> list[Result]:
        """As `Failures.for_each`, but a transient error is raised and not recorded."""
        return self._failures.for_each(items, step, is_fatal=self._can_retry)

    def _has_subscriptions(self) -> bool:
        return any(s.name not in self._failures for s in self._subscriptions)

    def _follow_slot(self) -> None:
        """Read the slot, and append and apply slices, until a table has to be copied or all subscriptions have failed."""
        with (
            FollowedSlotStream(self._slot_stream, self._project.lake.open(), self._note_progress) as stream,
            self._activity.record_reading(stream),
        ):
            self._stream = stream
            self._has_read_slot = True
            threading.Thread(target=self._stop_once_copies_can_start, args=[stream], daemon=True).start()
            if self._stop_event.is_set():
                return
            for _ in stream.read_slice_ends():
                with self._turn_lock:
                    if self._append_and_apply(stream) or not self._has_subscriptions():
                        return
                    self._slice_count += 1
                    if self._slice_count >= MAINTAIN_SLICES:
                        with self._activity.exempt_from_stall():
                            self._maintain()

    def _stop_once_copies_can_start(self, stream: FollowedSlotStream) -> None:
        """End the stream as soon as a copy no longer has to wait. After that, `_copy_and_follow` copies the table.

        `stream` is the object that reads the slot. This thread was started for this stream, and ends with it.
        """
        waiting_tables = list(
            chain.from_iterable(tables.items() for tables in self._waiting_tables_by_subscription.values())
        )
        awaited_id_tuples = {transaction_ids for _, transaction_ids in waiting_tables if transaction_ids}
        foreign_tables = {name for name, transaction_ids in waiting_tables if not transaction_ids}
        last_request_at = time.monotonic()
        while (
            waiting_tables
            and self._stream is stream
            and not self._stop_event.wait(_OPEN_TRANSACTIONS_SECONDS)
        ):
            can_start = not all(map(self._are_open, awaited_id_tuples))
            if foreign_tables and time.monotonic() - last_request_at >= _FOREIGN_SECONDS:
                can_start, last_request_at = (
                    can_start or any(map(self._do_servers_answer, foreign_tables)),
                    time.monotonic(),
                )
            if can_start:
                stream.stop()
                return

    def _are_open(self, transaction_ids: tuple[str, ...]) -> bool:
        """True if some of these transactions are still open, or if the server does not answer."""
        with suppress(PgsieveError):  # The stream meets the same error, and ends with it.
            return are_transactions_open(self._slot_stream.source, transaction_ids)
        return True

    def _do_servers_answer(self, name: TableName) -> bool:
        """True if the foreign servers that have rows of this table answer now."""
        with suppress(PgsieveError):
            verify_foreign_servers(self._slot_stream.source, name)
            return True
        return False

    def _note_progress(self, _: str) -> None:
        """Record that the stream makes progress."""
        self._activity.note_progress()

    def _append_and_apply(self, stream: FollowedSlotStream) -> bool:
        """Append the next slice to the change log, and apply it; returns true if a table has to be copied."""
        task = f"follow {self._slot_stream.slot}"
        self._progress.start(task)
        try:
            with (
                self._activity.record_apply(),
                span("slice", source=self._activity.source, slot=self._activity.slot),
            ):
                with self._time_step("append"), span("append"):
                    drain_result = stream.append_due_slice()
                if self._metrics is not None:
                    self._metrics.count_slices(
                        self._activity.source, self._activity.slot, drain_result.slices
                    )
                self._report.add_slice(drain_result, self._send_report)
                self._activity.note_progress()
                materializers = self._make_materializers()
                self._for_each(materializers, self._apply_slice)
                self._pause_seconds = _MIN_PAUSE_SECONDS
        finally:
            self._progress.finish(task)
        self._report_results(materializers)
        return any(self._for_each(materializers, Materializer.has_to_copy))

    def _apply_slice(self, materializer: Materializer) -> None:
        with self._time_step("apply"):
            changes_and_result = materializer.apply_slice()
        self._activity.note_progress()
        if changes_and_result is not None:
            if self._metrics is not None:
                self._metrics.count_changes(materializer.name, *changes_and_result)
            self._report.add_changes(materializer.name, *changes_and_result)
            self._changed_tables_by_subscription[materializer.name] |= changes_and_result[1].tables.keys()

    def _time_step(self, step: str) -> AbstractContextManager[None]:
        return nullcontext() if self._metrics is None else self._metrics.time_step(step)

    def _maintain(self) -> None:
        """Maintain the tables that have changed since the last maintenance.

        If it fails, it is tried again after the same number of slices.
        """
        lake, retention = self._project.lake.open(), self._project.retention
        self._slice_count = 0
        try:
            for subscription in self._subscriptions:
                changed_tables = self._changed_tables_by_subscription[subscription.name]
                maintain_subscription(subscription, lake, retention, no_log, changed_tables)
                changed_tables.clear()
            maintain_slot_stream(
                self._slot_stream,
                lake,
                self._project.find_subscriptions(self._slot_stream),
                retention,
                no_log,
            )
        except Exception:
            _logger.exception("maintenance of the followed tables has failed; it is tried again later")
        self._register(self._make_materializers())

    def _send_report(self) -> None:
        with self._turn_lock:
            self._report.send()

    def _report_cuts(self) -> None:
        """Report cuts to Dagster from time to time, even if they have not changed.

        Otherwise Dagster would show the replicas as late, although they are up to date. A cut that has changed is
        reported with the slices (`FollowReport`).
        """
        freshness_seconds = min(
            (s.freshness.total_seconds() / 8 for s in self._subscriptions), default=_CUT_SECONDS
        )
        while (
            not self._stop_event.wait(min(_CUT_SECONDS, freshness_seconds)) and not self._activity.has_ended
        ):
            with self._turn_lock:
                stream = self._stream
                if stream is None or not self._activity.is_connected or self._report.is_waiting:
                    continue
                freshness = Freshness(self._activity.waiting_seconds, stream.position)
                for subscription in self._subscriptions:
                    if subscription.name in self._failures:
                        continue
                    try:
                        lake = self._project.lake.open()
                        report_cut(self._instance, subscription, lake, DEFAULT_NAMES, freshness)
                    except Exception:
                        _logger.exception("the cut of %s could not be reported to Dagster", subscription.name)

    def _make_materializers(self) -> list[Materializer]:
        """Make an object for each subscription that has not failed. The object copies, applies, and collects the results."""
        return self._for_each(
            self._subscriptions,
            lambda s: Materializer(
                self._project, s, self._instance, self._progress, self._waiting_tables_by_subscription[s.name]
            ),
        )

    def _report_results(self, materializers: Sequence[Materializer]) -> None:
        subscription_runs = summarize_runs(materializers, self._failures)
        if runs_to_report := tuple(
            subscription_run
            for subscription_run in subscription_runs
            if subscription_run.changed or subscription_run.problems or subscription_run.warnings
        ):
            self._on_result(RunSummary(runs_to_report))
