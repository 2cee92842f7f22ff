"""Faults of an object store lose no change and apply none twice. A refusal says which lake, why, and what to do.

pgsieve's own process applies few changes, without a JVM. The long tests also use its threads, which mark rows, and a Spark Connect
server, which reaches the store through the same bad network.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from multiprocessing.process import BaseProcess
from pathlib import Path
from urllib.parse import unquote

import psycopg
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import yaml
from deltalake import DeltaTable, QueryBuilder
from deltalake.fs import DeltaStorageHandler

from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import MARKING, NOT_SMALL, REFUSED, start_pgsieve
from tests.fixtures.oracle import wait_until
from tests.fixtures.s3_proxy import (
    CUT,
    DENIED,
    EXPIRED,
    INTERNAL,
    NO_BUCKET,
    NOT_IMPLEMENTED,
    SLOW_DOWN,
    Answer,
    S3Proxy,
    s3_proxy,
)
from tests.fixtures.s3_server import SECRET, S3Server
from tests.fixtures.servers import drop_slots
from tests.fixtures.spark_servers import connect_server, python_without_pgsieve


class Shop:
    """A database with two keyed tables, and pgsieve with a lake behind a proxy."""

    def __init__(
        self,
        folder: Path,
        lake: str,
        server: S3Server,
        proxy: S3Proxy,
        database: psycopg.Connection,
        spark: dict[str, object],
    ) -> None:
        self.proxy, self.database, self._lake, self._server = proxy, database, lake, server
        self._file, self._log = folder / "pgsieve.yaml", folder / "log"
        self._written, self.tables = 0, list[str]()
        self._processes = list[BaseProcess]()
        written = {
            "lake": lake,
            "storage": {**server.storage, "endpoint": proxy.url},
            "sources": {"shop": {"conninfo": database.info.dsn + " password=postgres"}},
            "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
            "spark": spark,
        }
        self._file.write_text(yaml.safe_dump(written))
        self.publish("orders")
        self.publish("items")

    def publish(self, table: str) -> None:
        """Create a table with rows, and add it to the publication."""
        self.database.execute(f"create table {table} (id int primary key, note text)")
        self.database.execute(f"insert into {table} select i, '{table}' from generate_series(1, 20) i")
        self.database.execute(f"alter publication p add table {table}")
        self.tables.append(table)

    def write(self) -> None:
        """Commit an INSERT, an UPDATE and a DELETE in each table, three times."""
        for _ in range(3):
            self._written += 1
            for table in self.tables:
                self.database.execute(f"insert into {table} values ({self._written + 100}, 'new')")
                self.database.execute(
                    f"update {table} set note = '{self._written}' where id <= {self._written % 7}"
                )
                self.database.execute(f"delete from {table} where id = {self._written + 97}")

    def start(self, *arguments: str) -> BaseProcess:
        self._processes.append(start_pgsieve(arguments, self._file, self._log))
        return self._processes[-1]

    def end(self) -> None:
        """End processes that a failed test left running."""
        for process in self._processes:
            process.kill()
            process.join()

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Run a command. Return its exit code and its output."""
        before = len(self.log)
        process = self.start(*arguments)
        # On a slow store Spark sends hundreds of requests for each table, and the machine may be busy.
        process.join(600)
        assert process.exitcode is not None
        return process.exitcode, self.log[before:]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def confirmed(self) -> list[tuple]:
        return self.database.execute(
            "select confirmed_flush_lsn::text from pg_replication_slots where database = current_database()"
        ).fetchall()

    def is_current(self) -> bool:
        """Whether each replica has the publisher's rows."""
        return all(
            Counter(self._rows(f"public/{table}", "id, note"))
            == Counter(self.database.execute(f"select id, note from {table}").fetchall())
            for table in self.tables
        )

    def settle(self) -> None:
        """Assert that the next run on a good network repairs everything, and that no change is in a history twice."""
        self.proxy.heal()
        ended, printed = self("run")
        assert ended == 0, printed
        assert self.is_current()
        for table in self.tables:
            if not self._exists(f"_changes/public/{table}"):
                continue  # All changes were part of the copy.
            history = self._rows(f"_changes/public/{table}", "commit_lsn, ordinal")
            assert len(history) == len(set(history)), f"{table}: a change twice in its history"
        ended, printed = self("check")
        assert ended == 0, printed
        assert SECRET not in self.log
        assert "Traceback" not in self.log

    def objects(self) -> list[str]:
        """The lake's objects. SeaweedFS keeps folders without objects, and lists each as an object of 0 bytes; these are left out."""
        files = pafs.PyFileSystem(DeltaStorageHandler(self._lake, self._server.delta_rs))
        entries = files.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True))
        folders = {entry.path for entry in entries if entry.type == pafs.FileType.Directory}
        return [entry.path for entry in entries if entry.path not in folders]

    def _exists(self, path: str) -> bool:
        return DeltaTable.is_deltatable(f"{self._lake}/sales/{path}", self._server.delta_rs)

    def _rows(self, path: str, columns: str) -> list[tuple]:
        table = DeltaTable(f"{self._lake}/sales/{path}", storage_options=self._server.delta_rs)
        query = QueryBuilder().register("t", table).execute(f"select {columns} from t")
        return list(zip(*(column.to_pylist() for column in pa.table(query.read_all()).columns), strict=True))


