"""No change is lost while users alter capture publications, or another session or lake does."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pgsieve.assets.steps.operations import initial_copy
from pgsieve.assets.steps.slot_consumption import drain, ready
from pgsieve.pipelines.commands import materializer
from pgsieve.resources.postgres import waits
from tests.fixtures.shop import Shop


def test_no_change_is_lost_while_a_user_alters_a_capture_publication(shop: Shop) -> None:
    """The user takes each alteration back. A transaction that is open meanwhile commits only after the next run."""
    name, execute = shop.written["sources"]["shop"]["slot"], shop.database.execute
    everything = "publish = 'insert, update, delete, truncate'"
    shop.run_command(0)
    execute(f"alter publication {name} drop table notes; insert into notes values (5, 5)")
    with psycopg.connect(shop.database.info.dsn) as open_session:
        open_session.execute("insert into notes values (6, 6)")
        execute(f"alter publication {name} add table notes where (id < 5); insert into notes values (7, 7)")
        execute(f"alter publication {name} drop table notes; alter publication {name} add table notes")
        execute(f"alter publication {name} set (publish = 'insert'); update orders set n = 9 where id = 2")
        execute(f"alter publication {name} set ({everything})")
        shop.run_command(0)
    execute(f"alter publication {name} drop table orders; delete from orders where id = 4")
    shop.run_command(0)
    execute("insert into orders values (5, 5)")
    shop.run_command(0)
    assert shop.pairs("one", "notes") == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]
    assert shop.pairs("one", "orders") == [(2, 9), (3, 3), (5, 5)]


def _publish_in_configuration(shop: Shop, *tables: str) -> str:
    """Copy tables of a publication that pgsieve.yaml defines. Return the name of the capture publication."""
    source = shop.written["sources"]["shop"]
    own = {"tables": [{"table": f"public.{table}"} for table in tables]}
    shop.configure(
        sources={"shop": {**source, "publications": {"own": own}}},
        subscriptions={"two": {"source": "shop", "publications": ["own"]}},
    )
    shop.run_command(0)
    return str(source["slot"])


def test_a_table_of_a_publication_in_the_configuration_is_copied_that_a_user_took_out(shop: Shop) -> None:
    """The publisher cannot decide for such a publication. It takes long: a run for each way in which the table comes back."""
    name, execute = _publish_in_configuration(shop, "stock", "notes"), shop.database.execute
    take_out, put_back = (f"alter publication {name} {verb} table notes" for verb in ("drop", "add"))
    everything = "publish = 'insert, update, delete, truncate'"
    ways = (
        (take_out, None),
        (take_out, put_back),
        (
            f"alter publication {name} set (publish = 'delete')",
            f"alter publication {name} set ({everything})",
        ),
        (take_out, f"alter publication {name} add tables in schema public"),
        (f"drop publication {name}", f"create publication {name} for all tables"),
    )
    for number, (alteration, undoing) in enumerate(ways, 5):
        execute(alteration)
        execute(f"insert into notes values ({number}, 0); insert into stock values ({number}, 0)")
        if undoing is not None:
            execute(undoing)
        shop.run_command(0)
        assert shop.ids("two", "notes") == shop.ids("two", "stock") == list(range(1, number + 1)), undoing


def test_such_a_table_is_copied_if_an_older_transaction_puts_it_back(shop: Shop) -> None:
    """The transaction began before the catalog was recorded, and alters the capture publication afterwards."""
    name, execute = _publish_in_configuration(shop, "notes"), shop.database.execute
    with psycopg.connect(shop.database.info.dsn) as older_session:
        older_session.execute("select pg_current_xact_id()")
        execute("alter table notes replica identity full")
        shop.run_command(0)
        execute(f"alter publication {name} drop table notes; insert into notes values (5, 5)")
        older_session.execute(f"alter publication {name} add table notes")
    execute("insert into notes values (6, 6)")
    shop.run_command(0)
    assert shop.ids("two", "notes") == [1, 2, 3, 4, 5, 6]


def test_such_a_table_is_copied_at_once_if_it_was_taken_out_during_a_run(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, execute = _publish_in_configuration(shop, "notes"), shop.database.execute
    prepare_slot = drain.prepare_slot
    alterations = [
        f"alter publication {name} drop table notes; insert into notes values (5, 5)",
        f"alter publication {name} add table notes; insert into notes values (6, 6)",
    ]

    def prepare_and_alter(*arguments: Any) -> object:
        prepared = prepare_slot(*arguments)
        while alterations:
            execute(alterations.pop(0))
        return prepared

    monkeypatch.setattr(drain, "prepare_slot", prepare_and_alter)
    shop.run_command(0)
    assert shop.ids("two", "notes") == [1, 2, 3, 4, 5, 6]


@pytest.mark.drawn
def test_a_table_that_a_user_took_out_is_copied_if_prepared_transactions_arrive(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While such a transaction waits, the publisher cannot decide, and a copy has to wait, too."""
    monkeypatch.setattr(materializer, "PATIENT_SECONDS", 1.0)
    name, execute = shop.written["sources"]["shop"]["slot"], shop.database.execute
    one = {**shop.written["subscriptions"]["one"], "two_phase": True}
    shop.configure(subscriptions={"one": one})
    shop.run_command(0)
    with psycopg.connect(shop.database.info.dsn) as session:
        session.execute("insert into orders values (5, 5)")
        session.execute(f"prepare transaction '{name}'")
    execute("insert into notes values (5, 5)")
    shop.run_command(0)
    execute(f"alter publication {name} drop table notes; insert into notes values (6, 6)")
    execute(f"alter publication {name} add table notes")
    shop.cli("run")
    execute(f"commit prepared '{name}'")
    execute("insert into notes values (7, 7)")
    shop.run_command(0)
    assert (shop.ids("one", "notes"), shop.ids("one", "orders")) == ([1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5])


