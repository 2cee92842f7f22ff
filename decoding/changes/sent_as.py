"""Counts changes by relation, operation, row filter, and the operation as which they are sent.

In: codes of operations, a batch at a time. Out: counts by `SentAs`. Raises nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.columns import ROW_OPERATIONS

#: The code of an operation for changes that are not sent.
NOTHING = -1


class SentAs(NamedTuple):
    """Changes that are counted together: of one relation and operation, and sent as one operation.

    The relation is a table or a partition. `row_filter` is the text of the filter, or of several that are
    ORed; None without a filter. `sent_as` is None for changes that are not sent.
    """

    source: str
    row_filter: str | None
    operation: str
    sent_as: str | None


#: The number of changes of each kind.
SentCounts = Mapping[SentAs, int]


@dataclass(frozen=True)
class Origin:
    """The relation's qualified name, and for each operation the text of the row filter."""

    source: str = ""
    row_filters: Mapping[str, str | None] = field(default_factory=dict)

    def sent_as(self, operation: str, sent_as: str | None) -> SentAs:
        """The kind as which changes of this origin are counted."""
        return SentAs(self.source, self.row_filters.get(operation), operation, sent_as)

    def count(
        self, operations: npt.NDArray[np.int32], becomes: npt.NDArray[np.int32], counts: Counter[SentAs]
    ) -> None:
        """Add changes.

        Operations, and the operations as which they are sent (or `NOTHING`), are indexes in `ROW_OPERATIONS`.
        """
        most = len(ROW_OPERATIONS) + 1
        for code, count in enumerate(np.bincount(operations * most + becomes + 1).tolist()):
            if count:
                operation, sent = divmod(code, most)
                name = ROW_OPERATIONS[sent - 1] if sent else None
                counts[self.sent_as(ROW_OPERATIONS[operation], name)] += count


def received(counts: SentCounts) -> dict[str, int]:
    """The number of changes by their operation before row filters."""
    return {o: sum(n for each, n in counts.items() if each.operation == o) for o in ROW_OPERATIONS}


def became(counts: SentCounts, operation: str = "update") -> dict[str | None, int]:
    """The number of changes of an operation by the operation as which they were sent (None: not sent)."""
    return {
        sent: sum(n for each, n in counts.items() if (each.operation, each.sent_as) == (operation, sent))
        for sent in (*ROW_OPERATIONS, None)
    }


def added(*several: SentCounts) -> Counter[SentAs]:
    """The sum of some counts."""
    total = Counter[SentAs]()
    for counts in several:
        total.update(counts)
    return total


def as_rows(counts: SentCounts) -> list[dict[str, Any]]:
    """The counts as plain values, in a fixed order."""
    return [{**each._asdict(), "changes": count} for each, count in sorted(counts.items(), key=_order)]


def from_rows(rows: Iterable[Mapping[str, Any]] | None) -> Counter[SentAs]:
    """The counts that `as_rows` gave."""
    counts = Counter[SentAs]()
    for row in rows or ():
        counts[SentAs(*(row[name] for name in SentAs._fields))] += row["changes"]
    return counts


def by_origin(counts: SentCounts) -> dict[tuple[str, str | None], SentCounts]:
    """The counts of each relation and row filter, in order."""
    parts: dict[tuple[str, str | None], Counter[SentAs]] = {}
    for each, count in sorted(counts.items(), key=_order):
        parts.setdefault((each.source, each.row_filter), Counter())[each] = count
    return {**parts}


def _order(item: tuple[SentAs, int]) -> list[str]:
    return [part or "" for part in item[0]]
