"""Computes the versions of rows that changes make: which commit begins each version, and which commit ends it.

In: changes in order, with numbers of their keys (`KeyChanges`) and of their commits. Out: one element per version
(`RowVersions`). A tenure is the time during which a row has a key. The module `versions` makes rows of a history table
from these versions. Raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers, are_distinct, fill_none, mask_new_numbers
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, UPDATE, KeyChanges
from pgsieve.decoding.changes.tenures import REPLICA, Tenures, replace_lost_moves


@dataclass(frozen=True)
class RowVersions:
    """The versions of rows that changes make, and the ends of earlier versions.

    A commit makes a version of each key that it changes and that has a row after the commit. All fields but
    `former_end_commits` have one element per version.

    - `keys` is the key of the version, and `last_changes` the change that has its values. `base_keys`, `changes_by_column`
      and `begin_changes` tell where the values are that this change did not send (see `NetChange`).
    - `end_commits` is the number of the commit that ends the version, or `NONE` if no commit ends it.
    - `former_end_commits` has one element per key: the commit that ends the row from before the changes, or `NONE`.
    """

    keys: Numbers
    last_changes: Numbers
    base_keys: Numbers
    changes_by_column: Mapping[str, Numbers]
    begin_changes: Numbers
    end_commits: Numbers
    former_end_commits: Numbers


def compute_row_versions(changes: KeyChanges, commits: Numbers, has_row_before: Mask) -> RowVersions:
    """Return the versions that changes make. No change may be a `LEAVE`, or give a row a key that has a row already.

    `commits` has the number of each change's commit. A commit makes at most one version of a row, since other
    transactions see only the last of the versions that a transaction makes.
    """
    change_keys = np.where(changes.operations == DELETE, changes.old_keys, changes.new_keys)
    if not changes.is_move.any() and are_distinct(change_keys, len(has_row_before)):
        return _compute_versions_of_single_changes(changes, change_keys, commits, has_row_before)
    changes = replace_lost_moves(changes, has_row_before)
    tenures = Tenures.from_changes(changes, commits)
    rows = tenures.find_rows(changes)
    keys, tenure_commits = tenures.keys, commits[tenures.first_changes]
    has_row = ~tenures.is_ended & rows.mask_rows(has_row_before)
    final_tenures = (
        np.flatnonzero(np.append(mask_new_numbers(keys)[1:] | mask_new_numbers(tenure_commits)[1:], True))
        if len(keys)
        else fill_none(0)
    )
    is_first = mask_new_numbers(keys[final_tenures])
    end_commits = np.append(np.where(is_first[1:], NONE, tenure_commits[final_tenures][1:]), NONE)[
        : len(final_tenures)
    ]
    former_end_commits = fill_none(len(has_row_before))
    former_end_commits[keys[final_tenures][is_first]] = tenure_commits[final_tenures][is_first]
    former_end_commits[~has_row_before] = NONE
    has_version = has_row[final_tenures]
    version_tenures = final_tenures[has_version]
    return RowVersions(
        keys=keys[version_tenures],
        last_changes=rows.value_changes[version_tenures],
        base_keys=np.where(rows.origins[version_tenures] == REPLICA, rows.base_keys[version_tenures], NONE),
        changes_by_column=rows.select_columns(version_tenures),
        begin_changes=rows.begin_changes[version_tenures],
        end_commits=end_commits[has_version],
        former_end_commits=former_end_commits,
    )


def _compute_versions_of_single_changes(
    changes: KeyChanges, change_keys: Numbers, commits: Numbers, has_row_before: Mask
) -> RowVersions:
    """Return the versions if no change is a move (an UPDATE of a key), and all changes have different keys.

    `change_keys` is the key of each change. The order of the changes does not matter here.
    """
    former_end_commits = fill_none(len(has_row_before))
    former_end_commits[change_keys] = np.where(has_row_before[change_keys], commits, NONE)
    is_update = changes.operations == UPDATE
    last_changes = np.flatnonzero((changes.operations == INSERT) | (is_update & has_row_before[change_keys]))
    return RowVersions(
        keys=change_keys[last_changes],
        last_changes=last_changes,
        base_keys=np.where(is_update[last_changes], change_keys[last_changes], NONE),
        changes_by_column={
            name: np.where(is_sent[last_changes], last_changes, NONE)
            for name, is_sent in changes.is_sent_by_column.items()
        },
        begin_changes=np.where(is_update[last_changes], NONE, last_changes),
        end_commits=fill_none(len(last_changes)),
        former_end_commits=former_end_commits,
    )
