"""Parses the row filters of publications, with the columns of the catalog's tables.

In: a table of the catalog and the text of a row filter. The table has the server's case mappings (the letters
that upper() and lower() change, by collation), if its filters need them.

Out: the parsed filter, or the case mappings that the filter needs. Raises the errors of `parse_row_filter`.

The functions import the parser only when they are called, because the import takes a tenth of a second.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType

from pgsieve.decoding.errors import PgsieveError, UnsupportedFilterError
from pgsieve.decoding.publications.catalog import Table
from pgsieve.decoding.publications.published_tables import PublishedRelation
from pgsieve.decoding.row_filters.letter_case import CaseMappingFinder, MappingRequests, make_mapping_finder
from pgsieve.decoding.row_filters.nodes import RowFilter


def parse_published_filter(relation: PublishedRelation, text: str) -> RowFilter:
    """Parse a row filter, with the columns of the relation under whose name the changes are sent.

    With publish_via_partition_root, this relation is the root of the partition tree and not the changed leaf.
    """
    return parse_table_filter(relation.publish_as, text)


def parse_table_filter(
    table: Table, text: str, replacement_mappings: CaseMappingFinder | None = None
) -> RowFilter:
    """Parse a row filter over a table; `replacement_mappings`, if given, replace the table's case mappings.

    Raises UnsupportedFilterError, with a remedy, if pgsieve cannot evaluate the filter.
    """
    from pgsieve.decoding.publications.generated_columns import expand_unsent_columns
    from pgsieve.decoding.row_filters.analysis import PUBLISHER_HINT, FilterColumn, parse_row_filter
    from pgsieve.decoding.row_filters.evaluation.verdicts import compile_filters

    case_mappings = (
        make_mapping_finder(dict(table.case_mappings))
        if replacement_mappings is None
        else replacement_mappings
    )
    columns = {
        a.name: FilterColumn(a.name, a.type_oid, a.type_modifier, a.collation) for a in table.attributes
    }
    row_filter = parse_row_filter(
        expand_unsent_columns(text, table),
        columns,
        table.quoted_name,
        case_mappings,
        table.encoding,
        table.major_version,
    )
    try:
        compile_filters(row_filter.tree)
    # The compiler needs more nested calls than the parser, so a filter that was parsed can still be too deep.
    except RecursionError:
        raise UnsupportedFilterError(
            f"row filter of {table.quoted_name} cannot be evaluated outside PostgreSQL: it is nested too deeply",
            hint=PUBLISHER_HINT,
        ) from None
    return row_filter


@lru_cache(maxsize=4096)  # `pgsieve run --follow` calls this often with the same filters.
def find_needed_case_mappings(table: Table, text: str) -> Mapping[str, bool]:
    """The collations under which a row filter changes or ignores the case of letters.

    Maps each collation to whether the filter also calls initcap under this collation.
    """
    requests = MappingRequests()
    with suppress(PgsieveError):  # The filter's evaluation reports its errors.
        parse_table_filter(table, text, requests)
    return MappingProxyType(requests.collations)


def has_unsent_columns(table: Table, text: str) -> bool:
    """Whether a row filter reads a generated column that changes do not contain.

    Raises the errors of `expand_unsent_columns`.
    """
    from pgsieve.decoding.publications.generated_columns import expand_unsent_columns

    return expand_unsent_columns(text, table) != text
