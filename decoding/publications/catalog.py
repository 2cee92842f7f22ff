"""The publisher's tables and its publications, as the catalog or pgsieve.yaml has them.

In: rows of the catalog, and sections of pgsieve.yaml. Out: a `Catalog` of tables and publications. A `Publication` says what
it sends of a table, and `pgsieve.decoding.publications.published_tables` what several publications send together.

Raises `PublicationError` if a publication is missing.

Source: pg_publication, pg_publication_rel and pg_attribute (PostgreSQL documentation, System Catalogs); pg_publication_tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    - `is_sent` is false if changes never contain the column: for a virtual column, and before version 18 for each
      generated column.
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
      `names` maps each kind of such names to a digest of all names of this kind (`NAME_KIND_BY_OID` in
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
