"""Replicas follow the layout of the subscription, whichever writer writes them, also when it changes. By command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable

from pgsieve.pipelines.demo.demo import SMALL_DATA
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import start_pgsieve
from tests.fixtures.s3_server import S3Server
from tests.fixtures.servers import drop_slots

pytestmark = pytest.mark.slow

FEED = {"delta.enableChangeDataFeed": "true"}


@pytest.fixture
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database laid_out")
        with psycopg.connect(publisher_server.conninfo(dbname="laid_out"), autocommit=True) as connection:
            connection.execute("create table orders (id int primary key, region text, sent date)")
            connection.execute("create table plain (id int primary key, note text)")
            connection.execute(
                "insert into orders select i, md5(i::text), '2020-01-01' from generate_series(1, 12000) i;"
                "insert into plain values (1, 'a'), (2, 'b')"
            )
            connection.execute("create publication p for table orders, plain")
            yield connection
            drop_slots(connection)
        admin.execute("drop database laid_out with (force)")


class Pgsieve:
    """Runs commands on a lake. `layout` is the subscription's."""

    def __init__(self, folder: Path, source: str, lake: str, store: S3Server | None) -> None:
        self.lake, self._store, self._source = lake, store, source
        self._file, self._log = folder / "pgsieve.yaml", folder / "log"

    def __call__(
        self, *command: str, layout: Mapping[str, Any], ends: int = 0, master: str | None = None
    ) -> str:
        written: dict[str, Any] = {
            "lake": self.lake,
            "sources": {"shop": {"conninfo": self._source}},
            "subscriptions": {"sales": {"source": "shop", "publications": ["p"], "layout": dict(layout)}},
        }
        if self._store:
            written["storage"] = dict(self._store.storage)
        if master:
            conf = {**SMALL_DATA, "spark.pgsieve.smallBytes": "-1"}
            written["spark"] = {"master": master, "engine": "off", "conf": conf}
        self._file.write_text(yaml.safe_dump(written))
        before = len(self._printed)
        process = start_pgsieve(command, self._file, self._log)
        process.join(600)
        assert process.exitcode == ends, self._printed[before:]
        return self._printed[before:]

    @property
    def _printed(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def replica(self, folder: str) -> DeltaTable:
        return DeltaTable(
            f"{self.lake}/sales/{folder}", storage_options=self._store.delta_rs if self._store else None
        )

    def slot_stream(self, folder: str, since: int = 1) -> Counter[tuple[str, int]]:
        """The change data feed as delta-rs reads it: counts of (kind, key), without the copy."""
        rows = pa.table(self.replica(folder).load_cdf(since).read_all())
        return Counter(zip(rows["_change_type"].to_pylist(), rows["id"].to_pylist(), strict=True))

    def feed_by_spark(self, folder: str, since: int) -> Counter[tuple[str, int]]:
        """The same stream as Spark reads it."""
        program = (
            "import sys, json\n"
            "from pgsieve.resources.lake.session import SparkEngine\n"
            "from pgsieve.resources.lake.stores.storage import Storage, declare_storage\n"
            "lake, folder, since, options, conf = map(json.loads, sys.argv[1:])\n"
            "storage = Storage.from_address(lake, options)\n"
            "declare_storage(storage)\n"
            "spark = SparkEngine(master='local[2]', lake=storage.address, spark_config=conf).session\n"
            "feed = spark.read.option('readChangeFeed', 'true').option('startingVersion', since).format('delta')\n"
            "rows = feed.load(storage.address + '/sales/' + folder).select('_change_type', 'id').collect()\n"
            "print('rows', json.dumps([list(row) for row in rows]))\n"
        )
        options = dict(self._store.storage) if self._store else {}
        arguments = [json.dumps(each) for each in (self.lake, folder, since, options, SMALL_DATA)]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return Counter(map(tuple, json.loads(done.stdout.rpartition("rows ")[2])))


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.long)])
def pgsieve(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    publisher_server: EmbeddedServer,
    database: psycopg.Connection,
) -> Pgsieve:
    source = publisher_server.conninfo(dbname="laid_out")
    if request.param == "folder":
        return Pgsieve(tmp_path, source, str(tmp_path / "lake"), None)
    return Pgsieve(
        tmp_path, source, request.getfixturevalue("s3_folder"), request.getfixturevalue("s3_server")
    )


