"""Publications: which of them apply to a relation, and which part of its changes they send.

In: the publisher's tables and publications from its catalog (or pgsieve.yaml). Out: for a changed relation,
the part that the subscribed publications send together (`published_relation`), and the relation as which they
send it: `published_as` resolves publish_via_partition_root. Also the tables of the initial copy
(`replicated_tables`). Raises `PublicationError` for a combination that PostgreSQL refuses. Source:
get_rel_sync_entry() in src/backend/replication/pgoutput/pgoutput.c, pg_get_publication_tables() in
src/backend/catalog/pg_publication.c, and sections 29.4 and 29.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.row_filters.letter_case import CaseMapping
from pgsieve.decoding.server_versions import NEWEST_SERVER
from pgsieve.decoding.values.builtin_types import DefinedTypes

OPERATIONS = ("insert", "update", "delete", "truncate")


#: Stands for a row filter that the server could not print. It is no SQL, so that it is never evaluated.
UNREAD_FILTER = "? (the table is locked)"


class PublicationError(PgsieveError):
    """The subscribed publications cannot be used together, or one of them is missing."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of a table, as pg_attribute has it; `generated` is '', 's' (stored) or 'v' (virtual).

    `changed` is the transaction that last altered it. `missing` is the value of the column in rows older than
    it (attmissingval, as its type prints it), None if these rows have NULL. `collation` includes the schema
    unless that is pg_catalog. `is_sent` is false for a generated column that changes do not contain: a
    virtual one, and before version 18 a stored one.
    """

    name: str
    type_oid: int
    type_modifier: int
    type_name: str
    collation: str = ""
    not_null: bool = False
    generated: str = ""
    generation_expression: str | None = None
    number: int = 0
    changed: int = 0
    missing: str | None = None
    is_sent: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the publisher.

    - `kind` is 'r' or 'p'; `replica_identity` is 'd', 'n', 'f' or 'i'.
    - `ancestors` are the oids of the partitioned tables above a partition, nearest first; `leaves` are the
      oids of the leaf partitions below a partitioned table.
    - `partition_columns` are the columns of its partition key, '' for an expression.
    - `unsent_leaves` are the names, as SQL has them, of leaves whose changes are not in the WAL: unlogged and
      foreign ones.
    - `children` are the oids of the tables that directly inherit from a plain one.
    - `columns_ever` counts the dropped columns too (relnatts).
    - `file` is the file of the rows (relfilenode); it is another one after all rows were rewritten.
    - `case_mappings` are the server's mappings of letters' case by collation, if the table's row filters need
      them.
    - `encoding` is the server's encoding of the text that row filters read, and `major_version` the version
      of the server that evaluates them.
    - `legible` is false if the name, schema or columns have bytes that are invalid in that encoding.
    """

    oid: int
    schema: str
    name: str
    kind: str
    replica_identity: str
    attributes: tuple[Attribute, ...]
    primary_key: tuple[str, ...] = ()
    identity_index: tuple[str, ...] = ()
    ancestors: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    columns_ever: int = 0
    file: int = 0
    children: tuple[int, ...] = ()
    case_mappings: tuple[tuple[str, CaseMapping], ...] = ()
    encoding: str = "UTF8"
    partition_columns: tuple[str, ...] = ()
    unsent_leaves: tuple[str, ...] = ()
    legible: bool = True
    major_version: int = NEWEST_SERVER // 10000

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which a subscriber finds a row: the identity index, else the primary key.

        Without either it is empty, and rows are compared as a whole (FindReplTupleInLocalRel() in
        src/backend/replication/logical/worker.c).
        """
        if self.replica_identity == "i":
            return self.identity_index
        return () if self.replica_identity == "n" else self.primary_key

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that an old tuple has (ALTER TABLE ... REPLICA IDENTITY)."""
        if self.replica_identity == "f":
            return tuple(a.name for a in self.attributes)
        return self.key

    @property
    def qualified(self) -> str:
        """`schema.table`, for messages."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class PublicationTable:
    """A table listed in a publication, with its row filter and column list.

    `filter_columns` are the columns that the row filter reads, None if the filter has not been analysed.
    """

    oid: int
    where: str | None = None
    columns: frozenset[str] | None = None
    filter_columns: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication; `generated_columns` is publish_generated_columns: 'n' (none) or 's' (stored).

    `excluded` are the oids of the tables that ALL TABLES leaves out (EXCEPT, since version 19), with their
    partitions. `owner` is the role's name, None for a publication of pgsieve.yaml.
    """

    name: str
    operations: frozenset[str] = frozenset(OPERATIONS)
    all_tables: bool = False
    schemas: frozenset[str] = frozenset()
    tables: tuple[PublicationTable, ...] = ()
    via_root: bool = False
    generated_columns: str = "n"
    owner: str | None = None
    excluded: frozenset[int] = frozenset()

    def listed(self, oid: int) -> PublicationTable | None:
        """The publication's own entry of a table, if it lists that table by name."""
        return next((t for t in self.tables if t.oid == oid), None)

    def contains(self, table: Table) -> bool:
        """Whether the publication contains the table itself, not only an ancestor of it."""
        if self.all_tables:
            return self.excluded.isdisjoint({table.oid, *table.ancestors})
        return table.schema in self.schemas or self.listed(table.oid) is not None

    def row_filter(self, table: Table) -> str | None:
        """The row filter of a table that this publication contains; None sends every row."""
        if self.all_tables or table.schema in self.schemas:
            return None
        entry = self.listed(table.oid)
        return entry.where if entry else None

    def has_column_list(self, table: Table) -> bool:
        """Whether the publication has a column list for a table."""
        entry = self.listed(table.oid)
        return not self.all_tables and entry is not None and entry.columns is not None

    def column_list(self, table: Table) -> tuple[str, ...]:
        """The columns of a table that this publication sends, in the table's order."""
        entry = None if self.all_tables or table.schema in self.schemas else self.listed(table.oid)
        if entry and entry.columns is not None:
            return tuple(a.name for a in table.attributes if a.name in entry.columns)
        generated = {"", "s"} if self.generated_columns == "s" else {""}
        return tuple(a.name for a in table.attributes if a.generated in generated)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The publisher's tables by oid, at one moment; `types` defines users' types, by oid.

    For each kind of name that values of some types print (`NAMES_OF` of decoding/values/printed_names.py),
    `names` has a digest of all names of the kind. `locked` are the tables whose row filters and generation
    expressions are unknown because of a lock, and the holder of the lock.
    """

    tables: Mapping[int, Table]
    publications: Mapping[str, Publication]
    types: DefinedTypes = field(default_factory=dict)
    server_version: int = NEWEST_SERVER
    names: Mapping[str, str] = field(default_factory=dict)
    locked: Mapping[int, str] = field(default_factory=dict)
    by_name: Mapping[tuple[str, str], Table] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {(t.schema, t.name): t for t in self.tables.values()})

    def select(self, names: Sequence[str]) -> tuple[Publication, ...]:
        """The named publications; raises PublicationError for those that do not exist.

        Servers from 18 on ignore missing publications (LoadPublications() in
        src/backend/replication/pgoutput/pgoutput.c), so there only a selection without any publication is an
        error.
        """
        selected = tuple(self.publications[n] for n in names if n in self.publications)
        missing = self.missing(names)
        if missing is not None and (self.server_version < 180000 or not selected):
            raise missing
        return selected

    def missing(self, names: Iterable[str]) -> PublicationError | None:
        """The error for named publications that do not exist; None if all exist."""
        missing = ", ".join(f'"{n}"' for n in names if n not in self.publications)
        if not missing:
            return None
        return PublicationError(
            f"publication {missing} does not exist",
            hint="create it on the publisher, define it in pgsieve.yaml, or take it out of the subscription",
            sqlstate="42704",
        )


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """The part of a relation's changes that the publications of one subscription send together.

    `filters` has for each operation the row filters that are ORed, or None if every row passes.
    """

    relation: Table
    publish_as: Table
    operations: frozenset[str]
    filters: Mapping[str, tuple[str, ...] | None]
    columns: tuple[str, ...]
    publications: tuple[str, ...]


def published_as(publication: Publication, table: Table, catalog: Catalog) -> tuple[Table, int] | None:
    """The relation as which one publication sends changes of `table`, and its level above the table.

    The result is None if the publication sends none.
    """
    chain = [table, *(catalog.tables[a] for a in table.ancestors if a in catalog.tables)]
    containing = [level for level, relation in enumerate(chain) if publication.contains(relation)]
    if not containing:
        return None
    level = containing[-1] if publication.via_root else 0
    return chain[level], level


def _disjunction(filters: Iterable[str | None]) -> tuple[str, ...] | None:
    """Row filters to OR, each once; None if one of them is missing (every row passes)."""
    distinct: dict[str, None] = {}
    for row_filter in filters:
        if row_filter is None:
            return None
        distinct[row_filter] = None
    return tuple(distinct)


def _refuse_disagreement_on_generated_columns(publications: Sequence[Publication], table: Table) -> None:
    """Raise PublicationError as check_and_init_gencol() of pgoutput.c does (since version 18)."""
    if not any(a.generated for a in table.attributes):
        return
    unlisted = [p for p in publications if not p.has_column_list(table)]
    if len({p.generated_columns for p in unlisted}) > 1:
        names = ", ".join(f'"{p.name}"' for p in unlisted)
        raise PublicationError(
            "cannot use different values of publish_generated_columns for table"
            f' "{table.qualified}" in different publications ({names})',
            hint="give the publications the same publish_generated_columns, or subscribe to them separately",
            sqlstate="0A000",
        )


def _agreed_columns(publications: Sequence[Publication], table: Table) -> tuple[str, ...]:
    lists = {p.column_list(table) for p in publications}
    if len(lists) > 1:
        names = ", ".join(f'"{p.name}"' for p in publications)
        raise PublicationError(
            f'cannot use different column lists for table "{table.qualified}" in different publications ({names})',
            hint="give the table the same column list in each of them, or subscribe to them separately",
            sqlstate="0A000",
        )
    return lists.pop()


def published_relation(
    table: Table, publications: Sequence[Publication], catalog: Catalog
) -> PublishedRelation | None:
    """The part of changes to `table` (a plain table or a leaf) that `publications` together send.

    The result is None if they send nothing. The publish-as relation is the topmost that any publication asks
    for. Only publications that ask for this relation contribute row filters and column lists; the operations
    are those of all publications (get_rel_sync_entry). Raises PublicationError for column lists that
    disagree.
    """
    placed = [(p, at) for p in publications if (at := published_as(p, table, catalog)) is not None]
    # A partitioned table is itself published only under publish_via_partition_root.
    placed = [(p, at) for p, at in placed if at[0].kind != "p" or p.via_root]
    if not placed:
        return None
    top = max(level for _, (_, level) in placed)
    winning = [(p, relation) for p, (relation, level) in placed if level == top]
    publish_as = winning[0][1]
    _refuse_disagreement_on_generated_columns([p for p, _ in winning], publish_as)
    operations = frozenset().union(*(p.operations for p, _ in placed))
    filters = {
        operation: _disjunction(p.row_filter(publish_as) for p, _ in winning if operation in p.operations)
        if any(operation in p.operations for p, _ in winning)
        else None
        for operation in ("insert", "update", "delete")
    }
    return PublishedRelation(
        relation=table,
        publish_as=publish_as,
        operations=operations,
        filters=filters,
        columns=_agreed_columns([p for p, _ in winning], publish_as),
        publications=tuple(p.name for p, _ in winning),
    )


@dataclass(frozen=True, slots=True)
class ReplicatedTable:
    """A table of which a subscription has a replica: the initial copy's rows and columns, the replica's key.

    `row_filters` are ORed, whatever the publications' operations are; None copies every row (29.4.5).
    `leaves` are the partitions that contain the rows of a partitioned table, and `routed_by` the columns that
    decide in which partition a row is.
    """

    table: Table
    columns: tuple[str, ...]
    row_filters: tuple[str, ...] | None
    publications: tuple[str, ...]
    operations: frozenset[str]
    leaves: tuple[Table, ...] = ()
    routed_by: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[str, ...]:
        """The key columns of the replica; empty if only whole rows can be distinguished.

        Old rows have the identity of their leaf. So the root's key is used if the identities of all leaves
        contain it. Otherwise the key that all leaves share is used, if it contains the columns that choose
        the leaf: then it is unique in the whole tree. Without updates and deletes no row is looked up, so the
        leaves' keys do not count: a deleted row stays in the replica, and its key may come again.
        """
        own = self.table.key
        has_own = own and all(set(own) <= set(leaf.identity) for leaf in self.leaves if leaf.identity)
        key = own if has_own or not {"update", "delete"} & self.operations else self._shared_key or own
        return key if set(key) <= set(self.columns) else ()

    @property
    def _shared_key(self) -> tuple[str, ...]:
        keys = {frozenset(leaf.key) for leaf in self.leaves}
        shared = keys.pop() if len(keys) == 1 else frozenset()
        if not self.routed_by <= shared or self.table.unsent_leaves:
            return ()
        return tuple(a.name for a in self.table.attributes if a.name in shared)


def _tables_of(publication: Publication, catalog: Catalog) -> dict[int, Table]:
    """The tables that a publication sends, as pg_get_publication_tables() lists them."""
    members = {t.oid: t for t in catalog.tables.values() if publication.contains(t)}
    if publication.via_root:
        return {oid: t for oid, t in members.items() if not any(a in members for a in t.ancestors)}
    leaves = {leaf for t in members.values() for leaf in t.leaves}
    tables = members | {leaf: catalog.tables[leaf] for leaf in leaves if leaf in catalog.tables}
    return {oid: t for oid, t in tables.items() if t.kind != "p"}


def replicated_tables(
    publications: Sequence[Publication], catalog: Catalog
) -> dict[tuple[str, str], ReplicatedTable]:
    """The tables that a subscription to `publications` replicates, by (schema, name), in name order.

    If one publication publishes via the partition root, partitions with an ancestor in the combined list are
    left out, so that no row is copied twice (pg_get_publication_tables since version 16).
    """
    by_publication = [(p, _tables_of(p, catalog)) for p in publications]
    combined: dict[int, Table] = {}
    for _, tables in by_publication:
        combined |= tables
    if any(p.via_root for p in publications):
        combined = {oid: t for oid, t in combined.items() if not any(a in combined for a in t.ancestors)}
    result = {}
    for oid, table in sorted(combined.items(), key=lambda item: (item[1].schema, item[1].name)):
        sending = [p for p, tables in by_publication if oid in tables]
        result[table.schema, table.name] = ReplicatedTable(
            table=table,
            columns=_agreed_columns(sending, table),
            row_filters=_disjunction(p.row_filter(table) for p in sending),
            publications=tuple(p.name for p in sending),
            operations=frozenset().union(*(p.operations for p in sending)),
            leaves=(leaves := _present(table.leaves, catalog)),
            routed_by=_routed_by(table, leaves, catalog),
        )
    return result


def _present(oids: Iterable[int], catalog: Catalog) -> tuple[Table, ...]:
    return tuple(catalog.tables[oid] for oid in oids if oid in catalog.tables)


def _routed_by(root: Table, leaves: Iterable[Table], catalog: Catalog) -> frozenset[str]:
    """The columns of the partition keys from a root down to its leaves."""
    between = {a for leaf in leaves for a in leaf.ancestors} - {*root.ancestors}
    return frozenset(column for table in _present(between, catalog) for column in table.partition_columns)
