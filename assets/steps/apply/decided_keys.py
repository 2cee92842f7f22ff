"""What becomes of each key of many changes, as columns in this process: what `decided_changes` says by Spark.

In: the change history of a batch without moves, TRUNCATEs and columns that were left out. Out: a row a key, and the places of
the changes that have the rows. Only keys, operations and places are read; all reductions go over whole columns, so that
Python runs nothing per change. Raises what Arrow does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.records.columns import ROW_OPERATIONS
from pgsieve.resources.lake.delta.conforming import conformed, field_of
from pgsieve.resources.lake.stores.store import Store

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

INSERT, _UPDATE, DELETE = range(len(ROW_OPERATIONS))
#: What is read of a change besides its key.
_PLACED = ("slice", "number", "commit_lsn", "operation")
_TURN = 56


@dataclass(frozen=True)
class KeyedEvents:
    """The row changes of a batch in their order: key, place, operation (its number in `ROW_OPERATIONS`), commit LSN."""

    keys: pa.Table
    places: Places
    operations: npt.NDArray[np.int8]
    commit_lsns: Places

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        arrays = (self.places, self.operations, self.commit_lsns)
        return int(self.keys.nbytes) + sum(array.nbytes for array in arrays)


def places_of(changes: pa.Table, slices: Sequence[int]) -> Places:
    """Where changes stand in some slices, as `net_change.place_of` has it; -1 for those of other slices."""
    slice_of, number = np.asarray(changes["slice"]), np.asarray(changes["number"].fill_null(0))
    places = np.full(len(slice_of), -1, np.int64)
    for turn, end in enumerate(slices):
        places = np.where(slice_of == end, (turn << _TURN) + number, places)
    return places


def keyed_events(
    store: Store,
    files: Iterable[str],
    keys: pa.Schema,
    slices: Sequence[int],
    since: int,
    most_bytes: int,
) -> KeyedEvents | None:
    """The row changes in files of a change history that committed at or after `since`; None where they have more bytes.

    `keys` has the names and types of the key.
    """
    every = KeyedEvents(
        keys.empty_table(), np.empty(0, np.int64), np.empty(0, np.int8), np.empty(0, np.int64)
    )
    parts, size = [every], 0
    for file in files:
        sides = [f"{side}.{name}" for side in ("new", "old") for name in keys.names]
        parts.append(_events(store.columns(file, [*_PLACED, *sides]), keys, slices, since))
        size += parts[-1].nbytes
        if size > most_bytes:
            return None
    every = KeyedEvents(
        pa.concat_tables([part.keys for part in parts]),
        np.concatenate([part.places for part in parts]),
        np.concatenate([part.operations for part in parts]),
        np.concatenate([part.commit_lsns for part in parts]),
    )
    if (np.diff(every.places) > 0).all():
        return every
    order = np.argsort(every.places, kind="stable")
    return KeyedEvents(
        every.keys.take(pa.array(order)),
        every.places[order],
        every.operations[order],
        every.commit_lsns[order],
    )


def _events(changes: pa.Table, keys: pa.Schema, slices: Sequence[int], since: int) -> KeyedEvents:
    places, lsns = places_of(changes, slices), np.asarray(changes["commit_lsn"])
    operations = pc.index_in(changes["operation"], pa.array(ROW_OPERATIONS))
    concerned = (places >= 0) & (lsns >= since) & np.asarray(operations.is_valid())
    numbers = np.asarray(operations.fill_null(-1)).astype(np.int8)
    if not concerned.all():
        changes = changes.filter(pa.array(concerned))
        places, lsns, numbers = places[concerned], lsns[concerned], numbers[concerned]
    new, old = (
        conformed(pa.table({name: field_of(changes[side], name) for name in keys.names}), keys)
        for side in ("new", "old")
    )
    deleted = numbers == DELETE
    if deleted.any():
        new = pa.table(
            {name: pc.if_else(pa.array(deleted), old[name], new[name]) for name in keys.names}, keys
        )
    return KeyedEvents(new, places, numbers, lsns)


@dataclass(frozen=True)
class DecidedKeys:
    """What becomes of each key; of the arrays each has an element a key.

    `lasts` is the place of the last change, `begins` how often a row begins. The key is `expected` in the replica if its first
    change is no INSERT, and has to be `absent` if a row begins before one ends. Afterwards it is `upserted`, `updated` if the
    replica has it, or else deleted.
    """

    events: KeyedEvents
    codes: Places
    keys: pa.Table
    lasts: Places
    begins: Places
    expected: Mask
    absent: Mask
    upserted: Mask
    updated: Mask

    @classmethod
    def of(cls, events: KeyedEvents) -> "DecidedKeys":
        """The keys of some changes, by the rules of `decided_changes`."""
        codes = _codes(events.keys)
        count = int(codes.max()) + 1 if len(codes) else 0
        every = np.arange(len(codes))
        inserts, deletes = (np.flatnonzero(events.operations == operation) for operation in (INSERT, DELETE))
        first, last = _first(codes, every, count), _last(codes, every, count)
        begun, inserted = _first(codes, inserts, count), _last(codes, inserts, count)
        ended, deleted = _first(codes, deletes, count), _last(codes, deletes, count)
        # Nothing happened at -1: what did comes later.
        alive = inserted > deleted
        stays = events.operations[last] != DELETE
        return cls(
            events=events,
            codes=codes,
            keys=events.keys.take(pa.array(first)),
            lasts=events.places[last],
            begins=np.bincount(codes[inserts], minlength=count),
            expected=events.operations[first] != INSERT,
            absent=(begun >= 0) & ((ended < 0) | (begun < ended)),
            upserted=stays & alive,
            updated=stays & ~alive & (deleted < 0),
        )

    def suspect(self, present: Mask) -> Mask:
        """Which keys may have a conflict, where the replica has those that are `present`."""
        return (self.begins > 1) | self.absent & present

    def events_of(self, keys: Mask) -> tuple[pa.Table, npt.NDArray[np.int8], Places]:
        """The changes of some keys in their order: keys, operations and commit LSNs."""
        chosen = keys[self.codes]
        rows = self.events.keys.filter(pa.array(chosen))
        return rows, self.events.operations[chosen], self.events.commit_lsns[chosen]


def _first(codes: Places, at: Places, count: int) -> Places:
    """For each code the first of some rows that has it, -1 where none does; of equal places NumPy keeps the last value."""
    found = np.full(count, -1, np.int64)
    found[codes[at[::-1]]] = at[::-1]
    return found


def _last(codes: Places, at: Places, count: int) -> Places:
    found = np.full(count, -1, np.int64)
    found[codes[at]] = at
    return found


def _codes(keys: pa.Table) -> Places:
    """A number for each row, from 0 on, the same where the keys are equal."""

    def encoded(column: pa.ChunkedArray | pa.Array) -> Places:
        encoding = pa.chunked_array(column).combine_chunks().dictionary_encode()
        return np.asarray(encoding.indices).astype(np.int64)

    def combined(left: Places, right: Places) -> Places:
        return encoded(pa.array(left * (int(right.max(initial=0)) + 1) + right))

    return reduce(combined, (encoded(column) for column in keys.columns))
