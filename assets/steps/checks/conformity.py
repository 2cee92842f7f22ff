"""Row-filter conformity: no row of a replica fails its table's row filter.

In: the publications, as the publisher has them now, and the replicas. Out: the number of rows that fail, and keys of
some of these rows. The initial copy takes the rows that pass the filter of any publication, whatever operations it
publishes. An INSERT or UPDATE has to pass the filter of a publication that publishes this operation (PostgreSQL
documentation, 29.4 Row Filters). So each row has to pass at least one of all these filters. The filters are evaluated
over the replica's values, since unpublished operations may have changed the publisher's values. If the filter was
altered since the copy, earlier rows stay, as in PostgreSQL, and `altered` is true. Raises SourceError, and
PublicationError if a publication is missing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.checks.segments import living_rows
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, reason
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.validation.examination import locked_tables
from pgsieve.decoding.changes.metadata_columns import select_living
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable, published_relation
from pgsieve.decoding.publications.filters import parse_table_filter
from pgsieve.decoding.publications.routing import changed_relations
from pgsieve.decoding.row_filters.evaluation.verdicts import compile_filters
from pgsieve.decoding.row_filters.letter_case import CaseMappings, MappingRequests
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.values.replica_output import value_texts
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.spark_writes import number_columns
from pgsieve.resources.postgres.case_mappings import with_case_mappings
from pgsieve.resources.postgres.catalog import read_catalog

#: The most keys of failing rows that are reported.
MAX_KEYS = 10

Filters = tuple[str, ...] | None


@dataclass(frozen=True)
class TableConformity:
    """The number of rows of a table, the number of rows that fail its row filter, and keys of some of these.

    `altered` says that the filter may have been altered since the copy. `problem` says why it cannot be evaluated.
    """

    rows: int = 0
    failing: int = 0
    keys: tuple[str, ...] = ()
    altered: bool = False
    problem: str | None = None


def applicable_filters(subscription: Subscription, replicated: ReplicatedTable, catalog: Catalog) -> Filters:
    """The row filters for a replica (each row has to pass at least one); None if all rows are allowed."""
    publications = subscription.feed.publications(catalog, subscription.name)
    filters: dict[str, None] = {}
    sources = [replicated.row_filters]
    for relation in changed_relations(catalog):
        relation_published = published_relation(relation, publications, catalog)
        if relation_published is not None and relation_published.publish_as.oid == replicated.table.oid:
            sources += [
                relation_published.filters[o]
                for o in ("insert", "update")
                if o in relation_published.operations
            ]
    for texts in sources:
        if texts is None:
            return None
        filters |= dict.fromkeys(texts)
    return tuple(filters)


def is_checkable(subscription: Subscription, replicated: ReplicatedTable) -> bool:
    """Whether the table has a row filter that can be evaluated over the columns of the replica."""
    try:
        return bool(parsed_filters(subscription, replicated, replicated.row_filters or (), MappingRequests()))
    except PgsieveError:
        return False


def parsed_filters(
    subscription: Subscription,
    replicated: ReplicatedTable,
    texts: Sequence[str],
    mappings: CaseMappings | None = None,
) -> list[RowFilter]:
    """The parsed row filters.

    Raises PgsieveError if the replica lacks one of their columns, or has it in a type that the user chose.
    """
    table = replicated.table
    filters = [parse_table_filter(table, text, mappings) for text in texts]
    plain = {
        name
        for name in replicated.columns
        if subscription.chosen_type((table.schema, table.name), name) is None
    }
    for lacking in (f.columns - plain for f in filters):
        if lacking:
            raise PgsieveError(
                f"the row filter of {table.qualified} reads columns that the replica lacks, or has in another type:"
                f" {', '.join(sorted(lacking))}",
                sqlstate="42703",
            )
    return filters


def check_conformity(subscription: Subscription, lake: Lake, name: Name) -> TableConformity:
    """Evaluate the row filters of a table over its replica."""
    feed = subscription.feed
    with feed.source.connect() as connection:
        catalog = feed.with_defined_publications(read_catalog(connection))
        catalog = with_case_mappings(connection, catalog, feed.subscriptions[subscription.name])
    state, replicated = (
        TableStates(lake, subscription.name).newest().get(name),
        subscription.tables(catalog).get(name),
    )
    if replicated is None or state is None or state.state != SyncState.READY:
        return TableConformity(problem=(state.state if state else SyncState.INITIALIZE).meaning)
    if (lock_error := dict(locked_tables(feed, subscription.name, catalog)).get(name)) is not None:
        return TableConformity(problem=lock_error.message)
    filters = applicable_filters(subscription, replicated, catalog)
    replica = _FilteredReplica(subscription, lake, state, replicated, filters)
    altered = replica.is_altered()
    try:
        return replace(replica.evaluate(), altered=altered)
    except TABLE_ERRORS as error:
        return TableConformity(problem=reason(lake, error))


@dataclass(frozen=True)
class _FilteredReplica:
    """The replica of a table, and its row filters (each row has to pass at least one)."""

    subscription: Subscription
    lake: Lake
    state: TableState
    replicated: ReplicatedTable
    filters: Filters

    def is_altered(self) -> bool:
        """Whether the filter was, or may have been, altered since the copy."""
        subscription, state = self.subscription, self.state
        published = state.definition.published if state.definition else None
        if published is None or published.row_filters != self.replicated.row_filters:
            return True
        for recorded in Catalogs(self.lake, subscription.feed).since(state.lsn):
            try:
                catalog = subscription.feed.with_defined_publications(recorded)
                recorded_table = subscription.tables(catalog).get(state.name)
                if (
                    recorded_table is None
                    or applicable_filters(subscription, recorded_table, catalog) != self.filters
                ):
                    return True
            except PgsieveError:
                return True  # A publication was missing.
        return False

    def evaluate(self) -> TableConformity:
        """Evaluate the filters over all rows."""
        subscription, lake, replicated = self.subscription, self.lake, self.replicated
        path = lake.paths.replica(subscription.name, *self.state.name)
        if self.filters is None:
            return TableConformity(lake.count(path))
        row_filters = parsed_filters(subscription, replicated, self.filters)
        key = [name for name in replicated.columns if name in replicated.key]
        # At least one column is read, so that there are rows to count.
        read = {*key, *(name for each in row_filters for name in each.columns)} or set(replicated.columns[:1])
        types = subscription.column_types(replicated)
        schema = pa.schema([(name, types[name].arrow) for name in replicated.columns if name in read])
        stored = pa.schema([each.with_name(subscription.replica_name(each.name)) for each in schema])

        def examine(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            named_batches = (batch.rename_columns(schema.names) for batch in batches)
            return _evaluate_batches(named_batches, schema, row_filters, key)

        deleted_column = self.state.definition.deleted_column if self.state.definition else None
        with lake.access.translate_errors(path):
            if (reader := lake.policy.reader(path)) is not None:
                batches = (
                    select_living(batch, stored, deleted_column)
                    for batch in reader.batches(path, reader.version(path))
                )
                examined = pa.Table.from_batches(examine(batches), _BATCH_RESULT)
            else:
                rows = number_columns(living_rows(lake.current(path), stored.names, deleted_column))
                examined = rows.mapInArrow(examine, _BATCH_RESULT_DDL).toArrow()
        count, failing = (pc.sum(examined[name]).as_py() or 0 for name in ("rows", "failing"))
        keys = sorted(pc.list_flatten(examined["keys"]).to_pylist())
        return TableConformity(count, failing, tuple(keys[:MAX_KEYS]))


#: For a batch of rows: their number, the number that fail, and keys of some that fail.
_BATCH_RESULT = pa.schema({"rows": pa.int64(), "failing": pa.int64(), "keys": pa.list_(pa.string())})
_BATCH_RESULT_DDL = "rows bigint, failing bigint, keys array<string>"


def _evaluate_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, filters: Sequence[RowFilter], key: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Evaluate the filters over batches; yields a row (`_BATCH_RESULT`) per batch."""
    passes = compile_filters(*(row_filter.tree for row_filter in filters))
    for batch in batches:
        rows = batch.cast(schema)
        failing = pc.invert(pc.fill_null(passes(rows), False))
        sample = rows.filter(failing).slice(0, MAX_KEYS)
        values = zip(*(value_texts(sample.column(name)) for name in key), strict=True)
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "rows": rows.num_rows,
                    "failing": failing.true_count,
                    "keys": [_key(key, row) for row in values],
                }
            ],
            _BATCH_RESULT,
        )


def _key(names: Sequence[str], values: Sequence[str]) -> str:
    return f"({', '.join(names)})=({', '.join(values)})"
