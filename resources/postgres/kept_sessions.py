"""Sessions of publishers that are used again within a command, since a run asks many short questions.

In: conninfos. Out: sessions that are as new, one user at a time. To open one costs the server a process and its catalog caches,
some ten milliseconds of its processor: more than most answers. One that was idle for longer than a moment is not used: a
firewall may have forgotten it. Raises nothing.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus

from pgsieve.resources.postgres.sessions import Conninfo, settle_again

#: A session that was idle for longer is closed, and what more than so many are idle: a role may have a limit of sessions.
IDLE_SECONDS, MOST = 10.0, 3
#: So long the server is waited for that is asked to end a statement.
CANCEL_SECONDS = 5.0

_Session = psycopg.Connection[tuple[Any, ...]]
_KEPT: ContextVar["KeptSessions | None"] = ContextVar("sessions", default=None)


class KeptSessions:
    """Sessions that nobody uses now, the one that was used last first."""

    def __init__(self) -> None:
        self._idle: dict[Conninfo, list[tuple[float, _Session]]] = defaultdict(list)
        self._lent = set[_Session]()
        #: What gives a session that was used again the settings of a new one.
        self._settling = WeakKeyDictionary[_Session, str]()
        self._lock = Lock()

    def take(self, conninfo: Conninfo) -> _Session | None:
        """A session whose settings are those of a new one; None where there is none that answers."""
        while True:
            with self._lock:
                if not self._idle[conninfo]:
                    return None
                since, session = self._idle[conninfo].pop()
            if time.monotonic() - since < IDLE_SECONDS:
                with suppress(psycopg.Error):  # It was ended meanwhile.
                    self._settling[session] = settle_again(session, self._settling.get(session))
                    return session
            session.close()

    @contextmanager
    def lending(self, conninfo: Conninfo, session: _Session) -> Iterator[None]:
        """Keep a session after the block, unless the block fails."""
        with self._lock:
            self._lent.add(session)
        try:
            yield
        except BaseException:
            session.close()
            raise
        finally:
            with self._lock:
                self._lent.discard(session)
        self._give(conninfo, session)

    def cancel(self) -> None:
        """Have the server end the statements that somebody waits for, maybe for ever: with an error for who waits."""
        with self._lock:
            lent = list(self._lent)
        for session in lent:
            with suppress(psycopg.Error):
                session.cancel_safe(timeout=CANCEL_SECONDS)

    def _give(self, conninfo: Conninfo, session: _Session) -> None:
        """Keep a session, unless it was lost, was left amid something, or there are enough."""
        if not session.closed and session.info.transaction_status == TransactionStatus.IDLE:
            with self._lock:
                if len(idle := self._idle[conninfo]) < MOST:
                    idle.append((time.monotonic(), session))
                    return
        session.close()

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            sessions = [session for idle in self._idle.values() for _, session in idle]
            self._idle.clear()
        for session in sessions:
            session.close()


@contextmanager
def sessions_kept() -> Iterator[None]:
    """Within the block, and the same thread of work, sessions are used again."""
    kept = KeptSessions()
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
        kept.close()


def kept_sessions() -> KeptSessions | None:
    """Those of the block around; None where there is none."""
    return _KEPT.get()
