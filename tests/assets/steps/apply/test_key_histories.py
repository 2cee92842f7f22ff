"""What becomes of each key, found by following the changes: the same as by the rules of tenures, which Spark goes by."""

from __future__ import annotations

import random

from pgsieve.assets.steps.apply.key_histories import KeyedChange, NetChange, net_changes
from tests.fixtures import tenures as model


def _keyed(change: model.Change) -> KeyedChange:
    old, new = ((key,) if key is not None else None for key in (change.old, change.new))
    return KeyedChange(change.operation, old, new, [c for c in model.COLUMNS if c not in change.values])


def _modelled(net: NetChange, changes: list[model.Change]) -> model.NetChange:
    values = {name: changes[place].values[name] for name, place in net.sent.items()}
    return model.NetChange(net.action, values, None if net.base is None else net.base[0])  # type: ignore[arg-type]


def test_random_histories_become_the_net_changes_of_the_rules() -> None:
    for seed in range(500):
        changes, replica = model.history(random.Random(seed), length=12)
        net = net_changes(map(_keyed, changes), {(key,) for key in replica}, model.COLUMNS)
        wanted = model.net_changes(changes, replica)
        assert net.keys() == {(key,) for key in wanted}, f"seed {seed}"
        for (key,), change in net.items():
            assert change.action == wanted[key].action, f"seed {seed}"  # type: ignore[index]
            if change.action != "delete":
                assert _modelled(change, changes) == wanted[key], f"seed {seed}"  # type: ignore[index]


def test_a_key_is_expected_in_the_replica_unless_it_begins_there() -> None:
    changes = [
        KeyedChange("update", None, (1,)),
        KeyedChange("insert", None, (2,)),
        KeyedChange("delete", (2,), None),
        KeyedChange("update", (3,), (4,)),
        KeyedChange("update", (5,), (6,)),
    ]
    net = net_changes(changes, {(3,)}, ())
    assert {key: change.expected for (key,), change in net.items()} == {
        1: True,
        2: False,
        3: True,
        4: False,
        5: True,  # A move that finds no row: its old key is missing, its new one is not touched.
    }


def test_a_change_is_named_where_its_key_stands() -> None:
    changes = [KeyedChange("delete", (1,), None), KeyedChange("update", (2,), (3,))]
    net = net_changes(changes, {(2,)}, ())
    assert {key: change.named for (key,), change in net.items()} == {
        1: (0, "old"),
        2: (1, "old"),
        3: (1, "new"),
    }
