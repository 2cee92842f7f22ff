"""The user's choice of histories of rows, by table: `history` in pgsieve.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Name = tuple[str, str]


@dataclass(frozen=True)
class KeptHistory:
    """The choice for one table; a None leaves it to the subscription's choice, where None means no.

    `initial`: the change history begins with the copied rows. `scd2`: a table of its own has all versions of the rows,
    with their validity.
    """

    initial: bool | None = None
    scd2: bool | None = None

    @property
    def any(self) -> bool:
        """Whether one of the histories is kept."""
        return bool(self.initial or self.scd2)

    def over(self, other: "KeptHistory") -> "KeptHistory":
        """The choice with each None replaced by the value of the other one."""
        return KeptHistory(
            other.initial if self.initial is None else self.initial,
            other.scd2 if self.scd2 is None else self.scd2,
        )


@dataclass(frozen=True)
class KeptHistories:
    """The choices of a subscription: one for all tables (`every`), and others for single tables."""

    every: KeptHistory = field(default_factory=KeptHistory)
    tables: Mapping[Name, KeptHistory] = field(default_factory=dict)

    def of(self, name: Name) -> KeptHistory:
        """The choice for one table."""
        table = self.tables.get(name)
        return self.every if table is None else table.over(self.every)
