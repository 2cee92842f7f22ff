"""The rows that changes leave, and where their values are.

The place of a change is a number that orders the changes of a batch, the changes that one commit applies
(`pgsieve.decoding.changes.extent`).

In: a net change or rows that leave their keys, which refer to changes by their indexes; and the place of each change. Out:
rows, which refer to changes by their places. Raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.net_change import LeftRows, NetChange
from pgsieve.decoding.changes.value_sources import ColumnSources, Completion, NumberedValues, mask_unsent


@dataclass(frozen=True)
class NetRows:
    """New rows of the replica, in the order of the changes that made them. `places` has the places of these changes.

    - `sent_places` has an array for each column that some change did not send. For each row, the array has the place of
      the change that sent the row's value, or `NONE` if no change of the batch sent it.
    - `base_keys` has for each row the number of a key: the replica's row with this key has the values that no change
      sent. If it is `NONE`, these values are NULL.
    - `begin_places` has for each row the place of the INSERT with which it began, or `NONE` if the replica had it. An
      UPDATE of the key counts as an INSERT with the new key.
    """

    places: Numbers
    sent_places: Mapping[str, Numbers]
    base_keys: Numbers
    begin_places: Numbers

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return sum(
            array.nbytes
            for array in (self.places, self.base_keys, self.begin_places, *self.sent_places.values())
        )

    @property
    def is_unsent(self) -> Mask:
        """The mask of the rows with a value that no change of the batch sent."""
        return mask_unsent(self.sent_places, len(self))

    def take(self, numbers: Numbers) -> NetRows:
        """Return the rows with these indexes, which ascend."""
        sent_places = {name: places[numbers] for name, places in self.sent_places.items()}
        return NetRows(self.places[numbers], sent_places, self.base_keys[numbers], self.begin_places[numbers])

    def find_column_sources(self, name: str) -> tuple[Numbers, ColumnSources]:
        """Find the rows whose own change did not send a column. Returns their places, and where the values are."""
        is_incomplete = self.sent_places[name] != self.places
        return self.places[is_incomplete], ColumnSources(
            self.sent_places[name][is_incomplete], self.base_keys[is_incomplete]
        )

    def complete(self, name: str, sent_values: NumberedValues, base_values: NumberedValues) -> Completion:
        """Return the values of a column for the rows whose own change did not send it.

        `sent_values` are the values of other changes, by their places. `base_values` are those of the replica's rows, by the
        numbers of their keys.
        """
        places, sources = self.find_column_sources(name)
        return Completion(name, NumberedValues(places, sources.take_values(sent_values, base_values)))


def find_net_rows(places: Numbers, net: NetChange, has_row: Mask) -> NetRows:
    """Return the new rows, those of the keys for which `has_row` is True.

    `places` has the place of each change after the last TRUNCATE. `net` is what these changes do together. It refers to a
    change by its index in `places`.
    """
    indexes = np.flatnonzero(has_row)
    indexes = indexes[np.argsort(net.last_changes[indexes])]
    sent_places = {
        name: find_places(places, changes[indexes]) for name, changes in net.changes_by_column.items()
    }
    base_keys = np.where(net.is_updated[indexes], net.base_keys[indexes], NONE)
    begin_places = find_places(places, net.begin_changes[indexes])
    return NetRows(places[net.last_changes[indexes]], sent_places, base_keys, begin_places)


def describe_left_rows(places: Numbers, left_rows: LeftRows) -> NetRows:
    """Return the rows whose key an UPDATE changes, as they are before it. The result has the places of these UPDATEs.

    The argument `places` has the place of each change.
    """
    sent_places = {
        name: find_places(places, changes) for name, changes in left_rows.changes_by_column.items()
    }
    begin_places = find_places(places, left_rows.begin_changes)
    return NetRows(places[left_rows.leaves], sent_places, left_rows.base_keys, begin_places)


def find_places(places: Numbers, changes: Numbers) -> Numbers:
    """Return the places of changes, which are given by their indexes in `places`; `NONE` stays `NONE`."""
    return np.where(changes == NONE, NONE, places[changes]) if len(places) else changes
