"""The result of `pgsieve validate`, for people and as JSON.

Identifiers are as in PostgreSQL's catalog, without quotes. Nothing here raises an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pgsieve.pipelines.commands.sequences import ListedSequence


@dataclass(frozen=True, slots=True)
class ListedTable:
    """A table in a publication.

    - `columns`: the columns that are published; None if the publication has no column list for the table
    - `where`: the row filter; None if the publication has no row filter for the table
    """

    schema: str
    name: str
    columns: tuple[str, ...] | None
    where: str | None


@dataclass(frozen=True, slots=True)
class PublicationDescription:
    r"""A publication, with the facts that psql shows for `\dRp+`.

    - `owner`: the owner; None if pgsieve.yaml defines the publication, and the server does not have it
    - `excluded`: the schemas and names of the tables that ALL TABLES leaves out (EXCEPT)
    """

    source: str
    name: str
    owner: str | None
    all_tables: bool
    operations: tuple[str, ...]
    generated_columns: str
    via_root: bool
    tables: tuple[ListedTable, ...]
    schemas: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ReceivedChanges:
    """The changes that a subscription receives of some relations: of the table itself, or of its partitions.

    - `row_filters`: maps each published operation to its row filter; None means that every row is sent
    - `identity`: the replica identity of the relations
    - `updates_sent_as`: what an UPDATE may become: `insert`, `update`, `delete` or `nothing`
    """

    relations: tuple[str, ...]
    row_filters: Mapping[str, str | None]
    identity: str
    updates_sent_as: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceivedTable:
    """A table that a subscription will receive.

    - `row_filter`: the row filter of the initial copy; None if every row is copied
    - `since_copy`: how the table's publications have changed since it was copied
    - `metadata`: maps each kind of metadata, such as `commit_lsn`, to the name of its column in the replica
    - `renamed`: maps the publisher's name of a column to its name in the replica, if the two differ
    - `histories`: a sentence about each history of the table (its changes, or versions of its rows) that the lake has
    - `refilter_from`: a subscription from whose replica `pgsieve refilter` can make the table, instead of a copy from
      the publisher. None if there is no such subscription, or if no copy is needed.
    """

    schema: str
    name: str
    columns: tuple[str, ...]
    row_filter: str | None
    changes: tuple[ReceivedChanges, ...]
    since_copy: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    histories: tuple[str, ...] = ()
    refilter_from: str | None = None


@dataclass(frozen=True, slots=True)
class ReceivedTables:
    """The tables and sequences that a subscription will receive.

    `oldest_moment` is the LSN of its oldest cut. (A cut is an LSN, and for each replica the Delta version that equals
    the publisher's table at this LSN.) `pgsieve read` can read the replicas as they were at any moment since then.
    """

    subscription: str
    tables: tuple[ReceivedTable, ...]
    sequences: tuple[ListedSequence, ...] = ()
    oldest_moment: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationProblem:
    """A problem of `object`, for example a subscription or a source, or a warning about it."""

    object: str
    message: str
    sqlstate: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The findings of `pgsieve validate`.

    - `statements`: the SQL that the first run executes, or that an administrator can execute before it
    - `warnings`: problems that do not stop replication. They are about rows that appear or disappear unexpectedly, as
      they do for PostgreSQL's own subscribers; or about statements that the publisher will refuse during replication.
    """

    publications: tuple[PublicationDescription, ...]
    subscriptions: tuple[ReceivedTables, ...]
    problems: tuple[ValidationProblem, ...]
    statements: tuple[str, ...]
    warnings: tuple[ValidationProblem, ...] = ()