def changed(database: psycopg.Connection, key: int) -> Counter[tuple[str, int]]:
    """Commit an UPDATE, a DELETE, an INSERT and a change of a key. Return them as the stream has them."""
    database.execute(f"update orders set region = 'x' where id = {key}")
    database.execute(f"delete from orders where id = {key + 1}")
    database.execute(f"insert into orders values ({key + 100000}, 'new', null)")
    database.execute(f"update orders set id = {key + 200000} where id = {key + 2}")
    kinds = ("update_preimage", key), ("update_postimage", key), ("delete", key + 1), ("insert", key + 100000)
    return Counter((*kinds, ("delete", key + 2), ("insert", key + 200000)))


@pytest.mark.drawn
def test_replicas_follow_their_layout(pgsieve: Pgsieve, database: psycopg.Connection) -> None:
    """It takes long: eight commands, each a process."""
    layout: dict[str, Any] = {
        "folders": "bronze/{table}",
        "target_file_size": "64 kB",
        "cluster_by": ["region"],
        "tables": {"public.orders": {"properties": FEED}},
    }
    pgsieve("run", layout=layout)
    orders, plain = pgsieve.replica("bronze/orders"), pgsieve.replica("bronze/plain")
    assert orders.metadata().configuration == {**FEED, "delta.targetFileSize": "65536"}
    assert plain.metadata().configuration == {"delta.targetFileSize": "65536"}
    assert orders.version() == plain.version() == 0
    changes = changed(database, 1)
    pgsieve("run", layout=layout)
    assert pgsieve.slot_stream("bronze/orders") == changes
    # Clustering puts close rows into the same files, and no two files overlap. It is not repeated without need.
    pgsieve("maintain", layout=layout)
    bounds = pa.table(pgsieve.replica("bronze/orders").get_add_actions(flatten=True)).sort_by("min.region")
    least, greatest = bounds["min.region"].to_pylist(), bounds["max.region"].to_pylist()
    assert len(least) > 1
    assert all(high <= low for high, low in zip(greatest, least[1:], strict=False))
    versions = pgsieve.replica("bronze/orders").version()
    pgsieve("maintain", layout=layout)
    assert pgsieve.replica("bronze/orders").version() == versions
    # Changes of the layout apply to existing replicas although there are no changes of rows.
    layout["properties"] = {"delta.checkpointInterval": 5}
    pgsieve("run", layout=layout)
    assert pgsieve.replica("bronze/plain").metadata().configuration["delta.checkpointInterval"] == "5"
    del layout["properties"]
    pgsieve("run", layout=layout)
    assert pgsieve.replica("bronze/plain").metadata().configuration["delta.checkpointInterval"] == "10"
    versions = pgsieve.replica("bronze/plain").version()
    pgsieve("run", layout=layout)
    pgsieve("check", layout=layout)
    assert pgsieve.replica("bronze/plain").version() == versions


@pytest.mark.drawn
def test_a_table_with_a_column_of_the_feed_gets_no_feed(
    pgsieve: Pgsieve, database: psycopg.Connection
) -> None:
    """Delta reserves the column for the feed. The columns may get that name later, or the user may set the feed."""
    layout: dict[str, Any] = {"properties": FEED}
    database.execute("alter table plain add _commit_version int; create table late (id int primary key)")
    database.execute("insert into late values (1), (2); alter publication p add table late")
    pgsieve("run", layout=layout)
    assert "delta.enableChangeDataFeed" not in pgsieve.replica("public/plain").metadata().configuration
    assert pgsieve.replica("public/late").metadata().configuration == FEED
    database.execute('alter table late add "_Change_type" text')
    database.execute("""update late set "_Change_type" = 'x' where id = 1; delete from late where id = 2""")
    database.execute("update plain set _commit_version = 7 where id = 1; delete from plain where id = 2")
    pgsieve("run", layout=layout)
    pgsieve("check", layout=layout)
    turned_off = {"delta.enableChangeDataFeed": "false"}
    assert pgsieve.replica("public/late").metadata().configuration == turned_off
    # A user turns the feed on by delta-rs, which does not refuse it. A new copy turns it off.
    pgsieve.replica("public/plain").alter.set_table_properties(FEED)
    pgsieve("resync", "sales", "public.plain", layout=layout)
    pgsieve("run", layout=layout)
    assert pgsieve.replica("public/plain").metadata().configuration == turned_off
    pgsieve("check", layout=layout)
    # The table's own layout is refused, because it says that this table shall have a feed.
    own = {"tables": {"public.plain": {"properties": FEED}}}
    refused = pgsieve("validate", layout=own, ends=1)
    assert "Delta reserves the name of its column _commit_version for the feed [42939]" in refused


