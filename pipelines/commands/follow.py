"""`pgsieve run --follow`: repeat what a run does, as changes arrive, until it is stopped.

Each feed has a thread, which reads it through the streaming replication protocol. The changes of a slice are applied
before the next slice is appended. SIGTERM and SIGINT end it at a commit boundary. A subscription that fails is
left out until the command is started again. The others go on; after the last one of a feed, the feed is not read any more.
A
fault of the server or the network that passes is no failure: once a feed has been followed, it is followed again.
Copies are Dagster runs. Slices are reported to Dagster every few minutes (`pipelines/commands/follow_report.py`).
Every few hundred slices the follower maintains what they wrote, as each slice leaves a few more files and commits.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType

import dagster as dg

from pgsieve.assets.dagster_names import Name
from pgsieve.assets.steps.log import quiet
from pgsieve.assets.steps.operations.maintenance import maintain_feed, maintain_subscription
from pgsieve.assets.steps.records.failures import passes
from pgsieve.assets.steps.slot_consumption.follow import StreamedFeed
from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.failures import Failures, Part, Result
from pgsieve.pipelines.commands.follow_report import FollowReport
from pgsieve.pipelines.commands.results import Failure, Progress, RunSummary
from pgsieve.pipelines.commands.run import Materializer, enabled_ones, instance, summaries
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import Project, project
from pgsieve.resources.lake.errors import SparkLostError

Tell = Callable[[RunSummary], None]

#: The system may give a signal to any thread; Python's handler runs in the main one, once that is awake.
_AWAKE_SECONDS = 1.0
#: Between a fault that passes and the next attempt; doubled each time, until a slice is applied.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0

#: After so many slices the tables that they wrote are maintained.
MAINTAIN_SLICES = 500

_logger = logging.getLogger(__name__)


def follow(
    config: Config, selected: Sequence[SubscriptionConfig], progress: Progress, tell: Tell
) -> tuple[Failure, ...]:
    """Follow the selected subscriptions until stopped, or until all have failed; which ones failed.

    `tell` gets what was done, one slice at a time, and each failure when it happens. Raises SubscriptionDisabledError
    where every subscription is disabled.
    """
    declared = project(config)
    failures = Failures(lambda failure: tell(RunSummary((), (failure,))))
    subscriptions = enabled_ones(declared, [declared.subscriptions[s.name] for s in selected], failures)
    feeds, names = declared.feeds_of(subscriptions), {s.name for s in subscriptions}
    with instance(config) as dagster, ThreadPoolExecutor(max(1, len(feeds))) as pool:
        followers = [_Follower(declared, feed, names, dagster, progress, tell, failures) for feed in feeds]
        with _stopped_by_signals(followers):
            # Not in the main thread: there Dagster would end a run under way on the signal.
            working = {pool.submit(follower.follow) for follower in followers}
            while working:
                working = wait(working, _AWAKE_SECONDS).not_done
    return failures.listed()


@contextmanager
def _stopped_by_signals(followers: Sequence["_Follower"]) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        for follower in followers:
            follower.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Follower:
    """One feed, and the subscriptions that read it."""

    #: Only one slice is processed at a time, of whatever feed: a session's settings say whose writes they are.
    _turn = threading.Lock()

    def __init__(
        self,
        declared: Project,
        feed: Feed,
        names: set[str],
        dagster: dg.DagsterInstance,
        progress: Progress,
        tell: Tell,
        failures: Failures,
    ) -> None:
        self._declared, self._feed, self._dagster = declared, feed, dagster
        self._progress, self._tell, self._failures = progress, tell, failures
        self._subscriptions = [s for s in declared.reading(feed) if s.name in names]
        self._stopped = threading.Event()
        self._streamed: StreamedFeed | None = None
        self._report = FollowReport(declared, feed, self._subscriptions, dagster, progress)
        self._slices, self._written = 0, {s.name: set[Name]() for s in self._subscriptions}
        self._has_followed, self._pause = False, _PAUSE_SECONDS

    def stop(self) -> None:
        """End at the next commit boundary."""
        self._stopped.set()
        if (streamed := self._streamed) is not None:
            streamed.stop()

    def follow(self) -> None:
        """Follow until stopped, or until all subscriptions have failed."""
        with self._failures.of(*(s.name for s in self._subscriptions)):
            while not self._stopped.is_set() and self._going_on():
                try:
                    self._follow()
                except PgsieveError as fault:
                    if not self._tries_again(fault):
                        raise
                    self._progress.tell(f"{fault.message}; tried again in {self._pause:g} s")
                    self._stopped.wait(self._pause)
                    self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _follow(self) -> None:
        """Copy what needs a copy, then apply slice by slice until a table needs one again."""
        with self._turn:
            started = self._materializers()
            self._each(started, Materializer.copy)
            self._each(started, Materializer.apply)
            self._tell_of(started)
        if self._going_on():
            try:
                self._read()
            finally:
                self._tell_dagster()

    def _tries_again(self, error: Exception) -> bool:
        """Whether the same may succeed later: what never worked may be wrong, and a Spark that is lost stays so."""
        return self._has_followed and passes(error) and not isinstance(error, SparkLostError)

    def _each(self, parts: Sequence[Part], step: Callable[[Part], Result]) -> list[Result]:
        """As of Failures; raises a fault that passes."""
        return self._failures.each(parts, step, unless=self._tries_again)

    def _going_on(self) -> bool:
        return any(s.name not in self._failures for s in self._subscriptions)

    def _read(self) -> None:
        """Append and apply slices until a table has to be copied, or no subscription is left."""
        with StreamedFeed(self._feed, self._declared.lake.open(), quiet) as streamed:
            self._streamed = streamed
            self._has_followed = True
            if self._stopped.is_set():
                return
            for _ in streamed.slices():
                with self._turn:
                    if self._apply(streamed) or not self._going_on():
                        return
                    self._slices += 1
                    if self._slices >= MAINTAIN_SLICES:
                        self._maintain()

    def _apply(self, streamed: StreamedFeed) -> bool:
        """Append and apply the slice that is due; return whether a table has to be copied."""
        task = f"follow {self._feed.slot}"
        self._progress.start(task)
        try:
            self._report.appended(streamed.append(), self._tell_dagster)
            applied = self._materializers()
            self._each(applied, self._apply_slice)
            self._pause = _PAUSE_SECONDS
        finally:
            self._progress.finish(task)
        self._tell_of(applied)
        return any(self._each(applied, Materializer.has_to_copy))

    def _apply_slice(self, materializer: Materializer) -> None:
        if (done := materializer.apply_slice()) is not None:
            self._report.applied(materializer.name, *done)
            self._written[materializer.name] |= done[1].tables.keys()

    def _maintain(self) -> None:
        """Maintain what the slices since the last time wrote; what fails is tried again after as many."""
        lake, retention = self._declared.lake.open(), self._declared.retention
        self._slices = 0
        try:
            for subscription in self._subscriptions:
                written = self._written[subscription.name]
                maintain_subscription(subscription, lake, retention, quiet, written)
                written.clear()
            maintain_feed(self._feed, lake, self._declared.reading(self._feed), retention, quiet)
        except Exception:
            _logger.exception("what was followed is not maintained yet")

    def _tell_dagster(self) -> None:
        with self._turn:
            self._report.tell()

    def _materializers(self) -> list[Materializer]:
        return self._each(
            self._subscriptions, lambda s: Materializer(self._declared, s, self._dagster, self._progress)
        )

    def _tell_of(self, materializers: Sequence[Materializer]) -> None:
        done = summaries(materializers, self._failures)
        if changed := tuple(each for each in done if each.changed or each.problems):
            self._tell(RunSummary(changed))
