"""Completes rows whose changes left values out: with the last value sent before, or with the replica's value.

A TOASTed value that an UPDATE did not touch is not sent (PostgreSQL documentation, section 54.9,
`TupleData`). In: the new rows, by the places of their changes, and where each column's value is. Out: the
missing values, in parts that fit in memory. Raises Arrow's errors.

    change       columns                  the row of place 9
    place 3      id, note, body           note of place 9
    place 7      id, note                 body of place 3, or of the replica's row where no change sent it
    place 9      id, note
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.keyed_changes import places_of
from pgsieve.decoding.changes.columns import field_of
from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers
from pgsieve.resources.lake.delta.conforming import conformed
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.stores.store import RowGroup, Store, joined

#: Missing values up to this many bytes are kept in memory at once. For more, the changes are read again for
#: each part.
MEMORY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class NetRows:
    """New rows of the replica, by the places of their changes in ascending order.

    For some columns, `sent` has the places of the changes that have the value, or `NONE` where no change has
    it. Then the replica's row with the key `base` has it; without such a row (`base` is `NONE`) it is NULL.
    """

    places: Numbers
    sent: Mapping[str, Numbers]
    base: Numbers

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return sum(each.nbytes for each in (self.places, self.base, *self.sent.values()))

    def part(self, begin: int, end: int) -> "NetRows":
        """The rows from `begin` to `end`, by their numbers."""
        part = slice(begin, end)
        sent = {name: places[part] for name, places in self.sent.items()}
        return NetRows(self.places[part], sent, self.base[part])


def net_rows(places: Numbers, net: NetChange, remains: Mask) -> NetRows:
    """The rows of the keys that remain; `places` are the places of the changes."""
    at = np.flatnonzero(remains)
    at = at[np.argsort(net.last[at])]
    sent = {name: np.where(of[at] == NONE, NONE, places[of[at]]) for name, of in net.sent.items()}
    return NetRows(places[net.last[at]], sent, np.where(net.updated[at], net.base[at], NONE))


@dataclass(frozen=True)
class Completion:
    """The values of a column for the rows at some places, in ascending order."""

    column: str
    places: Numbers
    values: pa.Array

    def of(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """The rows at some places, with these values instead of their own."""
        if not len(self.places):
            return rows
        at = np.minimum(np.searchsorted(self.places, places), len(self.places) - 1)
        lacks = self.places[at] == places
        if not lacks.any():
            return rows
        number = rows.schema.get_field_index(self.column)
        every = pa.concat_arrays([rows.column(number), self.values])
        chosen = np.where(lacks, rows.num_rows + at, np.arange(rows.num_rows))
        return rows.set_column(number, rows.schema.field(number), every.take(pa.array(chosen)))


class _TooManyError(Exception):
    """The values have more bytes than may be in memory."""


@dataclass
class _Budget:
    """How many more bytes may be in memory."""

    bytes: int

    def take(self, values: pa.Array) -> pa.Array:
        self.bytes -= values.nbytes
        if self.bytes < 0:
            raise _TooManyError
        return values


def completions(
    store: Store,
    path: str,
    groups: Sequence[RowGroup],
    slices: Sequence[int],
    matches: Sequence[FileMatches],
    rows: NetRows,
    schema: pa.Schema,
) -> Iterator[tuple[Numbers, Sequence[Completion]]]:
    """The places of rows, part by part, with the values that the rows lack.

    `groups` have the changes. `matches` say in which rows of the replica at `path` the keys are. `schema` has the
    columns.
    """
    lacking = _Lacking(store, path, groups, slices, matches, schema)
    waiting = [(0, len(rows))]
    while waiting:
        begin, end = waiting.pop()
        part, budget = rows.part(begin, end), _Budget(MEMORY_BYTES)
        try:
            completed = [lacking.completion(name, part, budget) for name in rows.sent]
        except _TooManyError:
            if end - begin == 1:
                budget = _Budget(2**63)
                completed = [lacking.completion(name, part, budget) for name in rows.sent]
            else:
                middle = (begin + end) // 2
                waiting += [(middle, end), (begin, middle)]
                continue
        yield part.places, completed


@dataclass(frozen=True)
class _Lacking:
    """Where lacking values are: in the row groups of the changes, and in the replica's files."""

    store: Store
    path: str
    groups: Sequence[RowGroup]
    slices: Sequence[int]
    matches: Sequence[FileMatches]
    schema: pa.Schema

    def completion(self, name: str, rows: NetRows, budget: _Budget) -> Completion:
        """The values of a column for the rows whose own change left it out; raises _TooManyError."""
        sent, only = rows.sent[name], pa.schema([self.schema.field(name)])
        lacks = np.flatnonzero(sent != rows.places)
        of_changes, of_replica = lacks[sent[lacks] != NONE], lacks[sent[lacks] == NONE]
        of_replica, of_none = _parted(of_replica, rows.base[of_replica] != NONE)
        parts = [
            *self._from_changes(only, sent, of_changes, budget),
            *self._from_replica(only, rows.base, of_replica, budget),
            (of_none, pa.nulls(len(of_none), only.field(name).type)),
        ]
        numbers = np.concatenate([each for each, _ in parts])
        order = np.argsort(numbers)
        values = pa.concat_arrays([each for _, each in parts]).take(pa.array(order))
        return Completion(name, rows.places[numbers[order]], values)

    def _from_changes(
        self, only: pa.Schema, sent: Numbers, wanted: Numbers, budget: _Budget
    ) -> Iterator[tuple[Numbers, pa.Array]]:
        """The numbers of rows, and their values from changes; several rows may take one change's value."""
        if not len(wanted):
            return
        wanted = wanted[np.argsort(sent[wanted], kind="stable")]
        (name,), places = only.names, sent[wanted]
        for _, read in self.store.readers(self.groups):
            file_places = places_of(read(["slice", "number"]), self.slices)
            order = np.argsort(file_places, kind="stable")
            begin, end = (np.searchsorted(places, file_places[order], side) for side in ("left", "right"))
            times = np.where(file_places[order] < 0, 0, end - begin)
            if times.any():
                chosen = np.repeat(order, times)
                rows = pa.table({name: field_of(read([f"new.{name}"])["new"], name).take(pa.array(chosen))})
                numbers = wanted[_ranges(begin, times)]
                yield numbers, budget.take(_values(rows, only))

    def _from_replica(
        self, only: pa.Schema, base: Numbers, wanted: Numbers, budget: _Budget
    ) -> Iterator[tuple[Numbers, pa.Array]]:
        """The numbers of rows, and their values from the replica's rows with the keys `base`.

        Several rows may take one key's value: a row that moves has it in each tenure.
        """
        if not len(wanted):
            return
        wanted = wanted[np.argsort(base[wanted], kind="stable")]
        bases = base[wanted]
        for match in self.matches:
            order = np.argsort(match.rows)
            begin, end = (np.searchsorted(bases, match.keys[order], side) for side in ("left", "right"))
            times = end - begin
            if times.any():
                rows = np.repeat(match.rows[order], times)
                yield wanted[_ranges(begin, times)], self._rows(match, rows, only, budget)

    def _rows(self, match: FileMatches, rows: Numbers, only: pa.Schema, budget: _Budget) -> pa.Array:
        taken, begin = [_values(only.empty_table(), only)], 0
        for batch in self.store.batches(joined(self.path, match.name), only):
            first, last = np.searchsorted(rows, (begin, begin + batch.num_rows))
            chosen = batch.take(pa.array(rows[first:last] - begin))
            taken.append(budget.take(_values(pa.Table.from_batches([chosen]), only)))
            begin += batch.num_rows
        return pa.concat_arrays(taken)


def _values(rows: pa.Table, only: pa.Schema) -> pa.Array:
    """The only column of some rows, in the schema's type."""
    column = conformed(rows, only).column(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _parted(numbers: Numbers, chosen: Mask) -> tuple[Numbers, Numbers]:
    return numbers[chosen], numbers[~chosen]


def _ranges(begin: Numbers, count: Numbers) -> Numbers:
    """The numbers in ranges with these beginnings and lengths, one range after the other."""
    return np.repeat(begin - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
