"""`pgsieve run --explain` says truly why a table that takes changes is merged. No JVM."""

from __future__ import annotations

import json

from deltalake import DeltaTable

from tests.fixtures.shop import Shop


def test_rows_are_merged_into_tables_that_take_no_files_with_and_without_a_key(shop: Shop) -> None:
    shop.database.execute("create table log (v int); alter publication p add table log")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    lake = shop.lake
    for name in ("orders", "log"):
        column = "id" if name == "orders" else "v"
        path = lake.paths.replica("one", "public", name)
        DeltaTable(path).alter.add_constraint({"small": f"{column} < 1000"})
    code, printed = shop.cli("run", "one", "--explain", "--json")
    assert code == 0, printed
    explained = {table["name"]: table for table in json.loads(printed)["tables"]}
    for name, few in (("orders", "driver"), ("log", "Spark")):
        because = "rows are merged, because pgsieve cannot add files to the table"
        assert (explained[name]["because"], explained[name]["few"]) == (because, few)
