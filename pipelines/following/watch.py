"""Watches the process of `pgsieve run --follow`: answers health checks, and ends the process if it has stalled.

In: the activity of each stream (a slot with its subscriptions), which the stream's thread records
Out: - `Health`, the answer to `/healthz`
     - StalledError, if changes are waiting and a stream makes no progress for longer than a limit

A stream may stall because another session holds a lock, because a connected server sends nothing, or because a disk does
not answer. If a server refuses connections, its stream is not stalled: it keeps trying to connect. A server that does not
answer at all is silent, and then a thread may wait for an answer for ever.
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

from pgsieve.assets.steps.slot_consumption.follow import FollowedSlotStream
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.postgres.errors import SourceSilentError
from pgsieve.resources.postgres.stream import SILENCE_SECONDS

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

#: After an idle time the server may take this long to send the first WAL. Until then its stream does not count as stalled.
_MAX_DELAY_SECONDS = 30.0
#: If a server has been silent for this time, or for a shorter `limit_seconds` of the `Watch`, its stream is not healthy.
#: SILENCE_SECONDS is the least limit, because a stream connects again only after that time.
SILENCE_LIMIT_SECONDS = 300.0


class StalledError(PgsieveError):
    """Changes are waiting, and a stream makes no progress."""


class StopTimeoutError(PgsieveError):
    """The process has to end, but a stream did not reach the end of a transaction in time."""


@dataclass
class SlotStreamActivity:
    """The activity of the thread that follows one stream. The thread writes it, and other threads read it.

    - `stream`: the object by which the thread reads the slot; None while it does not read
    - `is_exempt`: true during work that may take long, such as a copy or maintenance. The stream does not count as
      stalled in that time.
    - `has_ended`: true if the stream is no longer followed
    - `progress_count`: a number that grows with progress that `stream` does not show
    - `apply_start`: the time at which the first commit arrived that the thread now applies; if it is not known, the time
      at which the thread began to apply; None if it applies no changes
    - `last_progress_at`: the time of the last progress
    - `silent_since`: the time since which the server does not answer, if the thread cannot read the slot for this
      reason; otherwise None
    - `behind_since`: the time since which the server has WAL that was not received. It is the time of the first check
      that found this after the last progress
    """

    source: str
    slot: str
    stream: FollowedSlotStream | None = None
    is_exempt: bool = True
    has_ended: bool = False
    progress_count: int = 0
    apply_start: float | None = None
    last_progress_at: float = field(default_factory=time.monotonic)
    silent_since: float | None = None
    behind_since: float | None = None
    _answered_at: float | None = None
    _progress: tuple[int, ...] = ()

    @contextmanager
    def record_apply(self) -> Iterator[None]:
        """Within the block, the thread stores a slice (changes that it has received) in the lake, and applies it."""
        self.apply_start = (self.stream and self.stream.waiting_since) or time.monotonic()
        try:
            yield
        finally:
            self.apply_start = None
            self.progress_count += 1

    @contextmanager
    def record_reading(self, stream: FollowedSlotStream) -> Iterator[None]:
        """Within the block, the thread reads the slot by streaming replication."""
        self.silent_since = None
        self.stream, self.is_exempt, self.last_progress_at = stream, False, time.monotonic()
        try:
            yield
        finally:
            self._answered_at = stream.answered_at
            self.stream, self.is_exempt = None, True

    @contextmanager
    def exempt_from_stall(self) -> Iterator[None]:
        """Within the block, the thread does work that may take long, and does not count as stalled."""
        self.is_exempt = True
        try:
            yield
        finally:
            self.is_exempt, self.last_progress_at = False, time.monotonic()

    def note_error(self, error: PgsieveError) -> None:
        """Record that the thread could not read the slot because of this error, and will try again."""
        if not isinstance(error, SourceSilentError):
            self.silent_since, self._answered_at = None, time.monotonic()
        elif self.silent_since is None:
            self.silent_since = self._answered_at or time.monotonic()

    def note_progress(self) -> None:
        """Record progress that the stream does not show."""
        self.progress_count += 1

    @property
    def is_connected(self) -> bool:
        """True if the server has sent a message lately, or a slice is being applied.

        While the thread applies a slice, it reads no message. Another thread keeps the connection alive in that time.
        """
        answered_at = self.stream.answered_at if self.stream else None
        return answered_at is not None and (
            self.apply_start is not None or time.monotonic() - answered_at < SILENCE_SECONDS
        )

    @property
    def silent_seconds(self) -> float:
        """For how many seconds the server has not answered.

        0 if the thread cannot read the slot for another reason than silence.
        """
        silent_since = self.stream.answered_at if self.stream else self.silent_since
        return 0.0 if silent_since is None or self.has_ended else time.monotonic() - silent_since

    @property
    def waiting_seconds(self) -> float:
        """For how many seconds received changes have been waiting to be applied; 0 if none are waiting."""
        waiting_since = self.apply_start
        if waiting_since is None and self.stream is not None and self.is_connected:
            waiting_since = self.stream.waiting_since
        return 0.0 if waiting_since is None else time.monotonic() - waiting_since

    def seconds_without_progress(self) -> float:
        """For how many seconds the stream has made no progress; 0 while it does work that may take long."""
        stream = self.stream
        progress = (
            self.progress_count,
            stream.position if stream else 0,
            stream.received_bytes if stream else 0,
        )
        if progress != self._progress or self.is_exempt:
            self._progress, self.last_progress_at, self.behind_since = progress, time.monotonic(), None
        return time.monotonic() - self.last_progress_at


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to `/healthz`: the state of each stream.

    `status` is `ok`; `stalled` if received changes are waiting, and their stream has stalled; or `silent` if a server has
    not answered for long. A server that refuses connections does answer: its stream connects again by itself. A stream to
    which the server sends no changes still counts as healthy: only `Watch.check` asks the server whether it has changes.
    """

    status: str
    slot_streams: Sequence[dict[str, object]]


