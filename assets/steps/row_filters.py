"""The row filters of a published relation, parsed over its publish-as relation."""

from decoding.publication import PublishedRelation
from decoding.row_filter import FilterColumn, RowFilter, parse_row_filter


def row_filter(sent: PublishedRelation, text: str) -> RowFilter:
    """Parse a row filter; raises UnsupportedFilterError, with the way out, for what Spark cannot evaluate."""
    table = sent.publish_as
    columns = {
        a.name: FilterColumn(a.name, a.type_oid, a.type_modifier, a.collation) for a in table.attributes
    }
    return parse_row_filter(text, columns, table.qualified)
