"""Counts changes by relation, row filter, operation, and the operation as which they are sent.

In: codes of operations, one batch at a time. Out: counts by `SentAs`. Raises nothing.
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
NOTHING = -1


#: Replaces the text of row filters that the publisher evaluates. pgsieve does not see the changes that they reject.
BY_PUBLISHER = "evaluated by the publisher"


class SentAs(NamedTuple):
    """A kind of changes that are counted together.

    - `source` is a table or a partition.
    - `row_filter` is the text of the row filters, joined with OR. It is None if there is no filter, and `BY_PUBLISHER`
      if the publisher evaluates the filters.
    - `operation` is the operation before row filters.
    - `sent_as` is the operation that is sent, or None for changes that are not sent.
    """

    source: str
    row_filter: str | None
    operation: str
    sent_as: str | None


#: The number of changes of each kind.
SentCounts = Mapping[SentAs, int]


@dataclass(frozen=True)
class Origin:
    """The relation that changes come from: its qualified name, and the text of its row filters by operation."""

    source: str = ""
    row_filters: Mapping[str, str | None] = field(default_factory=dict)

    def sent_as(self, operation: str, sent_as: str | None) -> SentAs:
        """Return the kind of the changes of this relation with these operations, before and after row filters."""
        return SentAs(self.source, self.row_filters.get(operation), operation, sent_as)

    def count(
        self, operations: npt.NDArray[np.int32], sent_codes: npt.NDArray[np.int32], counts: Counter[SentAs]
    ) -> None:
        """Add changes to `counts`.

        `operations` and `sent_codes` are indexes in `ROW_OPERATIONS`, and `NOTHING` for changes that are not
        sent.
        """
        base = len(ROW_OPERATIONS) + 1
        for code, count in enumerate(np.bincount(operations * base + sent_codes + 1).tolist()):
            if count:
                operation, sent = divmod(code, base)
                name = ROW_OPERATIONS[sent - 1] if sent else None
                counts[self.sent_as(ROW_OPERATIONS[operation], name)] += count


def received_counts(counts: SentCounts) -> dict[str, int]:
    """Return the number of changes by the operation before row filters."""
    return {o: sum(n for kind, n in counts.items() if kind.operation == o) for o in ROW_OPERATIONS}


def counts_by_result(counts: SentCounts, operation: str = "update") -> dict[str | None, int]:
    """Return the number of changes of one operation, by the operation that is sent (None if nothing is sent)."""
    return {
        sent: sum(n for kind, n in counts.items() if (kind.operation, kind.sent_as) == (operation, sent))
        for sent in (*ROW_OPERATIONS, None)
    }


def sum_counts(*several: SentCounts) -> Counter[SentAs]:
    """Add up several counts."""
    total = Counter[SentAs]()
    for counts in several:
        total.update(counts)
    return total


def counts_to_rows(counts: SentCounts) -> list[dict[str, Any]]:
    """Return the counts as dictionaries for JSON, in a fixed order."""
    return [{**kind._asdict(), "changes": count} for kind, count in sorted(counts.items(), key=_order)]


def counts_from_rows(rows: Iterable[Mapping[str, Any]] | None) -> Counter[SentAs]:
    """Return counts from the dictionaries that `counts_to_rows` made."""
    counts = Counter[SentAs]()
    for row in rows or ():
        counts[SentAs(*(row[name] for name in SentAs._fields))] += row["changes"]
    return counts


def counts_by_origin(counts: SentCounts) -> dict[tuple[str, str | None], SentCounts]:
    """Group the counts by relation and row filter; the groups are sorted."""
    parts: dict[tuple[str, str | None], Counter[SentAs]] = {}
    for kind, count in sorted(counts.items(), key=_order):
        parts.setdefault((kind.source, kind.row_filter), Counter())[kind] = count
    return {**parts}


def _order(item: tuple[SentAs, int]) -> list[str]:
    return [part or "" for part in item[0]]
