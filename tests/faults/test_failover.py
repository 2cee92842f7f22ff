"""A primary fails and its standby is promoted: pgsieve continues if the slot was synchronized; otherwise it names the loss.

Section 29.3 of PostgreSQL's manual, Logical Replication Failover (17 and later).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.following.follow import follow
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS
from tests.fixtures.shop import Quiet, Shop
from tests.fixtures.standby import standby_of

pytestmark = pytest.mark.spark

_VERSION = 18


@dataclass
class _Pair:
    """A primary, its hot standby, and a configuration with both hosts."""

    primary: EmbeddedServer
    standby: EmbeddedServer
    shop: Shop

    def on_primary(self, sql: str) -> None:
        self.shop.database.execute(sql)

    def on_standby(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.standby.conninfo(), autocommit=True) as connection:
            rows = connection.execute(sql)
            return rows.fetchall() if rows.description else []

    def synchronize(self) -> None:
        """Wait until the standby has the failover slot. This does the work of its slot synchronization worker."""
        project = build_project(load_config(self.shop.path))
        subscription = project.subscriptions["one"]
        ready = "select count(*) from pg_replication_slots where synced and not temporary"
        # One session for all attempts: a slot that is not ready yet belongs to its session.
        with psycopg.connect(self.standby.conninfo(), autocommit=True) as session:

            def synchronized() -> bool:
                # The standby accepts a slot only if no running transaction is older than its catalog_xmin.
                self.on_primary("insert into beats default values")
                self.on_primary("select pg_log_standby_snapshot()")
                drain_slot(subscription.slot_stream, project.lake.open(), [subscription], lambda _: None)
                # The standby must also have replayed restart_lsn. A second advance moves it on.
                self.on_primary(
                    "select pg_replication_slot_advance(slot_name, confirmed_flush_lsn) from pg_replication_slots"
                    " where slot_name = 'pgsieve_shop'"
                )
                self.replayed()
                session.execute("select pg_sync_replication_slots()")
                return session.execute(ready).fetchone() == (1,)

            wait_until(synchronized, lambda: "the slot is not synchronized", 60)

    def replayed(self) -> None:
        """Wait until the standby has replayed everything."""
        [(lsn,)] = self.shop.database.execute("select pg_current_wal_insert_lsn()::text").fetchall()
        wait_until(
            lambda: self.on_standby(f"select pg_last_wal_replay_lsn() >= '{lsn}'") == [(True,)],
            lambda: "the standby is behind",
            60,
        )

    def fail_over(self) -> None:
        self.primary.stop(immediate=True)
        self.on_standby("select pg_promote()")


@pytest.fixture
def pair(server_folder: Path, tmp_path: Path, orchestrator: None) -> Iterator[_Pair]:
    data = server_folder / "standby"
    with (
        EmbeddedServer(server_folder / "primary", version=_VERSION, settings=TEST_SETTINGS) as primary,
        standby_of(primary, data) as standby,
        psycopg.connect(primary.conninfo(), autocommit=True) as database,
    ):
        database.execute(
            "create table orders (id int primary key, n int); create table stock (id int primary key)"
        )
        database.execute("create table beats (id serial primary key)")
        database.execute("create publication p for table orders, beats; create publication q for table stock")
        both = f"host=127.0.0.1,127.0.0.1 port={primary.port},{standby.port} user=postgres dbname=postgres"
        written = {
            "lake": "./lake",
            "sources": {"shop": {"conninfo": f"{both} target_session_attrs=read-write"}},
            "subscriptions": {"one": {"source": "shop", "publications": ["p"], "failover": True}},
        }
        shop = Shop(database, written, tmp_path / "pgsieve.yaml")
        shop.configure()
        yield _Pair(primary, standby, shop)


@pytest.mark.drawn
def test_after_a_failover_a_run_continues_from_the_synchronized_slot_and_names_the_lost_one(
    pair: _Pair,
) -> None:
    """It takes long: a new primary and standby, and seven commands."""
    shop = pair.shop
    two = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    shop.configure(subscriptions={**shop.written["subscriptions"], "two": two})
    pair.on_primary("insert into orders values (1, 1)")
    assert not shop.run().failures
    pair.synchronize()
    # Delta is ahead of the synchronized slot, and the standby has changes that were not read.
    pair.on_primary("insert into orders values (2, 2); update orders set n = 3 where id = 1")
    assert not shop.run().failures
    pair.on_primary("insert into orders values (3, 3); delete from orders where id = 2")
    pair.replayed()
    pair.fail_over()
    summary = shop.run()
    (lost,) = summary.failures
    assert lost.subscriptions == ("two",)
    assert "does not exist, but Delta holds its changes up to" in str(lost.error)
    assert [(t.inserted, t.updated, t.deleted) for s in summary.subscriptions for t in s.tables] == [
        (1, 0, 1)
    ]
    pair.on_standby("insert into orders values (4, 4); insert into stock values (7)")
    assert [failure.subscriptions for failure in shop.run().failures] == [("two",)]
    assert shop.ids("one", "orders") == [1, 3, 4]
    shop.resync("two")
    assert not shop.run().failures
    assert shop.ids("two", "stock") == [7]


@pytest.mark.drawn
def test_a_failover_while_a_slot_is_followed_loses_nothing(pair: _Pair) -> None:
    """It takes long: a new primary and standby, and a follower that reconnects to the other server."""
    shop, config = pair.shop, load_config(pair.shop.path)
    pair.on_primary("insert into orders values (1, 1)")
    assert not shop.run().failures
    pair.synchronize()
    assert not shop.run().failures
    pair.on_primary("insert into orders values (2, 2)")
    inserted = []

    def tell(summary: RunSummary) -> None:
        assert not summary.failures
        inserted.append([t.inserted for s in summary.subscriptions for t in s.tables])
        if len(inserted) == 1:
            pair.replayed()
            pair.fail_over()
            pair.on_standby("insert into orders values (3, 3)")
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    assert not follow(config, config.select([]), Quiet(), tell)
    assert inserted == [[1], [1]]
    assert not shop.run().failures
    assert shop.ids("one", "orders") == [1, 2, 3]


@pytest.mark.drawn
def test_a_standby_that_lacks_deltas_changes_is_refused_until_a_full_copy(
    pair: _Pair,
) -> None:
    """It takes long: a new primary and standby, and seven commands."""
    shop = pair.shop
    pair.on_primary("insert into orders values (1, 1)")
    assert not shop.run().failures
    pair.synchronize()
    assert pair.on_standby("select failover from pg_replication_slots where synced") == [(True,)]
    pair.standby.stop()
    pair.on_primary("insert into orders values (2, 2)")
    assert not shop.run().failures
    assert shop.ids("one", "orders") == [1, 2]
    pair.primary.stop(immediate=True)
    pair.standby.start()
    pair.on_standby("select pg_promote()")
    # The new primary's LSNs pass those in Delta, but belong to other transactions.
    pair.on_standby("insert into orders values (3, 3); select pg_switch_wal()")
    pair.on_standby("insert into orders values (4, 4)")
    code, output = shop.cli("run")
    assert code == 2
    assert "Delta holds changes of timeline 1 up to" in output
    assert "but the server is now on timeline 2, and left timeline 1 at" in output
    assert "it may lack some of these changes" in output
    assert "`pgsieve resync one`" in output
    assert shop.ids("one", "orders") == [1, 2]
    config = load_config(shop.path)
    (failure,) = follow(config, config.select([]), Quiet(), lambda _: None)
    assert "now on timeline 2" in str(failure.error)
    assert shop.resync("one").lost
    assert not shop.run().failures
    assert shop.ids("one", "orders") == [1, 3, 4]


def test_an_existing_slot_gets_failover_and_a_standby_is_no_source(pair: _Pair) -> None:
    shop = pair.shop
    one = shop.written["subscriptions"]["one"]
    failover = "select failover from pg_replication_slots where slot_name = 'pgsieve_shop'"
    shop.configure(subscriptions={"one": {**one, "failover": False}})
    assert not shop.run().failures
    assert shop.database.execute(failover).fetchall() == [(False,)]
    shop.configure(subscriptions={"one": one})
    assert not shop.run().failures
    assert shop.database.execute(failover).fetchall() == [(True,)]
    shop.configure(sources={"shop": {"conninfo": pair.standby.conninfo()}})
    for command in ("run", "check"):
        code, output = shop.cli(command)
        assert code == 2, output
        assert "the server is a standby" in output
        assert "target_session_attrs=read-write" in output
