"""The results of `pgsieve demo`: frozen dataclasses of plain values, for the terminal, for JSON and for tests.

Nothing here raises an error.
"""

from dataclasses import dataclass
from pathlib import Path

from pgsieve.pipelines.commands.results import WorkCost


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """A table of the demo: its rows on the publisher, in pgsieve's replica, and in PostgreSQL's own subscriber."""

    table: str
    row_filter: str
    columns: tuple[str, ...]
    publisher: tuple[tuple[str, ...], ...]
    replica: tuple[tuple[str, ...], ...]
    subscriber: tuple[tuple[str, ...], ...]

    @property
    def equal(self) -> bool:
        """True if the replica has exactly the rows of PostgreSQL's subscriber."""
        return sorted(self.replica) == sorted(self.subscriber)


@dataclass(frozen=True, slots=True)
class LargeTableStep:
    """How many seconds CREATE SUBSCRIPTION and pgsieve have taken for the same rows or changes of the demo's large table."""

    title: str
    rows: int
    subscriber: float
    pgsieve: float
    spent: WorkCost | None


@dataclass(frozen=True, slots=True)
class LargeTableReport:
    """The demo's large table: the steps (its copy, its changes), and whether `check` has found no difference."""

    steps: tuple[LargeTableStep, ...]
    equal: bool


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of `pgsieve demo`: its configuration file, its lake, all comparisons, and its duration in seconds.

    `sized` is the result for the large table; None if the demo has none.
    """

    config: Path
    lake: str
    tables: tuple[ComparedTable, ...]
    seconds: float
    sized: LargeTableReport | None = None

    @property
    def equal(self) -> bool:
        """True if each replica has the rows of PostgreSQL's subscriber, and `check` has found no difference."""
        return all(table.equal for table in self.tables) and (self.sized is None or self.sized.equal)


@dataclass(frozen=True, slots=True)
class LiveDemo:
    """The running demo of `pgsieve demo --ui`: its web page, its pgsieve.yaml, its source, and its log file."""

    url: str
    config: Path
    conninfo: str
    log: Path
