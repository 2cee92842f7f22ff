"""Many tables are shown in subgroups, so that each column of assets fits on a screen."""

from __future__ import annotations

from collections import Counter

import dagster as dg

from pgsieve.assets.table_groups import group_paths, nested_group


def _counts(names: list[tuple[str, str]]) -> Counter[str]:
    return Counter(nested_group("sales", path) for path in group_paths(names).values())


def test_few_tables_are_in_the_group_itself() -> None:
    names = [(f"s{i % 3}", f"t{i}") for i in range(30)]
    assert _counts(names) == {"sales": 30}
    assert not group_paths([])


def test_many_tables_are_grouped_by_schema_and_by_the_begin_of_their_names() -> None:
    names = [("public", f"{kind}_{i:03}") for kind in ("dim", "fact", "stage") for i in range(30)]
    assert _counts(names) == {"sales/d": 30, "sales/f": 30, "sales/s": 30}
    assert _counts([*names, ("audit", "log")])["sales/audit"] == 1
    assert _counts([*names, ("audit", "log")])["sales/public/f"] == 30
    more = [*names, ("public", "fact"), ("public", "facts")]
    assert group_paths(more)["public", "fact"] == ("f", "fact")
    assert group_paths(more)["public", "fact_007"] == ("f", "fact_")
    assert group_paths(more)["public", "dim_007"] == ("d",), "other tables have moved to another group"


def test_no_group_exceeds_a_column_of_a_screen_whatever_the_names() -> None:
    for names in (
        [("public", f"t{i}") for i in range(200)],
        [("public", "x" * i) for i in range(1, 60)],
        [("public", f"Größe {chr(0x400 + i)}") for i in range(200)],
        [(f"tenant {i}", f"orders {j}") for i in range(40) for j in range(5)],
    ):
        assert group_paths(names).keys() == set(names)
        leaves = Counter(group_paths(names).values())
        assert max(leaves.values()) <= 30
        for path in leaves:  # Dagster accepts the names.
            dg.AssetSpec("any", group_name=nested_group("sales", path))
