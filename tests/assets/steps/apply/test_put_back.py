"""A replica that is put back to an earlier version during an apply is set aside, at whatever moment: no cut hides it.

If versions of rows are put back, the next run begins them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from pgsieve.assets.steps.apply import replica_tables
from pgsieve.assets.steps.checks import repair
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.resources.lake.delta.commits import Commits
from pgsieve.resources.lake.delta.records import REPAIRED_KEY, commit_metadata
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.shop import Shop

Act = Callable[..., Any]


class _Once:
    """Puts a table back at its first call, by default the replica of orders."""

    def __init__(self, shop: Shop, path: str | None = None, version: int = 0) -> None:
        self.path, self.done = path or shop.lake.paths.replica("one", "public", "orders"), False
        self._version = version

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            DeltaTable(self.path).restore(self._version)


def _after_the_first_look(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    look: Act = replica_tables.set_aside_damaged_tables

    def looked(*given: Any) -> object:
        states = look(*given)
        put_back()
        return states

    patch.setattr(replica_tables, "set_aside_damaged_tables", looked)


def _beside_a_commit(put_back: _Once, *, before: bool) -> Act:
    committed: Act = Commits.commit_with_retries

    def act(self: Commits, path: str, *given: Any, **named: Any) -> object:
        if before and path == put_back.path:
            put_back()
        done = committed(self, path, *given, **named)
        if not before and path == put_back.path:
            put_back()
        return done

    return act


def _before_the_commit(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    patch.setattr(Commits, "commit_with_retries", _beside_a_commit(put_back, before=True))


def _after_the_commit(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    patch.setattr(Commits, "commit_with_retries", _beside_a_commit(put_back, before=False))


def _after_a_run_without_a_cut(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    with pytest.MonkeyPatch.context() as within:
        within.setattr(replica_tables, "_write_cut", lambda *_: None)
        shop.run("one")
    _after_the_first_look(patch, shop, put_back)


def _after_a_repair(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    shop.run("one")
    shop.table("one", "orders").delete("id = 2")
    correct: Act = repair._correct_rows

    def corrected(*given: Any) -> object:
        done = correct(*given)
        put_back()
        return done

    patch.setattr(repair, "_correct_rows", corrected)
    # The repair uses the Spark of this process: the one that other tests share, which reaches S3.
    assert engine().session
    shop.cli("check", "--repair", "one")


def _after_a_resync(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    shop.run("one")
    shop.resync("one", "public.orders")
    put_back()


def _after_a_copy_and_before_its_cut(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    record: Act = replica_tables._Replicas.write_cut

    def recorded(*given: Any) -> object:
        put_back()
        return record(*given)

    shop.run("one")
    patch.setattr(replica_tables._Replicas, "write_cut", recorded)
    shop.resync("one", "public.orders")


@pytest.mark.drawn
@pytest.mark.parametrize(
    "when",
    [
        pytest.param(_after_a_resync, marks=pytest.mark.long),
        _after_a_copy_and_before_its_cut,
        pytest.param(_after_the_first_look, marks=pytest.mark.long),
        _before_the_commit,
        pytest.param(_after_the_commit, marks=pytest.mark.long),
        _after_a_run_without_a_cut,
        pytest.param(_after_a_repair, marks=[pytest.mark.spark, pytest.mark.long]),
    ],
)
def test_a_replica_that_is_put_back_during_a_run_is_set_aside(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, when: Callable[[pytest.MonkeyPatch, Shop, _Once], None]
) -> None:
    """It takes long: five commands on two subscriptions."""
    shop.run()
    for number in (5, 6):
        shop.database.execute(
            f"insert into orders values ({number}, 1); insert into notes values ({number}, 1)"
        )
        if number == 5:
            shop.run()
    put_back = _Once(shop)
    with monkeypatch.context() as patch:
        when(patch, shop, put_back)
        summary: RunSummary = shop.run("one")
    assert put_back.done
    (problem,) = summary.subscriptions[0].problems
    assert "back to an earlier version; `pgsieve resync one public.orders`" in problem
    assert shop.ids("one", "notes") == [1, 2, 3, 4, 5, 6]
    shop.resync("one", "public.orders")
    shop.database.execute("delete from orders where id = 3")
    assert shop.run("one").subscriptions[0].problems == ()
    assert shop.ids("one", "orders") == [2, 4, 5, 6]


def _current(path: str) -> list[tuple[int, int]]:
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    return sorted((row["id"], row["n"]) for row in rows if row["is_current"])


def _replica(shop: Shop) -> list[tuple[int, int]]:
    rows = shop.table("one", "orders").to_pyarrow_table().to_pylist()
    return sorted((row["id"], row["n"]) for row in rows)


@pytest.mark.drawn
@pytest.mark.parametrize("before", [pytest.param(True, marks=pytest.mark.long), False, None])
def test_versions_that_are_put_back_begin_again_with_the_next_run(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, *, before: bool | None
) -> None:
    """They are put back between two runs (None), or during a run that commits to them."""
    shop.written["subscriptions"]["one"]["history"] = "scd2"
    shop.configure()
    shop.run("one")
    for number in (20, 30):
        shop.database.execute(f"update orders set n = {number} where id = 2")
        shop.run("one")
    path = shop.lake.paths.row_versions("one", "public", "orders")
    put_back = _Once(shop, path, DeltaTable(path).version() - 1)
    if before is None:
        put_back()
    else:
        shop.database.execute("update orders set n = 40 where id = 3")
        with monkeypatch.context() as patch:
            patch.setattr(Commits, "commit_with_retries", _beside_a_commit(put_back, before=before))
            shop.run("one")
    assert put_back.done

    assert shop.run("one").subscriptions[0].problems == ()
    assert _current(path) == _replica(shop)
    version = DeltaTable(path).version()
    assert shop.run("one").subscriptions[0].problems == ()
    assert DeltaTable(path).version() == version, "versions begin again more than once"
    shop.database.execute("update orders set n = 50 where id > 2")
    shop.run("one")
    assert _current(path) == _replica(shop) == [(2, 30), (3, 50), (4, 50)]


@pytest.mark.drawn
def test_histories_follow_a_repair_whose_process_died_before_them(shop: Shop) -> None:
    """The repair's process died after its commit."""
    shop.written["subscriptions"]["one"]["history"] = {"initial": True, "scd2": True}
    shop.configure()
    shop.run("one")
    path = shop.lake.paths.row_versions("one", "public", "orders")
    for table in (path, shop.table("one", "orders").table_uri):
        DeltaTable(table).delete("id = 2")
    assert "the change history begins with the copied rows" in " ".join(shop.cli("validate")[1].split())
    repaired = CommitProperties(custom_metadata={"userMetadata": commit_metadata(None, {REPAIRED_KEY: 1})})
    row = pa.table({"id": pa.array([2], pa.int32()), "n": pa.array([2], pa.int32())})
    write_deltalake(shop.table("one", "orders"), row, mode="append", commit_properties=repaired)
    shop.run("one")
    assert _current(path) == _replica(shop) == [(2, 2), (3, 3), (4, 4)]
    assert "the change history lacks the copied rows" in " ".join(shop.cli("validate")[1].split())
    version = DeltaTable(path).version()
    shop.run("one")
    assert DeltaTable(path).version() == version, "histories begin again more than once"
    shop.database.execute("update orders set n = 20 where id = 2")
    shop.run("one")
    assert _current(path) == _replica(shop) == [(2, 20), (3, 3), (4, 4)]
