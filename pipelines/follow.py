"""`pgsieve run --follow`: materialise the same assets as a run again and again, as changes arrive, until stopped.

Each feed is read by a thread of its own through the streaming replication protocol; what a slice changes is
applied before the next one is appended. SIGTERM and SIGINT end it at a commit boundary.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType

import dagster as dg

from assets.change_log import change_log_asset
from assets.steps.initial_sync import tables_to_copy
from assets.steps.streaming import StreamedFeed
from assets.steps.subscription import Feed
from pipelines.config import Config, SubscriptionConfig
from pipelines.project import Project, project
from pipelines.results import Progress, RunSummary
from pipelines.run import Materializer, instance, materialize

Tell = Callable[[RunSummary], None]


def follow(config: Config, selected: Sequence[SubscriptionConfig], progress: Progress, tell: Tell) -> None:
    """Follow the selected subscriptions; `tell` gets what was done, a slice at a time.

    Raises PgsieveError, with everything durable so far kept.
    """
    declared = project(config)
    subscriptions = [declared.subscriptions[s.name] for s in selected]
    feeds = declared.feeds_of(subscriptions)
    names = {s.name for s in subscriptions}
    with instance(config) as dagster, ThreadPoolExecutor(len(feeds)) as pool:
        followers = [_Follower(declared, feed, names, dagster, progress, tell) for feed in feeds]
        with _stopped_by_signals(followers):
            # Not in the main thread: there Dagster would end a run under way on the signal.
            following = [pool.submit(follower.follow) for follower in followers]
            _wait(following, followers)


def _wait(following: Sequence[Future[None]], followers: Sequence["_Follower"]) -> None:
    """Until all are stopped; when one fails, the others are."""
    try:
        for future in wait(following, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        for follower in followers:
            follower.stop()
    for future in following:
        future.result()


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

    #: One slice is worked on at a time, whatever feed it is of: writes of a session are told apart by settings.
    _turn = threading.Lock()

    def __init__(
        self,
        declared: Project,
        feed: Feed,
        names: set[str],
        dagster: dg.DagsterInstance,
        progress: Progress,
        tell: Tell,
    ) -> None:
        self._declared, self._feed, self._dagster = declared, feed, dagster
        self._progress, self._tell = progress, tell
        self._subscriptions = [s for s in declared.reading(feed) if s.name in names]
        self._stopped = threading.Event()
        self._streamed: StreamedFeed | None = None

    def stop(self) -> None:
        """End at the next commit boundary."""
        self._stopped.set()
        if (streamed := self._streamed) is not None:
            streamed.stop()

    def follow(self) -> None:
        """Copy what needs a copy, then apply slice by slice until a table needs one again."""
        while not self._stopped.is_set():
            with self._turn:
                started = self._materializers()
                for each in started:
                    each.copy()
                    each.apply()
                self._tell_of(started)
            with StreamedFeed(self._feed, self._declared.lake.open(), _quiet) as streamed:
                self._streamed = streamed
                if self._stopped.is_set():
                    return
                for _ in streamed.slices():
                    with self._turn:
                        if self._apply(streamed):
                            break

    def _apply(self, streamed: StreamedFeed) -> bool:
        """Append and apply the slice that is due; return whether a table has to be copied."""
        asset = change_log_asset(self._feed, self._subscriptions, streamed.append)
        materialize(self._dagster, self._declared, [asset], self._progress, f"follow {self._feed.slot}")
        applied = self._materializers()
        for each in applied:
            each.apply()
        self._tell_of(applied)
        return any(tables_to_copy(each.subscription, each.lake) for each in applied)

    def _materializers(self) -> list[Materializer]:
        return [Materializer(self._declared, s, self._dagster, self._progress) for s in self._subscriptions]

    def _tell_of(self, materializers: Sequence[Materializer]) -> None:
        done = [each.summary() for each in materializers]
        if changed := tuple(each for each in done if each.changed or each.problems):
            self._tell(RunSummary(changed))


def _quiet(_: str) -> None:
    """Dagster's log has it."""
