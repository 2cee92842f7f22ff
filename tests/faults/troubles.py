"""All kinds of trouble around pgsieve: ended sessions, timeouts, settings, broken networks, server crashes, full disks.

In: the server, the role that pgsieve connects as, its proxy and its disk. Out: a thread that makes trouble until it is stopped,
then ends all trouble. It counts what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import psycopg
from psycopg.conninfo import make_conninfo

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.busy_publisher import Worker
from tests.faults.disk import Disk
from tests.faults.proxy import Proxy
from tests.replication.test_settings import SETTINGS as INHERITED

#: The role that only pgsieve connects as, so that only pgsieve is affected.
ROLE = "sieve"
TIMEOUTS = (
    "statement_timeout",
    "lock_timeout",
    "idle_session_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
)
#: Settings of the role alone: as settings of the database they would keep the writers from writing.
_OF_ROLE = {"default_transaction_read_only": "on", "client_encoding": "sql_ascii", "search_path": "other"}
_OF_DATABASE = {name: value for name, value in INHERITED.items() if name not in _OF_ROLE}
#: From version 19 on these settings have a fixed value.
_OUTDATED = {"standard_conforming_strings", "escape_string_warning"}

_SESSIONS = f"FROM pg_stat_activity WHERE usename = '{ROLE}'"
_ENDED = {
    "sessions terminated": f"SELECT pg_terminate_backend(pid) {_SESSIONS} AND random() < 0.5",
    "walsenders terminated": f"SELECT pg_terminate_backend(pid) {_SESSIONS} AND backend_type = 'walsender'",
    "lock holders terminated": "SELECT pg_terminate_backend(pid) FROM pg_locks"
    " WHERE locktype = 'advisory' AND granted",
    "statements cancelled": f"SELECT pg_cancel_backend(pid) {_SESSIONS} AND state = 'active' AND random() < 0.5",
}


class Troubles(Worker):
    """Makes trouble of each kind. `disk` can be filled; it is None if nothing can be mounted."""

    def __init__(
        self,
        server: EmbeddedServer,
        conninfo: str,
        random: Random,
        pause: tuple[float, float],
        proxy: Proxy,
        disk: Disk | None,
    ) -> None:
        super().__init__(conninfo, random, pause)
        self.server, self.proxy, self.disk = server, proxy, disk
        self._open: psycopg.Connection | None = None

    def act(self, connection: psycopg.Connection) -> None:
        kinds: dict[Callable[[psycopg.Connection], None], float] = {
            self._end_sessions: 5,
            self._set_timeouts: 3,
            self._set_settings: 2,
            self._stay_open: 1.5,
            self._lock_table: 1,
            self._cut: 1,
            self._stop_server: 0.25,
            self._fill_disk: 1.2 if self.disk else 0,
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
        _reset(connection)
        for name in self.random.sample(TIMEOUTS, self.random.randint(0, 3)):
            connection.execute(f"ALTER ROLE {ROLE} SET {name} = '{self.random.choice([1, 20, 100, 1000])}ms'")
            self.did["timeouts set"] += 1

    def _set_settings(self, connection: psycopg.Connection) -> None:
        place = self.random.choice(_places(connection))
        settings = _OF_DATABASE if place.startswith("DATABASE") else _OF_DATABASE | _OF_ROLE
        for name in self.random.sample(list(settings), self.random.randint(1, 6)):
            if name not in _OUTDATED or connection.info.server_version < 190000:
                connection.execute(f"ALTER {place} SET {name} = {settings[name]}")
                self.did[f"settings of a {place.partition(' ')[0].lower()}"] += 1

    def _stay_open(self, _: psycopg.Connection) -> None:
        """Open a transaction in another database, for which every copy waits. When drawn again, close it."""
        if self._open is not None:
            self._open.close()
            self._open = None
            return
        self._open = psycopg.connect(make_conninfo(self.conninfo, dbname="postgres"))
        self._open.execute("SELECT pg_current_xact_id()")
        self.did["transactions left open"] += 1

    def _lock_table(self, connection: psycopg.Connection) -> None:
        """Lock a table as ALTER TABLE and VACUUM do, sometimes for longer than pgsieve waits."""
        published = (
            "SELECT DISTINCT format('%I.%I', schemaname, tablename) FROM pg_publication_tables ORDER BY 1"
        )
        (table,) = self.random.choice(connection.execute(published).fetchall())
        mode = self.random.choice(["ACCESS EXCLUSIVE", "SHARE UPDATE EXCLUSIVE"])
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '1s'")
            connection.execute(f"LOCK TABLE {table} IN {mode} MODE")
            self.done.wait(self.random.uniform(0.5, 6))
        self.did["tables locked"] += 1

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
        """Leave little or no space in the file system."""
        assert self.disk is not None
        self.disk.fill(1024 * self.random.choice([0, 16, 72, 112, 160, 400]))
        self.done.wait(self.random.uniform(0.5, 3))
        self.did["disk nearly or wholly full"] += 1
        self.disk.make_room()

    def _calm(self) -> None:
        """End all trouble."""
        self.proxy.heal()
        if not self.server.is_running:
            self.server.start()
        if self.disk is not None:
            self.disk.make_room()
        if self._open is not None:
            self._open.close()
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            _reset(connection)


def _places(connection: psycopg.Connection) -> tuple[str, str, str]:
    """The objects from which a session of pgsieve inherits settings."""
    database = f"DATABASE {connection.info.dbname}"
    return f"ROLE {ROLE}", database, f"ROLE {ROLE} IN {database}"


def _reset(connection: psycopg.Connection) -> None:
    for place in _places(connection):
        connection.execute(f"ALTER {place} RESET ALL")