class Watch:
    """Watches the streams of a process, and finds those that have stalled. Any thread may call it.

    - `limit_seconds`: after this many seconds without progress a stream has stalled; None if there is no limit
    - `is_behind`: returns true if the server has WAL that the stream has not received. It raises PgsieveError if the
      server does not answer.
    """

    def __init__(self, limit_seconds: float | None, is_behind: Callable[[SlotStreamActivity], bool]) -> None:
        self._limit_seconds, self._is_behind, self._lock = limit_seconds, is_behind, threading.Lock()
        self._silence_limit_seconds = limit_seconds and max(
            min(limit_seconds, SILENCE_LIMIT_SECONDS), SILENCE_SECONDS
        )
        self._activities: list[SlotStreamActivity] = []

    def add(self, activity: SlotStreamActivity) -> None:
        """Watch another stream, too."""
        self._activities.append(activity)

    def check(self) -> None:
        """Raise StalledError if a stream has stalled."""
        for activity in self._activities:
            idle_seconds = self._seconds_without_progress(activity)
            if self._limit_seconds is None or activity.has_ended or idle_seconds < self._limit_seconds:
                continue
            if waiting_clause := self._describe_waiting_changes(activity):
                raise StalledError(
                    f'source "{activity.source}": following the slot "{activity.slot}" has made no progress for {idle_seconds:.0f} s,'
                    f" though {waiting_clause}",
                    hint="the log and pg_stat_activity show the cause; start the command again, nothing is lost;"
                    " --stall-limit is the time that it waits",
                )

    def _seconds_without_progress(self, activity: SlotStreamActivity) -> float:
        with self._lock:
            return activity.seconds_without_progress()

    def _describe_waiting_changes(self, activity: SlotStreamActivity) -> str | None:
        """A clause that says which changes are waiting, for the message of an error.

        None if no changes are waiting, or if this cannot be known because the server does not answer.
        """
        if activity.waiting_seconds:
            return "changes that arrived wait to be applied"
        has_unsent_wal = activity.is_connected and self._stays_behind(activity)
        return "the server has WAL that it does not send" if has_unsent_wal else None

    def _stays_behind(self, activity: SlotStreamActivity) -> bool:
        """True if the server has had WAL for a while that it has not sent.

        After an idle time, the server takes a moment to send the first WAL. That is not a stall.
        """
        try:
            is_behind = self._is_behind(activity)
        except PgsieveError:
            is_behind = False
        current_time = time.monotonic()
        activity.behind_since = (activity.behind_since or current_time) if is_behind else None
        min_seconds = min(self._limit_seconds or 0.0, _MAX_DELAY_SECONDS)
        return activity.behind_since is not None and current_time - activity.behind_since >= min_seconds

    def read_health(self) -> Health:
        """The state of each stream."""
        slot_stream_states, status = [], "ok"
        for activity in self._activities:
            idle_seconds = self._seconds_without_progress(activity)
            is_stalled = (
                self._limit_seconds is not None
                and activity.waiting_seconds > 0
                and idle_seconds >= self._limit_seconds
            )
            silent_seconds = activity.silent_seconds
            is_silent = (
                self._silence_limit_seconds is not None and silent_seconds >= self._silence_limit_seconds
            )
            if is_stalled or is_silent:
                status = "stalled" if is_stalled else "silent"
            slot_stream_states.append(
                {
                    "source": activity.source,
                    "slot": activity.slot,
                    "state": _describe_state(activity, is_stalled=is_stalled, is_silent=is_silent),
                    "waiting_seconds": round(activity.waiting_seconds, 1),
                    "still_seconds": round(idle_seconds, 1),
                    "silent_seconds": round(silent_seconds, 1),
                }
            )
        return Health(status, slot_stream_states)


def _describe_state(activity: SlotStreamActivity, *, is_stalled: bool, is_silent: bool) -> str:
    if activity.has_ended:
        return "ended"
    if is_stalled:
        return "stalled"
    if is_silent:
        return "the server does not answer"
    if activity.stream is None:
        return "copying or connecting"
    return "following" if activity.is_connected or activity.is_exempt else "connecting"


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server with a thread for each request, so that it can answer a health check during a scrape.

    `server_close` waits for all these threads. If Python ended while a thread runs code of the database driver, the
    process would crash.
    """

    daemon_threads = False


class _QuietHandler(WSGIRequestHandler):
    #: A connection is closed if the client sends nothing for this many seconds.
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Write nothing. The base class would write a line to stderr for each scrape."""


@contextmanager
def serve_metrics(host: str, port: int, registry: CollectorRegistry, watch: Watch) -> Iterator[int]:
    """Within the block, answer HTTP requests for /metrics and /healthz. Yields the port.

    For port 0, the system chooses a port. Raises PgsieveError if the address is not available.
    """
    metrics_app = make_wsgi_app(registry)

    def answer_request(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            metrics_response: Iterable[bytes] = metrics_app(environ, start_response)
            return metrics_response
        status, body = HTTPStatus.NOT_FOUND, '{"error": "there are /metrics and /healthz"}'
        if path == "/healthz":
            health = watch.read_health()
            status = HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
            body = json.dumps({"status": health.status, "feeds": health.slot_streams})
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [body.encode() + b"\n"]

    try:
        server = make_server(host, port, answer_request, _Server, _QuietHandler)
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
