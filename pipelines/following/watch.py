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
class Pulse:
    """The activity of one feed's thread, which writes it; other threads read it.

    `progressed_at` is the time of the last progress. `behind_since` is the time of the first look after it that found
    WAL at the server which the feed has not received. `is_exempt` is true during work that may take long, such
    as a copy or maintenance.
    """

    source: str
    slot: str
    streamed: StreamedFeed | None = None
    is_exempt: bool = True
    ended: bool = False
    steps: int = 0
    applying_since: float | None = None
    progressed_at: float = field(default_factory=time.monotonic)
    behind_since: float | None = None
    _progress: tuple[int, ...] = ()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """A block in which the thread appends and applies a received slice."""
        self.applying_since = (self.streamed and self.streamed.waiting_since) or time.monotonic()
        try:
            yield
        finally:
            self.applying_since = None
            self.steps += 1

    @contextmanager
    def watched(self, streamed: StreamedFeed) -> Iterator[None]:
        """A block in which the thread reads the slot by streaming replication."""
        self.streamed, self.is_exempt, self.progressed_at = streamed, False, time.monotonic()
        try:
            yield
        finally:
            self.streamed, self.is_exempt = None, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block of work that may take long, in which the thread does not count as stalled."""
        self.is_exempt = True
        try:
            yield
        finally:
            self.is_exempt, self.progressed_at = False, time.monotonic()

    def note_progress(self) -> None:
        """Record progress that the stream does not show."""
        self.steps += 1

    @property
    def connected(self) -> bool:
        """Whether the server has sent a message lately, or a slice is being applied.

        During an apply this thread reads no message; another thread keeps the connection alive.
        """
        last = self.streamed.last_message_at if self.streamed else None
        return last is not None and (
            self.applying_since is not None or time.monotonic() - last < _MAX_SILENCE_SECONDS
        )

    @property
    def waiting_seconds(self) -> float:
        """How long received changes have been waiting to be applied."""
        since = self.applying_since
        if since is None and self.streamed is not None and self.connected:
            since = self.streamed.waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def seconds_without_progress(self) -> float:
        """How long the feed has made no progress; 0 while it is exempt."""
        streamed = self.streamed
        progress = (self.steps, streamed.position if streamed else 0, streamed.received if streamed else 0)
        if progress != self._progress or self.is_exempt:
            self._progress, self.progressed_at, self.behind_since = progress, time.monotonic(), None
        return time.monotonic() - self.progressed_at


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of `/healthz`: the state of each feed; `is_healthy` if none has stalled."""

    is_healthy: bool
    feeds: Sequence[dict[str, object]]


class Watch:
    """Finds stalled feeds of a process; any thread may ask.

    `is_behind` says whether the server has WAL that the feed has not received; it raises PgsieveError if the
    server does not answer.
    """

    def __init__(self, limit: float | None, is_behind: Callable[[Pulse], bool]) -> None:
        self._limit, self._is_behind, self._lock = limit, is_behind, threading.Lock()
        self._pulses: list[Pulse] = []

    def add(self, pulse: Pulse) -> None:
        """Watch another feed."""
        self._pulses.append(pulse)

    def check(self) -> None:
        """Raise StalledError if a feed has stalled."""
        for pulse in self._pulses:
            idle_seconds = self._seconds_without_progress(pulse)
            if self._limit is None or pulse.ended or idle_seconds < self._limit:
                continue
            if waiting := self._waiting_changes(pulse):
                raise StalledError(
                    f'source "{pulse.source}": following the slot "{pulse.slot}" has made no progress for {idle_seconds:.0f} s,'
                    f" though {waiting}",
                    hint="the log and pg_stat_activity show the cause; start the command again, nothing is lost;"
                    " --stall-limit is the time that it waits",
                )

    def _seconds_without_progress(self, pulse: Pulse) -> float:
        with self._lock:
            return pulse.seconds_without_progress()

    def _waiting_changes(self, pulse: Pulse) -> str | None:
        """A clause that says which changes wait; None if none wait, or this is unknown."""
        if pulse.waiting_seconds:
            return "changes that arrived wait to be applied"
        is_silent = pulse.connected and self._stays_behind(pulse)
        return "the server has WAL that it does not send" if is_silent else None

    def _stays_behind(self, pulse: Pulse) -> bool:
        """Whether the server has had unsent WAL for a while.

        After an idle time the first WAL is unsent for a moment, too, and that is no stall.
        """
        try:
            is_behind = self._is_behind(pulse)
        except PgsieveError:
            is_behind = False
        now = time.monotonic()
        pulse.behind_since = (pulse.behind_since or now) if is_behind else None
        patience = min(self._limit or 0.0, _MAX_SILENCE_SECONDS)
        return pulse.behind_since is not None and now - pulse.behind_since >= patience

    def health(self) -> Health:
        """The state of each feed."""
        feeds, is_healthy = [], True
        for pulse in self._pulses:
            idle_seconds = self._seconds_without_progress(pulse)
            stalled = self._limit is not None and pulse.waiting_seconds > 0 and idle_seconds >= self._limit
            is_healthy = is_healthy and not stalled
            feeds.append(
                {
                    "source": pulse.source,
                    "slot": pulse.slot,
                    "state": _state(pulse, stalled=stalled),
                    "waiting_seconds": round(pulse.waiting_seconds, 1),
                    "still_seconds": round(idle_seconds, 1),
                }
            )
        return Health(is_healthy, feeds)


def _state(pulse: Pulse, *, stalled: bool) -> str:
    if pulse.ended:
        return "ended"
    if stalled:
        return "stalled"
    if pulse.streamed is None:
        return "copying or connecting"
    return "following" if pulse.connected or pulse.is_exempt else "connecting"


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
