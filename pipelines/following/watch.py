"""Watches a process that follows feeds: answers `/healthz`, and ends a stalled process.

In: the progress of each feed, from the threads that do the work. Out: `Health`, and a StalledError if changes
wait and a feed makes no progress for longer than a limit. Possible causes are a lock of another session, a
connected server that sends nothing, and a disk that does not answer. A feed whose server cannot be reached
is not stalled: it connects again.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from pgsieve.assets.steps.slot_consumption.follow import StreamedFeed
from pgsieve.decoding.errors import PgsieveError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

#: A connection without a message for this long counts as lost.
_MAX_SILENCE_SECONDS = 30.0


class StalledError(PgsieveError):
    """Changes wait, and a feed makes no progress."""


class StopTimeoutError(PgsieveError):
    """The process has to end, but a feed has not reached a commit boundary in time."""


@dataclass
class FeedActivity:
    """The activity of the thread that follows one feed. Only this thread writes it; other threads read it.

    `progress_count` grows with each progress that `stream` does not show. `progressed_at` is the time of the last
    progress. `behind_since` is the time of the first check after the last progress that found the server with
    unreceived WAL. `is_exempt` is true during work that may take long, such as a copy or maintenance.
    """

    source: str
    slot: str
    stream: StreamedFeed | None = None
    is_exempt: bool = True
    has_ended: bool = False
    progress_count: int = 0
    applying_since: float | None = None
    progressed_at: float = field(default_factory=time.monotonic)
    behind_since: float | None = None
    _progress: tuple[int, ...] = ()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """A block in which the thread appends and applies a received slice."""
        self.applying_since = (self.stream and self.stream.waiting_since) or time.monotonic()
        try:
            yield
        finally:
            self.applying_since = None
            self.progress_count += 1

    @contextmanager
    def reading(self, stream: StreamedFeed) -> Iterator[None]:
        """A block in which the thread reads the slot by streaming replication."""
        self.stream, self.is_exempt, self.progressed_at = stream, False, time.monotonic()
        try:
            yield
        finally:
            self.stream, self.is_exempt = None, True

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """A block of work that may take long, in which the thread does not count as stalled."""
        self.is_exempt = True
        try:
            yield
        finally:
            self.is_exempt, self.progressed_at = False, time.monotonic()

    def note_progress(self) -> None:
        """Record progress that the stream does not show."""
        self.progress_count += 1

    @property
    def is_connected(self) -> bool:
        """Whether the server has sent a message lately, or a slice is being applied.

        During an apply this thread reads no message; another thread keeps the connection alive.
        """
        last = self.stream.last_message_at if self.stream else None
        return last is not None and (
            self.applying_since is not None or time.monotonic() - last < _MAX_SILENCE_SECONDS
        )

    @property
    def waiting_seconds(self) -> float:
        """How long received changes have been waiting to be applied."""
        start_of_apply = self.applying_since
        if start_of_apply is None and self.stream is not None and self.is_connected:
            start_of_apply = self.stream.waiting_since
        return 0.0 if start_of_apply is None else time.monotonic() - start_of_apply

    def seconds_without_progress(self) -> float:
        """How long the feed has made no progress; 0 while it is exempt."""
        stream = self.stream
        progress = (self.progress_count, stream.position if stream else 0, stream.received if stream else 0)
        if progress != self._progress or self.is_exempt:
            self._progress, self.progressed_at, self.behind_since = progress, time.monotonic(), None
        return time.monotonic() - self.progressed_at


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of `/healthz`: the state of each feed; `is_healthy` if none has stalled."""

    is_healthy: bool
    feeds: Sequence[dict[str, object]]


