"""The source of a MERGE: a net change -> where each value of a new row comes from, a change or a row of the replica.

In: a net change. Out: one element per key, by numbers of keys and of changes. The caller fetches the values:
Arrow by `take`, Spark by joins. Raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers


@dataclass(frozen=True)
class MergeSource:
    """The action of a MERGE for each of some `keys`: delete, update or upsert.

    `last` is the change with the row. `sent` is, for columns that some change left out, the change with the
    column's value; `NONE` where no change has it. Then a row that comes from another key has the value of the
    replica's row of the key `base`, and a row that `keeps` the column has its own. `expected`: the replica
    should have a row of the key.
    """

    keys: Numbers
    actions: npt.NDArray[np.str_]
    expected: Mask
    last: Numbers
    sent: Mapping[str, Numbers]
    base: Numbers
    keeps: Mapping[str, Mask]


def merge_source(net: NetChange) -> MergeSource:
    """The source of a MERGE that applies a net change to the replica."""
    moved, remains = net.updated & (net.base != net.keys), net.upserted | net.updated
    unsent = {name: changes == NONE for name, changes in net.sent.items()}
    lacking = moved & np.logical_or.reduce([*unsent.values(), np.zeros_like(moved)])
    return MergeSource(
        keys=net.keys,
        actions=np.select([net.upserted | moved, net.updated], ["upsert", "update"], "delete"),
        expected=net.expected,
        last=np.where(remains, net.last, NONE),
        sent={name: np.where(remains, changes, NONE) for name, changes in net.sent.items()},
        base=np.where(lacking, net.base, NONE),
        keeps={name: net.updated & ~moved & lacks for name, lacks in unsent.items()},
    )
