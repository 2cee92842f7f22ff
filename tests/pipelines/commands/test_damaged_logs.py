"""A replica with a damaged log is set aside with the command that restores it. The other tables continue."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgsieve.resources.lake.delta.tables import share_tables
from tests.fixtures.shop import Shop

Damage = Callable[[Path], object]


def _entry(log: Path, place: int) -> Path:
    return sorted(log.glob("*.json"))[place]


def _checkpointed(log: Path) -> Path:
    """The checkpoint, after the cleanup of all entries except the newest."""
    table = DeltaTable(str(log.parent))
    table.create_checkpoint()
    for entry in sorted(log.glob("*.json"))[:-1]:
        entry.unlink()
    return next(log.glob("*.checkpoint.parquet"))


#: Kinds of damage to a log of several entries.
DAMAGES: dict[str, Damage] = {
    "first_gone": lambda log: _entry(log, 0).unlink(),
    "inner_gone": lambda log: _entry(log, 1).unlink(),
    "newest_gone": lambda log: _entry(log, -1).unlink(),
    "inner_garbage": lambda log: _entry(log, 1).write_text("{nonsense"),
    "newest_garbage": lambda log: _entry(log, -1).write_text('{"add": 3}\n'),
    "checkpoint_gone": lambda log: _checkpointed(log).unlink(),
    "checkpoint_garbage": lambda log: _checkpointed(log).write_bytes(b"PAR1xxxx"),
    "all_gone": lambda log: [each.unlink() for each in log.iterdir()],
}


@pytest.mark.drawn
def test_a_damaged_log_stops_only_its_table_until_a_copy(shop: Shop) -> None:
    """It takes long: many commands for seventeen tables."""
    changed, idle = ([f"{damage}_{kind}" for damage in DAMAGES] for kind in ("changed", "idle"))
    tables = [*changed, *idle, "whole"]
    shop.database.execute("drop publication p; drop publication q; create publication q")
    for table in tables:
        shop.database.execute(f"create table {table} (id int primary key)")
    shop.database.execute("create publication p for all tables")

    def write(*names: str) -> None:
        for name in names:
            shop.database.execute(f"insert into {name} select coalesce(max(id), 0) + 1 from {name}")

    def pgsieve(*arguments: str) -> tuple[int, str]:
        share_tables.cache_clear()  # simulates another process, which has no table open
        return shop.cli(*arguments)

    for _ in range(4):
        assert pgsieve("run")[0] == 0
        write(*tables)
    assert pgsieve("run")[0] == 0
    for table in (*changed, *idle):
        DAMAGES[table.rpartition("_")[0]](Path(shop.lake.paths.replica("one", "public", table), "_delta_log"))
    write("whole", *changed)
    code, output = pgsieve("run", "one")
    assert code == 1
    # If a run has no changes for a table, it reads only the newest entry of the log. Damage to the rest shows in a command that reads it.
    noticed = {f"{damage}_idle" for damage in ("newest_gone", "newest_garbage", "all_gone")}
    for table in idle:
        assert (f"public.{table} is set aside" in output) == (table in noticed)
    for table in changed:
        assert f"public.{table} is set aside" in output
        assert f"`pgsieve resync one public.{table}` copies the table again" in output
    assert "ParsedLogPath" not in output
    assert shop.ids("one", "whole") == [1, 2, 3, 4, 5]

    code, output = pgsieve("check")
    assert code == 1
    for table in (*changed, *idle):
        assert re.search(rf"public\.{table} .* not compared ", output), output
    assert re.search(r"public\.whole .* equal ", output)
    assert pgsieve("resync", "one", *(f"public.{t}" for t in (*changed, *idle)))[0] == 0
    write(*tables)
    assert pgsieve("run")[0] == 0
    code, output = pgsieve("check")
    assert (code, "every table equals the publisher" in output) == (0, True), output
