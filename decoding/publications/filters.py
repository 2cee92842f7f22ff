"""The row filters of a published relation, parsed over its publish-as relation."""

from pgsieve.decoding.publications.catalog import PublishedRelation, Table
from pgsieve.decoding.publications.generated_columns import expanded
from pgsieve.decoding.row_filters.analysis import FilterColumn, RowFilter, parse_row_filter


def row_filter(sent: PublishedRelation, text: str) -> RowFilter:
    """Parse a row filter; raises UnsupportedFilterError, with the way out, for what Spark cannot evaluate."""
    return table_filter(sent.publish_as, text)


def table_filter(table: Table, text: str) -> RowFilter:
    """Parse a row filter over a table; raises as `row_filter` does."""
    columns = {
        a.name: FilterColumn(a.name, a.type_oid, a.type_modifier, a.collation) for a in table.attributes
    }
    return parse_row_filter(expanded(text, table), columns, table.qualified)
