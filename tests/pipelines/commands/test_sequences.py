"""Sequences of publications in pgsieve.yaml, on every server: a table of their values, refreshed by each command that reads the slot."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest

from pgsieve.assets.steps.checks.sequences import SequenceComparison
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.follow import FollowedSlotStream
from pgsieve.pipelines.commands.status import status
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.sequences import SequenceValue
from pgsieve.resources.postgres.wal import read_flushed_lsn
from tests.fixtures.shop import Shop
from tests.fixtures.streamed import stop_at


def recorded(shop: Shop, subscription: str) -> dict[str, tuple[int | None, bool | None]]:
    newest = Sequences(shop.lake, subscription).read_newest()
    return {name: (value.last_value, value.is_called) for (_, name), value in newest.items()}


def checked(shop: Shop, subscription: str) -> tuple[int, dict[str, tuple[object, ...]]]:
    ended, report = shop.cli("check", subscription, "--json")
    of_sequences = json.JSONDecoder().raw_decode(report)[0]["sequences"]
    return ended, {s["name"]: (s["recorded"], s["publisher"], s["equal"], s["moved"]) for s in of_sequences}


def subscribed(shop: Shop, **subscriptions: list[str]) -> None:
    own = {
        "some": {"sequences": ["public.one", 'public."Two"']},
        "every": {"all_sequences": True, "tables": [{"table": "public.stock"}]},
    }
    shop.configure(
        sources={"shop": {**shop.written["sources"]["shop"], "publications": own}},
        subscriptions={
            name: {"source": "shop", "publications": publications}
            for name, publications in subscriptions.items()
        },
    )


@pytest.mark.drawn
def test_sequences_of_the_file_are_recorded_refreshed_and_compared(shop: Shop) -> None:
    """It may take long: many commands, some with runs of the whole graph."""
    shop.database.execute(
        """CREATE SEQUENCE one; CREATE SEQUENCE "Two" START 10 INCREMENT -2 MINVALUE -100 MAXVALUE 100; CREATE TEMPORARY SEQUENCE of_a_session;
        SELECT setval('one', 42, false); SELECT nextval('"Two"'), nextval('"Two"')"""
    )
    subscribed(shop, alone=["some"], beside=["every", "p"], none=["p"])
    ended, validated = shop.cli("validate", "--json")
    assert (ended, json.loads(validated)["problems"]) == (0, [])
    named = {
        r["subscription"]: [s["name"] for s in r["sequences"]] for r in json.loads(validated)["subscriptions"]
    }
    assert named == {"alone": ["Two", "one"], "beside": ["Two", "one"], "none": []}
    shop.copy()
    assert recorded(shop, "alone") == recorded(shop, "beside") == {"one": (42, False), "Two": (8, True)}
    assert not shop.lake.records.exists(Sequences(shop.lake, "none").path)
    # Unchanged values are not written again.
    version, project = Sequences(shop.lake, "alone").read_version(), build_project(load_config(shop.path))
    drain_slot(project.subscriptions["alone"].slot_stream, shop.lake, [], print)
    assert Sequences(shop.lake, "alone").read_version() == version
    # A sequence that moved on does not differ, and is refreshed; a sequence that was never recorded differs.
    shop.database.execute("SELECT nextval('one')")
    assert checked(shop, "alone") == (0, {"one": (42, 42, True, True), "Two": (8, 8, True, False)})
    assert recorded(shop, "alone")["one"] == (42, True)
    record = Sequences(shop.lake, "alone")
    two = record.read_newest()["public", "Two"]
    record.append([replace(two, last_value=4)], [], record.read_version())
    assert checked(shop, "alone") == (1, {"one": (42, 42, True, False), "Two": (4, 8, False, False)})
    shop.database.execute("SELECT nextval('one')")
    assert shop.cli("resync", "beside")[0] == 0
    assert recorded(shop, "beside")["one"] == (43, True)
    # A sequence that was dropped stops no table, and is named. ALL SEQUENCES no longer includes it.
    shop.database.execute("DROP SEQUENCE one; INSERT INTO stock VALUES (5, 5)")
    ended, ran = shop.cli("run", "alone", "beside")
    assert (ended, "sequence public.one" in ran) == (1, True), ran
    assert recorded(shop, "beside") == {"Two": (8, True)}
    assert shop.ids("beside", "stock") == [1, 2, 3, 4, 5]
    assert shop.cli("maintain", "alone")[0] == 0
    assert recorded(shop, "alone") == {"one": (43, True), "Two": (8, True)}, "the earlier value is lost"
    assert checked(shop, "alone") == (1, {"one": (43, None, False, False), "Two": (8, 8, True, False)})
    ended, shown = shop.cli("status")
    assert (ended, "sequence public.one: 43: problem: there is no such sequence" in shown) == (0, True), shown
    assert shop.cli("validate")[0] == 1
    [alone, *_] = status(load_config(shop.path)).subscriptions
    assert [(s.name, s.last_value, s.problem is None) for s in alone.sequences] == [
        ("Two", 8, True),
        ("one", 43, False),
    ]


def test_a_follower_refreshes_sequences_even_if_no_table_is_published(shop: Shop) -> None:
    shop.database.execute('CREATE SEQUENCE one; CREATE SEQUENCE "Two"')
    subscribed(shop, alone=["some"])
    project = build_project(load_config(shop.path))
    slot_stream, lake = project.subscriptions["alone"].slot_stream, shop.lake
    with FollowedSlotStream(slot_stream, lake, print) as streamed, ThreadPoolExecutor(1) as pool:
        assert recorded(shop, "alone") == {"one": (1, False), "Two": (1, False)}
        shop.database.execute("SELECT setval('one', 100)")
        stopping = pool.submit(stop_at, streamed, read_flushed_lsn(shop.database), Event())
        for _ in streamed.read_slice_ends():
            streamed.append_due_slice()
        stopping.result()
    assert recorded(shop, "alone") == {"one": (100, True), "Two": (1, False)}


def test_the_page_lsn_or_the_increment_tells_whether_a_sequence_moved() -> None:
    def moved(
        before: tuple[int, bool, int | None], now: tuple[int, bool, int | None], *, up: bool = True
    ) -> bool:
        values = [SequenceValue("s", "q", *each, ascending=up) for each in (before, now)]
        compared = SequenceComparison("s", "q", *values)
        assert compared.is_equal is (compared.has_moved or before[:2] == now[:2])
        return compared.has_moved

    assert moved((5, True, None), (6, True, None))
    assert moved((5, False, None), (5, True, None))
    assert not moved((5, True, None), (5, False, None))
    assert not moved((5, True, None), (4, True, None))
    assert moved((5, True, None), (4, True, None), up=False)
    assert moved((5, True, 16), (1, False, 17)), "setval() and RESTART are written to the WAL"
    assert not moved((5, True, 17), (6, True, 16))
    assert moved((5, True, 16), (6, True, 16))
    assert not moved((5, True, 16), (4, True, 16))
    assert not moved((5, True, 16), (5, True, 16))
    assert not SequenceComparison("s", "q", None, SequenceValue("s", "q", 1, True)).is_equal
    assert not SequenceComparison("s", "q", SequenceValue("s", "q", 1, True), None).is_equal
