"""ALTER TABLE and ALTER PUBLICATION while the writers work. PostgreSQL's own subscriber defines the outcome of each.

A subscriber gets its own DDL, or REFRESH PUBLICATION, at the right place in the stream: a column is added and widened there first,
a rename waits until everything before it is applied, and a row filter is altered in the transaction that empties its table.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from random import Random

import psycopg

from tests.faults.busy_publisher import FILTERS, LEAVING, Worker
from tests.faults.oracles import Oracle

_names = itertools.count(1)

#: Types of added columns: the type, the type that it may be widened to, and its default or None.
_TYPES = (
    ("int", "bigint", "7"),
    ("varchar(12)", "text", "'new'"),
    ("varchar(8)", "varchar(30)", None),
    ("int", "bigint", None),
    ("numeric(10,2)", "numeric(10,2)", "1.50"),
    ("text", "text", None),
)
#: By added column, the type that it may be widened to.
_WIDER: dict[str, str] = {}
_ALTERED = ("evolving", "documents", '"User"', "readings")


class Alterations(Worker):
    """Alters tables and publications. `left` are the tables that left a publication, `touched` those that came back since."""

    def __init__(
        self,
        conninfo: str,
        random: Random,
        pause: tuple[float, float],
        oracles: Sequence[Oracle],
        extra: dict[str, list[str]],
        unprepared: threading.Lock,
        *,
        filters: bool,
    ) -> None:
        """`filters` says whether row filters are altered, too."""
        super().__init__(conninfo, random, pause)
        self.filters = filters
        self.oracles, self.extra, self.unprepared = oracles, extra, unprepared
        self.left: set[str] = set()
        self.touched: set[str] = set()

    def act(self, connection: psycopg.Connection) -> None:
        kinds = {
            self._add_column: 3,
            self._drop_column: 2,
            self._rename_column: 1,
            self._widen: 1,
            self._identity: 0.7,
            self._filter: 3 if self.filters else 0,
            self._leave_or_come: 1,
        }
        self.random.choices(list(kinds), list(kinds.values()))[0](connection)

    def _add_column(self, connection: psycopg.Connection) -> None:
        table, name = self.random.choice(_ALTERED), f"c{next(_names)}"
        if len(self.extra.get(table, ())) > 4:
            self._drop_column(connection)
            return
        narrow, wide, default = self.random.choice(_TYPES)
        statement = f"ALTER TABLE {table} ADD COLUMN {name} {narrow}"
        statement += f" DEFAULT {default}" if default else ""
        for oracle in self.oracles:
            oracle.execute(statement)
        connection.execute(statement)
        self.extra.setdefault(table, []).append(name)
        _WIDER[name] = wide
        self.did["ADD COLUMN"] += 1

    def _chosen(self) -> tuple[str, str] | None:
        columns_by_table = [(table, column) for table, columns in self.extra.items() for column in columns]
        return self.random.choice(columns_by_table) if columns_by_table else None

    def _drop_column(self, connection: psycopg.Connection) -> None:
        """The subscribers keep the column: their additional columns are not compared."""
        if chosen := self._chosen():
            table, name = chosen
            self.extra[table].remove(name)
            connection.execute(f"ALTER TABLE {table} DROP COLUMN IF EXISTS {name}")
            self.did["DROP COLUMN"] += 1

    def _rename_column(self, connection: psycopg.Connection) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        (table, name), new = chosen, f"c{next(_names)}"
        self.extra[table].remove(name)
        renamed: list[Oracle] = []
        try:
            with connection.transaction():
                # The lock keeps writers away until the subscribers have the new name.
                connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
                for oracle in self.oracles:
                    oracle.catch_up()
                for oracle in self.oracles:
                    renamed.append(oracle)
                    oracle.execute(f"ALTER TABLE {table} RENAME COLUMN {name} TO {new}")
                connection.execute(f"ALTER TABLE {table} RENAME COLUMN {name} TO {new}")
        except psycopg.OperationalError:
            self._agree(renamed, table, name, new)
            return
        self.extra[table].append(new)
        _WIDER[new] = _WIDER[name]
        self.did["RENAME COLUMN"] += 1

    def _agree(self, renamed: Sequence[Oracle], table: str, name: str, new: str) -> None:
        """After a crash the publisher may have either name. Give the subscribers the same name."""
        query = "SELECT 1 FROM pg_attribute WHERE attrelid = %s::regclass AND attname = %s"
        while True:
            try:
                with psycopg.connect(self.conninfo, autocommit=True) as connection:
                    if connection.execute(query, [table, new]).fetchone():
                        return
                    break
            except psycopg.OperationalError:
                time.sleep(0.2)
        for oracle in renamed:
            oracle.execute(f"ALTER TABLE {table} RENAME COLUMN {new} TO {name}")

    def _widen(self, connection: psycopg.Connection) -> None:
        if chosen := self._chosen():
            table, name = chosen
            statement = f"ALTER TABLE {table} ALTER COLUMN {name} TYPE {_WIDER[name]}"
            for oracle in self.oracles:
                oracle.execute(statement)
            connection.execute(statement)
            self.did["ALTER COLUMN TYPE"] += 1

    def _identity(self, connection: psycopg.Connection) -> None:
        table, how = self.random.choice(["evolving", "documents"]), self.random.choice(["FULL", "DEFAULT"])
        connection.execute(f"ALTER TABLE {table} REPLICA IDENTITY {how}")
        self.did["REPLICA IDENTITY"] += 1

    def _filter(self, connection: psycopg.Connection) -> None:
        """Alter a row filter. Before it, all rows are deleted under the earlier filter, so that none remains."""
        publication, chosen = self.random.choice(["everything", "chosen"]), self.random.choice(FILTERS)
        with self.unprepared, connection.transaction():
            connection.execute("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
            connection.execute("DELETE FROM orders")
            connection.execute(f"ALTER PUBLICATION {publication} DROP TABLE orders")
            connection.execute(f"ALTER PUBLICATION {publication} ADD TABLE orders WHERE ({chosen})")
        self.did["row filter"] += 1

    def _leave_or_come(self, connection: psycopg.Connection) -> None:
        """Let a table leave `everything`, with a REFRESH. If a table has left, let it come back empty, with another REFRESH."""
        oracle = self.oracles[0]
        with self.unprepared:
            if self.left:
                self.come_back(connection)
                return
            table = self.random.choice(LEAVING)
            self.left.add(table)
            connection.execute(f"ALTER PUBLICATION everything DROP TABLE {table}")
            oracle.refresh()
        self.did["table left"] += 1

    def come_back(self, connection: psycopg.Connection) -> None:
        """Publish the tables that left, and copy them. A crash may have interrupted an earlier attempt at any step."""
        oracle = self.oracles[0]
        for table in sorted(self.left):
            self.touched.add(table)
            published = connection.execute(
                "SELECT 1 FROM pg_publication_rel JOIN pg_publication p ON p.oid = prpubid"
                " WHERE pubname = 'everything' AND prrelid = %s::regclass",
                [table],
            ).fetchone()
            if published:
                connection.execute(f"ALTER PUBLICATION everything DROP TABLE {table}")
            oracle.refresh()
            oracle.execute(f"TRUNCATE {table}")
            connection.execute(f"ALTER PUBLICATION everything ADD TABLE {table}")
            oracle.refresh()
            oracle.catch_up()
            self.left.discard(table)
            self.did["table came back"] += 1
