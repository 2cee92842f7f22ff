"""Publications: which part of a relation's changes they send.

In: the publisher's tables, and its publications from the catalog or pgsieve.yaml. Out:

- `find_published_relation`: the part of a relation's changes that several publications send together.
- `find_publish_as_relation`: the relation that one publication names in messages about a table's changes. This is the
  table itself, or with publish_via_partition_root the topmost ancestor that the publication contains.
- `find_replicated_tables`: the tables of the initial copy.

Raises `PublicationError` if PostgreSQL refuses to combine the publications.

Source: get_rel_sync_entry() in src/backend/replication/pgoutput/pgoutput.c, pg_get_publication_tables() in
src/backend/catalog/pg_publication.c; PostgreSQL documentation, Row Filters and Column Lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.row_filters.letter_case import CaseMapping
from pgsieve.decoding.server_versions import NEWEST_SERVER
from pgsieve.decoding.values.builtin_types import DerivedTypesByOid
from pgsieve.decoding.values.quoting import quote_qualified

OPERATIONS = ("insert", "update", "delete", "truncate")


#: Replaces a row filter that the server could not print because another session had locked the table. This text is
#: not valid SQL, so pgsieve never evaluates it.
UNREAD_FILTER = "? (the table is locked)"


class PublicationError(PgsieveError):
    """A publication is missing or not valid, or the publications of a subscription cannot be combined."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of a table (pg_attribute).

    - `collation` is the collation's name, with its schema unless the schema is pg_catalog.
    - `generated` is '', 's' (stored) or 'v' (virtual).
    - `changed` is the transaction that last altered the column.
    - `missing` is the column's value in rows that are older than the column (attmissingval). It is the text that
      the type prints, or None for NULL.
    - `is_sent` is false if changes never contain the column. These are virtual columns, and before version 18 all
      generated columns.
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

    - `kind` is 'r' for a plain table or a leaf partition, and 'p' for a partitioned table.
    - `replica_identity` is 'd' (default), 'n' (nothing), 'f' (full) or 'i' (index).
    - `ancestors` are the oids of the partitioned tables above a partition, the parent before the root. `leaves`
      are the oids of the leaf partitions below a partitioned table.
    - `partition_columns` are the columns of the table's partition key. An expression in the key counts as ''.
    - `unsent_leaves` are the quoted names of leaves whose changes are not in the WAL: unlogged and foreign
      tables.
    - `children` are the oids of the tables that inherit directly from a plain table.
    - `columns_ever` counts the columns, including dropped columns (relnatts).
    - `file` is the file of the rows (relfilenode); it changes when all rows are rewritten.
    - `case_mappings` are the server's case mappings (the letters that upper() and lower() change) by collation,
      if the table's row filters need them.
    - `encoding` is the database's encoding, and `major_version` the server's version. Row filters depend on both.
    - `legible` is false if the name of the table, of its schema or of a column is invalid in `encoding`.
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
        """The columns with which a subscriber finds a row.

        These are the columns of the index that is the replica identity, otherwise those of the primary key. If
        the table has neither, or its replica identity is NOTHING, the key is empty. Without a key, the subscriber
        compares whole rows (FindReplTupleInLocalRel() in src/backend/replication/logical/worker.c).
        """
        if self.replica_identity == "i":
            return self.identity_index
        return () if self.replica_identity == "n" else self.primary_key

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that old tuples in messages contain (ALTER TABLE ... REPLICA IDENTITY)."""
        if self.replica_identity == "f":
            return tuple(a.name for a in self.attributes)
        return self.key

    @property
    def qualified_name(self) -> str:
        """`schema.table`, for messages that have it within double quotes, as PostgreSQL's messages have it."""
        return f"{self.schema}.{self.name}"

    @property
    def quoted_name(self) -> str:
        """`schema.table`, with quotes where SQL needs them, for all other messages."""
        return quote_qualified(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class PublicationTable:
    """A table listed in a publication, with its row filter and column list.

    `filter_columns` are the columns that the row filter reads. It is None if there is no filter, or if the filter
    was not analysed.
    """

    oid: int
    where: str | None = None
    columns: frozenset[str] | None = None
    filter_columns: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication.

    - `via_root` is the parameter publish_via_partition_root.
    - `generated_columns` is publish_generated_columns: 'n' (none) or 's' (stored).
    - `excluded` are the oids of the tables that ALL TABLES excludes (EXCEPT, since version 19). Their partitions
      are excluded, too.
    - `owner` is the owner's role name, or None for a publication of pgsieve.yaml.
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
    entry_by_oid: Mapping[int, PublicationTable] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry_by_oid", {t.oid: t for t in self.tables})

    def find_table_entry(self, oid: int) -> PublicationTable | None:
        """The publication's entry for a table, or None if the publication does not list the table by name."""
        return self.entry_by_oid.get(oid)

    def contains(self, table: Table) -> bool:
        """Whether the publication contains the table itself.

        A publication that contains only an ancestor of a partition does not contain the partition itself.
        """
        if self.all_tables:
            return self.excluded.isdisjoint({table.oid, *table.ancestors})
        return table.schema in self.schemas or self.find_table_entry(table.oid) is not None

    def list_tables(self, tables: Iterable[Table]) -> Publication:
        """The publication with only those of `tables` that it contains; it lists each of them by name."""
        entries = [
            (None if table.schema in self.schemas else self.find_table_entry(table.oid))
            or PublicationTable(table.oid)
            for table in tables
            if self.contains(table)
        ]
        return replace(
            self, all_tables=False, schemas=frozenset(), excluded=frozenset(), tables=tuple(entries)
        )

    def find_row_filter(self, table: Table) -> str | None:
        """The publication's row filter for a table; None if it sends every row."""
        if self.all_tables or table.schema in self.schemas:
            return None
        entry = self.find_table_entry(table.oid)
        return entry.where if entry else None

    def has_column_list(self, table: Table) -> bool:
        """Whether the publication has a column list for a table."""
        entry = self.find_table_entry(table.oid)
        return not self.all_tables and entry is not None and entry.columns is not None

    def list_columns(self, table: Table) -> tuple[str, ...]:
        """The columns of a table that the publication sends, in the table's order."""
        entry = None if self.all_tables or table.schema in self.schemas else self.find_table_entry(table.oid)
        if entry and entry.columns is not None:
            return tuple(a.name for a in table.attributes if a.name in entry.columns)
        published_kinds = {"", "s"} if self.generated_columns == "s" else {""}
        return tuple(a.name for a in table.attributes if a.generated in published_kinds)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The publisher's tables, publications and users' types, all of one snapshot.

    - `tables` and `types` have the oids as keys.
    - `names`: values of some types print as names of other objects, for example those of regclass as names of relations.
      `names` maps each such kind of names to a digest of all its names (`NAME_KIND_BY_OID` in
      decoding/values/printed_names.py).
    - `locked` has the oids of tables that another session has locked, with the holder of each lock. The row
      filters and generation expressions of these tables are unknown.
    """

    tables: Mapping[int, Table]
    publications: Mapping[str, Publication]
    types: DerivedTypesByOid = field(default_factory=dict)
    server_version: int = NEWEST_SERVER
    names: Mapping[str, str] = field(default_factory=dict)
    locked: Mapping[int, str] = field(default_factory=dict)
    table_by_name: Mapping[tuple[str, str], Table] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table_by_name", {(t.schema, t.name): t for t in self.tables.values()})

    def select_publications(self, names: Sequence[str]) -> tuple[Publication, ...]:
        """Return the named publications that exist.

        Raises PublicationError if one does not exist. From version 18 on the server ignores missing publications
        (LoadPublications() in src/backend/replication/pgoutput/pgoutput.c). So for these servers the error is
        raised only if none of the publications exists.
        """
        publications = tuple(self.publications[n] for n in names if n in self.publications)
        missing_error = self.make_missing_publication_error(names)
        if missing_error is not None and (self.server_version < 180000 or not publications):
            raise missing_error
        return publications

    def make_missing_publication_error(self, names: Iterable[str]) -> PublicationError | None:
        """The error for publications that do not exist, or None if all exist."""
        missing_names = ", ".join(f'"{n}"' for n in names if n not in self.publications)
        if not missing_names:
            return None
        return PublicationError(
            f"publication {missing_names} does not exist",
            hint="create it on the publisher, define it in pgsieve.yaml, or take it out of the subscription",
            sqlstate="42704",
        )


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """The part of a relation's changes that the publications of one subscription send together.

    - `relation` is the table whose rows change, and `publish_as` is the relation that the messages name.
    - `filters` maps an operation to its row filters. A change is sent if one of the filters matches its row. None
      instead of filters means that the changes of all rows are sent.
    - `publications` are the publications that `filters` and `columns` come from.
    """

    relation: Table
    publish_as: Table
    operations: frozenset[str]
    filters: Mapping[str, tuple[str, ...] | None]
    columns: tuple[str, ...]
    publications: tuple[str, ...]


def find_publish_as_relation(
    publication: Publication, table: Table, catalog: Catalog
) -> tuple[Table, int] | None:
    """Return the relation that a publication names in messages about changes of `table`, and the relation's level.

    The level is 0 for the table itself, 1 for its parent, and so on. Returns None if the publication sends no
    changes of the table.
    """
    table_and_ancestors = [table, *(catalog.tables[oid] for oid in table.ancestors if oid in catalog.tables)]
    levels = [level for level, relation in enumerate(table_and_ancestors) if publication.contains(relation)]
    if not levels:
        return None
    level = levels[-1] if publication.via_root else 0
    return table_and_ancestors[level], level


def _find_distinct_filters(filters: Iterable[str | None]) -> tuple[str, ...] | None:
    """Return the distinct row filters; a row is sent if one of them matches.

    Returns None if one of the publications has no filter. Such a publication sends all rows, whatever the others filter.
    """
    distinct_filters: dict[str, None] = {}
    for row_filter in filters:
        if row_filter is None:
            return None
        distinct_filters[row_filter] = None
    return tuple(distinct_filters)


def _require_same_generated_columns(publications: Sequence[Publication], table: Table) -> None:
    """Raise PublicationError as check_and_init_gencol() of pgoutput.c does (since version 18)."""
    if not any(a.generated for a in table.attributes):
        return
    publications_without_column_list = [p for p in publications if not p.has_column_list(table)]
    if len({p.generated_columns for p in publications_without_column_list}) > 1:
        names = ", ".join(f'"{p.name}"' for p in publications_without_column_list)
        raise PublicationError(
            "cannot use different values of publish_generated_columns for table"
            f' "{table.qualified_name}" in different publications ({names})',
            hint="give the publications the same publish_generated_columns, or subscribe to them separately",
            sqlstate="0A000",
        )


def _require_same_columns(publications: Sequence[Publication], table: Table) -> tuple[str, ...]:
    column_lists = {p.list_columns(table) for p in publications}
    if len(column_lists) > 1:
        names = ", ".join(f'"{p.name}"' for p in publications)
        raise PublicationError(
            f'cannot use different column lists for table "{table.qualified_name}" in different publications ({names})',
            hint="give the table the same column list in each of them, or subscribe to them separately",
            sqlstate="0A000",
        )
    return column_lists.pop()


def find_published_relation(
    table: Table, publications: Sequence[Publication], catalog: Catalog
) -> PublishedRelation | None:
    """Return the part of the changes to `table` (a plain table or a leaf) that `publications` together send.

    Returns None if they send nothing. Each publication asks for messages that name the table itself or one of its
    ancestors. The messages name the topmost of these relations. All publications contribute their operations. Only
    those that ask for this relation contribute row filters and column lists (get_rel_sync_entry()).
    Raises PublicationError if these differ in their column lists or in publish_generated_columns.
    """
    # Each publication, with the relation that it names in messages about the table, and the level of this relation.
    publications_and_relations = [
        (publication, *relation_and_level)
        for publication in publications
        if (relation_and_level := find_publish_as_relation(publication, table, catalog)) is not None
    ]
    # Without publish_via_partition_root, no change has the name of a partitioned table.
    publications_and_relations = [
        (publication, relation, level)
        for publication, relation, level in publications_and_relations
        if relation.kind != "p" or publication.via_root
    ]
    if not publications_and_relations:
        return None
    _, publish_as, topmost_level = max(publications_and_relations, key=itemgetter(2))
    topmost_publications = [
        publication for publication, _, level in publications_and_relations if level == topmost_level
    ]
    _require_same_generated_columns(topmost_publications, publish_as)
    operations = frozenset().union(
        *(publication.operations for publication, _, _ in publications_and_relations)
    )
    filters = {
        operation: _find_distinct_filters(
            publication.find_row_filter(publish_as)
            for publication in topmost_publications
            if operation in publication.operations
        )
        if any(operation in publication.operations for publication in topmost_publications)
        else None
        for operation in ("insert", "update", "delete")
    }
    return PublishedRelation(
        relation=table,
        publish_as=publish_as,
        operations=operations,
        filters=filters,
        columns=_require_same_columns(topmost_publications, publish_as),
        publications=tuple(publication.name for publication in topmost_publications),
    )


@dataclass(frozen=True, slots=True)
class ReplicatedTable:
    """A table that a subscription replicates: the rows and columns of the initial copy, and the key of the replica.

    - `row_filters`: a row is copied if one of the filters matches it, whatever the publications' operations are
      (PostgreSQL documentation, Row Filters: Initial Data Synchronization). None copies all rows.
    - `leaves` are the leaf partitions of a partitioned table.
    - `partition_key_columns` are the columns that decide the leaf of a row.
    """

    table: Table
    columns: tuple[str, ...]
    row_filters: tuple[str, ...] | None
    publications: tuple[str, ...]
    operations: frozenset[str]
    leaves: tuple[Table, ...] = ()
    partition_key_columns: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[str, ...]:
        """The key columns of the replica; empty if rows can only be compared as a whole.

        An old row is sent with the identity columns of its leaf. So the key of a partitioned table is the first of
        these that applies:

        - The root's key, if the identity of each leaf that has an identity contains this key.
        - Otherwise the key that all leaves share, if this key contains the partition key, and no leaf is unlogged or
          foreign. It is unique in the whole tree, because rows with equal keys are in the same leaf.
        - Otherwise the root's key.

        If neither updates nor deletes are published, the key is always the root's key, because no old row is sent. A
        row that is deleted at the publisher then stays in the replica, and a later insert can repeat the key that the
        leaves share. If a column of the key is not published, there is no key.
        """
        root_key = self.table.key
        has_root_key = root_key and all(
            set(root_key) <= set(leaf.identity) for leaf in self.leaves if leaf.identity
        )
        key = (
            root_key
            if has_root_key or not {"update", "delete"} & self.operations
            else self._shared_key or root_key
        )
        return key if set(key) <= set(self.columns) else ()

    @property
    def _shared_key(self) -> tuple[str, ...]:
        keys = {frozenset(leaf.key) for leaf in self.leaves}
        shared_key = keys.pop() if len(keys) == 1 else frozenset()
        if not self.partition_key_columns <= shared_key or self.table.unsent_leaves:
            return ()
        return tuple(a.name for a in self.table.attributes if a.name in shared_key)


def _find_sent_tables(publication: Publication, catalog: Catalog) -> dict[int, Table]:
    """The tables that messages can name because of a publication (pg_get_publication_tables())."""
    contained_tables = {t.oid: t for t in catalog.tables.values() if publication.contains(t)}
    if publication.via_root:
        return {
            oid: t
            for oid, t in contained_tables.items()
            if not any(ancestor in contained_tables for ancestor in t.ancestors)
        }
    leaves = {leaf for t in contained_tables.values() for leaf in t.leaves}
    tables = contained_tables | {leaf: catalog.tables[leaf] for leaf in leaves if leaf in catalog.tables}
    return {oid: t for oid, t in tables.items() if t.kind != "p"}


def find_replicated_tables(
    publications: Sequence[Publication], catalog: Catalog
) -> dict[tuple[str, str], ReplicatedTable]:
    """The tables that a subscription to `publications` replicates, by schema and name; the result is sorted.

    If a publication has publish_via_partition_root, partitions with an ancestor in the list are omitted, so
    that no row is copied twice (pg_get_publication_tables() since version 16).
    """
    tables_by_publication = [(p, _find_sent_tables(p, catalog)) for p in publications]
    sent_tables: dict[int, Table] = {}
    for _, tables in tables_by_publication:
        sent_tables |= tables
    if any(p.via_root for p in publications):
        sent_tables = {
            oid: t
            for oid, t in sent_tables.items()
            if not any(ancestor in sent_tables for ancestor in t.ancestors)
        }
    replicated_table_by_name = {}
    for oid, table in sorted(sent_tables.items(), key=lambda item: (item[1].schema, item[1].name)):
        table_publications = [p for p, tables in tables_by_publication if oid in tables]
        replicated_table_by_name[table.schema, table.name] = ReplicatedTable(
            table=table,
            columns=_require_same_columns(table_publications, table),
            row_filters=_find_distinct_filters(p.find_row_filter(table) for p in table_publications),
            publications=tuple(p.name for p in table_publications),
            operations=frozenset().union(*(p.operations for p in table_publications)),
            leaves=(leaves := _find_tables_by_oid(table.leaves, catalog)),
            partition_key_columns=_find_partition_key_columns(table, leaves, catalog),
        )
    return replicated_table_by_name


def _find_tables_by_oid(oids: Iterable[int], catalog: Catalog) -> tuple[Table, ...]:
    return tuple(catalog.tables[oid] for oid in oids if oid in catalog.tables)


def _find_partition_key_columns(root: Table, leaves: Iterable[Table], catalog: Catalog) -> frozenset[str]:
    """The columns in the partition keys of the root and of all partitioned tables between the root and its leaves."""
    partitioned_oids = {oid for leaf in leaves for oid in leaf.ancestors} - {*root.ancestors}
    return frozenset(
        column
        for table in _find_tables_by_oid(partitioned_oids, catalog)
        for column in table.partition_columns
    )