def test_a_run_goes_on_while_another_session_alters_a_capture_publication(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That session locks the publication, not a table."""
    name, execute = shop.written["sources"]["shop"]["slot"], shop.database.execute
    for module in (ready, initial_copy, materializer):
        monkeypatch.setattr(module, "BRIEF_SECONDS", 0.5)
    monkeypatch.setattr(materializer, "PATIENT_SECONDS", 0.5)
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.2)
    shop.run_command(0)
    with psycopg.connect(shop.database.info.dsn) as altering_session:
        altering_session.execute(f"alter publication {name} drop table orders")
        execute("create table added (id int primary key, n int); alter publication p add table added")
        execute("insert into added values (1, 1); insert into notes values (5, 5)")
        output = shop.run_command(1)
        assert f"waits for open transactions: server process {altering_session.info.backend_pid}" in " ".join(
            output.split()
        )
        assert shop.ids("one", "notes") == [1, 2, 3, 4, 5]
    execute("insert into orders values (6, 6)")
    shop.run_command(0)
    assert (shop.ids("one", "added"), shop.ids("one", "orders")) == ([1], [2, 3, 4, 6])


@pytest.mark.drawn
def test_two_lakes_take_their_tables_out_of_the_same_capture_publications(shop: Shop) -> None:
    """Each run captures the tables of its own lake alone. It takes long: eight runs."""
    source, subscriptions = shop.written["sources"]["shop"], shop.written["subscriptions"]
    other_source = {**source, "slot": f"{source['slot']}_other"}
    other = Shop(shop.database, {**shop.written, "lake": "./other"}, shop.path.with_name("other.yaml"))
    shop.configure(subscriptions={"one": subscriptions["one"]})
    other.configure(sources={"shop": other_source}, subscriptions={"two": subscriptions["two"]})
    for number, lake in enumerate((shop, other, shop, other, other, shop, other), 5):
        lake.run_command(0)
        for table in ("notes", "stock"):
            shop.database.execute(f"insert into {table} values ({number}, 0)")
    other.run_command(0)
    assert other.ids("two", "stock") == list(range(1, 12))
    # The capture publications are dropped, too.
    other.drop("two")
    shop.database.execute("insert into notes values (12, 0)")
    shop.run_command(0)
    assert shop.ids("one", "notes") == list(range(1, 13))


def test_a_tree_whose_root_is_locked_names_the_lock_and_not_a_missing_right(shop: Shop) -> None:
    execute = shop.database.execute
    execute("create table tree (id int primary key, n int) partition by range (id)")
    execute("create table low partition of tree for values from (0) to (100)")
    execute("create publication r for table tree with (publish_via_partition_root)")
    shop.configure(subscriptions={"root": {"source": "shop", "publications": ["r"]}})
    shop.run_command(0)
    execute("alter publication r set (publish_via_partition_root = false)")
    with psycopg.connect(shop.written["sources"]["shop"]["conninfo"]) as other:
        # Such a lock prevents ALTER PUBLICATION.
        other.execute("lock table only tree in share update exclusive mode")
        output = shop.run_command(1)
        assert (
            "another session locks a table that has to leave a capture publication; each run tries again"
            in output
        )
        assert "may not alter" not in output
    execute("insert into tree values (1, 1)")
    shop.run_command(0)
    assert shop.pairs("root", "low") == [(1, 1)]