class Watch:
    """Finds the stalled feeds of a process; any thread may call it.

    `is_behind` says whether the server has WAL that the feed has not received; it raises PgsieveError if the
    server does not answer.
    """

    def __init__(self, limit: float | None, is_behind: Callable[[FeedActivity], bool]) -> None:
        self._limit, self._is_behind, self._lock = limit, is_behind, threading.Lock()
        self._activities: list[FeedActivity] = []

    def add(self, activity: FeedActivity) -> None:
        """Watch another feed."""
        self._activities.append(activity)

    def check(self) -> None:
        """Raise StalledError if a feed has stalled."""
        for activity in self._activities:
            idle_seconds = self._seconds_without_progress(activity)
            if self._limit is None or activity.has_ended or idle_seconds < self._limit:
                continue
            if waiting := self._waiting_changes(activity):
                raise StalledError(
                    f'source "{activity.source}": following the slot "{activity.slot}" has made no progress for {idle_seconds:.0f} s,'
                    f" though {waiting}",
                    hint="the log and pg_stat_activity show the cause; start the command again, nothing is lost;"
                    " --stall-limit is the time that it waits",
                )

    def _seconds_without_progress(self, activity: FeedActivity) -> float:
        with self._lock:
            return activity.seconds_without_progress()

    def _waiting_changes(self, activity: FeedActivity) -> str | None:
        """A clause that says which changes wait; None if no changes wait, or if it is unknown whether any wait."""
        if activity.waiting_seconds:
            return "changes that arrived wait to be applied"
        is_silent = activity.is_connected and self._stays_behind(activity)
        return "the server has WAL that it does not send" if is_silent else None

    def _stays_behind(self, activity: FeedActivity) -> bool:
        """Whether the server has had unsent WAL for a while.

        After an idle time the first WAL is unsent for a moment, too, and that is no stall.
        """
        try:
            is_behind = self._is_behind(activity)
        except PgsieveError:
            is_behind = False
        time_of_check = time.monotonic()
        activity.behind_since = (activity.behind_since or time_of_check) if is_behind else None
        patience = min(self._limit or 0.0, _MAX_SILENCE_SECONDS)
        return activity.behind_since is not None and time_of_check - activity.behind_since >= patience

    def health(self) -> Health:
        """The state of each feed."""
        feeds, is_healthy = [], True
        for activity in self._activities:
            idle_seconds = self._seconds_without_progress(activity)
            stalled = self._limit is not None and activity.waiting_seconds > 0 and idle_seconds >= self._limit
            is_healthy = is_healthy and not stalled
            feeds.append(
                {
                    "source": activity.source,
                    "slot": activity.slot,
                    "state": _state(activity, stalled=stalled),
                    "waiting_seconds": round(activity.waiting_seconds, 1),
                    "still_seconds": round(idle_seconds, 1),
                }
            )
        return Health(is_healthy, feeds)


def _state(activity: FeedActivity, *, stalled: bool) -> str:
    if activity.has_ended:
        return "ended"
    if stalled:
        return "stalled"
    if activity.stream is None:
        return "copying or connecting"
    return "following" if activity.is_connected or activity.is_exempt else "connecting"


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server that can answer a probe during a scrape; `server_close` waits for all answers.

    Python's exit while a thread is in a driver's code would crash the process.
    """

    daemon_threads = False


class _QuietHandler(WSGIRequestHandler):
    #: Seconds that a client has to send its request.
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Write no line, as one per scrape would be too many."""


@contextmanager
def serve_metrics(host: str, port: int, registry: CollectorRegistry, watch: Watch) -> Iterator[int]:
    """Serve /metrics and /healthz during the block; yields the port. For port 0 the system chooses one.

    Raises PgsieveError if the address is not available.
    """
    metrics = make_wsgi_app(registry)

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            answered: Iterable[bytes] = metrics(environ, start_response)
            return answered
        status, body = HTTPStatus.NOT_FOUND, '{"error": "there are /metrics and /healthz"}'
        if path == "/healthz":
            health = watch.health()
            status = HTTPStatus.OK if health.is_healthy else HTTPStatus.SERVICE_UNAVAILABLE
            body = json.dumps({"status": "ok" if health.is_healthy else "stalled", "feeds": health.feeds})
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [body.encode() + b"\n"]

    try:
        server = make_server(host, port, answer, _Server, _QuietHandler)
    except OSError as error:
        raise PgsieveError(
            f"{host}:{port} cannot be listened on: {error.strerror}",
            hint="choose another --metrics-port or --metrics-host",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
