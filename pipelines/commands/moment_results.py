"""What `pgsieve read` and `pgsieve restore` return, as `pgsieve.pipelines.commands.results` has the others'."""

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
