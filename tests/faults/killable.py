"""pgsieve in processes that tests kill, on a database whose rows show whether a change was lost or applied twice.

In: a server, a folder, the address of a Spark. Out: `Site`. Its `run` is `pgsieve run` in a separate process, and its `verify`
compares replicas, change history, slots and publications with the publisher.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

import psycopg
import pyarrow as pa
import yaml
from deltalake import DeltaTable, QueryBuilder

from pgsieve.resources.failpoints import VARIABLE
from pgsieve.resources.lake.paths import escape
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.commands import start
from tests.fixtures.oracle import wait_until
from tests.fixtures.s3_server import S3Server

#: Exit codes: a table is set aside or differs; pgsieve refuses, with advice; interrupted.
FOUND, REFUSED, INTERRUPTED = 1, 2, 130

#: Settings: Spark, or with a local master threads of the run, write all rows, however few. With MARKING deletion vectors mark removed rows.
NOT_SMALL = {"spark.pgsieve.smallBytes": "-1"}
MARKING = NOT_SMALL | {"spark.pgsieve.rewrittenBytes": "-1"}

TABLES = """
CREATE TABLE checking (id int PRIMARY KEY, amount int NOT NULL);
CREATE TABLE savings (id int PRIMARY KEY, amount int NOT NULL);
CREATE TABLE orders (id int PRIMARY KEY, region text, note text);
CREATE TABLE journal (transfer int, amount int);
ALTER TABLE journal REPLICA IDENTITY FULL;
ALTER TABLE orders REPLICA IDENTITY FULL;
INSERT INTO checking SELECT i, 100 FROM generate_series(1, 20) i;
INSERT INTO savings SELECT i, 100 FROM generate_series(1, 20) i;
INSERT INTO orders SELECT i, CASE i % 3 WHEN 0 THEN 'EMEA' ELSE 'APAC' END, 'first' FROM generate_series(1, 30) i;
CREATE PUBLICATION bank FOR TABLE checking, savings, journal;
CREATE PUBLICATION emea FOR TABLE orders WHERE (region = 'EMEA');
"""
#: The subscriptions with their tables, and the condition of the rows that the publisher publishes.
SUBSCRIPTIONS = {
    "accounts": {"checking": "true", "savings": "true", "journal": "true"},
    "filtered": {"orders": "region = 'EMEA'"},
}
MODES = {"accounts": "pipeline", "filtered": "publisher"}
PUBLICATIONS = {"accounts": "bank", "filtered": "emea"}
#: The sum of all amounts in checking and savings; transfers do not change it.
TOTAL = 4000


class Site:
    """A database, a lake, and a configuration with one subscription per `row_filter` mode."""

    def __init__(
        self,
        name: str,
        server: EmbeddedServer,
        folder: Path,
        master: str,
        port: int | None = None,
        store: S3Server | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._server, self._folder = name, server, folder
        # The folder's name is different for each test, so each lake has its own address in the bucket.
        self.lake = folder / "lake" if store is None else Path("lake") / folder.name / name
        self._store = store
        self._file = folder / "pgsieve.yaml"
        self._log = folder / "log"
        self.transfers = 0
        self._prepare: Callable[[], object] | None = None
        configuration = {
            "lake": self._address(self.lake),
            **({"storage": dict(store.storage)} if store else {}),
            "spark": {"master": master, "conf": dict(conf or {})},
            "sources": {name: {"conninfo": server.conninfo(dbname=name, port=str(port or server.port))}},
            "subscriptions": {
                subscription: {
                    "source": name,
                    "publications": [PUBLICATIONS[subscription]],
                    "row_filter": mode,
                }
                for subscription, mode in MODES.items()
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text(yaml.safe_dump(configuration))

    def keep_versions(self) -> None:
        """From now on, keep versions of rows and full change histories."""
        configuration = yaml.safe_load(self._file.read_text())
        for subscription in configuration["subscriptions"].values():
            subscription["history"] = {"initial": True, "scd2": True}
        self._file.write_text(yaml.safe_dump(configuration))

    def divide_by_keys(self) -> None:
        """From now on, runs decide all changes by parts of the keys, however few these are."""
        self._prepare = _divide_by_keys

    def verify_versions(self) -> None:
        """Assert that current versions are the replicas' rows, versions of a key do not overlap, and no moment splits a transfer."""
        moved, begins = Counter[int](), list[int]()
        for table in ("checking", "savings", "orders"):
            subscription, value = ("filtered", "note") if table == "orders" else ("accounts", "amount")
            path = self.lake / subscription / "_scd2" / "public" / table
            columns = f"id, valid_from_lsn, valid_to_lsn, {value}"
            versions = sorted(self.rows(path, columns), key=lambda row: row[:2])
            for (key, _, until, _), (following, begun, *_) in itertools.pairwise(versions):
                assert key != following or (until is not None and until <= begun), f"{table}: overlap"
            current = [(key, amount) for key, _, until, amount in versions if until is None]
            assert current == sorted(self.rows(self.replica(subscription, table), f"id, {value}")), table
            if table != "orders":
                begins.append(min(begun for _, begun, *_ in versions))
                for _, begun, until, amount in versions:
                    moved.update({begun: amount})
                    moved.update({} if until is None else {until: -amount})
        total = 0
        for lsn in sorted(moved):
            total += moved[lsn]
            assert total == TOTAL or lsn < max(begins), f"part of a transfer at {lsn}"

    def connect(self) -> psycopg.Connection:
        """A connection to the publisher's database."""
        return psycopg.connect(self._server.conninfo(dbname=self.name), autocommit=True)

    def write(self, connection: psycopg.Connection, transactions: int = 3) -> None:
        """Commit transfers between two tables, each recorded in a third, and orders that start and stop to match the filter."""
        for _ in range(transactions):
            self.transfers += 1
            number, amount = self.transfers, self.transfers % 7 + 1
            with connection.transaction():
                connection.execute(
                    "UPDATE checking SET amount = amount - %s WHERE id = %s", [amount, number % 20 + 1]
                )
                connection.execute(
                    "UPDATE savings SET amount = amount + %s WHERE id = %s", [amount, number % 13 + 1]
                )
                connection.execute("INSERT INTO journal VALUES (%s, %s), (0, 0)", [number, amount])
                connection.execute("INSERT INTO orders VALUES (%s, 'EMEA', 'new')", [1000 + number])
                connection.execute("UPDATE orders SET region = 'APAC' WHERE id = %s", [1000 + number - 2])
                connection.execute("UPDATE orders SET region = 'EMEA' WHERE id = %s", [1000 + number - 4])
                connection.execute("DELETE FROM orders WHERE id = %s", [1000 + number - 5])

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """In the block, transactions are committed all the time."""
        done = threading.Event()

        def work() -> None:
            with self.connect() as connection:
                while not done.wait(0.02):
                    self.write(connection, 1)

        writer = threading.Thread(target=work)
        writer.start()
        try:
            yield
        finally:
            done.set()
            writer.join()

    def start(self, *arguments: str, failpoint: str | None = None) -> BaseProcess:
        """Start a command of pgsieve in a process that can be killed."""
        return start_pgsieve(arguments, self._file, self._log, failpoint, self._prepare)

    def run(self, failpoint: str | None = None) -> int:
        """Run `pgsieve run` to its end, or up to a failpoint. Return its exit code."""
        return self.command("run", failpoint=failpoint)

    def command(self, *arguments: str, failpoint: str | None = None) -> int:
        """Run a command to its end. Return its exit code."""
        process = self.start(*arguments, failpoint=failpoint)
        process.join(300)
        assert process.exitcode is not None, "the run did not end"
        return process.exitcode

    @property
    def log(self) -> str:
        """The output of all commands so far."""
        return self._log.read_text(errors="replace")

    def wait_for_walsenders(self, connection: psycopg.Connection, number: int) -> None:
        """Wait until `number` walsenders stream."""
        streaming = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        wait_until(lambda: connection.execute(streaming).fetchone() == (number,), lambda: self.log, 180)

    def wait_until_applied(self) -> None:
        """Wait until the replicas have the newest transfer of the journal and the newest order."""
        replicas = [
            (self.replica("accounts", "journal"), "transfer"),
            (self.replica("filtered", "orders"), "id"),
        ]
        newest = [self.transfers, 1000 + self.transfers]

        def applied() -> bool:
            return [
                max((v for (v,) in self.rows(path, column)), default=0) for path, column in replicas
            ] == newest

        wait_until(applied, lambda: self.log, 180)

    def verify(self, connection: psycopg.Connection) -> None:
        """After a complete run: assert that every replica has the published rows, and that nothing was left behind."""
        for subscription, tables in SUBSCRIPTIONS.items():
            for table, condition in tables.items():
                expected = connection.execute(f"SELECT * FROM {table} WHERE {condition}").fetchall()
                replica = self.rows(self.replica(subscription, table))
                assert Counter(map(tuple, replica)) == Counter(expected), f"{subscription}/{table}"
                history = self.lake / subscription / "_changes" / "public" / escape(table)
                if DeltaTable.is_deltatable(self._address(history), self._options):
                    keys = self.rows(history, "commit_lsn, ordinal")
                    assert len(keys) == len(set(keys)), (
                        f"{subscription}/{table}: a change twice in its history"
                    )
        slots = connection.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
        ).fetchall()
        assert slots == [(f"pgsieve_{self.name}",), (f"pgsieve_{self.name}_filtered",)]
        publications = connection.execute("SELECT pubname FROM pg_publication ORDER BY 1").fetchall()
        assert [p for (p,) in publications if p not in PUBLICATIONS.values()] == [f"pgsieve_{self.name}"]
        accounts = {'"public"."checking"', '"public"."savings"'}
        for cut in self.cuts():
            # A table that is set aside is not in cuts.
            assert self.total(cut) == TOTAL or not accounts <= cut.keys(), "a cut in the middle of a transfer"

    def cuts(self) -> list[dict[str, int]]:
        """The cuts of the accounts: for each, the Delta version by table."""
        rows = self.rows(self.lake / "accounts" / "_cuts", "tables")
        return [dict(cut) for (cut,) in rows]

    def total(self, cut: dict[str, int]) -> int:
        """The sum of all amounts in the accounts at a cut."""
        versions = [(t, cut[f'"public"."{t}"']) for t in ("checking", "savings") if f'"public"."{t}"' in cut]
        return sum(
            row[0]
            for t, version in versions
            for row in self.rows(self.replica("accounts", t), "amount", version)
        )

    def replica(self, subscription: str, table: str) -> Path:
        """The path of a replica."""
        return self.lake / subscription / "public" / escape(table)

    @property
    def _options(self) -> dict[str, str] | None:
        return self._store.delta_rs if self._store else None

    def _address(self, path: Path) -> str:
        """A path of the lake in Delta's form."""
        return f"s3://{path}" if self._store else str(path)

    def rows(self, path: Path, columns: str = "*", version: int | None = None) -> list[tuple]:
        """The rows of a Delta table, now or at a version."""
        table = DeltaTable(self._address(path), version=version, storage_options=self._options)
        query = QueryBuilder().register("t", table)
        table = pa.table(query.execute(f"SELECT {columns} FROM t").read_all())
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def start_pgsieve(
    arguments: Sequence[str],
    file: Path,
    log: Path,
    failpoint: str | None = None,
    prepare: Callable[[], object] | None = None,
) -> BaseProcess:
    """Start a command of pgsieve in a process that can be killed. It calls `prepare` first."""
    return start(
        ["--verbose", *arguments, "-c", str(file)],
        log,
        environment={**os.environ, **({} if failpoint is None else {VARIABLE: failpoint})},
        prepare=prepare,
    )


