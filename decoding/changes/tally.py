"""Counts of changes: Arrow batches of changes in, tallies (counts by name) out. Raises nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import SIDES, struct_field
from pgsieve.decoding.changes.equality import to_comparable
from pgsieve.decoding.changes.sent_as import ChangeKind, counts_from_rows, counts_to_rows

#: Counts by name: a JSON object.
Tally = dict[str, Any]


def empty_tally() -> Tally:
    """Return an empty tally. `count_changes` adds counts to it."""
    return {"key_changes": 0, "unchanged": []}


def count_changes(batch: pa.RecordBatch, key: Sequence[str], tally: Tally) -> None:
    """Add the counts of a batch of changes to a tally.

    The tally has the number of changes of each operation, and in `key_changes` the number of UPDATEs that change a key.
    `unchanged` lists the columns that are missing from some change because their TOASTed value did not change. The rows
    `old` and `new` in the batch need only have the columns of the key.
    """

    def add(name: str, count: int) -> None:
        tally[name] = tally.get(name, 0) + count

    for item in pc.value_counts(batch.column("operation")).to_pylist():
        add(item["values"], item["counts"])
    add("key_changes", pc.sum(mask_key_changes(batch, key)).as_py() or 0)
    unchanged = pc.unique(pc.list_flatten(batch.column("unchanged"))).to_pylist()
    tally["unchanged"] = sorted({*tally.get("unchanged", ()), *unchanged})


def count_changes_and_bytes(batch: pa.RecordBatch, key: Sequence[str], tally: Tally) -> None:
    """Add the counts of a batch to a tally, and the size of the batch in memory (`bytes`).

    The size is right only if the batch has all columns.
    """
    count_changes(batch, key, tally)
    tally["bytes"] = tally.get("bytes", 0) + batch.nbytes


def sum_tallies(tallies: Iterable[Tally]) -> Tally:
    """Add up tallies; the result has the `unchanged` columns of all of them."""
    total = empty_tally()
    for tally in tallies:
        for name, value in tally.items():
            if name == "unchanged":
                total[name] = sorted({*total[name], *value})
            else:
                total[name] = total.get(name, 0) + value
    return total


@dataclass
class ChangeCounts:
    """Counts of the changes that one task or thread has decoded; `sum` adds up the counts of several tasks.

    `sent_as` counts the changes that the publisher sent, also by what row filters make of them (`ChangeKind`). `sent` is
    the tally of the changes that remain after row filters, with their size in memory.
    """

    sent_as: Counter[ChangeKind] = field(default_factory=Counter)
    sent: Tally = field(default_factory=lambda: {**empty_tally(), "bytes": 0})

    def to_json(self) -> str:
        """Return the counts as JSON."""
        return json.dumps({"sent_as": counts_to_rows(self.sent_as), "sent": self.sent})

    @classmethod
    def sum(cls, texts: Iterable[str]) -> ChangeCounts:
        """Add up the counts of several tasks; `texts` has the JSON of each task's counts."""
        parts, total = [json.loads(text) for text in texts], cls()
        for part in parts:
            total.sent_as.update(counts_from_rows(part["sent_as"]))
        return cls(total.sent_as, sum_tallies([total.sent, *(part["sent"] for part in parts)]))


def mask_key_changes(batch: pa.RecordBatch, key: Sequence[str]) -> pa.BooleanArray:
    """Return the mask of the UPDATEs that change the key of their row. It is false everywhere if the table has no key."""
    if not key:
        return pa.repeat(pa.scalar(False), batch.num_rows)
    is_different = pa.repeat(pa.scalar(False), batch.num_rows)
    for name in key:
        sides = to_comparable(pa.chunked_array([struct_field(batch.column(s), name) for s in SIDES]))
        old, new = sides.slice(0, batch.num_rows), sides.slice(batch.num_rows)
        # An old tuple of another replica identity can have NULL in a column of the key, and no row of the replica has such
        # a key. The UPDATE counts as a change of the key, so that it is not applied to the row that has the new key.
        is_null_once = pc.xor(pc.is_null(old), pc.is_null(new))
        is_different = pc.or_(is_different, pc.or_(is_null_once, pc.fill_null(pc.not_equal(old, new), False)))
    has_both_rows = pc.and_(pc.equal(batch.column("operation"), "update"), pc.is_valid(batch.column("old")))
    return pc.and_(has_both_rows, is_different)
