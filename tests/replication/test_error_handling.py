"""An error during apply disables a subscription with `disable_on_error`, and a transaction can be skipped.

PostgreSQL documentation 29.8, Conflicts; ALTER SUBSCRIPTION ... SKIP; src/test/subscription/t/029_on_error.pl. The
subscriber refuses NaN by a constraint, a replica by its column's type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import psycopg
import pytest

from pgsieve.assets.steps.records.subscription_state import (
    SubscriptionDisabledError,
    SubscriptionRecord,
    SubscriptionState,
)
from pgsieve.assets.steps.update_transformation.skip import Skip
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from tests.fixtures.oracle import Rows, Scenario, wait_until
from tests.fixtures.pgsieve_replica import PgsieveReplica

pytestmark = pytest.mark.spark


@pytest.fixture
def prices(scenario: Scenario) -> Iterator[Scenario]:
    """Two tables, and a subscription with `disable_on_error`."""
    scenario.tables("CREATE TABLE prices (a int PRIMARY KEY, b numeric(8,2)); CREATE TABLE notes (a int)")
    scenario.subscriber("ALTER TABLE prices ADD CHECK (b <> 'NaN')")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE prices, notes")
    scenario.subscribe("pub", disable_on_error=True)
    yield scenario
    scenario.subscriber(f"ALTER SUBSCRIPTION {scenario.name} DISABLE")


def _replicas(scenario: Scenario) -> list[PgsieveReplica]:
    return [r for r in scenario.replicas.values() if isinstance(r, PgsieveReplica)]


def _state(replica: PgsieveReplica) -> SubscriptionState:
    return SubscriptionRecord(replica.lake, "sub").read_state()


def _everywhere(scenario: Scenario, sql: str, ours: Callable[[PgsieveReplica], object]) -> None:
    scenario.subscriber(f"ALTER SUBSCRIPTION {scenario.name} {sql}")
    for replica in _replicas(scenario):
        ours(replica)


def _fail(scenario: Scenario, failed: int) -> str:
    """Run until the error has disabled every subscription. Return the finish LSN that PostgreSQL names.

    `failed` is the number of LSNs in its log before.
    """
    for replica in _replicas(scenario):
        replica.run()
        assert not _state(replica).enabled
    disabled = f"SELECT subenabled FROM pg_subscription WHERE subname = '{scenario.name}'"
    wait_until(lambda: scenario.subscriber(disabled) == [("f",)], lambda: "the subscription is not disabled")
    wait_until(lambda: len(_named(scenario)) > failed, lambda: "no LSN is in the log")
    return _named(scenario)[-1]


def _named(scenario: Scenario) -> list[str]:
    log = scenario.subscriber_server.log_path.read_text(errors="replace")
    return [format_lsn(parse_lsn(lsn)) for lsn in re.findall(r"in transaction \d+, finished at (\S+)", log)]


def _check_rows(scenario: Scenario, **expect: list[str]) -> None:
    assert scenario.builtin is not None
    for table, rows in expect.items():
        for replica in (scenario.builtin, *_replicas(scenario)):
            assert Rows(replica.rows("public", table)).shown == rows, (table, replica)


def test_an_error_disables_the_subscription_before_its_transaction(
    prices: Scenario,
) -> None:
    failed = len(_named(prices))
    prices.publisher("BEGIN; INSERT INTO prices VALUES (1, 1); INSERT INTO notes VALUES (1); COMMIT")
    prices.publisher("BEGIN; INSERT INTO notes VALUES (2); INSERT INTO prices VALUES (2, 'NaN'); COMMIT")
    prices.publisher("INSERT INTO notes VALUES (3)")
    lsn = _fail(prices, failed)
    _check_rows(prices, prices=["1|1.00"], notes=["1"])
    for replica in _replicas(prices):
        reason = _state(replica).reason or ""
        assert f"in the transaction finished at {lsn};" in reason, (reason, lsn)
        with pytest.raises(SubscriptionDisabledError):
            replica.run()
    # After it is enabled again, the same transaction fails again.
    failed = len(_named(prices))
    _everywhere(prices, "ENABLE", lambda r: SubscriptionRecord(r.lake, "sub").enable())
    assert _fail(prices, failed) == lsn
    _check_rows(prices, prices=["1|1.00"], notes=["1"])

    skip = parse_lsn(lsn)
    _everywhere(prices, f"SKIP (lsn = '{lsn}')", lambda r: Skip(r.subscription, r.lake).set_lsn(skip))
    _everywhere(prices, "ENABLE", lambda r: SubscriptionRecord(r.lake, "sub").enable())
    prices.publisher("UPDATE prices SET b = 3 WHERE a = 1")
    prices.check(expect={"prices": ["1|3.00"], "notes": ["1", "3"]})
    assert prices.subscriber("SELECT subskiplsn FROM pg_subscription WHERE subskiplsn <> '0/0'") == []
    for replica in _replicas(prices):
        state = _state(replica)
        notice = f"skipped the transaction finished at {lsn}"
        assert state == SubscriptionState(notice=notice, database=state.database)


def test_an_lsn_to_skip_that_ends_no_transaction_is_cleared_by_the_next_applied_one(
    prices: Scenario,
) -> None:
    [(lsn,)] = prices.publisher("SELECT pg_current_wal_lsn() + 1000000")
    _everywhere(
        prices, f"SKIP (lsn = '{lsn}')", lambda r: Skip(r.subscription, r.lake).set_lsn(parse_lsn(lsn))
    )
    chosen = "SELECT count(*) FROM pg_subscription WHERE subskiplsn <> '0/0'"
    # For the subscriber, a transaction without changes of published tables does not exist.
    prices.publisher("CREATE TABLE unpublished (a int); INSERT INTO unpublished VALUES (1)")
    prices.check("notes")
    assert prices.subscriber(chosen) == [("1",)]
    assert {_state(r).skip_lsn for r in _replicas(prices)} == {parse_lsn(lsn)}
    prices.publisher("INSERT INTO notes VALUES (1); INSERT INTO notes VALUES (2)")
    prices.check(expect={"notes": ["1", "2"]})
    assert prices.subscriber(chosen) == [("0",)]
    for replica in _replicas(prices):
        assert _state(replica).skip_lsn is None
        assert str(_state(replica).notice).startswith("warning: skip LSN")


def test_an_lsn_in_the_past_cannot_be_skipped(prices: Scenario) -> None:
    prices.publisher("INSERT INTO notes VALUES (1)")
    prices.check("notes")
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        prices.subscriber(f"ALTER SUBSCRIPTION {prices.name} SKIP (lsn = '0/1')")
    assert "must be greater than origin LSN" in str(refused.value)
    for replica in _replicas(prices):
        with pytest.raises(PgsieveError) as raised:
            Skip(replica.subscription, replica.lake).set_lsn(1)
        assert raised.value.sqlstate == refused.value.sqlstate
        assert "must be greater than origin LSN" in raised.value.message
