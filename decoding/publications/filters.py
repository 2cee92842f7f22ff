"""The row filters of a published relation, parsed over its publish-as relation.

In: a table of the catalog, with the server's case mappings. Out: row filters, or the case mappings that a
filter needs. Raises the errors of `parse_row_filter`. The import of the parser takes a tenth of a second, so
the functions import it only when there is a filter.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType

from pgsieve.decoding.errors import PgsieveError, UnsupportedFilterError
from pgsieve.decoding.publications.catalog import PublishedRelation, Table
from pgsieve.decoding.row_filters.letter_case import CaseMappings, NeededMappings, of_server
from pgsieve.decoding.row_filters.nodes import RowFilter


def row_filter(sent: PublishedRelation, text: str) -> RowFilter:
    """Parse a row filter.

    Raises UnsupportedFilterError, with a remedy, for one that pgsieve cannot evaluate.
    """
    return table_filter(sent.publish_as, text)


def table_filter(table: Table, text: str, mappings: CaseMappings | None = None) -> RowFilter:
    """Parse a row filter over a table; raises as `row_filter` does.

    `mappings` replaces the table's case mappings.
    """
    from pgsieve.decoding.publications.generated_columns import expanded
    from pgsieve.decoding.row_filters.analysis import PUBLISHER_HINT, FilterColumn, parse_row_filter
    from pgsieve.decoding.row_filters.evaluation.verdicts import condition

    chosen = of_server(dict(table.case_mappings)) if mappings is None else mappings
    columns = {
        a.name: FilterColumn(a.name, a.type_oid, a.type_modifier, a.collation) for a in table.attributes
    }
    parsed = parse_row_filter(
        expanded(text, table), columns, table.qualified, chosen, table.encoding, table.major_version
    )
    try:
        condition(parsed.tree)
    # A filter that can be parsed cannot always be evaluated: that takes more nested calls.
    except RecursionError:
        raise UnsupportedFilterError(
            f"row filter of {table.qualified} cannot be evaluated outside PostgreSQL: it is nested too deeply",
            hint=PUBLISHER_HINT,
        ) from None
    return parsed


@lru_cache(maxsize=4096)  # A continuous run calls this for each slice.
def needed_mappings(table: Table, text: str) -> Mapping[str, bool]:
    """The collations under which a row filter changes or ignores case.

    The value is true if the filter uses initcap under the collation.
    """
    needed = NeededMappings()
    with suppress(PgsieveError):  # The filter's evaluation reports its errors.
        table_filter(table, text, needed)
    return MappingProxyType(needed.collations)


def reads_unsent(table: Table, text: str) -> bool:
    """Whether a row filter reads a generated column that changes do not contain.

    It raises the errors of `expanded`.
    """
    from pgsieve.decoding.publications.generated_columns import expanded

    return expanded(text, table) != text
