"""The changes of a change history that a batch applies: columns of changes in, masks and places out. Raises nothing.

A slice is a stretch of the WAL, named by the LSN at its end. A batch applies the changes of some slices. The place of
a change is one integer that orders the changes of a batch: the number of the change's slice in the batch, then the
number of the change in its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.net_change import Mask, Numbers

#: The columns of a change that say whether it is within an extent, and where.
PLACE_COLUMNS = ("slice", "number", "commit_lsn", "ordinal", "operation")
#: How many bits of a change's place are its number in the slice; the bits above are the slice's number in the batch.
_NUMBER_BITS = 56


def change_places(changes: pa.Table | pa.RecordBatch, slices: Sequence[int]) -> Numbers:
    """The place of each change in these slices; -1 for a change of another slice."""
    # A TRUNCATE has no number, and must not have the place of a change.
    ends, number = (
        np.asarray(changes["slice"]),
        np.asarray(changes["number"].fill_null((1 << _NUMBER_BITS) - 1)),
    )
    places = np.full(len(ends), -1, np.int64)
    for slice_number, end in enumerate(slices):
        places = np.where(ends == end, (slice_number << _NUMBER_BITS) + number, places)
    return places


@dataclass(frozen=True)
class Extent:
    """The changes of a batch: those in the `slices`, oldest first, that committed at or after `since`.

    `truncated_at` is the order key of the last TRUNCATE. Only later changes are effective; without a TRUNCATE, all
    are. The changes that committed before `since` are in the copy: a slice may have been transformed for an older
    copy. Spark sends an extent to executors.
    """

    slices: Sequence[int]
    since: int = 0
    truncated_at: tuple[int, int] | None = None

    def mask(self, changes: pa.Table | pa.RecordBatch) -> Mask:
        """The mask of the changes and TRUNCATEs of the batch."""
        mask: Mask = (change_places(changes, self.slices) >= 0) & (
            np.asarray(changes["commit_lsn"]) >= self.since
        )
        return mask

    def effective_changes(self, changes: pa.Table | pa.RecordBatch) -> Mask:
        """The mask of the changes of rows that are effective."""
        effective_changes: Mask = self.mask(changes) & np.asarray(
            pc.not_equal(changes["operation"], "truncate")
        )
        if self.truncated_at is not None:
            lsn, ordinal = self.truncated_at
            lsns, ordinals = (np.asarray(changes[name]) for name in ("commit_lsn", "ordinal"))
            effective_changes &= (lsns > lsn) | ((lsns == lsn) & (ordinals > ordinal))
        return effective_changes
