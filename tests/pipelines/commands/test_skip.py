"""`pgsieve skip` and `pgsieve enable`: LSNs to skip, and disabled subscriptions. Copies are small and need no JVM."""

from __future__ import annotations

import re

import psycopg
import pytest

from pgsieve.assets.steps.records.subscription_state import SubscriptionDisabledError, SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.skip import enable
from pgsieve.pipelines.commands.status import status
from pgsieve.pipelines.config.model import load_config
from tests.fixtures.shop import Shop


@pytest.mark.drawn
def test_an_lsn_to_skip_is_kept_shown_and_cleared(shop: Shop) -> None:
    shop.copy()
    assert shop.cli("skip", "one", "7f/0") == (0, "one: will skip the transaction finished at LSN 7F/0\n")
    assert shop.skip("one", "7F/1") == "7F/1"
    one, two = status(load_config(shop.path)).subscriptions
    assert (one.skip_lsn, two.skip_lsn) == ("7F/1", None)
    for _ in range(2):
        assert shop.skip("one", "none") is None
        assert status(load_config(shop.path)).subscriptions[0].skip_lsn is None


@pytest.mark.parametrize(
    ("lsn", "error"),
    [("0/0", psycopg.errors.InvalidParameterValue), ("x", psycopg.errors.InvalidTextRepresentation)],
)
def test_an_invalid_lsn_is_refused_as_by_postgresql(shop: Shop, lsn: str, error: type[psycopg.Error]) -> None:
    subscription = "connection 'dbname=x' publication p with (connect = false)"
    shop.database.execute(f"create subscription skipping {subscription}".encode())
    with pytest.raises(error) as refused:
        shop.database.execute(f"alter subscription skipping skip (lsn = '{lsn}')".encode())
    shop.database.execute("alter subscription skipping set (slot_name = none)")
    shop.database.execute("drop subscription skipping")
    with pytest.raises(PgsieveError) as raised:
        shop.skip("one", lsn)
    expected = (refused.value.diag.message_primary, refused.value.sqlstate)
    assert (raised.value.message, raised.value.sqlstate) == expected


@pytest.mark.drawn
@pytest.mark.spark
def test_a_disabled_subscription_is_refused_until_it_is_enabled_and_the_others_continue(shop: Shop) -> None:
    shop.copy()
    SubscriptionRecord(shop.lake, "one").disable("a value, in the transaction finished at 0/10")
    shop.database.execute("create table later (id int primary key)")
    shop.database.execute("alter publication p add table later")
    shop.database.execute("alter publication q add table later")
    for refused in (lambda: shop.run("one"), lambda: shop.resync("one")):
        with pytest.raises(SubscriptionDisabledError) as raised:
            refused()
        assert "finished at 0/10" in raised.value.message
        assert "`pgsieve enable one`" in str(raised.value.hint)
    assert shop.cli("run", "one")[0] == 2
    code, output = shop.cli("run")
    assert code == 1
    assert 'subscription "one" is disabled' in output
    assert shop.state("two", "later") == "ready"
    assert ("public", "later") not in TableStates(shop.lake, "one").read_newest()
    found_one = status(load_config(shop.path)).subscriptions[0]
    assert (found_one.enabled, found_one.reason) == (False, "a value, in the transaction finished at 0/10")
    assert shop.cli("enable", "one") == (0, "one: enabled\n")
    assert shop.cli("enable", "one") == (0, "one: was enabled already\n")
    shop.copy()
    assert shop.state("one", "later") == "ready"


@pytest.mark.parametrize("is_conflict", [True, False])
def test_the_commands_that_a_disabled_subscription_names_bring_it_back(shop: Shop, is_conflict: bool) -> None:
    """A conflict is found after its transaction was transformed. Then only a copy helps, and not `skip`."""
    shop.configure(
        subscriptions={"two": {"source": "shop", "publications": ["q"], "disable_on_error": True}},
    )
    shop.database.execute("alter table stock add price numeric(4, 2)")
    shop.copy()
    applied_lsn = shop.run().subscriptions[0].to_lsn
    if is_conflict:
        shop.database.execute("delete from stock where id = 1")
        shop.database.execute("insert into stock values (1, 9)")
    else:
        shop.database.execute("insert into stock values (9, 9, 'NaN')")
    shop.database.execute("insert into stock values (5, 5)")
    code, output = shop.cli("run", "two")
    assert code == 1, output
    assert f"two: nothing new: everything up to LSN {applied_lsn} is already applied" in output

    code, output = shop.cli("run", "two")
    assert code == 2
    reason, hint = output.split("hint: ")
    named, *in_reason = re.findall(r"`pgsieve (.*?)`", reason)
    enabling, running = re.findall(r"`pgsieve (.*?)`", hint)
    assert (enabling, in_reason, running) == ("enable two", [], "run two")
    assert named.split()[:2] == (["resync", "two"] if is_conflict else ["skip", "two"])
    for command in (enabling, named, running):
        code, output = shop.cli(*command.split())
        assert code == 0, output
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("way", ["resync", "skip"])
def test_a_row_that_a_filter_fails_for_is_left_behind_by_one_copy_or_by_a_skip_of_each_transaction(
    shop: Shop, way: str
) -> None:
    """The transaction that corrects the row fails, too: pgoutput evaluates the filter for the old row."""
    database = shop.database
    database.execute("alter table stock replica identity full")
    database.execute("create publication d for table stock where (100 / n > 0), notes")
    shop.configure(
        subscriptions={"two": {"source": "shop", "publications": ["d"], "disable_on_error": True}},
    )
    shop.copy()
    database.execute("begin; insert into stock values (9, 0); insert into notes values (9, 9); commit")
    database.execute("update stock set n = 7 where id = 9")
    database.execute("insert into stock values (5, 5)")
    skipped = list[str]()
    for _ in range(3):
        if shop.cli("run", "two")[0] == 0:
            break
        (state,) = status(load_config(shop.path)).subscriptions
        assert state.skip_lsn is None, "the transaction was skipped already"
        assert state.notice == (f"skipped the transaction finished at {skipped[-1]}" if skipped else None)
        commands = re.findall(r"`pgsieve (.*?)`", str(state.reason))
        assert [command.split()[0] for command in commands] == ["resync", "skip"]
        (command,) = [command for command in commands if command.startswith(way)]
        skipped += re.findall(r"skip two (\S+)", command)
        for following in ("enable two", command):
            assert (done := shop.cli(*following.split()))[0] == 0, done
    assert len(skipped) == (2 if way == "skip" else 0)
    rows = {"resync": ([(9, 7)], [(9, 9)]), "skip": ([], [])}[way]
    before = [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert shop.pairs("two", "stock") == [*before, (5, 5), *rows[0]]
    assert shop.pairs("two", "notes") == [*before, *rows[1]]


def test_a_subscription_that_never_failed_is_enabled_already(shop: Shop) -> None:
    config = load_config(shop.path)
    assert not enable(config, config.subscriptions["one"])
