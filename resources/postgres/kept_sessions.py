"""Publisher sessions that are reused within a command, since a run makes many short queries.

In: conninfos. Out: sessions in the state of a new one, for one caller at a time. A new session costs the
server a process and its catalog caches: some ten milliseconds of CPU, more than most queries. A session that
was idle for `IDLE_SECONDS` is not reused, as a firewall may have dropped it. Raises nothing.
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

from pgsieve.resources.context import assigned
from pgsieve.resources.postgres.sessions import Conninfo, settle_again

#: A session that was idle for longer is closed. So are idle sessions beyond this number, because a role's
#: number of sessions may be limited.
IDLE_SECONDS, MOST = 10.0, 3
#: How long a request to cancel a statement may take.
CANCEL_SECONDS = 5.0

_Session = psycopg.Connection[tuple[Any, ...]]
_KEPT: ContextVar["KeptSessions | None"] = ContextVar("sessions", default=None)


class KeptSessions:
    """The idle sessions of a command; the one that was used last is reused first."""

    def __init__(self) -> None:
        self._idle: dict[Conninfo, list[tuple[float, _Session]]] = defaultdict(list)
        self._lent = set[_Session]()
        #: For each session the statement that gives it the settings of a new one.
        self._settling = WeakKeyDictionary[_Session, str]()
        self._lock = Lock()

    def take(self, conninfo: Conninfo) -> _Session | None:
        """Take an idle session, with the settings of a new one; None if no idle session answers."""
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
        """Keep a session for reuse after the block, unless the block fails."""
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
        """Have the server cancel the statements in progress; their callers get an error."""
        with self._lock:
            lent = list(self._lent)
        for session in lent:
            with suppress(psycopg.Error):
                session.cancel_safe(timeout=CANCEL_SECONDS)

    def _give(self, conninfo: Conninfo, session: _Session) -> None:
        """Keep a session, unless it was lost, is within a transaction or statement, or there are `MOST` already."""
        if not session.closed and session.info.transaction_status == TransactionStatus.IDLE:
            with self._lock:
                if len(idle := self._idle[conninfo]) < MOST:
                    idle.append((time.monotonic(), session))
                    return
        session.close()

    def close(self) -> None:
        """Close all idle sessions."""
        with self._lock:
            sessions = [session for idle in self._idle.values() for _, session in idle]
            self._idle.clear()
        for session in sessions:
            session.close()


@contextmanager
def sessions_kept() -> Iterator[None]:
    """Reuse sessions within the block, and in the threads that continue its context."""
    with closing(KeptSessions()) as kept, assigned(_KEPT, kept):
        yield


def kept_sessions() -> KeptSessions | None:
    """The sessions of the enclosing block; None outside of one."""
    return _KEPT.get()