@pytest.mark.drawn
def test_another_template_of_folders_needs_a_new_copy(pgsieve: Pgsieve, database: psycopg.Connection) -> None:
    """It takes long: nine commands, each a process."""
    pgsieve("run", layout={})
    first, other = "its replicas are in folders named", {"folders": "{schema}_{table}"}
    refused = pgsieve("run", layout=other, ends=2)
    assert f'{first} "{{schema}}/{{table}}", and pgsieve.yaml says "{{schema}}_{{table}}"' in refused
    assert "pgsieve drop sales" in refused
    assert first in pgsieve("maintain", layout=other, ends=2)
    database.execute("insert into plain values (3, 'c')")
    pgsieve("run", layout={})
    pgsieve("drop", "sales", layout=other)
    pgsieve("run", layout=other)
    assert pgsieve.replica("public_plain").version() == 0
    assert pgsieve.replica("public/plain").version() == 1
    assert first in pgsieve("run", layout={}, ends=2)
    database.execute("create schema s_public; create table s_public.plain (id int primary key)")
    database.execute("create schema s; create table s.public_plain (id int primary key)")
    database.execute("alter publication p add table s_public.plain, s.public_plain")
    problems = pgsieve("validate", layout={**other, "cluster_by": ["id"]}, ends=1)
    assert "would have the same folder, s_public_plain" in problems
    waiting = pgsieve("run", layout=other, ends=1)
    assert "would have the same folder, s_public_plain" in waiting


@pytest.mark.drawn
def test_a_layouts_missing_tables_and_columns_are_reported(
    pgsieve: Pgsieve, database: psycopg.Connection
) -> None:
    layout = {"tables": {"public.plain": {"cluster_by": ["nothing"]}, "public.gone": {}}}
    problems = pgsieve("validate", layout=layout, ends=1)
    assert "table public.plain cannot be clustered by nothing" in problems
    assert "does not replicate table public.gone, which its layout names" in problems
    pgsieve("run", layout=layout)
    refused = pgsieve("maintain", layout=layout, ends=2)
    assert "table public.plain cannot be clustered by nothing" in refused


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(1800)  # it starts five JVMs
def test_spark_writes_and_reads_the_same_feed_as_this_process(
    pgsieve: Pgsieve, database: psycopg.Connection
) -> None:
    """It takes long: five JVMs start, one after the other."""
    # With a timestamp the protocol lists features. Without a key, the rows of whole files would be replaced.
    database.execute("alter table orders add at timestamp; alter table plain drop constraint plain_pkey")
    database.execute("alter table plain replica identity full")
    layout: dict[str, Any] = {"cluster_by": ["id"], "properties": {}}
    pgsieve("run", layout=layout)
    layout["properties"] = FEED
    pgsieve("run", layout=layout)
    orders = pgsieve.replica("public/orders")
    assert orders.version() == 1
    assert "variantType" not in (orders.protocol().reader_features or ())
    expected = {"public/orders": Counter[tuple[str, int]](), "public/plain": Counter[tuple[str, int]]()}
    for key, master in ((1, None), (11, "local[2]")):
        expected["public/orders"] += changed(database, key)
        database.execute(f"insert into plain values ({key + 10}, 'c'); delete from plain where id = {key}")
        expected["public/plain"][("insert", key + 10)] += 1
        expected["public/plain"][("delete", key)] += 1
        pgsieve("run", layout=layout, master=master)
    pgsieve("maintain", layout=layout)
    pgsieve("check", layout=layout)
    for folder, changes in expected.items():
        assert pgsieve.slot_stream(folder, since=2) == changes
        assert pgsieve.feed_by_spark(folder, since=2) == changes
