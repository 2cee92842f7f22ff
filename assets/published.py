"""A published table as Dagster shows it.

In: a `ReplicatedTable` of a catalog (definitions of tables and publications that were read from the publisher); or, if
there is no catalog, the state of the table in the lake
Out: names, publications, and the row filter as text. A row filter that is not known is shown as unknown, and not as
     "none".
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from pgsieve.assets.metadata import NO_FILTER
from pgsieve.assets.steps.records.table_states import TableState
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.resources.lake.delta.layout import TableName

#: The text for a row filter that is not known.
UNKNOWN_FILTER = "not known before the source has been read"


@dataclass(frozen=True)
class PublishedTable:
    """A table that a subscription replicates.

    - `row_filter`: the row filter as text; None if it is not known
    - `replicated`: the table in the catalog; None if there is no catalog
    - `comment`: the publisher's comment on the table
    """

    schema: str
    name: str
    publications: tuple[str, ...]
    row_filter: str | None
    replicated: ReplicatedTable | None = field(default=None, compare=False)
    comment: str | None = field(default=None, compare=False)

    @classmethod
    def from_catalog(cls, replicated_table: ReplicatedTable, comment: str | None = None) -> "PublishedTable":
        """Make it from a table of a catalog, and the comment on the table."""
        table = replicated_table.table
        row_filter = format_filter(replicated_table.row_filters)
        return cls(
            table.schema, table.name, replicated_table.publications, row_filter, replicated_table, comment
        )

    @classmethod
    def from_state(cls, state: TableState, publications: tuple[str, ...]) -> "PublishedTable":
        """Make it from the state of a table, which records what was published at the copy.

        If the state does not record the publications of the table, those of the subscription are used (`publications`).
        """
        publication_record = state.definition.published if state.definition else None
        if publication_record is None:
            return cls(state.schema, state.table, publications, None)
        return cls(
            state.schema,
            state.table,
            publication_record.publications,
            format_filter(publication_record.row_filters),
        )


Tables = Mapping[TableName, PublishedTable]


def split_tables(tables: Tables, names: Container[TableName]) -> tuple[Tables, Tables]:
    """Divide the tables into those whose names are in `names`, and the others."""
    return (
        {name: table for name, table in tables.items() if name in names},
        {name: table for name, table in tables.items() if name not in names},
    )


def format_filter(row_filters: Iterable[str] | None) -> str:
    """Write row filters as text. A row is sent if it matches one of them. None stands for no row filter."""
    return NO_FILTER if row_filters is None else " OR ".join(row_filters)
