"""The changes of a table without a key, by digests of their rows, and their net change.

A table without a key is a multiset of rows: it may have several equal rows. In: files of the change history, and the
replica. Out: the changes as if the digest of the whole row were the key (`KeyedChanges`), and the rows to delete and
insert. Only one row group is in memory at a time. Raises LakeError, and Arrow's errors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges, keyed_changes
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.digests import DIGEST_SCHEMA, WantedDigests, digest_sides
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent
from pgsieve.decoding.changes.multiset import (
    MultisetChange,
    mask_first,
    multiset_change,
    needed_rows,
    rows_before_and_after,
)
from pgsieve.decoding.changes.net_change import NONE, Numbers
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.executors import Executors
from pgsieve.resources.lake.stores.store import RowGroup, Store, divide_groups
from pgsieve.resources.parts import Guard

#: A function that counts the replica's rows of each digest.
RowCounter = Callable[[WantedDigests], Numbers]


def change_columns(row: pa.DataType) -> pa.Schema:
    """The columns to read from the change history; `row` is the type of a row, or of a row's digest."""
    kinds = dict.fromkeys(PLACE_COLUMNS, pa.int64()) | {"operation": pa.string()}
    return pa.schema(kinds | dict.fromkeys(SIDES, row))


DIGEST_COLUMNS = change_columns(pa.struct(DIGEST_SCHEMA))


def stored_digests(store: Store, groups: Sequence[RowGroup], rows: pa.Schema, runner: Executors) -> pa.Table:
    """The changes in some row groups of a change history, with digests of their rows; `rows` is the rows' schema."""
    parts = divide_groups(groups, runner.parallelism)
    return runner.run(_DigestTask(store, parts, rows), len(parts), schema=DIGEST_COLUMNS)


@dataclass(frozen=True)
class _DigestTask:
    """Reads changes, part by part, and replaces their rows by digests. The task is sent to executors."""

    store: Store
    parts: Sequence[Sequence[RowGroup]]
    rows: pa.Schema

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        schema = change_columns(pa.struct(self.rows))
        for _, read in self.store.group_readers(self.parts[number]):
            changes = conform(read(schema.names), schema).to_batches()
            yield from (digest_sides(batch, self.rows.names) for batch in guard(changes))


@dataclass(frozen=True)
class KeylessChanges:
    """The changes of a batch to a table without a key.

    Distinct rows are numbered: row i of `rows.keys` is the digest of the row with the number i.
    """

    rows: KeyedChanges

    @classmethod
    def of(cls, digests: pa.Table, extent: Extent) -> "KeylessChanges":
        """The changes of a change history within an extent."""
        keyed = keyed_changes([digests], DIGEST_SCHEMA, (), extent)
        assert keyed is not None
        return cls(keyed)

    @property
    def places(self) -> Numbers:
        """The place of each change after the last TRUNCATE."""
        return self.rows.places[self.rows.first_effective :]

    def net_change(self, count_rows: RowCounter) -> "MultisetOutcome":
        """The net change of the multiset.

        First only those rows are looked up that the replica must have. If one of them is missing, the changes are
        replayed one by one, and this needs to know about all old rows: these are looked up in a second pass.
        """
        changes, count = self.rows.since_truncate, self.rows.keys.num_rows
        old_rows = rows_before_and_after(changes)[0]
        for looked_up in (np.flatnonzero(needed_rows(changes, count)), np.unique(old_rows[old_rows != NONE])):
            counts = np.zeros(count, np.int64)
            if len(looked_up):
                counts[looked_up] = count_rows(WantedDigests(self.rows.keys.take(pa.array(looked_up))))
            net = multiset_change(changes, counts)
            if not net.missing:
                break
        return MultisetOutcome(net, counts, looked_up)

    def places_of_old(self, rows: Numbers) -> Numbers:
        """For each of these row numbers, the place of a change that removes the row."""
        old_rows = rows_before_and_after(self.rows.since_truncate)[0]
        places = np.full(self.rows.keys.num_rows, NONE)
        places[old_rows[old_rows != NONE]] = self.places[old_rows != NONE]
        return places[rows]


@dataclass(frozen=True)
class MultisetOutcome:
    """The net change of a multiset.

    `looked_up` are the numbers of the rows that were looked up in the replica. For each row number, `counts` has how
    often the replica has the row; 0 if it was not looked up.
    """

    net: MultisetChange
    counts: Numbers
    looked_up: Numbers


def first_matches(matches: Sequence[FileMatches], counts: Numbers) -> list[FileMatches]:
    """The first matches of each row number; `counts` has for each row number how many are wanted."""
    remaining, first = counts.copy(), list[FileMatches]()
    for match in matches:
        is_first = mask_first(match.key_indices, remaining)
        if is_first.any():
            first.append(
                replace(
                    match, row_numbers=match.row_numbers[is_first], key_indices=match.key_indices[is_first]
                )
            )
    return first
