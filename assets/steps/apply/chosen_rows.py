"""Picks rows from changes: the new rows of a batch's net change, or the rows before the changes.

The place of a change is a number that orders the changes of a batch (`pgsieve.decoding.changes.extent`). In: columns of a
change history, from a row group of a file or from a batch of Spark. Out: the rows of the changes at chosen places, filled
up with the values that these changes did not send. Raises Arrow's errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.completion import Completion
from pgsieve.assets.steps.history.shared_rows import SharedRows
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent, change_places
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.net_change import Mask, Numbers
from pgsieve.decoding.changes.versions import VALIDITY_SCHEMA, Commits, add_validity
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.stores.store import Reader


@dataclass(frozen=True)
class Validity:
    """The commits that begin and end versions of rows.

    `places` are the ascending places of the changes that begin the versions. For each version, `begun` and `until` are
    the numbers in `commits` of the commits that begin and end it.
    """

    places: Numbers
    begun: Numbers
    until: Numbers
    commits: Commits

    def of(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """Add validity to the rows of the changes at `places`."""
        versions = np.searchsorted(self.places, places)
        return add_validity(rows, self.begun[versions], self.until[versions], self.commits)

    def batches(self, places: Numbers, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The batch of `of`, as an iterator for `RowWriter`."""
        yield self.of(rows, places)


@dataclass(frozen=True)
class ChosenRows:
    """Chooses rows from the changes of a batch. Executors get a copy.

    - `extent`: the changes that count
    - `stamp`: sets the time at which the rows are applied
    - `kept`: the ascending places of the chosen changes; if it is None, all effective INSERTs are chosen
    - `completed`: the values of columns that the chosen changes did not send
    - `validity`: if it is given, the rows become versions of rows (`scd2`)
    - `shared`: gets the new rows, and the rows that were removed from the replica
    - `side`: `new` for the rows after the changes, `old` for the rows before them
    """

    extent: Extent
    stamp: Stamp
    kept: Numbers | None = None
    completed: Sequence[Completion] = ()
    validity: Validity | None = None
    shared: SharedRows | None = None
    side: str = "new"

    def schema(self, rows: pa.Schema) -> pa.Schema:
        """The columns of the files: those of the rows, and validity if versions are written."""
        return rows if self.validity is None else pa.schema([*rows, *VALIDITY_SCHEMA])

    def rows(self, read: Reader, kind: pa.DataType) -> pa.RecordBatch | None:
        """The chosen rows of the changes that `read` reads; None if there are none. `kind` is the rows' type."""
        return None if (placed_rows := self.placed(read, kind)) is None else placed_rows[1]

    def placed(self, read: Reader, kind: pa.DataType) -> tuple[Numbers, pa.RecordBatch] | None:
        """The rows that `rows` returns, with the places of their changes."""
        changes = read(PLACE_COLUMNS)
        places = change_places(changes, self.extent.slices)
        is_chosen = self._inserted(changes) if self.kept is None else is_in(places, self.kept)
        if not is_chosen.any():
            return None
        rows, places = read([self.side]), places[is_chosen]
        rows = rows if is_chosen.all() else rows.filter(pa.array(is_chosen))
        batch = pa.RecordBatch.from_struct_array(
            conform(rows, pa.schema([(self.side, kind)]))[self.side].combine_chunks()
        )
        for completion in self.completed:
            batch = completion.of(batch, places)
        batch = self.stamp.apply(batch)
        if self.shared is not None:
            self.shared.add_new_rows(places, batch)
        return places, batch if self.validity is None else self.validity.of(batch, places)

    def _inserted(self, changes: pa.Table) -> Mask:
        inserted: Mask = self.extent.effective_changes(changes) & np.asarray(
            pc.equal(changes["operation"], "insert")
        )
        return inserted


def is_in(places: Numbers, kept: Numbers) -> Mask:
    """A mask of the places that are among `kept`, which ascend."""
    if not len(kept):
        return np.zeros(len(places), np.bool_)
    indexes = np.minimum(np.searchsorted(kept, places), len(kept) - 1)
    is_kept: Mask = kept[indexes] == places
    return is_kept
