"""Counts changes by their relation, their row filters, their operation, and the operation that is sent for them.

A row filter can turn an UPDATE into an INSERT or a DELETE, or can reject the change. So the sent operation can be another
one, or none.

In: codes of operations, one batch at a time. Out: counts by `ChangeKind`. Raises nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.columns import ROW_OPERATIONS

#: The code for changes that are not sent.
NOT_SENT = -1


#: Stands in place of the row filters' text if the publisher evaluates them. In that case pgsieve does not receive the
#: changes that the filters reject, and cannot count them.
EVALUATED_BY_PUBLISHER = "evaluated by the publisher"


class ChangeKind(NamedTuple):
    """A kind of changes that are counted together.

    - `source` is a table or a partition.
    - `row_filter` is the text of the row filters, joined with OR. It is None if there is no filter, and
      `EVALUATED_BY_PUBLISHER` if the publisher evaluates the filters.
    - `operation` is the operation before row filters.
    - `sent_as` is the operation that is sent, or None for changes that are not sent.
    """

    source: str
    row_filter: str | None
    operation: str
    sent_as: str | None


#: The number of changes of each kind.
SentCounts = Mapping[ChangeKind, int]


@dataclass(frozen=True)
class Origin:
    """The relation that changes come from: its qualified name, and the text of its row filters by operation."""

    source: str = ""
    row_filters: Mapping[str, str | None] = field(default_factory=dict)

    def make_kind(self, operation: str, sent_as: str | None) -> ChangeKind:
        """Return the kind of the changes of this relation with these operations, before and after row filters."""
        return ChangeKind(self.source, self.row_filters.get(operation), operation, sent_as)

    def add_counts(
        self,
        operations: npt.NDArray[np.int32],
        sent_codes: npt.NDArray[np.int32],
        counts: Counter[ChangeKind],
    ) -> None:
        """Add changes to `counts`.

        `operations` has the index in `ROW_OPERATIONS` of the operation of each change. `sent_codes` has the index of
        the operation that is sent for it, or `NOT_SENT`.
        """
        code_count = len(ROW_OPERATIONS) + 1
        for code, count in enumerate(np.bincount(operations * code_count + sent_codes + 1).tolist()):
            if count:
                operation, sent_index = divmod(code, code_count)
                sent_operation = ROW_OPERATIONS[sent_index - 1] if sent_index else None
                counts[self.make_kind(ROW_OPERATIONS[operation], sent_operation)] += count


def count_received(counts: SentCounts) -> dict[str, int]:
    """Return the number of changes by the operation before row filters."""
    return {
        operation: sum(count for kind, count in counts.items() if kind.operation == operation)
        for operation in ROW_OPERATIONS
    }


def count_by_result(counts: SentCounts, operation: str = "update") -> dict[str | None, int]:
    """Count the changes of one operation by the operation that is sent for them; None stands for no operation."""
    return {
        sent: sum(
            count for kind, count in counts.items() if (kind.operation, kind.sent_as) == (operation, sent)
        )
        for sent in (*ROW_OPERATIONS, None)
    }


def sum_counts(*counts_of_parts: SentCounts) -> Counter[ChangeKind]:
    """Add up several counts."""
    total = Counter[ChangeKind]()
    for counts in counts_of_parts:
        total.update(counts)
    return total


def counts_to_rows(counts: SentCounts) -> list[dict[str, Any]]:
    """Return the counts as dictionaries for JSON, in a fixed order."""
    return [{**kind._asdict(), "changes": count} for kind, count in sorted(counts.items(), key=_sort_key)]


def counts_from_rows(rows: Iterable[Mapping[str, Any]] | None) -> Counter[ChangeKind]:
    """Return counts from the dictionaries that `counts_to_rows` made."""
    counts = Counter[ChangeKind]()
    for row in rows or ():
        counts[ChangeKind(*(row[name] for name in ChangeKind._fields))] += row["changes"]
    return counts


def group_by_origin(counts: SentCounts) -> dict[tuple[str, str | None], SentCounts]:
    """Group the counts by relation and row filter; the groups are sorted."""
    counts_by_group: dict[tuple[str, str | None], Counter[ChangeKind]] = {}
    for kind, count in sorted(counts.items(), key=_sort_key):
        counts_by_group.setdefault((kind.source, kind.row_filter), Counter())[kind] = count
    return {**counts_by_group}


def _sort_key(item: tuple[ChangeKind, int]) -> list[str]:
    return [part or "" for part in item[0]]
