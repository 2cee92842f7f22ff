"""A publisher where sessions commit all the time: every kind of table and change, large and prepared transactions.

In: a conninfo and a `random.Random`. Out: threads that write until they are stopped, and that reconnect after a crash of the
server. Only the server records the written rows.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import psycopg
from psycopg import errors

#: For the publisher and the oracles.
TABLES = """
CREATE TABLE checking (id int PRIMARY KEY, amount int NOT NULL);
CREATE TABLE savings (id int PRIMARY KEY, amount int NOT NULL);
CREATE TABLE journal (transfer int, amount int);
ALTER TABLE journal REPLICA IDENTITY FULL;
CREATE TABLE orders (id int PRIMARY KEY, region text, note text, amount int);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE TABLE "User" (id int PRIMARY KEY, "createdAt" timestamptz, "e.mail" text);
CREATE TABLE documents (id int PRIMARY KEY, title varchar(40), body text);
ALTER TABLE documents ALTER body SET STORAGE EXTERNAL;
CREATE TABLE evolving (id int PRIMARY KEY, n int, label varchar(20));
CREATE TABLE readings (id int, sensor int, value int, PRIMARY KEY (id, sensor)) PARTITION BY RANGE (sensor);
CREATE TABLE readings_low PARTITION OF readings FOR VALUES FROM (0) TO (3);
CREATE TABLE readings_high PARTITION OF readings FOR VALUES FROM (3) TO (6) PARTITION BY LIST (sensor);
CREATE TABLE readings_three PARTITION OF readings_high FOR VALUES IN (3);
CREATE TABLE readings_more PARTITION OF readings_high DEFAULT;
CREATE TABLE readings_rest PARTITION OF readings DEFAULT;
"""
ROWS = """
INSERT INTO checking SELECT i, 100 FROM generate_series(1, 20) i;
INSERT INTO savings SELECT i, 100 FROM generate_series(1, 20) i;
INSERT INTO orders SELECT i, CASE i % 3 WHEN 0 THEN 'EMEA' ELSE 'APAC' END, 'first', i FROM generate_series(1, 60) i;
INSERT INTO "User" SELECT i, '2024-02-29 12:00:00+00', i || '@example.org' FROM generate_series(1, 40) i;
INSERT INTO documents SELECT i, 'first', repeat(md5(i::text), 100) FROM generate_series(1, 30) i;
INSERT INTO evolving SELECT i, i, 'first' FROM generate_series(1, 60) i;
INSERT INTO readings SELECT i, i % 8, i FROM generate_series(1, 80) i;
CREATE PUBLICATION everything FOR TABLE checking, savings, journal, "User", documents, evolving, readings,
    orders WHERE (region = 'EMEA') WITH (publish_via_partition_root = true);
CREATE PUBLICATION chosen FOR TABLE orders WHERE (region = 'EMEA'), readings WHERE (sensor < 4), evolving, journal
    WITH (publish_via_partition_root = true);
