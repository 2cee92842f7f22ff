"""FOR ALL SEQUENCES: such a publication replicates no table, but values are recorded.

PostgreSQL documentation, Replicating Sequences, version 19.
"""

from __future__ import annotations

import json

from pgsieve.assets.steps.records.sequences import Sequences
from tests.fixtures.oracle import Scenario, wait_until
from tests.fixtures.shop import Shop


def test_a_run_records_the_same_values_as_refresh_sequences(scenario: Scenario, shop: Shop) -> None:
    made = "CREATE SEQUENCE one; CREATE SEQUENCE two INCREMENT -3; CREATE UNLOGGED SEQUENCE unlogged"
    scenario.subscriber(made)
    shop.database.execute(f"{made}; SELECT setval('one', 7, false); SELECT nextval('two'), nextval('two')")
    shop.database.execute("CREATE PUBLICATION seqs FOR ALL SEQUENCES")
    subscriptions = {
        "alone": {"source": "shop", "publications": ["seqs"]},
        "beside": {"source": "shop", "publications": ["q", "seqs"]},
        "filtered": {"source": "shop", "publications": ["seqs"], "row_filter": "publisher"},
    }
    shop.configure(subscriptions=subscriptions)
    ended, validated = shop.cli("validate", "--json")
    assert (ended, json.loads(validated)["problems"]) == (0, [])
    conninfo, new = shop.written["sources"]["shop"]["conninfo"], shop.path.with_name("new.yaml")
    chosen = ("--conninfo", conninfo, "--publication", "seqs", "--role", "reads")
    assert shop.cli("init", "-c", str(new), *chosen)[0] == 0
    statements = new.with_name("new-role.sql").read_text().splitlines()
    assert statements[-3:] == [
        "GRANT USAGE ON SCHEMA public TO reads;",
        "GRANT SELECT ON SEQUENCE public.one TO reads;",
        "GRANT SELECT ON SEQUENCE public.two TO reads;",
    ]
    scenario.subscriber(f"CREATE SUBSCRIPTION sequences CONNECTION '{conninfo}' PUBLICATION seqs")
    try:
        expect_refreshed(scenario, shop, "run")
        shop.database.execute("SELECT nextval('one'); SELECT setval('two', -50)")
        for name in ("alone", "filtered"):  # a refresh of the first also refreshes the others of its slot
            expect_checked(shop, name, moved=True)
        expect_refreshed(scenario, shop, "check")
        for name in subscriptions:
            expect_checked(shop, name, moved=False)
    finally:
        scenario.subscriber("DROP SUBSCRIPTION sequences")
    assert shop.ids("beside", "stock") == [1, 2, 3, 4]


def expect_refreshed(scenario: Scenario, shop: Shop, command: str) -> None:
    """Let the subscriber and pgsieve refresh their values, and compare them."""
    scenario.subscriber("ALTER SUBSCRIPTION sequences REFRESH SEQUENCES")
    states = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'"
    wait_until(lambda: scenario.subscriber(states) == [("0",)], lambda: "not refreshed")
    assert scenario.subscriber("SELECT srrelid::regclass FROM pg_subscription_rel ORDER BY 1") == [
        ("one",),
        ("two",),
    ]
    assert shop.cli(command)[0] == 0
    for subscription in ("alone", "beside", "filtered"):
        newest = Sequences(shop.lake, subscription).read_newest()
        assert all(value.page_lsn for value in newest.values())
        assert {n: (str(v.last_value), str(v.is_called).lower()) for (_, n), v in newest.items()} == {
            name: scenario.subscriber(f"SELECT last_value, is_called::text FROM {name}")[0]
            for name in ("one", "two")
        }


def expect_checked(shop: Shop, subscription: str, *, moved: bool) -> None:
    ended, output = shop.cli("check", subscription, "--json")
    report, _ = json.JSONDecoder().raw_decode(output)
    assert (ended, [(s["name"], s["moved"]) for s in report["sequences"]]) == (
        0,
        [("one", moved), ("two", moved)],
    )
