"""The source of a MERGE that applies a net change (the outcome of many changes for each key) to a replica.

In: a net change. Out: numbers of keys and of changes, one element per key. For each value of a new row they say which
change, or which row of the replica, has the value. The caller fetches the values: with Arrow by `take`, with Spark by
joins. Raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers


@dataclass(frozen=True)
class MergeSource:
    """What a MERGE does for each of `keys`. Each array has one element per key.

    - `actions` is "delete", "update", "upsert", or "end" if the replica retains ended rows. The action end changes only
      the metadata of a row.
    - `last` is the change that has the new row.
    - `sent` has the columns that some change did not send. It maps such a column to the change that has the column's
      value for each key, or to `NONE` if no change has it.
    - `base` says where a row gets the values from that no change has. A row that moved from another key takes them from
      the replica's row with the key `base`.
    - `retains_value` maps each of these columns to the mask of the keys whose row keeps the value that it has.
    - `ended` is the change that ended a row that the replica retains.
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

    `retain_ended` says that the replica retains ended rows, as in `net_changes`.
    """
    moved, has_row = net.updated & (net.base != net.keys), net.has_row
    unsent = {name: changes == NONE for name, changes in net.sent.items()}
    takes_value = moved & np.logical_or.reduce([*unsent.values(), np.zeros_like(moved)])
    # With `retain_ended`, a key without a row afterwards needs no action: its ended row stays as it is.
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
