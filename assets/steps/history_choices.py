"""The histories of rows that the user wants to keep, by table: the section `history` in pgsieve.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pgsieve.resources.lake.delta.layout import TableName


@dataclass(frozen=True)
class HistoryChoice:
    """The choice for one table. If a field is None, the choice for the whole subscription applies. There, None means no.

    - `initial`: the change history of the table (a Delta table with all its changes) begins with the rows that were
      copied
    - `scd2`: a table of its own has all versions of each row, with the times between which each was valid
    """

    initial: bool | None = None
    scd2: bool | None = None

    @property
    def is_kept(self) -> bool:
        """True if one of the histories is kept."""
        return bool(self.initial or self.scd2)

    def with_defaults(self, defaults: "HistoryChoice") -> "HistoryChoice":
        """The same choice, in which each None is replaced by the value of `defaults`."""
        return HistoryChoice(
            defaults.initial if self.initial is None else self.initial,
            defaults.scd2 if self.scd2 is None else self.scd2,
        )


@dataclass(frozen=True)
class HistoryChoices:
    """The choices of a subscription: `default_choice` for all tables, and `choice_by_table` for single tables."""

    default_choice: HistoryChoice = field(default_factory=HistoryChoice)
    choice_by_table: Mapping[TableName, HistoryChoice] = field(default_factory=dict)

    def find_choice(self, name: TableName) -> HistoryChoice:
        """The choice for one table."""
        choice = self.choice_by_table.get(name)
        return self.default_choice if choice is None else choice.with_defaults(self.default_choice)
