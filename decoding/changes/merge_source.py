"""The source of a MERGE: for each value of a new row, the change or the replica's row that has it.

In: a net change. Out: numbers of keys and of changes, one element per key. The caller fetches the values:
with Arrow by `take`, with Spark by joins. Raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers


@dataclass(frozen=True)
class MergeSource:
    """The action of a MERGE for each of `keys`: delete, update, upsert, or end if ended rows are retained.

    - `last` is the change that has the row.
    - `sent` is, for each column that some change omitted, the change that has the column's value, or `NONE`.
      With `NONE`, a row that moved from another key takes the value of the replica's row with the key `base`,
      and a row with `retains_value` retains its value.
    - `ended` is the change that ended a retained row. The action end alters only such a row's metadata.
    """

    keys: Numbers
    actions: npt.NDArray[np.str_]
    last: Numbers
    sent: Mapping[str, Numbers]
    base: Numbers
    retains_value: Mapping[str, Mask]
    ended: Numbers


def merge_source(net: NetChange, *, retain_ended: bool = False) -> MergeSource:
    """Return the source of a MERGE that applies a net change to the replica.

    `retain_ended` is as in `net_changes`.
    """
    moved, has_row = net.updated & (net.base != net.keys), net.has_row
    unsent = {name: changes == NONE for name, changes in net.sent.items()}
    takes_value = moved & np.logical_or.reduce([*unsent.values(), np.zeros_like(moved)])
    # The ended row of a key stays if the key has no row afterwards.
    rows = np.flatnonzero(has_row) if retain_ended else np.arange(len(net.keys))
    ends = net.updated & (net.last == NONE)
    actions = np.select([net.upserted | moved, ends, net.updated], ["upsert", "end", "update"], "delete")
    return MergeSource(
        keys=net.keys[rows],
        actions=actions[rows],
        last=np.where(has_row, net.last, NONE)[rows],
        sent={name: np.where(has_row, changes, NONE)[rows] for name, changes in net.sent.items()},
        base=np.where(takes_value, net.base, NONE)[rows],
        retains_value={name: (net.updated & ~moved & lacks)[rows] for name, lacks in unsent.items()},
        ended=net.ended[rows],
    )
