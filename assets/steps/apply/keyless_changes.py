"""Reads the changes of a table without a key, and computes their net change. Rows are compared by digests.

A table without a key is a multiset of rows: it may have several equal rows. A batch is the changes that one commit
applies. Their net change is what they do together: which rows are deleted and inserted, and how often. The place of a
change is a number that orders the changes of a batch.

In: files of the change history (the table's changes), and the replica.
Out: the changes, with the digest of the whole row as the key (`KeyedChanges`), and the rows to delete and insert.
A task that reads digests has only one row group in memory at a time. Raises LakeError, and Arrow's errors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.digests import DIGEST_SCHEMA, WantedDigests, digest_sides
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent
from pgsieve.decoding.changes.multiset import (
    MultisetChange,
    compute_multiset_change,
    count_needed_rows,
    mask_first_occurrences,
    rows_before_and_after,
)
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import RowGroup, Store, divide_groups
from pgsieve.resources.parts import Guard

#: A function that counts the replica's rows of each digest.
RowCounter = Callable[[WantedDigests], Numbers]


def make_change_schema(row_type: pa.DataType) -> pa.Schema:
    """Make the schema to read from the change history; `row_type` is the type of a row, or of a row's digest."""
    types = dict.fromkeys(PLACE_COLUMNS, pa.int64()) | {"operation": pa.string()}
    return pa.schema(types | dict.fromkeys(SIDES, row_type))


DIGESTED_CHANGE_SCHEMA = make_change_schema(pa.struct(DIGEST_SCHEMA))


def read_digests(store: Store, groups: Sequence[RowGroup], row_schema: pa.Schema, runner: Runner) -> pa.Table:
    """Read the changes in some row groups of a change history, with digests instead of rows.

    `row_schema` has the columns of a row.
    """
    change_parts = divide_groups(groups, runner.parallelism)
    return runner.run(
        _DigestTask(store, change_parts, row_schema), len(change_parts), schema=DIGESTED_CHANGE_SCHEMA
    )


def iterate_digests(
    store: Store, groups: Sequence[RowGroup], row_schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Read the changes in some row groups, batch by batch, with digests instead of rows."""
    schema = make_change_schema(pa.struct(row_schema))
    for _, read in store.iterate_group_readers(groups):
        for batch in conform(read(schema.names), schema).to_batches():
            yield digest_sides(batch, row_schema.names)


@dataclass(frozen=True)
class _DigestTask:
    """Reads changes, part by part, and replaces their rows by digests. The task is sent to executors."""

    store: Store
    change_parts: Sequence[Sequence[RowGroup]]
    row_schema: pa.Schema

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        yield from guard(iterate_digests(self.store, self.change_parts[number], self.row_schema))


@dataclass(frozen=True)
class KeylessChanges:
    """The changes of a batch to a table without a key.

    Distinct rows are numbered. In `keyed_changes` the digest of a row is its key, so `keyed_changes.keys[i]` is the
    digest of the row with the number i.
    """

    keyed_changes: KeyedChanges

    @classmethod
    def from_digests(cls, digests: pa.Table, extent: Extent) -> "KeylessChanges":
        """Make the object from what `read_digests` has read; `extent` tells which changes belong to the batch."""
        return cls(make_keyed_changes([digests], DIGEST_SCHEMA, (), extent))

    @property
    def places(self) -> Numbers:
        """The place of each change after the last TRUNCATE."""
        return self.keyed_changes.effective_places

    def compute_net_change(self, count_rows: RowCounter) -> "MultisetOutcome":
        """Compute the net change of the multiset.

        First, only those rows are looked up that the replica must have if each change finds its row. If one of them is
        missing, the old rows of all changes are looked up, and the changes are replayed one by one.
        """
        changes, row_count = self.keyed_changes.effective_changes, self.keyed_changes.keys.num_rows
        old_rows = rows_before_and_after(changes)[0]
        for looked_up in (
            np.flatnonzero(count_needed_rows(changes, row_count)),
            np.unique(old_rows[old_rows != NONE]),
        ):
            counts = np.zeros(row_count, np.int64)
            if len(looked_up):
                counts[looked_up] = count_rows(
                    WantedDigests(self.keyed_changes.keys.take(pa.array(looked_up)))
                )
            net = compute_multiset_change(changes, counts)
            if not net.missing_count:
                break
        return MultisetOutcome(net, counts, looked_up)

    def find_delete_places(self, rows: Numbers) -> Numbers:
        """For each of these row numbers, find the place of a change that removes the row."""
        old_rows = rows_before_and_after(self.keyed_changes.effective_changes)[0]
        places = np.full(self.keyed_changes.keys.num_rows, NONE)
        places[old_rows[old_rows != NONE]] = self.places[old_rows != NONE]
        return places[rows]


@dataclass(frozen=True)
class MultisetOutcome:
    """The net change of a multiset.

    `looked_up_rows` are the numbers of the rows that were looked up in the replica. For each row number, `counts` has how
    often the replica has the row; 0 if it was not looked up.
    """

    net_change: MultisetChange
    counts: Numbers
    looked_up_rows: Numbers


def select_first_matches(matches: Sequence[FileMatches], wanted_counts: Numbers) -> list[FileMatches]:
    """Select as many of the replica's rows as are to be deleted.

    `matches` has the rows that were found, file by file: their numbers in the file (`row_numbers`), and the numbers of
    the distinct rows that they equal (`key_indices`). `wanted_counts[i]` is the number of rows to select that equal the
    row with the number i.
    """
    remaining_counts, first_matches = wanted_counts.copy(), list[FileMatches]()
    for match in matches:
        is_first = mask_first_occurrences(match.key_indices, remaining_counts)
        if is_first.any():
            first_matches.append(
                replace(
                    match, row_numbers=match.row_numbers[is_first], key_indices=match.key_indices[is_first]
                )
            )
    return first_matches
