"""A copy that waits for other sessions' transactions delays no changes, and names the session that it waits for."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import psycopg
import pytest

from pgsieve.assets.steps.checks import consistency
from pgsieve.assets.steps.initial_sync import one_batch
from pgsieve.assets.steps.operations import initial_copy
from pgsieve.assets.steps.slot_consumption import ready
from pgsieve.pipelines.commands import materializer
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.following.follow import follow
from pgsieve.resources.failpoints import Failpoint
from pgsieve.resources.postgres import capture, catalog, filter_analysis, snapshot, waits
from tests.fixtures.shop import Quiet, Shop


def _one_more_table(shop: Shop) -> None:
    shop.database.execute("create table more (id int primary key); insert into more values (1)")
    shop.database.execute("alter publication p add table more")
    shop.database.execute("insert into orders values (5, 5); insert into stock values (5, 5)")


@pytest.mark.drawn
def test_changes_continue_while_a_copy_waits_for_an_open_transaction(shop: Shop) -> None:
    """It takes long: in each of two modes a copy waits for the transaction in vain."""
    source = shop.written["sources"]["shop"]
    own = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    shop.configure(subscriptions={**shop.written["subscriptions"], "three": own})
    shop.copy()
    elsewhere = psycopg.conninfo.make_conninfo(
        source["conninfo"], dbname="postgres", application_name="batch"
    )
    with psycopg.connect(elsewhere) as session:
        session.execute("create temporary table f (i int)")
        _one_more_table(shop)
        code, output = shop.cli("run")
        assert code == 1, output
        assert [shop.ids("one", "orders"), shop.ids("two", "stock")] == [[2, 3, 4, 5], [1, 2, 3, 4, 5]], (
            output
        )
        assert shop.ids("three", "stock") == [1, 2, 3, 4, 5], output
        holder = f'server process {session.info.backend_pid} ("batch" in database "postgres", since '
        for text in (output, shop.cli("status")[1]):
            assert holder in " ".join(text.split()), text
        shown = json.loads(shop.cli("status", "--json")[1])
        problems = [t["problem"] for s in shown["subscriptions"] for t in s["tables"] if t["name"] == "more"]
        assert holder in problems[0]
    assert (ran := shop.cli("run"))[0] == 0, ran
    assert shop.ids("one", "more") == [1]


_TABLES = """
create table plain (id int primary key); create table tree (id int primary key) partition by range (id);
create table leaf partition of tree for values from (0) to (100);
create table made (id int primary key, g int generated always as (id + 1) stored);
create table filtered (id int primary key);
alter publication q add table plain, tree, made, filtered where (id > 0)
"""
_NEW = """
create table vacuumed (id int primary key); create table altered (id int primary key); create table free (id int primary key);
create table chosen (id int primary key); alter publication q add table vacuumed, altered, free, chosen where (id > 0)
"""


@pytest.mark.drawn
def test_a_locked_table_delays_no_other(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock delays only its own table, in both modes. It takes long: in six commands each step waits a little for the lock."""
    for module in (ready, initial_copy, materializer):
        monkeypatch.setattr(module, "BRIEF_SECONDS", 0.5)
    for module in (materializer, consistency):
        monkeypatch.setattr(module, "PATIENT_SECONDS", 0.5)
    for module in (catalog, filter_analysis):
        monkeypatch.setattr(module, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(snapshot, "_SET_LOCK_TIMEOUT", "set lock_timeout = '0.2s'")
    own = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    written = {"tables": [{"table": "public.filtered", "where": "id > 0"}]}
    source = {**shop.written["sources"]["shop"], "publications": {"d": written}}
    defined = {"source": "shop", "publications": ["d"]}
    shop.configure(
        subscriptions={**shop.written["subscriptions"], "three": own, "four": defined},
        sources={"shop": source},
    )
    shop.database.execute(_TABLES)
    shop.copy()
    settled, conninfo = ["filtered", "made", "plain", "leaf", "stock"], source["conninfo"]

    def write(number: int, *tables: str) -> None:
        for table in tables:
            shop.database.execute(f"insert into {table} (id) values ({number})")

    def newest(*tables: str) -> set[int]:
        return {max(shop.ids(name, table)) for name in ("two", "three") for table in tables}

    with psycopg.connect(conninfo) as vacuum, psycopg.connect(conninfo, application_name="batch") as ddl:
        shop.database.execute(_NEW)
        write(5, *settled, "vacuumed", "altered", "free", "chosen")
        # VACUUM and CREATE INDEX CONCURRENTLY take this lock. The lock of ALTER TABLE follows after a snapshot is exported.
        vacuum.execute("lock table vacuumed in share update exclusive mode")

        def locking(point: Failpoint) -> None:
            if point == Failpoint.SNAPSHOT_EXPORTED and not ddl.closed:
                ddl.execute("lock table altered, chosen in access exclusive mode")

        monkeypatch.setattr(one_batch, "reach", locking)
        code, output = shop.cli("run")
        assert code == 1, output
        assert newest(*settled) == {5}, output
        # By now the second snapshot waits for ALTER TABLE.
        assert shop.ids("two", "vacuumed") == [5], output
        holder_text = f'server process {ddl.info.backend_pid} ("batch" in database "'
        for text in (output, shop.cli("status")[1]):
            assert " ".join(text.split()).count(f"waits for open transactions: {holder_text}") >= 2, text
        # Ready tables continue, and stay ready, whatever is locked and altered.
        ddl.execute("lock table plain, leaf, made, filtered in access exclusive mode")
        write(6, "stock", "vacuumed")
        shop.database.execute("alter publication q set (publish = 'insert, update')")
        assert (ran := shop.cli("run"))[0] == 1, ran
        assert (newest("stock"), shop.ids("two", "vacuumed")) == ({6}, [5, 6]), ran
        assert {shop.state(name, table) for name in ("two", "three") for table in settled} == {"ready"}
        code, output = shop.cli("check", "three")
        assert code == 2, output
        assert holder_text in " ".join(output.split())
    assert (ran := shop.cli("run"))[0] == 0, ran
    assert newest("altered", "free", "chosen", "vacuumed") == {5, 6}
    with psycopg.connect(conninfo) as ddl:
        applied = consistency.apply

        def locking_then(*arguments: Any) -> object:
            ddl.execute("lock table plain in access exclusive mode")
            return applied(*arguments)

        monkeypatch.setattr(consistency, "apply", locking_then)
        code, output = shop.cli("check", "three", "--json")
        assert code == 1, output
        tables = json.JSONDecoder().raw_decode(output)[0]["tables"]
        assert {t["name"] for t in tables if not t["equal"]} == {"plain"}
        monkeypatch.undo()
    assert (checked := shop.cli("check"))[0] == 0, checked


def test_drop_waits_for_no_lock(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock may keep a table in a capture publication; the next run removes it. Dropping a slot or a publication needs no lock."""
    monkeypatch.setattr(capture, "LOCK_SECONDS", 0.2)
    shop.database.execute("alter publication q set (publish = 'insert, update, delete, truncate')")
    shop.copy()
    name = shop.written["sources"]["shop"]["capture"]

    def captured() -> list[str]:
        rows = shop.database.execute(
            "select relname from pg_publication_rel join pg_publication p on p.oid = prpubid join pg_class c on c.oid = prrelid"
            " where pubname = %s order by 1",
            [name],
        )
        return [row[0] for row in rows]

    with psycopg.connect(shop.written["sources"]["shop"]["conninfo"]) as ddl:
        ddl.execute("lock table orders in access exclusive mode")
        assert (captured(), shop.drop("one").altered) == (["notes", "orders", "stock"], (name,))
        assert captured() == ["orders", "stock"]
    shop.configure(subscriptions={"two": shop.written["subscriptions"]["two"]})
    shop.copy()
    assert captured() == ["stock"]
    with psycopg.connect(shop.written["sources"]["shop"]["conninfo"]) as ddl:
        ddl.execute("lock table stock in access exclusive mode")
        dropped = shop.drop("two")
    assert (dropped.slot, shop.on_server()) == (name, ([], ["p", "q"]))


@pytest.mark.long
def test_a_follower_copies_once_the_transaction_has_ended(shop: Shop) -> None:
    """It takes long: a follower tries the copy again until the transaction has ended."""
    shop.copy()
    shop.database.execute("begin; create table holder_text (i int); prepare transaction 'forgotten'")
    _one_more_table(shop)
    config, gids = load_config(shop.path), ["forgotten"]
    summaries: list[str] = []

    def tell(summary: RunSummary) -> None:
        summaries.extend(problem for each in summary.subscriptions for problem in each.problems)
        copied = {t.name for each in summary.subscriptions for t in each.copied}
        if gids and shop.ids("one", "orders")[-1] == 5 and shop.ids("two", "stock")[-1] == 5:
            shop.database.execute(f"rollback prepared '{gids.pop()}'")
        elif "more" in copied:
            os.kill(os.getpid(), signal.SIGTERM)

    late = threading.Timer(100, os.kill, [os.getpid(), signal.SIGTERM])
    late.start()
    try:
        assert follow(config, config.select([]), Quiet(), tell) == ()
    finally:
        late.cancel()
        for gid in gids:
            shop.database.execute(f"rollback prepared '{gid}'")
    assert any('prepared transaction "forgotten" of database' in problem for problem in summaries)
    assert shop.ids("one", "more") == [1]
