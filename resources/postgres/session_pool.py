"""Keeps a pool of publisher sessions, which a command uses again for its many short queries.

In: conninfos.
Out: sessions with the settings of a new session. A session belongs to only one caller at a time.

A new session costs the server a new process with new catalog caches. That is some ten milliseconds of processor
time, which is more than most queries take. Raises nothing.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus

from pgsieve.resources.context import assign_within
from pgsieve.resources.postgres.sessions import Conninfo, reset_settings

#: A session that has been idle for longer than this is closed, because a firewall may have dropped its connection.
IDLE_SECONDS = 10.0
#: The number of idle sessions that the pool keeps for each conninfo. The server may limit the number of sessions of a
#: role, so further idle sessions are closed.
MAX_IDLE_SESSIONS = 3
#: How long a request to cancel a statement may take.
CANCEL_SECONDS = 5.0

_Session = psycopg.Connection[tuple[Any, ...]]
_CURRENT_POOL: ContextVar["SessionPool | None"] = ContextVar("sessions", default=None)


class SessionPool:
    """The idle sessions of a command. The session that was used last is used again first."""

    def __init__(self) -> None:
        self._idle_sessions_by_conninfo: dict[Conninfo, list[tuple[float, _Session]]] = defaultdict(list)
        self._lent_sessions = set[_Session]()
        #: For each session, the statements that restore the settings of a new session.
        self._reset_statements_by_session = WeakKeyDictionary[_Session, str]()
        self._lock = Lock()

    def take(self, conninfo: Conninfo) -> _Session | None:
        """Take an idle session, and give it the settings of a new session. None if no idle session answers."""
        while True:
            with self._lock:
                if not self._idle_sessions_by_conninfo[conninfo]:
                    return None
                idle_start_time, session = self._idle_sessions_by_conninfo[conninfo].pop()
            if time.monotonic() - idle_start_time < IDLE_SECONDS:
                with suppress(psycopg.Error):  # The server may have ended the session meanwhile.
                    statements = self._reset_statements_by_session.get(session)
                    self._reset_statements_by_session[session] = reset_settings(session, statements)
                    return session
            session.close()

    @contextmanager
    def lend(self, conninfo: Conninfo, session: _Session) -> Iterator[None]:
        """Use a session in the block, and keep it in the pool afterwards. If the block fails, the session is closed."""
        with self._lock:
            self._lent_sessions.add(session)
        try:
            yield
        except BaseException:
            session.close()
            raise
        finally:
            with self._lock:
                self._lent_sessions.discard(session)
        self._take_back(conninfo, session)

    def cancel_statements(self) -> None:
        """Make the server cancel the statements that are running, so that their callers get an error."""
        with self._lock:
            sessions = list(self._lent_sessions)
        for session in sessions:
            with suppress(psycopg.Error):
                session.cancel_safe(timeout=CANCEL_SECONDS)

    def _take_back(self, conninfo: Conninfo, session: _Session) -> None:
        """Add a session to the idle sessions.

        The session is closed instead if its connection was lost, if it is within a transaction or a statement, or
        if the pool already has `MAX_IDLE_SESSIONS` for this conninfo.
        """
        if not session.closed and session.info.transaction_status == TransactionStatus.IDLE:
            with self._lock:
                if len(idle_sessions := self._idle_sessions_by_conninfo[conninfo]) < MAX_IDLE_SESSIONS:
                    idle_sessions.append((time.monotonic(), session))
                    return
        session.close()

    def close(self) -> None:
        """Close all idle sessions."""
        with self._lock:
            sessions = [session for idle in self._idle_sessions_by_conninfo.values() for _, session in idle]
            self._idle_sessions_by_conninfo.clear()
        for session in sessions:
            session.close()


@contextmanager
def pool_sessions() -> Iterator[None]:
    """Use sessions again within the block, and in threads that have a copy of the block's context."""
    with closing(SessionPool()) as pool, assign_within(_CURRENT_POOL, pool):
        yield


def get_session_pool() -> SessionPool | None:
    """The pool of the enclosing `pool_sessions`; None if the caller is not within `pool_sessions`."""
    return _CURRENT_POOL.get()
