"""The results of `pgsieve read`, `restore` and `refilter`, for people and as JSON. Nothing here raises an error."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableAtLsn:
    """A table as it was at an LSN.

    - `rows`: the number of its rows
    - `changes`: how many changes were applied to an earlier version of the replica; 0 if a version has exactly these rows
    - `path`, `version`: the Delta table and version that have the rows. None if the rows were in a clone (a temporary
      copy), which has been deleted.
    """

    schema: str
    name: str
    rows: int
    changes: int
    path: str | None
    version: int | None


@dataclass(frozen=True, slots=True)
class MomentReport:
    """The tables of a subscription with exactly the transactions that committed before an LSN.

    `warnings` name published tables that `tables` lacks, and say why.
    """

    subscription: str
    lsn: str
    tables: tuple[TableAtLsn, ...]
    #: The folder into which the tables were restored; None if they were only read.
    folder: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefilteredTable:
    """A table that `pgsieve refilter` has made, or could make, from a replica of a subscription.

    - `source`: the subscription whose replica is used; None if the table cannot be made from any
    - `reason`: why it cannot be made
    - `rows`: the number of rows; None if the table was not made
    - `lsn`: the LSN at which the table has the rows of a copy, and from which on later runs apply changes. In a plan it is
      the LSN that the command would reach now; None if the table cannot be made
    """

    schema: str
    name: str
    source: str | None
    reason: str | None
    rows: int | None = None
    lsn: str | None = None


@dataclass(frozen=True, slots=True)
class RefilterReport:
    """The tables that `pgsieve refilter` has made, or would make.

    - `planned`: true if the command was only asked what it would make
    - `lsn`: the greatest LSN of the tables that were made; None if no table was made
    """

    subscription: str
    planned: bool
    lsn: str | None
    tables: tuple[RefilteredTable, ...]

    @property
    def has_tables_to_copy(self) -> bool:
        """True if a table has to be copied from the publisher."""
        return any(table.source is None for table in self.tables)
