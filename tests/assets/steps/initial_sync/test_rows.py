"""If Spark's master is this machine, threads of this process copy large tables, with the same rows and refusals. No JVM."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.checks.consistency import check_consistency
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.initial_sync.one_table import CopyResult
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.resources import parts
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.postgres import snapshot
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from tests.fixtures.lakes import no_session
from tests.fixtures.oracle import wait_until
from tests.fixtures.samples import TYPES, arrays, of_users, scalars
from tests.fixtures.servers import own_database

pytestmark = pytest.mark.slow

_numbers = itertools.count(1)


def quiet(_: str) -> None:
    pass


class Site:
    """A database whose publication `p` is copied."""

    def __init__(self, name: str, conninfo: str, database: psycopg.Connection, folder: Path) -> None:
        self._name, self._conninfo, self.database, self._folder = name, conninfo, database, folder

    def subscription(self, by: str) -> Subscription:
        """A subscription to all tables, with its own slot."""
        slot_stream = SlotStream(
            name=by,
            source=Source("publisher", self._conninfo),
            slot=f"{self._name}_{by}",
            capture=f"{self._name}_{by}",
            filtered=False,
            subscriptions={"sub": ("p",)},
        )
        return Subscription("sub", slot_stream)

    def lake(self, by: str) -> Lake:
        """A lake whose tables are copied by this `process`, or by two of its `threads`."""
        small = {"process": 2**30, "threads": -1}[by]
        return Lake(str(self._folder / by), no_session, LakeSettings(small, thread_count=2))

    def copy(self, by: str) -> list[CopyResult]:
        """Copy all tables."""
        subscription, lake = self.subscription(by), self.lake(by)
        return copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), quiet)

    def replica(self, by: str, table: str) -> DeltaTable:
        """The replica of a table."""
        return DeltaTable(self.lake(by).paths.replica("sub", "public", table))


@pytest.fixture
def site(publisher_server: EmbeddedServer, tmp_path: Path) -> Iterator[Site]:
    name = f"rows_{next(_numbers)}"
    with own_database(publisher_server, name) as database:
        yield Site(name, publisher_server.conninfo(dbname=name), database, tmp_path)


@pytest.mark.drawn
def test_values_of_all_types_are_the_same_for_every_way_to_copy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 8 * 1024)
    drawn = random.Random(19)
    kinds = {"scalars": scalars(drawn), "users": of_users(drawn)}
    kinds["arrays"] = arrays(drawn, kinds["scalars"])
    site.database.execute(TYPES)
    for name, columns in kinds.items():
        types = [column.type for column in columns]
        declared = ", ".join(f"c{number} {type_}" for number, type_ in enumerate(types))
        site.database.execute(f"create table {name} (id int primary key, {declared})")
        insert = f"insert into {name} values (%s, {', '.join(f'%s::text::{type_}' for type_ in types)})"
        site.database.execute(insert, [0, *(None for _ in types)])
        for row in range(1, 100):
            values = [drawn.choice([*column.edges, column.draw()]) for column in columns]
            site.database.execute(insert, [row, *values])
    site.database.execute(f"create publication p for table {', '.join(kinds)}")
    for by in ("process", "threads"):
        outcomes = {copied.table: (copied.rows, copied.problem) for copied in site.copy(by)}
        assert outcomes == dict.fromkeys(kinds, (100, None))
        checked = check_consistency(site.subscription(by), site.lake(by), quiet)
        assert {each.table: (each.publisher_rows, each.equal) for each in checked} == dict.fromkeys(
            kinds, (100, True)
        )
    for name in kinds:
        assert len(site.replica("threads", name).file_uris()) > 1, "the table was copied in one chunk"


def test_threads_share_a_copy_evenly(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 64 * 1024)
    site.database.execute(
        "create table rows (id int primary key, note text);"
        "insert into rows select i, repeat('x', 100) from generate_series(1, 4000) i;"
        # Large values are not in the pages of their rows.
        "create table large (id int primary key, note text); alter table large alter note set storage external;"
        "insert into large select i, repeat('x', 5000) from generate_series(1, 1000) i;"
        "create table tree (id int, note text) partition by range (id);"
        "create table low partition of tree for values from (0) to (4000);"
        "create table high partition of tree for values from (4000) to (4010);"
        "insert into tree select i, repeat('x', 100) from generate_series(0, 4009) i;"
        "create publication p for table rows, large, tree with (publish_via_partition_root = true)"
    )
    assert {copied.table: copied.rows for copied in site.copy("threads")} == {
        "rows": 4000,
        "large": 1000,
        "tree": 4010,
    }
    for table, least in (("rows", 1500), ("large", 400), ("tree", 10)):
        files = site.replica("threads", table).get_add_actions(flatten=True)
        counts = pa.table(files)["num_records"].to_pylist()
        assert len(counts) == (3 if table == "tree" else 2), table
        assert min(counts) >= least, table


def test_a_table_is_refused_in_the_same_words_for_every_way_to_copy(site: Site) -> None:
    site.database.execute(
        "create table price (id int primary key, amount numeric(5, 2));"
        "insert into price select i, case i when 777 then 'NaN' else 1.5 end from generate_series(1, 1000) i;"
        "create table divided (id int primary key); insert into divided values (1);"
        "create publication p for table price, divided where (1 / (id - 1) = 1)"
    )
    problems = [{copied.table: copied.problem for copied in site.copy(by)} for by in ("process", "threads")]
    assert problems[0] == problems[1]
    assert "in the row with key (id)=(777)" in str(problems[0]["price"])
    assert "division by zero" in str(problems[0]["divided"])


def test_the_sessions_of_a_copy_end_if_a_chunk_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 64 * 1024)
    site.database.execute(
        "create table price (id int primary key, amount numeric(5, 2), note text);"
        "insert into price select i, case i when 1 then 'NaN' else 1.5 end, repeat('x', 500)"
        " from generate_series(1, 50000) i;"
        "create publication p for table price"
    )
    (copied,) = site.copy("threads")
    assert copied.problem is not None
    sessions = "select query from pg_stat_activity where query like 'COPY%' and datname = current_database()"
    wait_until(lambda: not site.database.execute(sessions).fetchall(), lambda: "a chunk is read on")
