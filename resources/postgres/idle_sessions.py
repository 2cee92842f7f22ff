"""Keeps sessions of ADBC open between two uses.

In: sessions that a caller no longer uses.
Out: the same sessions, for the next callers.

A new session of ADBC reads all types of the database, and each table has a type. In a database of 300 tables this takes
0.1 s. So a step that reads many small tables would spend most of its time on new sessions. Raises nothing.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import adbc_driver_manager

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi

#: A session that has been idle for longer than this is closed, because a firewall may have dropped its connection.
MAX_IDLE_SECONDS = 10.0


def _make_none() -> None:
    return None


class IdleSessions:
    """Sessions that no caller uses, each at the beginning of a transaction. Several threads may take and add sessions.

    They are for the threads of this process. An executor of Spark gets None instead, and closes each session after its use.
    """

    def __init__(self) -> None:
        #: For each session, the time at which it became idle. A deque needs no lock for its operations at an end.
        self._sessions: deque[tuple[float, dbapi.Connection]] = deque()
        self._is_closed = False

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle to None. Another process cannot use these sessions, and nothing there would close sessions of its own."""
        return _make_none, ()

    def take(self, begin: Callable[["dbapi.Connection"], None]) -> "dbapi.Connection | None":
        """Take the session that was used last, after `begin` has run with it. None if there is no session that answers."""
        while True:
            try:
                idle_start_time, session = self._sessions.pop()
            except IndexError:
                return None
            if time.monotonic() - idle_start_time < MAX_IDLE_SECONDS:
                with suppress(adbc_driver_manager.Error):  # The server may have ended the session meanwhile.
                    begin(session)
                    return session
            session.close()

    def add(self, session: "dbapi.Connection") -> None:
        """Roll the session's transaction back, and keep the session. It is closed if that fails."""
        try:
            session.rollback()
        except adbc_driver_manager.Error:
            session.close()
            return
        self._sessions.append((time.monotonic(), session))
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Close all sessions. A session that is added later is closed, too."""
        self._is_closed = True
        with suppress(IndexError):
            while True:
                self._sessions.pop()[1].close()
