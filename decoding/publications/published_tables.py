"""Finds which part of a table several publications send together.

In: the catalog (`pgsieve.decoding.publications.catalog`), and publications of it. Out:

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
from dataclasses import dataclass
from operator import itemgetter

from pgsieve.decoding.publications.catalog import Catalog, Publication, PublicationError, Table


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
    """Raise PublicationError if publications differ in publish_generated_columns (check_and_init_gencol() of pgoutput.c)."""
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
    # Without publish_via_partition_root, no message names a partitioned table.
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

        If neither updates nor deletes are published, no old row is sent, and the key is always the root's key. Rows that
        are deleted at the publisher then stay in the replica. With a key that only the leaves have, a later insert of the
        same key would be a conflict. If a column of the key is not published, there is no key.
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
