"""The findings of `pgsieve validate`, for people and as JSON: publications, what each subscription will receive, problems.

Identifiers are as in PostgreSQL's catalog, not quoted. Nothing here raises.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pgsieve.pipelines.commands.sequences import ListedSequence


@dataclass(frozen=True, slots=True)
class ListedTable:
    """A table in a publication; `columns` None is no column list, `where` None no row filter."""

    schema: str
    name: str
    columns: tuple[str, ...] | None
    where: str | None


@dataclass(frozen=True, slots=True)
class PublicationPicture:
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
    """The changes of some relations that are replicated: the operations with their row filters, and the old rows' columns.

    `relations` are the table itself or its partitions; a filter of None lets every row pass.
    """

    relations: tuple[str, ...]
    row_filters: Mapping[str, str | None]
    identity: str


@dataclass(frozen=True, slots=True)
class ReceivedTable:
    """A table that a subscription will receive; `row_filter` is that of the initial copy, None copies every row.

    `since_copy` is what is different from when it was copied, `metadata` has the names of metadata columns by what they say,
    `renamed` has the names in the replica of columns that have other names there. `histories` says which histories of its
    rows are kept. `refilter_from` is the subscription whose replica has the rows that a table lacks which is not copied, or
    which was published in another way when it was; None where none has, or nothing is lacking.
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
    """What one subscription will receive. `oldest_moment` is the LSN of its oldest cut, from which on any moment can be read."""

    subscription: str
    tables: tuple[ReceivedTable, ...]
    sequences: tuple[ListedSequence, ...] = ()
    oldest_moment: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationProblem:
    """Something that PostgreSQL, or pgsieve, would refuse; `object` names the object concerned."""

    object: str
    message: str
    sqlstate: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The findings of `pgsieve validate`; `statements` is SQL for a role that may run it.

    `warnings` stop nothing: rows that come or go in an unexpected way, as with a subscriber, or statements
    that the publisher refuses as long as something is replicated.
    """

    publications: tuple[PublicationPicture, ...]
    subscriptions: tuple[ReceivedTables, ...]
    problems: tuple[ValidationProblem, ...]
    statements: tuple[str, ...]
    warnings: tuple[ValidationProblem, ...] = ()
