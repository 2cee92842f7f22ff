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

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.net_change import NetChange


@dataclass(frozen=True)
class MergeSource:
    """What a MERGE does for each of `keys`. Each array has one element per key.

    - `actions` is "delete", "update", "upsert", or "end" if the replica retains ended rows (rows that were
      deleted, but stay). The action "end" changes only the metadata columns of a row.
    - `last_changes` is, for each key, the change that has the new row.
    - `changes_by_column` has the columns that some change did not send. For each key, such a column has the number of
      the change with the column's value, or `NONE` if no change has it.
    - `base_keys`: the key of the replica's row that has the values which no change sent, if an UPDATE gave that row another
      key. Otherwise `NONE`.
    - `retains_value_by_column` maps each column of `changes_by_column` to a mask of the keys whose rows in the replica
      keep its present value.
    - If the replica retains a row that a change ended, `end_changes` has that change.
    """

    keys: Numbers
    actions: npt.NDArray[np.str_]
    last_changes: Numbers
    changes_by_column: Mapping[str, Numbers]
    base_keys: Numbers
    retains_value_by_column: Mapping[str, Mask]
    end_changes: Numbers


def make_merge_source(net: NetChange, *, retain_ended: bool = False) -> MergeSource:
    """Return the source of a MERGE that applies a net change to the replica.

    `retain_ended` says that the replica retains ended rows, as in `compute_net_change`.
    """
    is_moved, has_row = net.is_updated & (net.base_keys != net.keys), net.has_row
    is_unsent_by_column = {name: changes == NONE for name, changes in net.changes_by_column.items()}
    needs_base = is_moved & np.logical_or.reduce([*is_unsent_by_column.values(), np.zeros_like(is_moved)])
    # With `retain_ended`, a row that the changes end counts as a row. So a key without a row had none before, either, and
    # needs no action.
    indexes = np.flatnonzero(has_row) if retain_ended else np.arange(len(net.keys))
    is_end = net.is_updated & (net.last_changes == NONE)
    actions = np.select(
        [net.is_upserted | is_moved, is_end, net.is_updated], ["upsert", "end", "update"], "delete"
    )
    return MergeSource(
        keys=net.keys[indexes],
        actions=actions[indexes],
        last_changes=np.where(has_row, net.last_changes, NONE)[indexes],
        changes_by_column={
            name: np.where(has_row, changes, NONE)[indexes] for name, changes in net.changes_by_column.items()
        },
        base_keys=np.where(needs_base, net.base_keys, NONE)[indexes],
        retains_value_by_column={
            name: (net.is_updated & ~is_moved & is_unsent)[indexes]
            for name, is_unsent in is_unsent_by_column.items()
        },
        end_changes=net.end_changes[indexes],
    )
