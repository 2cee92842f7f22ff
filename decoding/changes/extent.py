"""The changes of a change history that a batch applies: columns of changes in, masks and places out. Raises nothing.

The place of a change orders the changes of a batch in one integer: the number of its slice in the batch, then its
number in the slice.
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


def places_of(changes: pa.Table | pa.RecordBatch, slices: Sequence[int]) -> Numbers:
    """The places of changes in some slices, ascending in the order of the changes; -1 for changes of other slices."""
    # A TRUNCATE has no number, and must not have the place of a change.
    slice_of, number = (
        np.asarray(changes["slice"]),
        np.asarray(changes["number"].fill_null((1 << _NUMBER_BITS) - 1)),
    )
    places = np.full(len(slice_of), -1, np.int64)
    for turn, end in enumerate(slices):
        places = np.where(slice_of == end, (turn << _NUMBER_BITS) + number, places)
    return places


@dataclass(frozen=True)
class Extent:
    """The changes of a batch: those in the `slices`, oldest first, that committed at or after `since`.

    Of these, the changes after the order key `after` of the last TRUNCATE are effective; None: all. The changes that
    committed before `since` are in the copy: a slice may have been transformed for an older copy. It is sent to
    executors.
    """

    slices: Sequence[int]
    since: int = 0
    after: tuple[int, int] | None = None

    def within(self, changes: pa.Table | pa.RecordBatch) -> Mask:
        """The mask of the changes and TRUNCATEs of the batch."""
        within: Mask = (places_of(changes, self.slices) >= 0) & (
            np.asarray(changes["commit_lsn"]) >= self.since
        )
        return within

    def effective_changes(self, changes: pa.Table | pa.RecordBatch) -> Mask:
        """The mask of the changes of rows that are effective."""
        effective_changes: Mask = self.within(changes) & np.asarray(
            pc.not_equal(changes["operation"], "truncate")
        )
        if self.after is not None:
            lsn, ordinal = self.after
            lsns, ordinals = (np.asarray(changes[name]) for name in ("commit_lsn", "ordinal"))
            effective_changes &= (lsns > lsn) | ((lsns == lsn) & (ordinals > ordinal))
        return effective_changes
