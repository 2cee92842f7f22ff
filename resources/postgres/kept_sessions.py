"""Publisher sessions that are reused within a command, since a run asks many short questions.

In: conninfos. Out: sessions as good as new, for one caller at a time. A new session costs the server a
process and its catalog caches: some ten milliseconds of CPU, more than most answers. A session that was idle
for more than a moment is not reused, as a firewall may have dropped it. Raises nothing.
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

#: A session that was idle for longer is closed, and so are idle sessions beyond this number: a role may have
#: a limit of sessions.
IDLE_SECONDS, MOST = 10.0, 3
#: How long to wait for the server when it is asked to cancel a statement.
CANCEL_SECONDS = 5.0

_Session = psycopg.Connection[tuple[Any, ...]]
_KEPT: ContextVar["KeptSessions | None"] = ContextVar("sessions", default=None)


class KeptSessions:
    """Sessions that are not in use, the last used one first."""

    def __init__(self) -> None:
        self._idle: dict[Conninfo, list[tuple[float, _Session]]] = defaultdict(list)
        self._lent = set[_Session]()
        #: Gives a reused session the settings of a new one.
        self._settling = WeakKeyDictionary[_Session, str]()
        self._lock = Lock()

    def take(self, conninfo: Conninfo) -> _Session | None:
        """A session with the settings of a new one; None where none answers."""
        while True:
            with self._lock:
                if not self._idle[conninfo]:
                    return None
                since, session = self._idle[conninfo].pop()
            if time.monotonic() - since < IDLE_SECONDS:
                with suppress(psycopg.Error):  # The server has ended it meanwhile.
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
        """Have the server cancel the statements that callers wait for, perhaps for ever: the callers get an error."""
        with self._lock:
            lent = list(self._lent)
        for session in lent:
            with suppress(psycopg.Error):
                session.cancel_safe(timeout=CANCEL_SECONDS)

    def _give(self, conninfo: Conninfo, session: _Session) -> None:
        """Keep a session, unless it was lost, is within a transaction or statement, or there are enough."""
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
    """Within the block, and the same thread of work, sessions are reused."""
    kept = KeptSessions()
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
        kept.close()


def kept_sessions() -> KeptSessions | None:
    """The sessions of the enclosing block; None outside of one."""
    return _KEPT.get()
