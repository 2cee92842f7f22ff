"""The changes of a table in order, with numbers of their keys.

In: operations, keys and masks, with an element per change. Out: the keys to look up in the replica; and the same changes
with DELETEs in place of TRUNCATEs. Raises nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers, find_first_indexes

#: The operations of changes. An UPDATE that changes the key is a move. A caller may split a move into a `LEAVE` of the old
#: key and an `INSERT` of the new key. `net_change.find_left_rows` then finds the values that the move did not send. A move
#: that finds no row becomes only a `LEAVE` (`tenures.find_moves_without_row`).
INSERT, UPDATE, DELETE, LEAVE = range(4)


@dataclass(frozen=True)
class KeyChanges:
    """The changes of a table in order, with numbers of their keys (0, 1, …).

    - `operations` are `INSERT`, `UPDATE`, `DELETE` and `LEAVE`.
    - `old_keys` is the key before a DELETE, a LEAVE or a move, and `NONE` for other changes.
    - `new_keys` is the key after an INSERT or an UPDATE, and `NONE` for other changes.
    - `is_sent_by_column` has the columns that some change did not send, because their TOASTed value did not change. It
      maps such a column to the mask of the changes that sent it.
    """

    operations: npt.NDArray[np.int8]
    old_keys: Numbers
    new_keys: Numbers
    is_sent_by_column: Mapping[str, Mask]

    @property
    def is_move(self) -> Mask:
        """The mask of UPDATEs from one key to another."""
        is_move: Mask = (self.operations == UPDATE) & (self.old_keys != NONE)
        return is_move

    def compute_lookup_masks(self, key_count: int) -> tuple[Mask, Mask]:
        """Return two masks of keys, which say for which keys the caller must look into the replica.

        The first mask has the keys that need a row before the changes: their first change is an UPDATE, a DELETE or a
        LEAVE. For the keys of the second mask it matters whether the replica has a row: either a move takes this row
        away, or the key gets another row before any change ends this one, which is a conflict.
        """
        first_begins = find_first_indexes(
            np.where((self.operations == INSERT) | self.is_move, self.new_keys, NONE), key_count
        )
        first_ends = find_first_indexes(self.old_keys, key_count)
        first_updates = find_first_indexes(
            np.where((self.operations == UPDATE) & ~self.is_move, self.new_keys, NONE), key_count
        )
        is_row_relevant = first_begins < first_ends
        is_row_relevant[self.old_keys[self.is_move]] = True
        return np.minimum(first_ends, first_updates) < np.minimum(
            first_begins, len(self.operations)
        ), is_row_relevant


def insert_deletes(
    changes: KeyChanges, truncates: Sequence[int], key_count: int
) -> tuple[KeyChanges, Numbers]:
    """Replace each TRUNCATE by DELETEs of keys.

    `truncates` has the number of changes before each TRUNCATE, in order. The first TRUNCATE becomes DELETEs of all
    `key_count` keys. A later TRUNCATE becomes DELETEs of the keys of the changes since the previous TRUNCATE.

    Returns the changes with these DELETEs, and for each change the number of its origin. The origin of an
    inserted DELETE is its TRUNCATE, and the origin of any other change is the change itself. The numbers of TRUNCATEs
    follow the number of the last change.
    """
    positions, deleted, origins, start = list[Numbers](), list[Numbers](), list[Numbers](), 0
    for origin, end in enumerate(truncates, len(changes.operations)):
        deleted_keys = np.concatenate([changes.old_keys[start:end], changes.new_keys[start:end]])
        deleted_keys = np.unique(deleted_keys[deleted_keys != NONE]) if positions else np.arange(key_count)
        deleted.append(deleted_keys)
        positions.append(np.full(len(deleted_keys), end))
        origins.append(np.full(len(deleted_keys), origin))
        start = end
    if not positions:
        return changes, np.arange(len(changes.operations))
    indexes = np.concatenate(positions)
    expanded = KeyChanges(
        np.insert(changes.operations, indexes, DELETE),
        np.insert(changes.old_keys, indexes, np.concatenate(deleted)),
        np.insert(changes.new_keys, indexes, NONE),
        {name: np.insert(is_sent, indexes, False) for name, is_sent in changes.is_sent_by_column.items()},
    )
    return expanded, np.insert(np.arange(len(changes.operations)), indexes, np.concatenate(origins))
