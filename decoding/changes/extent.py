"""Selects the changes of a table that one commit applies to the replica, and orders them.

In: columns of changes. Out: masks, and places (defined below). Raises nothing.

A slice is a part of the WAL. It is identified by the LSN at its end. A batch is some slices whose changes are applied
together, in one commit. The place of a change is one integer that orders the changes of a batch. Its high bits are the
number of the change's slice in the batch, and its low bits are the number of the change in its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.arrays import Mask, Numbers

#: The columns of a change that decide whether a batch applies the change, and the change's place.
PLACE_COLUMNS = ("slice", "number", "commit_lsn", "ordinal", "operation")
#: This many low bits of a place are the number of the change in its slice.
_NUMBER_BITS = 56


def compute_places(changes: pa.Table | pa.RecordBatch, slices: Sequence[int]) -> Numbers:
    """Return the place of each change that is in one of these slices; -1 for a change of another slice."""
    # A TRUNCATE has no number. It gets the greatest number, which no change of a row has.
    slice_ends, numbers = (
        np.asarray(changes["slice"]),
        np.asarray(changes["number"].fill_null((1 << _NUMBER_BITS) - 1)),
    )
    places = np.full(len(slice_ends), -1, np.int64)
    for slice_number, end in enumerate(slices):
        places = np.where(slice_ends == end, (slice_number << _NUMBER_BITS) + numbers, places)
    return places


@dataclass(frozen=True)
class Extent:
    """The changes that a batch applies. Spark sends objects of this class to executors.

    - `slices` has the slices of the batch, the oldest first.
    - `since_lsn` is the LSN from which the batch applies changes. If the table was copied later than a slice was decoded,
      the copy already contains those changes of the slice that committed before this LSN.
    - `truncated_at` is the order key (commit LSN, ordinal) of the last TRUNCATE, or None. Only changes after this
      TRUNCATE have an effect.
    """

    slices: Sequence[int]
    since_lsn: int = 0
    truncated_at: tuple[int, int] | None = None

    def mask_changes(self, changes: pa.Table | pa.RecordBatch) -> Mask:
        """Return the mask of the changes and TRUNCATEs that belong to the batch."""
        mask: Mask = (compute_places(changes, self.slices) >= 0) & (
            np.asarray(changes["commit_lsn"]) >= self.since_lsn
        )
        return mask

    def mask_effective_changes(self, changes: pa.Table | pa.RecordBatch) -> Mask:
        """Return the mask of the row changes that still have an effect: those after the last TRUNCATE."""
        mask: Mask = self.mask_changes(changes) & np.asarray(pc.not_equal(changes["operation"], "truncate"))
        if self.truncated_at is not None:
            lsn, ordinal = self.truncated_at
            lsns, ordinals = (np.asarray(changes[name]) for name in ("commit_lsn", "ordinal"))
            mask &= (lsns > lsn) | ((lsns == lsn) & (ordinals > ordinal))
        return mask
