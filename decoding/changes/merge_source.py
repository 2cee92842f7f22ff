"""The source of a MERGE: for each value of a new row, the change or the replica's row from which it comes.

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
    """The action of a MERGE for each of `keys`: delete, update or upsert, and end if ended rows are kept.

    `last` is the change that has the row. For each column that some change left out, `sent` is the change
    that has the column's value, or `NONE` without one. Then a row that came from another key takes the value
    of the replica's row of the key `base`, and a row that `keeps` the column has its own value. `expected`:
    the replica should have a row of the key. `ended` is the change that ended a kept row; `end` alters only
    that row's metadata.
    """

    keys: Numbers
    actions: npt.NDArray[np.str_]
    expected: Mask
    last: Numbers
    sent: Mapping[str, Numbers]
    base: Numbers
    keeps: Mapping[str, Mask]
    ended: Numbers


def merge_source(net: NetChange, *, keeps: bool = False) -> MergeSource:
    """The source of a MERGE that applies a net change to the replica; `keeps` as in `net_changes`."""
    moved, remains = net.updated & (net.base != net.keys), net.remains
    unsent = {name: changes == NONE for name, changes in net.sent.items()}
    lacking = moved & np.logical_or.reduce([*unsent.values(), np.zeros_like(moved)])
    # A key without a row afterwards keeps its ended row.
    at = np.flatnonzero(remains) if keeps else np.arange(len(net.keys))
    ends = net.updated & (net.last == NONE)
    actions = np.select([net.upserted | moved, ends, net.updated], ["upsert", "end", "update"], "delete")
    return MergeSource(
        keys=net.keys[at],
        actions=actions[at],
        expected=net.expected[at],
        last=np.where(remains, net.last, NONE)[at],
        sent={name: np.where(remains, changes, NONE)[at] for name, changes in net.sent.items()},
        base=np.where(lacking, net.base, NONE)[at],
        keeps={name: (net.updated & ~moved & lacks)[at] for name, lacks in unsent.items()},
        ended=net.ended[at],
    )
