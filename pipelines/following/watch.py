"""Watches a process that follows feeds: answers `/healthz`, and ends a stalled process.

In: the progress of each feed, from the threads that do the work. Out: `Health`, and a StalledError if changes
waited and a feed made no progress for longer than a limit. Causes are a lock of another session, a connected
server that sends nothing, or a disk that does not answer. A feed whose server cannot be reached is not
stalled: it connects again.
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

#: A connection counts as lost if no message has arrived for this long.
_SILENCE_SECONDS = 30.0


class StalledError(PgsieveError):
    """Changes wait, and a feed makes no progress."""


class BrokenOffError(PgsieveError):
    """The process has to end, but a feed has not reached a commit boundary in time."""


@dataclass
class Pulse:
    """The activity of one feed's thread; written by that thread, read by others.

    `moved` is the time of the last progress. While `unwatched`, the thread does work that may take long, such
    as a copy or maintenance.
    """

    source: str
    slot: str
    streamed: StreamedFeed | None = None
    unwatched: bool = True
    ended: bool = False
    steps: int = 0
    applying_since: float | None = None
    moved: float = field(default_factory=time.monotonic)
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
        self.streamed, self.unwatched, self.moved = streamed, False, time.monotonic()
        try:
            yield
        finally:
            self.streamed, self.unwatched = None, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block of work that may take long, in which the thread does not count as stalled."""
        self.unwatched = True
        try:
            yield
        finally:
            self.unwatched, self.moved = False, time.monotonic()

    def step(self) -> None:
        """Record progress that the stream does not show."""
        self.steps += 1

    @property
    def connected(self) -> bool:
        """Whether the server has sent a message lately, or a slice is being applied.

        During an apply this thread reads no message; another thread keeps the connection alive.
        """
        last = self.streamed.last_message_at if self.streamed else None
        return last is not None and (
            self.applying_since is not None or time.monotonic() - last < _SILENCE_SECONDS
        )

    @property
    def waiting_seconds(self) -> float:
        """How long received changes have been waiting to be applied."""
        since = self.applying_since
        if since is None and self.streamed is not None and self.connected:
            since = self.streamed.waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def still_seconds(self) -> float:
        """How long the feed has made no progress."""
        streamed = self.streamed
        progress = (self.steps, streamed.position if streamed else 0, streamed.received if streamed else 0)
        if progress != self._progress or self.unwatched:
            self._progress, self.moved = progress, time.monotonic()
        return time.monotonic() - self.moved


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of `/healthz`: whether no feed has stalled, and the state of each feed."""

    well: bool
    feeds: Sequence[dict[str, object]]


class Watch:
    """Watches the feeds of a process, from one thread.

    `behind` says whether the server has WAL that the feed has not received; it raises PgsieveError if the
    server does not answer.
    """

    def __init__(self, limit: float | None, behind: Callable[[Pulse], bool]) -> None:
        self._limit, self._behind, self._lock = limit, behind, threading.Lock()
        self._pulses: list[Pulse] = []

    def add(self, pulse: Pulse) -> None:
        """Watch another feed."""
        self._pulses.append(pulse)

    def check(self) -> None:
        """Raise StalledError if a feed has stalled."""
        for pulse in self._pulses:
            still = self._still_seconds(pulse)
            if self._limit is None or pulse.ended or still < self._limit:
                continue
            if waiting := self._waiting(pulse):
                raise StalledError(
                    f'source "{pulse.source}": following the slot "{pulse.slot}" has made no progress for {still:.0f} s,'
                    f" though {waiting}",
                    hint="the log and pg_stat_activity show the cause; start the command again, nothing is lost;"
                    " --stall-limit is the time that it waits",
                )

    def _still_seconds(self, pulse: Pulse) -> float:
        with self._lock:
            return pulse.still_seconds()

    def _waiting(self, pulse: Pulse) -> str | None:
        """The changes that wait, as the end of a sentence; None if none wait, or that is unknown."""
        if pulse.waiting_seconds:
            return "changes that arrived wait to be applied"
        if not pulse.connected:
            return None
        try:
            return "the server has WAL that it does not send" if self._behind(pulse) else None
        except PgsieveError:
            return None

    def health(self) -> Health:
        """The state of each feed."""
        feeds, well = [], True
        for pulse in self._pulses:
            still = self._still_seconds(pulse)
            stalled = self._limit is not None and pulse.waiting_seconds > 0 and still >= self._limit
            well = well and not stalled
            feeds.append(
                {
                    "source": pulse.source,
                    "slot": pulse.slot,
                    "state": _state(pulse, stalled=stalled),
                    "waiting_seconds": round(pulse.waiting_seconds, 1),
                    "still_seconds": round(still, 1),
                }
            )
        return Health(well, feeds)


def _state(pulse: Pulse, *, stalled: bool) -> str:
    if pulse.ended:
        return "ended"
    if stalled:
        return "stalled"
    if pulse.streamed is None:
        return "copying or connecting"
    return "following" if pulse.connected or pulse.unwatched else "connecting"


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server that can answer a probe during a scrape; `server_close` waits for all answers.

    Otherwise a thread could be in a driver's code at the interpreter's exit, which crashes the process.
    """

    daemon_threads = False


class _Quiet(WSGIRequestHandler):
    #: Seconds that a client has to send its request.
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Write no line, as one per scrape would be too many."""


@contextmanager
def serving(host: str, port: int, registry: CollectorRegistry, watch: Watch) -> Iterator[int]:
    """Serve /metrics and /healthz in the block; yields the port, which the system chooses for 0.

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
            status = HTTPStatus.OK if health.well else HTTPStatus.SERVICE_UNAVAILABLE
            body = json.dumps({"status": "ok" if health.well else "stalled", "feeds": health.feeds})
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [body.encode() + b"\n"]

    try:
        server = make_server(host, port, answer, _Server, _Quiet)
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
