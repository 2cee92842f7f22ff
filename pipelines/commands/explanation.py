"""The result of `pgsieve run --explain`, for people and as JSON. Nothing here raises an error."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """What a run would do for a table.

    - `work`: `copy`, `apply`, `wait` or `set aside`. The last two mean that the run does nothing for the table.
    - `bytes`: the size of the table, if it is copied
    - `few`: the engine that writes up to `small_bytes` bytes of rows: `driver` (this process), `threads` or `Spark`;
      None if nothing is written
    - `many`: the same for more bytes
    - `because`: the reason for the engine, or for the state of the table
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
    """The tables of the selected subscriptions, and the WAL that they have not read.

    - `waiting_bytes`: maps each stream (a slot with its subscriptions) to the bytes of WAL that wait in its slot; None if
      the slot does not exist yet
    - `small_bytes`: the limit up to which this process writes a table without Spark or threads
    """

    tables: tuple[ExplainedTable, ...]
    waiting_bytes: Mapping[str, int | None]
    small_bytes: int
