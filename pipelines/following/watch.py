"""Watches a process that follows feeds: the answers of `/healthz`, and the end of a stalled process.

In: the progress of each feed, from the threads that do the work. Out: `Health`, and a StalledError where
something waited and nothing moved for longer than a limit. Another session holds a lock, a connected server
sends nothing, or a disk does not answer. A feed whose server cannot be reached is not stalled: it connects again.
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

#: A connection on which nothing has arrived for this long counts as lost.
_SILENCE_SECONDS = 30.0


class StalledError(PgsieveError):
    """Something waits, and nothing moves."""


class BrokenOffError(PgsieveError):
    """The process has to end, and a feed has reached no commit boundary in time."""


@dataclass
class Pulse:
    """The activity of one feed's thread; written by that thread, read by others.

    `moved` is when something last moved. While `unwatched`, the thread does work that may legitimately take
    long: a copy, maintenance.
    """

    source: str
    slot: str
    streamed: StreamedFeed | None = None
    unwatched: bool = True
    ended: bool = False
    steps: int = 0
    applying_since: float | None = None
    moved: float = field(default_factory=time.monotonic)
    _seen: tuple[int, ...] = ()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Within the block a received slice is appended and applied."""
        self.applying_since = (self.streamed and self.streamed.waiting_since) or time.monotonic()
        try:
            yield
        finally:
            self.applying_since = None
            self.steps += 1

    @contextmanager
    def watched(self, streamed: StreamedFeed) -> Iterator[None]:
        """Within the block the slot is read by streaming replication."""
        self.streamed, self.unwatched, self.moved = streamed, False, time.monotonic()
        try:
            yield
        finally:
            self.streamed, self.unwatched = None, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block the thread does work that may take long, and does not count as stalled."""
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
        """Whether the server has sent something lately."""
        last = self.streamed.last_message_at if self.streamed else None
        # While a slice is applied the stream is not read here: its own thread keeps the connection.
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
        """How long nothing has moved."""
        streamed = self.streamed
        seen = (self.steps, streamed.position if streamed else 0, streamed.received if streamed else 0)
        if seen != self._seen or self.unwatched:
            self._seen, self.moved = seen, time.monotonic()
        return time.monotonic() - self.moved


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of `/healthz`: whether all is well, and each feed's part."""

    well: bool
    feeds: Sequence[dict[str, object]]


class Watch:
    """The feeds of a process, watched by one thread.

    `behind` says whether the server has WAL that the feed has not received; it raises PgsieveError where the
    server does not answer.
    """

    def __init__(self, limit: float | None, behind: Callable[[Pulse], bool]) -> None:
        self._limit, self._behind, self._lock = limit, behind, threading.Lock()
        self._pulses: list[Pulse] = []

    def add(self, pulse: Pulse) -> None:
        """Watch another feed."""
        self._pulses.append(pulse)

    def check(self) -> None:
        """Raise StalledError where a feed has stalled."""
        for pulse in self._pulses:
            still = self._still_seconds(pulse)
            if self._limit is None or pulse.ended or still < self._limit:
                continue
            if waiting := self._waiting(pulse):
                raise StalledError(
                    f'source "{pulse.source}": nothing has moved for {still:.0f} s in following the slot "{pulse.slot}",'
                    f" though {waiting}",
                    hint="the log and pg_stat_activity say what it waits for; start it again, nothing is lost;"
                    " --stall-limit says how long it waits",
                )

    def _still_seconds(self, pulse: Pulse) -> float:
        with self._lock:
            return pulse.still_seconds()

    def _waiting(self, pulse: Pulse) -> str | None:
        """What waits; None where nothing waits, or where that is unknown."""
        if pulse.waiting_seconds:
            return "changes that arrived wait to be applied"
        if not pulse.connected:
            return None
        try:
            return "the server has WAL that it does not send" if self._behind(pulse) else None
        except PgsieveError:
            return None

    def health(self) -> Health:
        """The activity of each feed."""
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
    """An HTTP server that can answer a probe during a scrape; `close` waits for all answers.

    A thread that is within a driver's code when the interpreter ends would crash the process.
    """

    daemon_threads = False


class _Quiet(WSGIRequestHandler):
    #: Seconds that a client has to send its request.
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Drops the line: one per scrape would be too many."""


@contextmanager
def serving(host: str, port: int, registry: CollectorRegistry, watch: Watch) -> Iterator[int]:
    """Serve /metrics and /healthz in the block; returns the port, which the system chooses for 0.

    Raises PgsieveError where the address is not available.
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
