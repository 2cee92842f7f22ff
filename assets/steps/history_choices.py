"""The user's choice of histories of rows, by table: `history` in pgsieve.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Name = tuple[str, str]


@dataclass(frozen=True)
class HistoryChoice:
    """The choice for one table; a None leaves it to the subscription's choice, where None means no.

    `initial`: the change history begins with the copied rows. `scd2`: a table of its own has all versions of the rows,
    with their validity.
    """

    initial: bool | None = None
    scd2: bool | None = None

    @property
    def is_kept(self) -> bool:
        """Whether one of the histories is kept."""
        return bool(self.initial or self.scd2)

    def or_else(self, other: "HistoryChoice") -> "HistoryChoice":
        """The choice with each None replaced by the value of the other one."""
        return HistoryChoice(
            other.initial if self.initial is None else self.initial,
            other.scd2 if self.scd2 is None else self.scd2,
        )


@dataclass(frozen=True)
class HistoryChoices:
    """The choices of a subscription: one for all tables (`every`), and others for single tables."""

    every: HistoryChoice = field(default_factory=HistoryChoice)
    tables: Mapping[Name, HistoryChoice] = field(default_factory=dict)

    def of(self, name: Name) -> HistoryChoice:
        """The choice for one table."""
        table = self.tables.get(name)
        return self.every if table is None else table.or_else(self.every)
