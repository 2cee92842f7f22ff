"""`pgsieve read` of one table gives its rows at a moment between two cuts, and clones no other table. No JVM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.shop import Shop


@pytest.mark.usefixtures("orchestrator")
def test_one_table_is_read_as_of_an_lsn_between_two_cuts(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    database = shop.database
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    database.execute("insert into orders values (77, 1)")
    database.execute("insert into notes values (77, 1)")
    row = database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    database.execute("update orders set n = 2 where id = 77")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    clones = _remembered_clones(monkeypatch)
    code, printed = shop.cli("read", "one", "public.orders", "--at", row[0], "--json")
    assert code == 0, printed
    rows = [json.loads(line) for line in printed.splitlines()]
    assert {"id": 77, "n": 1} in rows
    assert {"id": 77, "n": 2} not in rows
    assert clones == ["orders"], "other tables are cloned, too"
    code, printed = shop.cli("read", "one", "--at", row[0], "--json")
    assert code == 0, printed
    listed = {table["name"]: table for table in json.loads(printed)["tables"]}
    assert listed["orders"]["path"] is listed["orders"]["version"] is None, "its clone is gone by now"
    code, printed = shop.cli("read", "one", "--json")
    assert code == 0, printed
    listed = {table["name"]: table for table in json.loads(printed)["tables"]}
    assert Path(listed["orders"]["path"], "_delta_log").is_dir()
    code, refused = shop.cli("read", "one", "public.order", "--at", row[0])
    assert code == 2
    assert "42P01" in refused
    assert "did you mean 'public.orders'?" in " ".join(refused.split())


def test_a_table_is_read_between_two_cuts_although_another_one_was_copied_again(shop: Shop) -> None:
    """A change of type begins a table anew, and its changes before are lost. Those of the other tables are not."""
    database = shop.database
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    database.execute("insert into orders values (77, 1)")
    row = database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    database.execute("insert into orders values (78, 1); alter table notes alter n type bigint")
    reason = 'column "n" has another type'
    code, printed = shop.cli("run", "one", "--explain")
    assert code == 0, printed
    assert f"{reason}; this process commits it" in " ".join(printed.split())
    code, printed = shop.cli("run", "one")
    assert code == 0, printed
    assert f"public.notes is copied again: {reason}" in printed
    code, printed = shop.cli("read", "one", "public.orders", "--at", row[0], "--json")
    assert code == 0, printed
    assert {77, 78} & {json.loads(line)["id"] for line in printed.splitlines()} == {77}
    for table in (["public.notes"], []):
        code, refused = shop.cli("read", "one", *table, "--at", row[0])
        refused = " ".join(refused.split())
        assert code == 2
        assert 'table "public.notes" cannot be read' in refused
        assert f"it had to be copied again ({reason}); it was copied at" in refused
    code, refused = shop.cli("read", "one", "public.order", "--at", row[0])
    assert code == 2
    assert "did you mean 'public.orders'?" in " ".join(refused.split())


def _remembered_clones(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that are cloned from now on."""
    from pgsieve.assets.steps.moments import reading

    names, clone = list[str](), reading.clone

    def remembered(table: object, path: str, *rest: object) -> None:
        names.append(Path(path).name)
        clone(table, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "clone", remembered)
    return names
