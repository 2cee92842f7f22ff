"""The result of `pgsieve run --explain`, for people and as JSON. Nothing here raises."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """The work of a run for a table: `copy` its `bytes`, `apply` its changes, `wait`, or none (`set aside`).

    `few` is the engine for rows up to the small limit, `many` the one for more: `driver` (this process),
    `threads` or `Spark`; None if nothing is written. `because` is the reason for the engine or the state.
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
    """The tables, and the bytes of WAL that wait in each feed's slot (None: no slot yet).

    `small_bytes` is the small limit.
    """

    tables: tuple[ExplainedTable, ...]
    waiting_bytes: Mapping[str, int | None]
    small_bytes: int
