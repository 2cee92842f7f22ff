"""The results of `pgsieve read`, `restore` and `refilter`, for people and as JSON. Nothing here raises."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableOfMoment:
    """A table as of a moment: its number of rows, and the Delta table and version that contain them.

    `changes` is the number of changes that were applied to the replica's last version before the moment. `path` and
    `version` are None if the rows were in a clone, which is deleted already.
    """

    schema: str
    name: str
    rows: int
    changes: int
    path: str | None
    version: int | None


@dataclass(frozen=True, slots=True)
class MomentReport:
    """The tables of a subscription with exactly the transactions that committed before an LSN."""

    subscription: str
    lsn: str
    tables: tuple[TableOfMoment, ...]
    #: The folder that the tables were restored to.
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class RefilteredTable:
    """A table that was or could be made from the replica of another subscription (`source`).

    `source` is None for a table that cannot be made; `reason` says why. `rows` is None unless it was made.
    """

    schema: str
    name: str
    source: str | None
    reason: str | None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class RefilterReport:
    """The tables that `pgsieve refilter` made, or with `planned` would make.

    Runs continue the tables from `lsn`; it is None if none was made.
    """

    subscription: str
    planned: bool
    lsn: str | None
    tables: tuple[RefilteredTable, ...]

    @property
    def has_missing_tables(self) -> bool:
        """Whether a table has to be copied from the publisher."""
        return any(table.source is None for table in self.tables)
