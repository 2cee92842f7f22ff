"""The results of `pgsieve read`, `restore` and `refilter`, for people and as JSON. Nothing here raises."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableOfMoment:
    """A table as of a moment: the number of its rows, and the Delta table and version that contain them.

    `changes` is the number of changes that were applied to the last earlier version of its replica.
    """

    schema: str
    name: str
    rows: int
    changes: int
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class MomentReport:
    """The tables of a subscription with all transactions that committed before an LSN, and no later ones."""

    subscription: str
    lsn: str
    tables: tuple[TableOfMoment, ...]
    #: The folder that they were restored to.
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class RefilteredTable:
    """A table that can be, or was, made from the replica of another subscription (`source`).

    `reason` says why it cannot be made. `rows` is the number of its rows; None if it was not made.
    """

    schema: str
    name: str
    source: str | None
    reason: str | None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class RefilterReport:
    """The tables that `pgsieve refilter` made, or with `planned` would make.

    Runs continue the tables from `lsn`; None if none was made.
    """

    subscription: str
    planned: bool
    lsn: str | None
    tables: tuple[RefilteredTable, ...]

    @property
    def lacking(self) -> bool:
        """Whether a table has to be copied from the publisher."""
        return any(table.source is None for table in self.tables)
