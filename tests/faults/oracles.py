"""Built-in subscriptions with the rows that replicas must hold, on a server without trouble."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psycopg
from psycopg import sql

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until


class Oracle:
    """A built-in subscription, with its own database."""

    def __init__(
        self,
        name: str,
        publications: Sequence[str],
        server: EmbeddedServer,
        publisher: str,
        tables: str,
        *,
        two_phase: bool,
    ) -> None:
        self.name, self._publisher, self._server = name, publisher, server
        self._conninfo = server.conninfo(dbname=name)
        self._log: Path = server.log_path
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}")
        self.execute(tables)
        connection = sql.Literal(publisher).as_string(None)
        self.execute(
            f"CREATE SUBSCRIPTION {name} CONNECTION {connection} PUBLICATION {', '.join(publications)}"
            f" WITH (streaming = on, two_phase = {str(two_phase).lower()})"
        )

    def execute(self, statement: str) -> list[tuple]:
        """Run a statement in a new session. Return its rows.

        It waits for a lock only briefly, again and again: the COMMIT PREPARED that releases the lock may queue behind this statement.
        """
        deadline = time.monotonic() + 240
        while True:
            try:
                with psycopg.connect(
                    self._conninfo, autocommit=True, options="-c lock_timeout=500ms"
                ) as connection:
                    cursor = connection.execute(statement)
                    return cursor.fetchall() if cursor.description else []
            except psycopg.errors.LockNotAvailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def catch_up(self) -> None:
        """Wait until the tables are copied and everything that the publisher committed is applied."""
        target: list[str] = []

        def applied() -> bool:
            try:
                with psycopg.connect(self._publisher, autocommit=True) as connection:
                    if not target:
                        row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
                        assert row is not None
                        target.append(row[0])
                    at = connection.execute(
                        "SELECT coalesce(bool_or(replay_lsn >= %s::pg_lsn), false) FROM pg_stat_replication"
                        " WHERE application_name = %s",
                        [target[0], self.name],
                    ).fetchone()
            except psycopg.OperationalError:
                return False
            return at == (True,) and not self.execute(
                "SELECT 1 FROM pg_subscription_rel WHERE srsubstate NOT IN ('r', 's')"
            )

        wait_until(applied, self._stuck, 240)

    def _stuck(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join([f"the built-in subscription {self.name} does not go on", *lines])

    def refresh(self) -> None:
        """ALTER SUBSCRIPTION … REFRESH PUBLICATION."""
        self.execute(f"ALTER SUBSCRIPTION {self.name} REFRESH PUBLICATION")

    def drop(self) -> None:
        """Drop the subscription without the publisher, and the database."""
        self.execute(f"ALTER SUBSCRIPTION {self.name} DISABLE")
        self.execute(f"ALTER SUBSCRIPTION {self.name} SET (slot_name = NONE)")
        self.execute(f"DROP SUBSCRIPTION {self.name}")
        with psycopg.connect(self._server.conninfo(), autocommit=True) as admin:
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)")
