"""Row-filter conformity: checks that each row of a replica matches the row filter of its table.

In: the publications, as the publisher has them now, and the replicas
Out: the number of rows that do not match, and the keys of some of these rows

The initial copy takes the rows that match the filter of any publication, whatever operations that publication
publishes. An INSERT or UPDATE has to match the filter of a publication that publishes this operation (PostgreSQL
documentation, 29.4 Row Filters). So each row has to match at least one of all these filters.

The filters are evaluated with the replica's values: the publisher's may differ, because of operations that are not
published. If the filter was altered since the copy, earlier rows stay as they are, as in PostgreSQL. In that case
`TableConformity.altered` is true. Raises SourceError if the publisher does not answer, and PublicationError if a
publication is missing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.checks.segments import open_living_rows
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, describe_error
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.validation.examination import find_locked_tables
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.filters import parse_table_filter
from pgsieve.decoding.publications.published_tables import ReplicatedTable, find_published_relation
from pgsieve.decoding.publications.routing import list_relations_with_rows
from pgsieve.decoding.row_filters.evaluation.verdicts import compile_filters
from pgsieve.decoding.row_filters.letter_case import CaseMappingFinder, MappingRequests
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.values.replica_output import list_texts
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.case_mappings import add_case_mappings
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.work import name_jobs

#: The keys of at most this many rows are reported.
MAX_KEYS = 10

#: Row filters. A row has to match at least one of them. None means that all rows are allowed.
FilterTexts = tuple[str, ...] | None


@dataclass(frozen=True)
class TableConformity:
    """The result for a table.

    - `rows`: the number of its rows
    - `failing`: the number of rows that do not match its row filter
    - `keys`: the keys of some of these rows
    - `altered`: true if the filter may have been altered since the copy
    - `problem`: the reason why the filter cannot be evaluated
    """

    rows: int = 0
    failing: int = 0
    keys: tuple[str, ...] = ()
    altered: bool = False
    problem: str | None = None


def find_applicable_filters(
    subscription: Subscription, replicated_table: ReplicatedTable, catalog: Catalog
) -> FilterTexts:
    """Find the row filters that apply to a replica."""
    publications = subscription.slot_stream.publications(catalog, subscription.name)
    filters: dict[str, None] = {}
    filter_lists = [replicated_table.row_filters]
    for relation in list_relations_with_rows(catalog):
        published_relation = find_published_relation(relation, publications, catalog)
        if published_relation is not None and published_relation.publish_as.oid == replicated_table.table.oid:
            filter_lists += [
                published_relation.filters[operation]
                for operation in ("insert", "update")
                if operation in published_relation.operations
            ]
    for texts in filter_lists:
        if texts is None:
            return None
        filters |= dict.fromkeys(texts)
    return tuple(filters)


def is_checkable(subscription: Subscription, replicated_table: ReplicatedTable) -> bool:
    """True if the table has a row filter, and it can be evaluated with the columns of the replica."""
    try:
        return bool(
            parse_filters(
                subscription, replicated_table, replicated_table.row_filters or (), MappingRequests()
            )
        )
    except PgsieveError:
        return False


def parse_filters(
    subscription: Subscription,
    replicated_table: ReplicatedTable,
    texts: Sequence[str],
    mappings: CaseMappingFinder | None = None,
) -> list[RowFilter]:
    """Parse row filters.

    Raises PgsieveError if the replica does not have a column of a filter, or has it in another type that the user has
    chosen.
    """
    table = replicated_table.table
    filters = [parse_table_filter(table, text, mappings) for text in texts]
    usable_columns = {
        name
        for name in replicated_table.columns
        if subscription.chosen_type((table.schema, table.name), name) is None
    }
    for missing_columns in (row_filter.columns - usable_columns for row_filter in filters):
        if missing_columns:
            raise PgsieveError(
                f"the row filter of {table.quoted_name} reads columns that the replica lacks, or has in another type: {', '.join(sorted(missing_columns))}",
                sqlstate="42703",
            )
    return filters


def check_conformity(subscription: Subscription, lake: Lake, name: Name) -> TableConformity:
    """Evaluate the row filters of a table for all rows of its replica."""
    slot_stream = subscription.slot_stream
    with slot_stream.source.connect() as connection:
        catalog = slot_stream.with_defined_publications(read_catalog(connection))
        catalog = add_case_mappings(connection, catalog, slot_stream.subscriptions[subscription.name])
    state, replicated_table = (
        TableStates(lake, subscription.name).read_newest().get(name),
        subscription.tables(catalog).get(name),
    )
    if replicated_table is None or state is None or state.state != SyncState.READY:
        return TableConformity(problem=(state.state if state else SyncState.INITIALIZE).meaning)
    if (
        lock_error := dict(find_locked_tables(slot_stream, subscription.name, catalog)).get(name)
    ) is not None:
        return TableConformity(problem=lock_error.message)
    filters = find_applicable_filters(subscription, replicated_table, catalog)
    replica = _FilteredReplica(subscription, lake, state, replicated_table, filters)
    is_altered = replica.is_filter_altered()
    try:
        with name_jobs(subscription.name, f"row filter check of {quote_qualified(*name)}"):
            return replace(replica.evaluate_filters(), altered=is_altered)
    except TABLE_ERRORS as error:
        return TableConformity(problem=describe_error(lake, error))


@dataclass(frozen=True)
class _FilteredReplica:
    """The replica of a table, and its row filters."""

    subscription: Subscription
    lake: Lake
    state: TableState
    replicated_table: ReplicatedTable
    filters: FilterTexts

    def is_filter_altered(self) -> bool:
        """True if the filter was, or may have been, altered since the copy."""
        subscription, state = self.subscription, self.state
        publication_record = state.definition.published if state.definition else None
        if publication_record is None or publication_record.row_filters != self.replicated_table.row_filters:
            return True
        for recorded_catalog in Catalogs(self.lake, subscription.slot_stream).read_since(state.lsn):
            try:
                catalog = subscription.slot_stream.with_defined_publications(recorded_catalog)
                recorded_table = subscription.tables(catalog).get(state.name)
                if (
                    recorded_table is None
                    or find_applicable_filters(subscription, recorded_table, catalog) != self.filters
                ):
                    return True
            except PgsieveError:
                return True  # A publication was missing.
        return False

    def evaluate_filters(self) -> TableConformity:
        """Evaluate the filters for all rows."""
        subscription, lake, replicated_table = self.subscription, self.lake, self.replicated_table
        path = lake.paths.replica(subscription.name, *self.state.name)
        if self.filters is None:
            return TableConformity(lake.count_rows(path))
        row_filters = parse_filters(subscription, replicated_table, self.filters)
        key = [name for name in replicated_table.columns if name in replicated_table.key]
        # At least one column is read; otherwise there would be no rows to count.
        names = {*key, *(name for row_filter in row_filters for name in row_filter.columns)} or set(
            replicated_table.columns[:1]
        )
        type_by_column = subscription.column_types(replicated_table)
        schema = pa.schema(
            [(name, type_by_column[name].arrow_type) for name in replicated_table.columns if name in names]
        )
        replica_schema = pa.schema(
            [column.with_name(subscription.replica_name(column.name)) for column in schema]
        )

        def evaluate_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            named_batches = (batch.rename_columns(schema.names) for batch in batches)
            return _evaluate_batches(named_batches, schema, row_filters, key)

        deleted_column = self.state.definition.deleted_column if self.state.definition else None
        with lake.access.translate_errors(path):
            rows = open_living_rows(lake, path, lake.records.version(path), replica_schema, deleted_column)
            results = rows.compute(evaluate_batches, _BATCH_RESULT_SCHEMA)
        row_count, failing_count = (pc.sum(results[name]).as_py() or 0 for name in ("rows", "failing"))
        keys = sorted(pc.list_flatten(results["keys"]).to_pylist())
        return TableConformity(row_count, failing_count, tuple(keys[:MAX_KEYS]))


#: Each row is the result for a batch: the number of its rows, how many of them do not match, and keys of some of these.
_BATCH_RESULT_SCHEMA = pa.schema({"rows": pa.int64(), "failing": pa.int64(), "keys": pa.list_(pa.string())})


def _evaluate_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, filters: Sequence[RowFilter], key: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Evaluate the filters for batches of rows; yields a row (`_BATCH_RESULT_SCHEMA`) for each batch."""
    evaluate_filters = compile_filters(*(row_filter.tree for row_filter in filters))
    for batch in batches:
        rows = batch.cast(schema)
        is_failing = pc.invert(pc.fill_null(evaluate_filters(rows), False))
        sample = rows.filter(is_failing).slice(0, MAX_KEYS)
        values = zip(*(list_texts(sample.column(name)) for name in key), strict=True)
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "rows": rows.num_rows,
                    "failing": is_failing.true_count,
                    "keys": [_format_key(key, row) for row in values],
                }
            ],
            _BATCH_RESULT_SCHEMA,
        )


def _format_key(names: Sequence[str], values: Sequence[str]) -> str:
    return f"({', '.join(names)})=({', '.join(values)})"
