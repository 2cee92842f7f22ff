"""A replica that somebody puts back to an earlier version while it is applied to is set aside, whenever that is: no cut hides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pgsieve.assets.steps.apply import replica_tables
from pgsieve.assets.steps.checks import repair
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.resources.lake.delta.commits import Commits
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.shop import Shop

Act = Callable[..., Any]


class _Once:
    """Puts the replica of orders back, the first time that it is asked to."""

    def __init__(self, shop: Shop) -> None:
        self._shop, self.done = shop, False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            self._shop.table("one", "orders").restore(0)


def _after_the_first_look(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    look: Act = replica_tables.states_without_damaged

    def looked(*given: Any) -> object:
        states = look(*given)
        put_back()
        return states

    patch.setattr(replica_tables, "states_without_damaged", looked)


def _beside_a_commit(put_back: _Once, *, before: bool) -> Act:
    committed: Act = Commits.committed

    def act(self: Commits, path: str, *given: Any, **named: Any) -> object:
        if before and path.endswith("/one/public/orders"):
            put_back()
        done = committed(self, path, *given, **named)
        if not before and path.endswith("/one/public/orders"):
            put_back()
        return done

    return act


def _before_the_commit(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    patch.setattr(Commits, "committed", _beside_a_commit(put_back, before=True))


def _after_the_commit(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    patch.setattr(Commits, "committed", _beside_a_commit(put_back, before=False))


def _after_a_run_without_a_cut(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    with pytest.MonkeyPatch.context() as within:
        within.setattr(replica_tables, "_record", lambda *_: None)
        shop.run("one")
    _after_the_first_look(patch, shop, put_back)


def _after_a_repair(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    shop.run("one")
    shop.table("one", "orders").delete("id = 2")
    merge: Act = repair._merged

    def merged(*given: Any) -> object:
        done = merge(*given)
        put_back()
        return done

    patch.setattr(repair, "_merged", merged)
    # The repair takes the Spark that this process has: the one that other tests share, and that reaches S3.
    assert engine().session
    shop.cli("check", "--repair", "one")


def _after_a_resync(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    shop.run("one")
    shop.resync("one", "public.orders")
    put_back()


def _after_a_copy_and_before_its_cut(patch: pytest.MonkeyPatch, shop: Shop, put_back: _Once) -> None:
    record: Act = replica_tables._Replicas.cut

    def recorded(*given: Any) -> object:
        put_back()
        return record(*given)

    shop.run("one")
    patch.setattr(replica_tables._Replicas, "cut", recorded)
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
def test_a_replica_that_is_put_back_amid_a_run_is_set_aside(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, when: Callable[[pytest.MonkeyPatch, Shop, _Once], None]
) -> None:
    """Five commands on two subscriptions."""
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
