"""What `pgsieve read`, `restore` and `refilter` return, as `pgsieve.pipelines.commands.results` has the others'."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableOfMoment:
    """A table as it was: its rows, and how many changes were applied to the version of its replica that was nearest before.

    `path` is the Delta table with these rows, `version` the one that has them.
    """

    schema: str
    name: str
    rows: int
    changes: int
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class MomentReport:
    """The tables of a subscription as they were when all that counts had committed before an LSN."""

    subscription: str
    lsn: str
    tables: tuple[TableOfMoment, ...]
    #: Where they were restored to.
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class RefilteredTable:
    """A table that can be, or was, made of another subscription's replica (`source`), or why it cannot.

    `rows` are those that it has now; None where it was only planned.
    """

    schema: str
    name: str
    source: str | None
    reason: str | None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class RefilterReport:
    """What `pgsieve refilter` made, or would make (`planned`); `lsn`: from which LSN on the tables follow, where it was made."""

    subscription: str
    planned: bool
    lsn: str | None
    tables: tuple[RefilteredTable, ...]

    @property
    def lacking(self) -> bool:
        """Whether a table has to be copied from the publisher."""
        return any(table.source is None for table in self.tables)
