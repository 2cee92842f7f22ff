"""Finds out which versions of rows (`history: scd2`) a batch ends and begins.

A version of a row is valid from one of the publisher's commits to another. A present version has not ended yet. A batch is
the changes that one commit applies.

In: the changes by key, their commits, and which keys have a present version before the changes. Out: the versions that
end, and the new versions with the places of their changes. A place is a number that orders the changes of a batch.
Raises nothing. Both ways to write versions use this: `row_versions` for all keys at once, `version_part_tasks` for a part
of the keys.
"""

from dataclasses import dataclass, replace

import numpy as np

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.row_selection import Validity
from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.key_changes import DELETE, LEAVE, insert_deletes
from pgsieve.decoding.changes.net_change import find_left_rows
from pgsieve.decoding.changes.net_rows import NetRows, describe_left_rows, find_places
from pgsieve.decoding.changes.row_versions import RowVersions, compute_row_versions
from pgsieve.decoding.changes.tenures import find_moves_without_row
from pgsieve.decoding.changes.versions import Commits


@dataclass(frozen=True)
class VersionOutcome:
    """The versions that a batch ends and begins; a TRUNCATE counts as a DELETE of each key.

    - `commit_numbers`: for each change, the number of its commit in `commits`
    - `places`: for each change, its place
    - `truncate_commit`: the number of the first commit with a TRUNCATE; None if there is no TRUNCATE
    - `lost_places`: the places of split moves that find no row; empty if moves are not split. A move is an UPDATE of the
      key, and `split_moves` replaces it by a LEAVE of the old key and an INSERT of the new one.
    - `left_rows`: rows that leave their keys by such moves, with the moves' places; None if there are none
    """

    versions: RowVersions
    commit_numbers: Numbers
    places: Numbers
    commits: Commits
    truncate_commit: int | None
    lost_places: Numbers
    left_rows: NetRows | None

    @classmethod
    def compute(cls, keyed_changes: KeyedChanges, commits: Commits, has_version: Mask) -> "VersionOutcome":
        """Compute the outcome; `has_version` is a mask of the keys with a present version (`mask_present_keys`)."""
        changes, lsns, places = keyed_changes.changes, keyed_changes.commit_lsns, keyed_changes.places
        truncate_lsns, truncate_commit = np.asarray(keyed_changes.truncate_lsns, np.int64), None
        if len(truncate_lsns):
            truncate_commit = int(commits.find_numbers(truncate_lsns[:1])[0])
            changes, change_indices = insert_deletes(
                changes, keyed_changes.truncate_indices, keyed_changes.keys.num_rows
            )
            lsns = np.concatenate([lsns, truncate_lsns])[change_indices]
            places = np.concatenate([places, np.full(len(truncate_lsns), NONE)])[change_indices]
        commit_numbers = commits.find_numbers(lsns)
        is_left, lost_places, left_rows = changes.operations == LEAVE, places[:0], None
        if is_left.any():
            lost_places = places[find_moves_without_row(changes, has_version)]
            left_rows = describe_left_rows(places, find_left_rows(changes, has_version))
            # A row that leaves a key ends the key's version, as a DELETE does.
            changes = replace(changes, operations=np.where(is_left, np.int8(DELETE), changes.operations))
        versions = compute_row_versions(changes, commit_numbers, has_version)
        return cls(versions, commit_numbers, places, commits, truncate_commit, lost_places, left_rows)

    def select_new_versions(self, *, are_present: bool) -> tuple[NetRows, Validity]:
        """Select the versions that the batch begins, in the order of their changes, and the commits that begin and end them.

        With `are_present`, these are the versions that the batch does not end, otherwise those that it ends.
        """
        versions = self.versions
        is_selected = (versions.end_commits == NONE) == are_present
        # Mostly all versions are selected, and are in order. A slice copies nothing.
        version_indices: slice | Numbers = slice(None) if is_selected.all() else np.flatnonzero(is_selected)
        places = self.places[versions.last_changes[version_indices]]
        if (places[1:] < places[:-1]).any():
            order = np.argsort(places, kind="stable")
            version_indices, places = np.flatnonzero(is_selected)[order], places[order]
        sent_places = {
            name: find_places(self.places, changes[version_indices])
            for name, changes in versions.changes_by_column.items()
        }
        validity = Validity(
            places,
            self.commit_numbers[versions.last_changes[version_indices]],
            versions.end_commits[version_indices],
            self.commits,
        )
        begin_places = find_places(self.places, versions.begin_changes[version_indices])
        return NetRows(places, sent_places, versions.base_keys[version_indices], begin_places), validity
