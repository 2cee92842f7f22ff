"""What `pgsieve run --explain` returns: plain values, as those of `results`. Nothing here raises."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """What a run would do for a table: `copy` its `bytes`, `apply` its changes, `wait`, or nothing (`set aside`).

    `few` is the engine that would write rows up to the small limit, `many` the one for more: `driver` (this process),
    `threads` or `Spark`; None if nothing is written. `because` says why.
    """

    subscription: str
    schema: str
    name: str
    work: str
    because: str
    bytes: int | None = None
    few: str | None = None
    many: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `pgsieve run --explain` found: the tables, and by feed how many bytes of WAL wait in the slot (None: no slot yet)."""

    tables: tuple[ExplainedTable, ...]
    waiting_bytes: Mapping[str, int | None]
    small_bytes: int