@contextmanager
def new_shop(
    publisher: EmbeddedServer,
    server: S3Server,
    lake: str,
    folder: Path,
    proxy: S3Proxy,
    spark: dict[str, object],
) -> Iterator[Shop]:
    name = "store_faults"
    with psycopg.connect(publisher.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        with psycopg.connect(publisher.conninfo(dbname=name), autocommit=True) as database:
            database.execute("create publication p")
            shop = Shop(folder, lake, server, proxy, database, spark)
            try:
                yield shop
            finally:
                shop.end()
                proxy.heal()
                drop_slots(database)
        admin.execute(f"drop database {name} with (force)")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3_server.url) as made:
        yield made


@pytest.fixture(scope="module")
def store_master(
    s3_server: S3Server, proxy: S3Proxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A warm Spark whose requests go through the proxy."""
    folder = tmp_path_factory.mktemp("connect")
    with connect_server(folder, python_without_pgsieve(folder), on_s3=True) as address:
        yield address


@pytest.fixture(
    params=[
        "process",
        pytest.param("marking", marks=pytest.mark.long),
        pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.long]),
    ]
)
def shop(
    request: pytest.FixtureRequest,
    publisher_server: EmbeddedServer,
    s3_server: S3Server,
    proxy: S3Proxy,
    s3_folder: str,
    tmp_path: Path,
) -> Iterator[Shop]:
    spark: dict[str, object] = {}
    if request.param == "marking":
        spark = {"master": "threads[2]", "conf": MARKING}
    elif request.param == "spark":
        spark = {"master": request.getfixturevalue("store_master"), "conf": NOT_SMALL}
    with new_shop(publisher_server, s3_server, s3_folder, tmp_path, proxy, spark) as made:
        yield made


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("answer", "methods"),
    [
        (SLOW_DOWN, ""),
        pytest.param(CUT, "PUT", marks=pytest.mark.long),
        pytest.param(INTERNAL, "GET HEAD", marks=pytest.mark.long),
        pytest.param(CUT, "GET", marks=pytest.mark.long),
    ],
    ids=["slow_down", "cut_uploads", "internal_errors", "cut_downloads"],
)
def test_a_run_survives_temporary_faults(shop: Shop, answer: Answer, methods: str) -> None:
    """It takes long: runs repeat requests to a failing store."""
    assert shop("run")[0] == 0, shop.log
    for every in (4, 9):
        shop.write()
        shop.proxy.refuse(answer, methods=methods, every=every)
        ended, printed = shop("run")
        assert ended == 0, printed
        assert shop.is_current()
        assert shop.proxy.refusals
    shop.settle()


@pytest.mark.long
def test_a_slow_store_is_waited_for(shop: Shop) -> None:
    """It takes long: each request waits a tenth of a second."""
    shop.proxy.delay = 0.1
    for _ in range(2):
        shop.write()
        assert shop("run")[0] == 0, shop.log
    shop.settle()


#: Where a run writes, in order: the change log, a history, a replica, the cuts.
PLACES = ("change_log/_delta_log/", "_changes/public/orders/", "sales/public/items/", "_cuts/_delta_log/")


@pytest.mark.drawn
@pytest.mark.parametrize(
    "place", ["sales/public/items/", pytest.param("_delta_log/", marks=pytest.mark.long)]
)
def test_an_object_that_is_stored_although_its_answer_is_lost_counts_once(shop: Shop, place: str) -> None:
    """It takes long: several commands, each a process, repeat requests to a store behind a proxy."""
    assert shop("run")[0] == 0, shop.log
    for times in (3, 1) if place == "_delta_log/" else (1,):
        shop.write()
        losses = 0
        shop.proxy.heal()

        def lost(method: str, path: str, times: int = times) -> bool:
            nonlocal losses
            if method != "PUT" or place not in path or losses == times:
                return False
            losses += 1
            return True

        shop.proxy.lost = lost
        ended, printed = shop("run")
        assert losses == times, printed
        assert ended in {0, REFUSED}, printed
        if ended == REFUSED:
            assert "Delta table" in printed
        shop.settle()


REFUSALS = {
    "expired": (EXPIRED, "", "the store does not accept the credentials (ExpiredToken)", "renew them"),
    "read-only": (DENIED, "PUT POST DELETE", "the store does not allow it (AccessDenied)", "need the right"),
    "gone": (NO_BUCKET, "", "there is no such bucket or container (NoSuchBucket)", "create it"),
}


@pytest.mark.drawn
@pytest.mark.parametrize(
    "kind", ["expired", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("read-only", "gone"))]
)
def test_a_store_that_refuses_stops_a_run_and_sets_nothing_aside(
    shop: Shop, s3_folder: str, kind: str
) -> None:
    """It takes long: runs repeat requests to a failing store."""
    answer, methods, what, hint = REFUSALS[kind]
    lake = s3_folder.replace("s3://", "s3a://")

    def refused(*arguments: str) -> None:
        ended, printed = shop(*arguments)
        assert ended == REFUSED, printed
        assert f'lake "{lake}": {what}' in printed
        assert hint in printed
        assert "set aside" not in printed

    assert shop("run")[0] == 0, shop.log
    before = shop.confirmed()
    # From here on a run is refused in the middle of its work. A missing bucket has no middle.
    places = {"gone": ("",), "expired": PLACES[::2]}
    for number, place in enumerate(places.get(kind, PLACES)):
        shop.write()
        shop.proxy.refuse(answer, methods=methods, part=place)
        refused("run")
        assert number or shop.confirmed() == before
        shop.proxy.heal()
    shop.proxy.refuse(answer, methods=methods)
    refused("drop", "sales", "--delete-tables")
    if kind == "gone":
        refused("maintain")
        refused("status")
        refused("check")
    shop.settle()


@pytest.mark.drawn
@pytest.mark.parametrize("shop", ["process"], indirect=True)
def test_drop_delete_tables_deletes_nothing_of_another_lake(
    shop: Shop, s3_server: S3Server, s3_folder: str
) -> None:
    """It takes long: three commands, each a process, and an S3 server."""
    store = Store.from_storage(Storage.from_address(s3_folder, s3_server.storage))
    neighbours = [f"{s3_folder}{end}" for end in ("2/sales/x", "/sales2/x", "-old/_pgsieve/shop/x")]
    within = f"{s3_folder}/sales/other/_pgsieve/shop/x"
    for path in (*neighbours, within):
        store.touch(path)
    assert shop("run")[0] == 0, shop.log
    before = shop.objects()
    ended, printed = shop("drop", "sales", "--delete-tables")
    assert ended == REFUSED, printed
    assert "another lake is in its folder" in printed
    assert shop.objects() == before
    assert len(shop.confirmed()) == 1
    store.remove(within.rpartition("/other/")[0] + "/other")
    ended, printed = shop("drop", "sales", "--delete-tables")
    assert ended == 0, printed
    assert shop.confirmed() == []
    assert all(map(store.has_file, neighbours))
    assert not [name for name in shop.objects() if name.startswith("sales/")]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "kind",
    ["ignored at times", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("ignored", "unknown"))],
)
@pytest.mark.parametrize("shop", ["process"], indirect=True)
def test_a_store_that_may_lose_commits_is_refused_before_anything_is_written(
    shop: Shop, s3_server: S3Server, s3_folder: str, kind: str
) -> None:
    """It takes long: many commands against a store behind a proxy, each a process."""
    if kind.startswith("ignored"):
        shop.proxy.lies = 1 if kind == "ignored" else 12
        problem = "does not honour If-None-Match on PUT: it accepted two objects of one name"
    else:
        shop.proxy.refuse(NOT_IMPLEMENTED, methods="PUT", part="_delta_log/")
        problem = "does not know If-None-Match on PUT"
    # Requests are repeated ten times if the server answers 5xx.
    commands = [("validate",), ("run",), ("run", "--follow"), ("resync", "sales")]
    for command in commands if kind == "ignored" else commands[:1]:
        ended, printed = shop(*command)
        assert ended == REFUSED, printed
        assert f"the server at {shop.proxy.url} {problem}" in printed
        assert "only_writer: spark" in printed
        assert "Traceback" not in printed
        assert shop.confirmed() == []
        assert shop.objects() == []
    shop.proxy.heal()
    assert shop("validate")[0] == 0, shop.log
    assert shop.objects() == []
    for _ in range(2):
        # On a busy machine too few writers may meet in one run. Then nothing is recorded, and the next run tries again.
        is_recorded = any("_commits_kept" in path for path in shop.objects())
        shop.proxy.answered.clear()
        shop.write()
        assert shop("run")[0] == 0, shop.log
        assert any("_commits_tried" in path for _, path, _ in shop.proxy.answered) is not is_recorded
    shop.settle()


@pytest.mark.drawn
@pytest.mark.parametrize("more", [2, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("shop", ["process"], indirect=True)
def test_a_first_copy_needs_few_requests_per_table_of_a_distant_store(shop: Shop, more: int) -> None:
    """It takes long: three commands, each a process, and an S3 server."""
    for number in range(more):
        shop.publish(f"more{number}")
    assert shop("run")[0] == 0, shop.log
    copying = takewhile(lambda a: a[0] != "PUT" or "/_transformed/" not in a[1], shop.proxy.answered)
    of_tables = [path for _, path, _ in copying if "/public/" in unquote(path)]
    # Requests per table: two to look at an open table, or at none; five to open one; ten to write a new one.
    assert len(of_tables) <= 24 * len(shop.tables)
    shop.settle()


@pytest.mark.parametrize("shop", [pytest.param("process", marks=pytest.mark.long)], indirect=True)
def test_a_follower_survives_a_burst_of_errors_and_ends_when_the_store_refuses(shop: Shop) -> None:
    """It takes long: a follower repeats requests to a failing store, and two commands follow."""
    follower = shop.start("run", "--follow")
    # Changes before the copy are in no slice.
    wait_until(lambda: "copied" in shop.log, lambda: shop.log, 120)
    shop.write()
    wait_until(lambda: _has_begun(shop) and shop.is_current(), lambda: shop.log, 120)
    shop.proxy.refuse(INTERNAL, every=2)
    shop.write()
    wait_until(shop.is_current, lambda: shop.log, 120)
    shop.proxy.refuse(SLOW_DOWN)
    shop.write()
    follower.join(3)
    assert follower.exitcode is None
    shop.proxy.heal()
    wait_until(shop.is_current, lambda: shop.log, 120)
    shop.proxy.refuse(EXPIRED)
    shop.write()
    follower.join(120)
    assert follower.exitcode == REFUSED, shop.log
    assert "the store does not accept the credentials" in shop.log
    shop.settle()


def _has_begun(shop: Shop) -> bool:
    return "follow" in shop.log


@pytest.mark.long
def test_a_stale_listing_loses_and_doubles_nothing(shop: Shop) -> None:
    """It takes long: thirteen commands, each a process."""
    assert shop("run")[0] == 0, shop.log
    for seconds in (0.3, 2.0, 10.0):
        for _ in range(2):
            shop.write()
            shop.proxy.late = seconds
            ended, printed = shop("run")
            assert ended in {0, REFUSED}, printed
            assert "set aside" not in printed
        shop.settle()


@pytest.mark.long
def test_runs_killed_amid_faults_are_completed_by_the_next(shop: Shop) -> None:
    """It takes long: eight runs are killed after up to four seconds, and two commands follow."""
    for number in range(8):
        shop.proxy.refuse((SLOW_DOWN, CUT, INTERNAL)[number % 3], every=4)
        shop.write()
        process = shop.start("run")
        process.join(0.5 + number % 4)
        process.kill()
        process.join()
        assert process.exitcode in {0, -signal.SIGKILL}, shop.log
    shop.settle()
