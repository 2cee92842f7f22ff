"""What becomes of changes: how many came through a relation, which row filter decided, and what they were sent as.

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

#: A change that is not sent, where operations are numbers.
NOTHING = -1


class SentAs(NamedTuple):
    """Changes of one operation that came through one relation (a table, or a partition), and what they became.

    `row_filter` is what decided, as it is written; several that are ORed are one. None: there is none. `sent_as` is None for
    changes that are not sent.
    """

    source: str
    row_filter: str | None
    operation: str
    sent_as: str | None


#: How many changes became what.
SentCounts = Mapping[SentAs, int]


@dataclass(frozen=True)
class Origin:
    """Where changes come from: the relation, by its qualified name, and for each operation the row filter as it is written."""

    source: str = ""
    row_filters: Mapping[str, str | None] = field(default_factory=dict)

    def sent_as(self, operation: str, sent_as: str | None) -> SentAs:
        """What changes of this origin are counted as."""
        return SentAs(self.source, self.row_filters.get(operation), operation, sent_as)

    def count(
        self, operations: npt.NDArray[np.int32], becomes: npt.NDArray[np.int32], counts: Counter[SentAs]
    ) -> None:
        """Add changes, by places of their operations in `ROW_OPERATIONS`, and of what they are sent as (or `NOTHING`)."""
        most = len(ROW_OPERATIONS) + 1
        for code, count in enumerate(np.bincount(operations * most + becomes + 1).tolist()):
            if count:
                operation, sent = divmod(code, most)
                name = ROW_OPERATIONS[sent - 1] if sent else None
                counts[self.sent_as(ROW_OPERATIONS[operation], name)] += count


def received(counts: SentCounts) -> dict[str, int]:
    """How many changes of each operation came."""
    return {o: sum(n for each, n in counts.items() if each.operation == o) for o in ROW_OPERATIONS}


def became(counts: SentCounts, operation: str = "update") -> dict[str | None, int]:
    """How many changes of an operation were sent as each operation, and as nothing (None)."""
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
    """The counts as plain values, in the same order however they were counted."""
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
