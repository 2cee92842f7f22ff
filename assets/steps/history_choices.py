"""The user's choice which histories of rows are kept, by table. It is the section `history` in pgsieve.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Name = tuple[str, str]


@dataclass(frozen=True)
class HistoryChoice:
    """The choice for one table. If a field is None, the choice for the whole subscription applies, where None means no.

    - `initial`: the change history of the table begins with the rows that were copied
    - `scd2`: a table of its own has all versions of each row, with the times between which each was valid
    """

    initial: bool | None = None
    scd2: bool | None = None

    @property
    def is_kept(self) -> bool:
        """True if one of the histories is kept."""
        return bool(self.initial or self.scd2)

    def or_else(self, other: "HistoryChoice") -> "HistoryChoice":
        """The same choice, in which each None is replaced by the value of `other`."""
        return HistoryChoice(
            other.initial if self.initial is None else self.initial,
            other.scd2 if self.scd2 is None else self.scd2,
        )


@dataclass(frozen=True)
class HistoryChoices:
    """The choices of a subscription: `every` for all tables, and `tables` for single tables."""

    every: HistoryChoice = field(default_factory=HistoryChoice)
    tables: Mapping[Name, HistoryChoice] = field(default_factory=dict)

    def of(self, name: Name) -> HistoryChoice:
        """The choice for one table."""
        table = self.tables.get(name)
        return self.every if table is None else table.or_else(self.every)
