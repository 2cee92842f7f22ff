"""The result of `pgsieve validate`, for people and as JSON.

Identifiers are as in PostgreSQL's catalog, not quoted. Nothing here raises.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pgsieve.pipelines.commands.sequences import ListedSequence


@dataclass(frozen=True, slots=True)
class ListedTable:
    """A table in a publication; `columns` is None without a column list, `where` without a row filter."""

    schema: str
    name: str
    columns: tuple[str, ...] | None
    where: str | None


@dataclass(frozen=True, slots=True)
class PublicationDescription:
    r"""A publication as psql's `\dRp+` describes it; `owner` is None for one that pgsieve.yaml defines.

    `excluded` are the tables that ALL TABLES leaves out, by schema and name.
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
    """The replicated changes of some relations: row filters by operation, and the replica identity.

    `relations` are the table itself or its partitions. A row filter of None means every row. `updates_sent_as`
    are the operations that an UPDATE may become: `insert`, `update`, `delete`, `nothing`.
    """

    relations: tuple[str, ...]
    row_filters: Mapping[str, str | None]
    identity: str
    updates_sent_as: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceivedTable:
    """A table that a subscription will receive.

    - `row_filter`: that of the initial copy; None copies every row
    - `since_copy`: how its publications changed since it was copied
    - `metadata`: the names of metadata columns, by kind
    - `renamed`: by the publisher's name of a column, its name in the replica if this differs
    - `histories`: the retained histories of its rows, a sentence each
    - `refilter_from`: a subscription from whose replica the table can be made instead of a copy; None if there
      is none, or no copy is needed
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
    """The tables and sequences of a subscription.

    `oldest_moment` is the LSN of its oldest cut; moments from then on can be read.
    """

    subscription: str
    tables: tuple[ReceivedTable, ...]
    sequences: tuple[ListedSequence, ...] = ()
    oldest_moment: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationProblem:
    """A problem for which PostgreSQL or pgsieve would refuse `object`."""

    object: str
    message: str
    sqlstate: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The findings of `pgsieve validate`; `statements` is SQL for a role that may run it.

    A warning does not stop replication. It is about rows that appear or disappear unexpectedly, as with any
    subscriber, or about statements that the publisher will refuse during replication.
    """

    publications: tuple[PublicationDescription, ...]
    subscriptions: tuple[ReceivedTables, ...]
    problems: tuple[ValidationProblem, ...]
    statements: tuple[str, ...]
    warnings: tuple[ValidationProblem, ...] = ()
