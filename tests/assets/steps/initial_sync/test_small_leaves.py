"""Copies of partition trees that have many small leaves."""

from __future__ import annotations

from tests.fixtures.shop import Shop


def test_small_leaves_of_a_tree_share_sessions_and_files(shop: Shop) -> None:
    shop.database.execute(
        "create table parts (id int primary key, note text) partition by range (id);"
        "do $$ begin for i in 0..99 loop"
        " execute format('create table part%s partition of parts for values from (%s) to (%s)', i, 10 * i, 10 * i + 10);"
        " end loop; end $$;"
        "insert into parts select i, i from generate_series(0, 999) i;"
        "create publication parts for table parts where (id % 2 = 0) with (publish_via_partition_root)"
    )
    subscription = {"source": "shop", "publications": ["parts"]}
    # Every copy counts as large.
    shop.configure(
        spark={"master": "threads[2]", "conf": {"spark.pgsieve.smallBytes": "-1"}},
        subscriptions={"parts": subscription},
    )
    shop.copy()
    assert shop.ids("parts", "parts") == [*range(0, 1000, 2)]
    # A query reads at most 64 leaves.
    assert len(shop.table("parts", "parts").file_uris()) == 2
    shop.database.execute("update parts set note = 'new' where id = 500")
    code, output = shop.cli("check")
    assert code == 0, output