"""
#: The sum of all amounts in checking and savings; transfers do not change it.
TOTAL = 4000
#: Tables that leave the publication `everything`, and come back.
LEAVING = ('"User"', "documents")
#: Row filters of orders.
FILTERS = ("region = 'EMEA'", "region <> 'APAC'", "amount > 50", "region = 'EMEA' AND amount > 20")

KEYS = 120
LARGE = 10_000

#: Errors that a statement may meet because of another session, a key or an ALTER.
IN_THE_WAY = (
    errors.UniqueViolation,
    errors.UndefinedColumn,
    errors.StringDataRightTruncation,
    errors.NumericValueOutOfRange,
)


def _regions(random: Random) -> str:
    return random.choice(["'EMEA'", "'EMEA'", "'APAC'", "'Übersee'", "NULL"])


def _numbers(random: Random) -> str:
    return str(random.choice([0, 7, 21, 60, random.randrange(100), "NULL"]))


def _texts(random: Random) -> str:
    return random.choice(
        ["''", "'a'", "'Motörhead €'", "E'tab\\t\"quoted\"'", f"'{random.random()}'", "NULL"]
    )


def _times(random: Random) -> str:
    return f"'2024-06-30 12:34:56.{random.randrange(10**6):06}+00'"


def _bodies(random: Random) -> str:
    if random.random() < 0.2:
        return "'short'"
    return f"(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, {random.randint(70, 200)}))"


def _sensors(random: Random) -> str:
    return str(random.randrange(8))


@dataclass(frozen=True)
class Table:
    """A table for random writes: its name in SQL, and functions that draw literals for its columns except `id`."""

    name: str
    columns: Mapping[str, Callable[[Random], str]]


WRITTEN = (
    Table('"User"', {'"createdAt"': _times, '"e.mail"': _texts}),
    Table("documents", {"title": _texts, "body": _bodies}),
    Table("evolving", {"n": _numbers, "label": _texts}),
    Table("readings", {"sensor": _sensors, "value": _numbers}),
)
ORDERS = Table("orders", {"region": _regions, "note": _texts, "amount": _numbers})


class Worker(threading.Thread, ABC):
    """Acts again and again, in its own session, until it is stopped.

    `failure` keeps an error other than a lost session.
    """

    def __init__(self, conninfo: str, random: Random, pause: tuple[float, float]) -> None:
        super().__init__(daemon=True)
        self.conninfo, self.random, self.pause = conninfo, random, pause
        self.done = threading.Event()
        self.did: Counter[str] = Counter()
        self.failure: str | None = None

    def run(self) -> None:
        while not self.done.is_set():
            try:
                with psycopg.connect(self.conninfo, autocommit=True, connect_timeout=5) as connection:
                    while not self.done.wait(self.random.uniform(*self.pause)):
                        self.act(connection)
            except psycopg.OperationalError:  # terminated, restarting, or a deadlock
                self.done.wait(0.2)
            except Exception:  # noqa: BLE001 (the day tells it)
                self.failure = traceback.format_exc()
                return

    @abstractmethod
    def act(self, connection: psycopg.Connection) -> None:
        """Act once. A pause follows."""


@contextlib.contextmanager
def working(workers: Sequence[Worker]) -> Iterator[None]:
    """The workers work during the block."""
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.done.set()
        for worker in workers:
            worker.join()


_transfers = itertools.count(1)
_prepared = itertools.count(1)


#: Light kinds are applied quickly, so they are always written. A heavy kind takes Spark seconds per batch; each round draws one.
LIGHT = {"transfer": 6.0, "mixed": 8.0, "large": 0.15, "two phases": 0.5, "truncate": 0.1}
HEAVY = ("moves", "filtered", "keyless")


class Writer(Worker):
    """Commits transactions of the given kinds, by their weights.

    `extra` names columns that ALTER TABLE added. While `unprepared` is locked, no transaction is prepared.
    """

    def __init__(
        self,
        conninfo: str,
        random: Random,
        pause: tuple[float, float],
        kinds: Mapping[str, float],
        extra: dict[str, list[str]],
        unprepared: threading.Lock,
    ) -> None:
        super().__init__(conninfo, random, pause)
        self.kinds, self.extra, self.unprepared = kinds, extra, unprepared
        self._actions: dict[str, Callable[[psycopg.Connection], None]] = {
            "transfer": self._transfer,
            "mixed": self._mixed,
            "large": self._large,
            "two phases": self._two_phases,
            "truncate": self._truncate,
            "moves": lambda connection: self._mixed(connection, moves=True),
            "filtered": self._filtered,
            "keyless": self._keyless,
        }

    def act(self, connection: psycopg.Connection) -> None:
        kind = self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        self._actions[kind](connection)
        self.did["transactions"] += 1

    def _transfer(self, connection: psycopg.Connection) -> None:
        number = next(_transfers)
        amount = number % 7 + 1
        with connection.transaction():
            for table, sign, row in (("checking", "-", number % 20), ("savings", "+", number % 13)):
                connection.execute(f"UPDATE {table} SET amount = amount {sign} {amount} WHERE id = {row + 1}")
            connection.execute(f"INSERT INTO journal VALUES ({number}, {amount}), (0, 0)")

    def _keyless(self, connection: psycopg.Connection) -> None:
        """Some of several equal rows are deleted, and other rows become equal."""
        row = connection.execute("SELECT coalesce(max(transfer), 0) FROM journal").fetchone()
        assert row is not None
        newest = row[0]
        with connection.transaction():
            one = "ctid = (SELECT ctid FROM journal WHERE transfer = 0 LIMIT 1)"
            connection.execute(f"DELETE FROM journal WHERE {one}")
            if self.random.random() < 0.5:
                connection.execute(
                    f"UPDATE journal SET amount = 0, transfer = 0 WHERE transfer BETWEEN {newest - 4} AND {newest}"
                )
            connection.execute(f"DELETE FROM journal WHERE transfer BETWEEN 1 AND {newest - 300}")
        self.did["keyless transactions"] += 1

    def _filtered(self, connection: psycopg.Connection) -> None:
        """Rows start to match row filters, and stop to match them."""
        with connection.transaction():
            for _ in range(self.random.randint(1, 5)):
                self._statement(connection, ORDERS, moves=self.random.random() < 0.3)
        self.did["transactions through row filters"] += 1

    def _mixed(self, connection: psycopg.Connection, *, moves: bool = False) -> None:
        with connection.transaction():
            for _ in range(self.random.randint(1, 6)):
                self._statement(connection, self.random.choice(WRITTEN), moves=moves)
                if self.random.random() < 0.05:
                    with contextlib.suppress(psycopg.Rollback), connection.transaction():
                        self._statement(connection, self.random.choice(WRITTEN), moves=moves)
                        raise psycopg.Rollback
        self.did["transactions that move keys"] += moves

    def _large(self, connection: psycopg.Connection) -> None:
        rows = self.random.choice([500, 2000, 8000])
        with connection.transaction():
            connection.execute(f"DELETE FROM evolving WHERE id >= {LARGE}")
            connection.execute(
                "INSERT INTO evolving (id, n, label) SELECT i, i % 7, 'large' FROM "
                f"generate_series({LARGE}, {LARGE + rows}) i ON CONFLICT DO NOTHING"
            )
            if self.random.random() < 0.5:
                connection.execute(f"UPDATE evolving SET n = n + 1 WHERE id >= {LARGE}")
        self.did["large transactions"] += 1

    def _truncate(self, connection: psycopg.Connection) -> None:
        tables = ['"User"', "readings", "evolving", "journal", "documents"]
        with connection.transaction():
            connection.execute(f"TRUNCATE {', '.join(self.random.sample(tables, self.random.randint(1, 2)))}")
            for _ in range(self.random.randint(0, 3)):
                self._statement(connection, self.random.choice(WRITTEN))
        self.did["truncates"] += 1

    def _two_phases(self, connection: psycopg.Connection) -> None:
        """PREPARE TRANSACTION and its second phase, also after a crash of the server."""
        if not self.unprepared.acquire(blocking=False):
            return
        gid = f"hard day {next(_prepared)}"
        try:
            connection.execute("BEGIN")
            for _ in range(self.random.randint(1, 4)):
                self._statement(connection, self.random.choice(WRITTEN))
            connection.execute(f"PREPARE TRANSACTION '{gid}'")
            self.done.wait(self.random.uniform(0, 1))
        finally:
            self._finish(gid)
            self.unprepared.release()
        self.did["prepared transactions"] += 1

    def _finish(self, gid: str) -> None:
        how = self.random.choice(["COMMIT", "COMMIT", "ROLLBACK"])
        while True:
            try:
                with psycopg.connect(self.conninfo, autocommit=True) as connection:
                    waiting = connection.execute("SELECT 1 FROM pg_prepared_xacts WHERE gid = %s", [gid])
                    if waiting.fetchone():
                        connection.execute(f"{how} PREPARED '{gid}'")
                    return
            except psycopg.OperationalError:
                time.sleep(0.2)

    def _statement(self, connection: psycopg.Connection, table: Table, *, moves: bool = False) -> None:
        """Run one statement of a transaction. If it fails for an expected reason, roll it back alone."""
        columns = dict(table.columns)
        columns.update(dict.fromkeys(self.extra.get(table.name, ()), _numbers))
        for statement in self._drawn(table.name, columns, moves=moves):
            connection.execute("SAVEPOINT one")
            try:
                connection.execute(statement)
            except IN_THE_WAY:
                connection.execute("ROLLBACK TO SAVEPOINT one")
            connection.execute("RELEASE SAVEPOINT one")

    def _drawn(self, name: str, columns: Mapping[str, Callable[[Random], str]], *, moves: bool) -> list[str]:
        weights = {"insert": 5.0, "update": 6.0, "delete": 2.0, "replace": 1.0}
        weights |= {"move": 3.0, "swap": 1.0} if moves else {}
        kind = self.random.choices(list(weights), list(weights.values()))[0]
        key, other = self.random.sample(range(KEYS), 2)
        if kind == "insert":
            return [self._insert(name, columns, self.random.randint(1, 5))]
        if kind == "move":
            return [f"UPDATE {name} SET id = {other} WHERE id = {key}"]
        if kind == "swap":
            # The key is negative in between. Only another session that does the same can have it.
            return [
                f"UPDATE {name} SET id = {a} WHERE id = {b}"
                for a, b in ((-key, key), (key, other), (other, -key))
            ]
        if kind == "delete":
            return [f"DELETE FROM {name} WHERE id BETWEEN {key} AND {key + self.random.choice([0, 0, 5])}"]
        if kind == "replace":
            values = ", ".join([str(key), *(draw(self.random) for draw in columns.values())])
            return [
                f"DELETE FROM {name} WHERE id = {key}",
                f"INSERT INTO {name} (id, {', '.join(columns)}) VALUES ({values})",
            ]
        free = [column for column in columns if moves or column != "sensor"]
        chosen = self.random.sample(free, self.random.randint(1, len(free)))
        changes = ", ".join(f"{column} = {columns[column](self.random)}" for column in chosen)
        return [
            f"UPDATE {name} SET {changes} WHERE id BETWEEN {key} AND {key + self.random.choice([0, 0, 3])}"
        ]

    def _insert(self, name: str, columns: Mapping[str, Callable[[Random], str]], rows: int) -> str:
        values = (
            f"({', '.join([str(self.random.randrange(KEYS)), *(draw(self.random) for draw in columns.values())])})"
            for _ in range(rows)
        )
        named = ", ".join(["id", *columns])
        return f"INSERT INTO {name} ({named}) VALUES {', '.join(values)} ON CONFLICT DO NOTHING"
