"""A published table as Dagster shows it: read from a catalog, or from the lake if there is no catalog.

In: a `ReplicatedTable` of a catalog, or a table's state in the lake. Out: names, publications and the row
filter as text. An unknown filter is shown as unknown, never as "none".
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from pgsieve.assets.dagster_names import Name
from pgsieve.assets.metadata import NO_FILTER
from pgsieve.assets.steps.records.table_states import TableState
from pgsieve.decoding.publications.catalog import ReplicatedTable

#: The text for a row filter that is not known.
UNKNOWN_FILTER = "not known before the source has been read"


@dataclass(frozen=True)
class PublishedTable:
    """A table that a subscription replicates.

    `row_filter` is None if it is unknown. `replicated` is None if there is no catalog. `comment` is the publisher's
    comment on the table.
    """

    schema: str
    name: str
    publications: tuple[str, ...]
    row_filter: str | None
    replicated: ReplicatedTable | None = field(default=None, compare=False)
    comment: str | None = field(default=None, compare=False)

    @classmethod
    def of_catalog(cls, replicated: ReplicatedTable, comment: str | None = None) -> "PublishedTable":
        """A table as a catalog has it, with its comment."""
        table = replicated.table
        filters = filter_text(replicated.row_filters)
        return cls(table.schema, table.name, replicated.publications, filters, replicated, comment)

    @classmethod
    def of_replica(cls, state: TableState, publications: tuple[str, ...]) -> "PublishedTable":
        """A table as it was when it was copied; `publications` are the subscription's, for a table without a record."""
        published_columns = state.definition.published if state.definition else None
        if published_columns is None:
            return cls(state.schema, state.table, publications, None)
        return cls(
            state.schema,
            state.table,
            published_columns.publications,
            filter_text(published_columns.row_filters),
        )


Tables = Mapping[Name, PublishedTable]


def split_tables(tables: Tables, names: Container[Name]) -> tuple[Tables, Tables]:
    """The tables whose names are in `names`, and the others."""
    return (
        {name: table for name, table in tables.items() if name in names},
        {name: table for name, table in tables.items() if name not in names},
    )


def filter_text(row_filters: Iterable[str] | None) -> str:
    """The text of row filters that are ORed; None stands for no filter."""
    return NO_FILTER if row_filters is None else " OR ".join(row_filters)
