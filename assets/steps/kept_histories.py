"""The histories of rows that `history` of pgsieve.yaml asks for, by table. Raises nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Name = tuple[str, str]


@dataclass(frozen=True)
class KeptHistory:
    """The histories of one table. None means the subscription's choice, or no history.

    `initial`: the change history has the copied rows, too. `scd2`: a table has the versions of rows with their
    validity.
    """

    initial: bool | None = None
    scd2: bool | None = None

    @property
    def any(self) -> bool:
        """Whether one of them is kept."""
        return bool(self.initial or self.scd2)

    def over(self, other: "KeptHistory") -> "KeptHistory":
        """The values of this choice, or of the other one where they are None."""
        return KeptHistory(
            other.initial if self.initial is None else self.initial,
            other.scd2 if self.scd2 is None else self.scd2,
        )


@dataclass(frozen=True)
class KeptHistories:
    """The histories of a subscription's tables: the choice for all, and others for some."""

    every: KeptHistory = field(default_factory=KeptHistory)
    tables: Mapping[Name, KeptHistory] = field(default_factory=dict)

    def of(self, name: Name) -> KeptHistory:
        """The choice for one table."""
        table = self.tables.get(name)
        return self.every if table is None else table.over(self.every)
