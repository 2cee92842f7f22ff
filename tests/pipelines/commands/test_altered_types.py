"""Which changes of a column's type copy a table again, and that a run says so. No JVM."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.fixtures.shop import Shop

#: Maps a type and the type after it to why the table is copied again; None if the replica follows in place.
_REASONS: dict[tuple[str, str], str | None] = {
    ("varchar(5)", "varchar(9)"): None,
    ("varchar(5)", "text"): None,
    ("text", "varchar"): None,
    ("timestamp(0)", "timestamp(3)"): None,
    ("int", "bigint"): 'column "v" has another type',
    ("numeric(10,2)", "numeric(12,2)"): 'column "v" has another type',
    ("numeric(10,2)", "numeric(14,3)"): 'column "v" has another type',
    ("varchar(9)", "varchar(5)"): 'column "v" was altered and the table rewritten',
}


def test_a_run_says_which_change_of_a_type_copies_a_table_again(shop: Shop) -> None:
    reason_by_table = {f"t{number}": reason for number, reason in enumerate(_REASONS.values())}
    for number, (former_type, _) in enumerate(_REASONS):
        shop.database.execute(f"create table t{number} (id int primary key, v {former_type})")
        shop.database.execute(f"insert into t{number} values (1, null)")
        shop.database.execute(f"alter publication p add table t{number}")
    code, printed = shop.cli("run", "one")
    assert code == 0, printed
    assert "copied again" not in printed
    for number, (_, type_after) in enumerate(_REASONS):
        shop.database.execute(f"alter table t{number} alter v type {type_after}")
    code, explained = shop.cli("run", "one", "--explain")
    assert code == 0, explained
    code, printed = shop.cli("run", "one")
    assert code == 0, printed
    lines = printed.splitlines()
    for table, reason in reason_by_table.items():
        told = [
            line.partition("is copied again: ")[2] for line in lines if f"public.{table} is copied" in line
        ]
        assert told == ([] if reason is None else [reason]), printed
    # The explanation is a table with columns that may be broken anywhere.
    assert " ".join(explained.split()).count("has another type;") == 3, explained
    assert shop.cli("run", "one")[1].count("is copied again") == 0


def test_threads_write_a_copy_with_other_types_and_leave_its_names_plain(shop: Shop) -> None:
    """Spark would map a name with a space; then delta-rs and Polars would refuse the table."""
    run = shop.database.execute
    run('create table lines ("Line No" int primary key, nums int[], at date, gone int)')
    run("insert into lines values (1, '{1,2}', '2026-03-01', 7); create publication r for table lines")
    one = {"source": "shop", "publications": ["r"]}
    conf = {"spark.pgsieve.smallBytes": "-1"}
    shop.configure(spark={"master": "threads[2]", "conf": conf}, subscriptions={"one": one})
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    shop.configure(subscriptions={"one": one | {"types": {"public.lines.nums": "string"}}})
    run("alter table lines alter at type timestamp, drop gone, add added int default 3")
    code, printed = shop.cli("resync", "one", "public.lines")
    assert code == 0, printed
    table = shop.table("one", "lines")
    assert not [name for name in table.metadata().configuration if "columnMapping" in name]
    assert {str(commit["engineInfo"]).partition(":")[0] for commit in table.history()} == {"delta-rs"}
    row = {"Line No": 1, "nums": "{1,2}", "at": datetime(2026, 3, 1), "added": 3}  # noqa: DTZ001 - it has no time zone
    assert table.to_pyarrow_table().to_pylist() == [row]
    run("update lines set added = 4")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    assert shop.table("one", "lines").to_pyarrow_table().to_pylist() == [row | {"added": 4}]
    code, checked = shop.cli("check", "one")
    assert code == 0, checked


@pytest.mark.drawn
def test_other_types_copy_a_table_unless_it_is_set_aside(shop: Shop) -> None:
    """It may take long: several commands, each of which is a run of the graph."""
    shop.database.execute(
        "create table prices (id int primary key, v numeric); alter publication p add table prices"
    )
    shop.database.execute("insert into prices values (1, 12345)")
    one = shop.written["subscriptions"]["one"]

    def run_with(**types: str) -> tuple[int, str]:
        chosen = {f"public.{column.replace('__', '.')}": spark_type for column, spark_type in types.items()}
        shop.configure(subscriptions={"one": one | {"types": chosen}})
        return shop.cli("run", "one")

    code, printed = run_with(prices__v="decimal(3,0)")
    assert (code, shop.state("one", "prices")) == (1, "set aside"), printed
    code, printed = run_with(prices__v="decimal(5,0)", notes__n="bigint")
    assert (code, shop.state("one", "prices")) == (1, "set aside"), printed
    assert 'public.notes is copied again: column "n" has another type' in printed
    code, printed = shop.cli("resync", "one", "public.prices")
    assert (code, shop.state("one", "prices")) == (0, "ready"), printed
