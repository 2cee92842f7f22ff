"""What goes wrong around pgsieve all day: sessions end, roles get timeouts, networks break, servers crash, disks fill.

In: the server, the role that pgsieve connects as, the proxy and the lake that it uses. Out: a thread that makes trouble
until it is told to stop, and then leaves a calm world; what it did is counted.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import psycopg

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.busy_publisher import Worker
from tests.faults.proxy import Proxy

#: The role that pgsieve connects as: what is done to it concerns nobody else.
ROLE = "sieve"
TIMEOUTS = (
    "statement_timeout",
    "lock_timeout",
    "idle_session_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
)
#: Of the file system that the lake is in, when it is not full.
LAKE_SIZE = "6g"

_SESSIONS = f"FROM pg_stat_activity WHERE usename = '{ROLE}'"
_ENDED = {
    "sessions terminated": f"SELECT pg_terminate_backend(pid) {_SESSIONS} AND random() < 0.5",
    "walsenders terminated": f"SELECT pg_terminate_backend(pid) {_SESSIONS} AND backend_type = 'walsender'",
    "lock holders terminated": "SELECT pg_terminate_backend(pid) FROM pg_locks"
    " WHERE locktype = 'advisory' AND granted",
    "statements cancelled": f"SELECT pg_cancel_backend(pid) {_SESSIONS} AND state = 'active' AND random() < 0.5",
}


class Troubles(Worker):
    """Makes trouble of each kind; `lake` is a mount that can be full, None where nothing can be mounted."""

    def __init__(
        self,
        server: EmbeddedServer,
        conninfo: str,
        random: Random,
        pause: tuple[float, float],
        proxy: Proxy,
        lake: Path | None,
    ) -> None:
        super().__init__(conninfo, random, pause)
        self.server, self.proxy, self.lake = server, proxy, lake

    def act(self, connection: psycopg.Connection) -> None:
        kinds: dict[Callable[[psycopg.Connection], None], float] = {
            self._end_sessions: 5,
            self._set_timeouts: 3,
            self._cut: 1,
            self._stop_server: 0.25,
            self._fill_disk: 1.2 if self.lake else 0,
        }
        self.random.choices(list(kinds), list(kinds.values()))[0](connection)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._calm()

    def _end_sessions(self, connection: psycopg.Connection) -> None:
        what = self.random.choice(list(_ENDED))
        self.did[what] += len(connection.execute(_ENDED[what]).fetchall())

    def _set_timeouts(self, connection: psycopg.Connection) -> None:
        connection.execute(f"ALTER ROLE {ROLE} RESET ALL")
        for name in self.random.sample(TIMEOUTS, self.random.randint(0, 3)):
            connection.execute(f"ALTER ROLE {ROLE} SET {name} = '{self.random.choice([1, 20, 100, 1000])}ms'")
            self.did["timeouts set"] += 1

    def _cut(self, _: psycopg.Connection) -> None:
        cuts = self.proxy.cuts
        self.proxy.cut_after = self.random.choice([7_777, 60_000, 200_000, 400_000])
        self.done.wait(self.random.uniform(0.5, 3))
        self.proxy.heal()
        self.did["connections cut"] += self.proxy.cuts - cuts

    def _stop_server(self, _: psycopg.Connection) -> None:
        immediate = self.random.random() < 0.7
        self.server.stop(immediate=immediate)
        self.done.wait(self.random.uniform(0, 1))
        self.server.start()
        self.did["server crashes" if immediate else "server restarts"] += 1

    def _fill_disk(self, _: psycopg.Connection) -> None:
        """The file system becomes as small as what it holds, and a little room."""
        assert self.lake is not None
        room = self.random.choice([0, 16, 72, 112, 160, 400])
        used = shutil.disk_usage(self.lake).used // 1024
        _resize(self.lake, f"{used + room}k")
        self.done.wait(self.random.uniform(0.5, 3))
        self.did["disk nearly or wholly full"] += 1
        _resize(self.lake, LAKE_SIZE)

    def _calm(self) -> None:
        """All is well again."""
        self.proxy.heal()
        if not self.server.running:
            self.server.start()
        if self.lake is not None:
            _resize(self.lake, LAKE_SIZE)
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute(f"ALTER ROLE {ROLE} RESET ALL")


def _resize(mount: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(mount)], check=False, capture_output=True)
