"""Histories by command: enabled with the first run, enabled later, disabled, refused where impossible, and begun again by a resync."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

if TYPE_CHECKING:
    from tests.fixtures.shop import Shop


def _stored(shop: Shop, kind: str, table: str) -> list[dict[str, Any]]:
    path = Path(shop.lake.uri) / "one" / kind / "public" / table
    return DeltaTable(str(path)).to_pyarrow_table().to_pylist()


def _versions(shop: Shop, table: str) -> list[tuple[int, int, bool]]:
    return sorted((row["id"], row["n"], row["is_current"]) for row in _stored(shop, "_scd2", table))


def _operations(shop: Shop, table: str) -> list[tuple[str, int | None]]:
    changes = sorted(_stored(shop, "_changes", table), key=lambda c: (c["commit_lsn"], c["ordinal"]))
    return [(c["operation"], (c["new"] or c["old"] or {}).get("id")) for c in changes]


def _configure(shop: Shop, history: object) -> None:
    for subscription in shop.written["subscriptions"].values():
        subscription.pop("history", None)
    if history is not None:
        shop.written["subscriptions"]["one"]["history"] = history
    shop.configure()


def _output_of(shop: Shop, *arguments: str) -> str:
    code, output = shop.cli(*arguments)
    assert code == 0, output
    return " ".join(output.split())


@pytest.mark.drawn
def test_histories_begin_with_the_copy_and_are_disabled_and_enabled(shop: Shop, tmp_path: Path) -> None:
    """It takes long: fifteen commands, each a process."""
    shop.database.execute("create table log (id int); alter table log replica identity full")
    shop.database.execute("create table soft (id int primary key); insert into soft values (1), (2)")
    shop.database.execute("alter publication p add table log, soft; insert into log values (1), (1)")
    shop.written["subscriptions"]["one"]["layout"] = {"tables": {"public.soft": {"deletes": "soft"}}}
    _configure(shop, {"initial": True, "scd2": True, "tables": {"public.notes": "off"}})
    output = _output_of(shop, "validate")
    assert "public.orders: the change history begins with the copied rows" in output
    assert f'public.orders: versions of its rows in "{shop.lake.uri}/one/_scd2/public/orders"' in output
    assert "public.log: no versions of its rows are kept: it has no key" in output
    assert (
        "public.soft: no versions of its rows are kept: its deleted rows are kept (`deletes: soft`)" in output
    )
    assert "public.notes: " not in output
    _output_of(shop, "run")
    assert _operations(shop, "orders") == [("snapshot", None), *[("copy", i) for i in (2, 3, 4)]]
    assert _operations(shop, "log") == [("snapshot", None), ("copy", 1), ("copy", 1)]
    assert not (Path(shop.lake.uri) / "one" / "_changes" / "public" / "notes").exists()
    assert _versions(shop, "orders") == [(i, i, True) for i in (2, 3, 4)]
    for statement in (
        "update orders set n = 20 where id = 2; delete from orders where id = 3",
        "delete from soft where id = 1",
    ):
        shop.database.execute(statement)
    _output_of(shop, "run")
    assert not (Path(shop.lake.uri) / "one" / "_scd2" / "public" / "soft").exists()
    assert shop.table("one", "soft").to_pyarrow_table().num_rows == 2
    assert _operations(shop, "soft") == [("snapshot", None), ("copy", 1), ("copy", 2), ("delete", 1)]
    assert _versions(shop, "orders") == [(2, 2, False), (2, 20, True), (3, 3, False), (4, 4, True)]

    # Disabled: the table stays as it is. Enabled: a new history begins at the newest cut.
    _configure(shop, None)
    assert "stay as they are: new ones are no longer kept" in _output_of(shop, "validate")
    shop.database.execute("update orders set n = 21 where id = 2")
    _output_of(shop, "run")
    assert _versions(shop, "orders")[1] == (2, 20, True)
    _configure(shop, "scd2")
    assert "which the next run begins at the newest cut" in _output_of(shop, "validate")
    shop.database.execute("update orders set n = 22 where id = 2")
    _output_of(shop, "run")
    assert _versions(shop, "orders") == [
        (2, 2, False),
        (2, 20, False),
        (2, 21, False),
        (2, 22, True),
        (3, 3, False),
        (4, 4, False),
        (4, 4, True),
    ]
    assert _output_of(shop, "check")

    # A copy ends the current versions, and begins new ones.
    shop.database.execute("update orders set n = 23 where id = 2")
    output = _output_of(shop, "resync", "one", "public.orders") + _output_of(shop, "run")
    assert "the versions of public.orders are ended, and begin anew at" in output
    rows = _versions(shop, "orders")
    assert [row for row in rows if row[2]] == [(2, 23, True), (4, 4, True)]
    assert rows.count((4, 4, False)) == 2
    _output_of(shop, "maintain")
    assert _versions(shop, "orders") == rows

    # So does a run that notices that the table was put back to an earlier version.
    folder = Path(shop.lake.uri) / "one" / "_scd2" / "public" / "orders"
    shutil.copytree(folder, tmp_path / "before")
    shop.database.execute("update orders set n = 24 where id = 2")
    _output_of(shop, "run")
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "before", folder)
    shop.database.execute("update orders set n = 25 where id = 2")
    _output_of(shop, "run")
    rows = _versions(shop, "orders")
    assert [row for row in rows if row[2]] == [(2, 25, True), (4, 4, True)]
    assert rows.count((4, 4, False)) == 3


@pytest.mark.drawn
def test_a_history_that_lacks_the_copied_rows_says_how_to_complete_it(shop: Shop) -> None:
    """It takes long: eleven commands, each a process."""
    _output_of(shop, "run")
    _configure(shop, {"initial": True})
    way_out = "`pgsieve resync one public.orders` copies the table again"
    assert f"public.orders: the change history lacks the copied rows; {way_out}" in _output_of(
        shop, "validate"
    )
    shop.database.execute("update orders set n = 20 where id = 2")
    _output_of(shop, "run")
    assert _operations(shop, "orders") == [("update", 2)]
    _output_of(shop, "resync", "one", "public.orders")
    _output_of(shop, "run")
    assert _operations(shop, "orders") == [
        ("update", 2),
        ("snapshot", None),
        *[("copy", i) for i in (2, 3, 4)],
    ]
    assert "public.orders: the change history begins with the copied rows" in _output_of(shop, "validate")
    shop.database.execute("insert into orders values (9, 9)")
    assert _output_of(shop, "run")
    assert _operations(shop, "orders")[-1] == ("insert", 9)

    # Without `history`, a copy adds no rows to the change history, and its rows stay.
    _configure(shop, None)
    before = _operations(shop, "orders")
    _output_of(shop, "resync", "one", "public.orders")
    _output_of(shop, "run")
    assert _operations(shop, "orders") == before
    assert "the change history begins with the copied rows" not in _output_of(shop, "validate")


def test_a_feed_of_the_versions_ends_no_history(shop: Shop) -> None:
    """Not pgsieve but a user gives the table of versions a change data feed."""
    _configure(shop, "scd2")
    _output_of(shop, "run")
    shop.database.execute("update orders set n = 20 where id = 2")
    _output_of(shop, "run")
    feed = "delta.enableChangeDataFeed"
    versions = DeltaTable(str(Path(shop.lake.uri) / "one" / "_scd2" / "public" / "orders"))
    versions.alter.set_table_properties({feed: "true"})
    shop.database.execute("update orders set n = 21 where id = 2")
    code, output = shop.cli("run")
    assert code == 1, output
    assert f"set its property {feed} to false; `pgsieve resync one public.orders`" in " ".join(output.split())
    versions.alter.set_table_properties({feed: "false"})
    _output_of(shop, "resync", "one", "public.orders")
    shop.database.execute("update orders set n = 22 where id = 2")
    _output_of(shop, "run")
    values = [n for i, n, _ in _versions(shop, "orders") if i == 2]
    assert sorted(values) == [2, 20, 21, 22]