def settle(pgsieve: Site, database: psycopg.Connection) -> None:
    """Assert that the next run succeeds, and that it repairs everything."""
    assert pgsieve.run() == 0, pgsieve.log
    pgsieve.verify(database)


def output_of(pgsieve: Site, *arguments: str, ends: int) -> str:
    """Run a command that must end with the exit code `ends`. Return its output."""
    printed = len(pgsieve.log)
    assert pgsieve.command(*arguments) == ends, pgsieve.log[printed:]
    return pgsieve.log[printed:]


def _divide_by_keys() -> None:
    """Let tasks decide all changes by parts of the keys. If the driver reads the keys, this fails."""
    from pgsieve.assets.steps.apply import by_files, row_versions
    from pgsieve.resources.lake import resource

    make_settings = resource.make_lake_settings
    resource.make_lake_settings = lambda engine: replace(make_settings(engine), min_parted_changes=0)
    by_files.make_keyed_changes = row_versions.make_keyed_changes = None  # type: ignore[assignment]


def set_clock(ahead: timedelta) -> None:
    """Set the clock that Python code of this process reads; libraries in Rust and C see the real time."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            # A real datetime: values that are pickled for an executor must not refer to this class.
            return datetime.now(tz) + ahead  # type: ignore[return-value]

    # These modules are loaded first, because a module binds the name `datetime` when it is imported.
    from pgsieve.pipelines.command_line import cli  # noqa: F401
    from pgsieve.pipelines.commands import check, maintain, resync, run  # noqa: F401
    from pgsieve.pipelines.following import follow  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("pgsieve.") and getattr(module, "datetime", None) is datetime:
            module.datetime = Clock  # type: ignore[attr-defined]
    real = time.time
    time.time = lambda: real() + ahead.total_seconds()


@contextlib.contextmanager
def site(
    name: str,
    server: EmbeddedServer,
    folder: Path,
    master: str,
    port: int | None = None,
    store: S3Server | None = None,
    conf: Mapping[str, str] | None = None,
) -> Iterator[tuple[Site, psycopg.Connection]]:
    """A site with its own database on the server. The database and its slots are dropped afterwards.

    `port` is the port that pgsieve connects to, by default the server's. `store` holds the lake, by default the folder does. `conf`
    are Spark's settings.
    """
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    made = Site(name, server, folder, master, port, store, conf)
    with made.connect() as connection:
        connection.execute(TABLES)
    try:
        with contextlib.closing(made.connect()) as connection:
            yield made, connection
    finally:
        with made.connect() as connection:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database = current_database() AND NOT active"
            )
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
