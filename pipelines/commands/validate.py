"""`pgsieve validate`: finds problems before the first run creates anything.

In: the configuration
Out: a `ValidationReport`: the publications, the tables of each subscription, problems with PostgreSQL's SQLSTATE,
     warnings, and the SQL that the first run executes
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any

import psycopg

from pgsieve.assets.steps.history.expected_histories import describe_histories
from pgsieve.assets.steps.operations.refilter import Refilter
from pgsieve.assets.steps.operations.resync import describe_changes_since_copy
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.sequences import describe_unread_sequences
from pgsieve.assets.steps.records.table_states import Name, TableStates
from pgsieve.assets.steps.slot_consumption.sequences import read_received_sequences
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.validation.examination import Examination
from pgsieve.assets.steps.validation.layouts import find_layout_problems, find_unused_layouts
from pgsieve.assets.steps.validation.rights import find_missing_rights
from pgsieve.assets.steps.validation.warnings import (
    find_name_warnings,
    find_slot_stream_warnings,
    find_subscription_warnings,
    make_decoding_warning,
)
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog, Publication, PublicationError, Table
from pgsieve.decoding.publications.published_tables import (
    PublishedRelation,
    ReplicatedTable,
    find_published_relation,
)
from pgsieve.decoding.publications.routing import list_relations_with_rows
from pgsieve.decoding.publications.update_transformation import UPDATE_TRANSFORMATION
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.pipelines.commands.refilter import find_possible_sources
from pgsieve.pipelines.commands.sequences import list_sequences
from pgsieve.pipelines.commands.validation_results import (
    ListedTable,
    PublicationDescription,
    ReceivedChanges,
    ReceivedTable,
    ReceivedTables,
    ValidationProblem,
    ValidationReport,
)
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.lake.delta.errors import LakeUnavailableError, SparkUnavailableError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.capture import (
    describe_preparation,
    make_capture_statements,
    make_root_removals,
)
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.ddl import find_trigger_error
from pgsieve.resources.postgres.sequences import SequenceValue
from pgsieve.resources.postgres.source import is_decoding_switched


def validate(config: Config, *, are_rights_checked: bool = True) -> ValidationReport:
    """Examine the lake's store, all sources and all subscriptions.

    To examine a store with the interface of S3, objects are created there and removed again. With `are_rights_checked`,
    the rights of each source's role are checked, too.
    """
    project = build_project(config)
    project.lake.engine.check_store()
    project.lake.open().access.check_conditional_put(record=False)
    findings = _FindingCollector(project, are_rights_checked=are_rights_checked)
    findings.examine_lake()
    for slot_stream in project.slot_streams.values():
        findings.examine_slot_stream(slot_stream)
    return findings.make_report()


@dataclass(frozen=True)
class _PublisherState:
    """What was read from the publisher of a slot stream, a slot with the subscriptions that read it.

    - `examination`: the stream's publications, and their problems
    - `server_catalog`: the server's catalog, without the publications that pgsieve.yaml defines
    - `server_version`: the server's version
    - `sequences_by_subscription`: maps each subscription to the sequences that it receives
    """

    examination: Examination
    server_catalog: Catalog
    server_version: int
    sequences_by_subscription: Mapping[str, tuple[SequenceValue, ...]]


class _FindingCollector:
    """Collects the findings of `pgsieve validate`, stream by stream."""

    def __init__(self, project: Project, *, are_rights_checked: bool) -> None:
        self._project, self._are_rights_checked = project, are_rights_checked
        self._publications: dict[tuple[str, str], PublicationDescription] = {}
        self._received_tables: list[ReceivedTables] = []
        self._problems: list[ValidationProblem] = []
        self._statements: list[str] = []
        self._warnings: list[ValidationProblem] = []

    def make_report(self) -> ValidationReport:
        """All findings so far."""
        return ValidationReport(
            tuple(self._publications.values()),
            tuple(self._received_tables),
            tuple(self._problems),
            tuple(self._statements),
            tuple(self._warnings),
        )

    def examine_lake(self) -> None:
        """Record a problem if the lake cannot be written, and a warning if Spark needs Java and Java is missing."""
        lake = self._project.lake
        try:
            # This is only a warning, because small tables and few changes are written without Spark.
            lake.engine.check_java()
        except SparkUnavailableError as error:
            self._warnings.append(_make_problem("spark", error))
        try:
            lake.open().access.check_permitted()
        except LakeUnavailableError as error:
            self._problems.append(_make_problem("lake", error))

    def examine_slot_stream(self, slot_stream: SlotStream) -> None:
        """Record what the subscriptions of a stream will receive, and all problems."""
        source_name = slot_stream.source.name
        try:
            publisher, errors = self._examine_source(slot_stream)
        except PgsieveError as error:
            self._problems.append(_make_problem(source_name, error))
            return
        self._problems += [
            problem
            for problem in (_make_problem(source_name, error) for error in errors)
            if problem not in self._problems
        ]
        examination = publisher.examination
        self._problems += [_make_problem(source_name, error) for error in examination.definition_problems]
        if examination.check_failure is not None:
            self._problems.append(_make_problem(source_name, examination.check_failure))
        for subscription in self._project.find_subscriptions(slot_stream):
            self._examine_subscription(subscription, publisher)
        # Like a run, leave out the subscriptions that are refused.
        sound_slot_stream, catalog = examination.select_sound_subscriptions(), examination.catalog
        self._statements += _make_capture_statements(
            sound_slot_stream, catalog, publisher.server_catalog, publisher.server_version
        )
        self._warnings += [
            _make_problem(source_name, error)
            for error in find_slot_stream_warnings(sound_slot_stream, catalog)
        ]

    def _examine_source(self, slot_stream: SlotStream) -> tuple[_PublisherState, list[PgsieveError]]:
        """The state of a stream's publisher; and the errors about rights, event triggers, and data of another publisher."""
        server_version = slot_stream.source.check_ready()
        with slot_stream.source.connect() as connection:
            server_catalog = read_catalog(connection)
            examination = Examination(connection, slot_stream, server_catalog)
            catalog = examination.catalog
            errors = (
                list(_find_rights_errors(connection, self._project, slot_stream, catalog))
                if self._are_rights_checked
                else []
            )
            errors += _find_other_publisher_errors(connection, self._project, slot_stream)
            sound_slot_stream = examination.select_sound_subscriptions()
            errors += _find_trigger_errors(connection, sound_slot_stream, catalog, server_catalog)
            sequences_by_subscription = {
                subscription_name: read_received_sequences(connection, slot_stream, subscription_name)
                for subscription_name in slot_stream.subscriptions
            }
            if is_decoding_switched(connection):
                self._warnings.append(
                    _make_problem(slot_stream.source.name, make_decoding_warning(slot_stream))
                )
        return _PublisherState(examination, server_catalog, server_version, sequences_by_subscription), errors

    def _examine_subscription(self, subscription: Subscription, publisher: _PublisherState) -> None:
        """Record what a subscription will receive, and its problems."""
        subscription_name, slot_stream, catalog = (
            subscription.name,
            subscription.slot_stream,
            publisher.examination.catalog,
        )
        unread_errors = map(
            PgsieveError,
            describe_unread_sequences(publisher.sequences_by_subscription[subscription_name])
            if self._are_rights_checked
            else (),
        )
        errors = (*publisher.examination.find_problems(subscription_name), *unread_errors)
        self._problems += [_make_problem(subscription_name, error) for error in errors]
        for publication_name in slot_stream.subscriptions[subscription_name]:
            if publication_name in catalog.publications:
                description = _describe_publication(
                    slot_stream.source.name, catalog.publications[publication_name], catalog
                )
                self._publications[slot_stream.source.name, publication_name] = description
        try:
            for replicated_table in subscription.tables(catalog).values():
                if (problem := subscription.metadata_problem(replicated_table)) is not None:
                    self._problems.append(_make_problem(subscription_name, problem))
            lake = self._project.lake.open()
            find_sources = partial(find_possible_sources, self._project, subscription, lake)
            self._received_tables.append(
                _describe_received_tables(
                    subscription, catalog, lake, publisher.sequences_by_subscription, find_sources
                )
            )
            # A table that has left the publication may have been dropped since. Then only its state is left.
            existing_names = (
                catalog.table_by_name.keys() | TableStates(lake, subscription_name).read_newest().keys()
            )
            replicated_tables = subscription.tables(catalog)
            layout_errors = find_layout_problems(subscription, replicated_tables, existing_names)
            self._problems += [_make_problem(subscription_name, error) for error in layout_errors]
            row_warnings = find_subscription_warnings(subscription, catalog)
            name_warnings = find_name_warnings(
                subscription, catalog, partial(_has_mapped_columns, lake, subscription_name)
            )
            self._warnings += [
                _make_problem(subscription_name, error)
                for error in (
                    *row_warnings,
                    *name_warnings,
                    *find_unused_layouts(subscription, replicated_tables, existing_names),
                )
            ]
        except PgsieveError as error:
            # Usually the examination has found the same error and recorded it. The problems of publications that
            # pgsieve.yaml defines are recorded for the source.
            unsound_names = publisher.examination.problems_by_publication.keys()
            if unsound_names.isdisjoint(slot_stream.subscriptions[subscription_name]) and all(
                problem.object != subscription_name for problem in self._problems
            ):
                self._problems.append(_make_problem(subscription_name, error))


def _has_mapped_columns(lake: Lake, subscription_name: str, table_name: Name) -> bool:
    """True if Delta maps the names of a replica's columns to other names in its files.

    This includes a replica that only Spark can write, because Spark maps the names when it writes.
    """
    return lake.policy.is_written_by_spark(lake.paths.replica(subscription_name, *table_name))


def _find_rights_errors(
    connection: psycopg.Connection[Any], project: Project, slot_stream: SlotStream, catalog: Catalog
) -> Iterator[PgsieveError]:
    """Yields an error for each right that the role lacks to read the stream's slot and to copy its tables."""
    tables = list[ReplicatedTable]()
    for subscription in project.find_subscriptions(slot_stream):
        with suppress(PublicationError):  # The examination has found this error, too, and reports it.
            tables += subscription.tables(catalog).values()
    yield from find_missing_rights(connection, tables)


def _find_other_publisher_errors(
    connection: psycopg.Connection[Any], project: Project, slot_stream: SlotStream
) -> Iterator[PgsieveError]:
    """Yields an error if the lake has data of this stream from another cluster or another database."""
    lake = project.lake.open()
    try:
        refuse_other_publisher(connection, slot_stream, lake)
    except PgsieveError as error:
        yield error


def _find_trigger_errors(
    connection: psycopg.Connection[Any], slot_stream: SlotStream, catalog: Catalog, server_catalog: Catalog
) -> Iterator[PgsieveError]:
    """Yields errors about event triggers that would make the creation of capture publications fail.

    Capture publications are pgsieve's own publications, with which it reads the slot.
    """
    for plan in slot_stream.planned_capture(catalog):
        publication_name = slot_stream.capture + plan.suffix
        statements = make_capture_statements(
            publication_name, plan, server_catalog, connection.info.server_version
        )
        error = find_trigger_error(
            connection, slot_stream.source.name, describe_preparation(publication_name), statements
        )
        if error is not None:
            yield error


def _make_problem(object_name: str, error: PgsieveError) -> ValidationProblem:
    """Convert an error to a problem of `object_name`: a source, a subscription, the lake, or Spark."""
    return ValidationProblem(object_name, error.message, error.sqlstate, error.hint)


def _make_capture_statements(
    slot_stream: SlotStream, catalog: Catalog, server_catalog: Catalog, server_version: int
) -> Iterator[str]:
    """The statements that create the stream's capture publications.

    The first run executes them. If the role lacks the rights to do so, an administrator has to execute them.
    """
    plans = slot_stream.planned_capture(catalog)
    statements = [
        statement
        for plan in plans
        for statement in make_capture_statements(
            slot_stream.capture + plan.suffix, plan, server_catalog, server_version
        )
    ]
    # Partition roots that are not in the plan have to be removed, because their changes would be sent as changes of
    # the root. Without a plan (for example if the publisher filters) the slot is not read with these publications, so
    # nothing has to be removed.
    statements += make_root_removals(slot_stream.capture, plans, server_catalog) if plans else []
    for statement in statements:
        yield f"{statement};"


def _describe_received_tables(
    subscription: Subscription,
    catalog: Catalog,
    lake: Lake,
    sequences_by_subscription: Mapping[str, tuple[SequenceValue, ...]],
    find_sources: Callable[[], Sequence[Subscription]],
) -> ReceivedTables:
    """What a subscription will receive.

    - `sequences_by_subscription`: maps subscriptions to sequences
    - `find_sources`: returns the subscriptions from whose replicas `pgsieve refilter` may make a table, without a copy
    """
    states_by_name = TableStates(lake, subscription.name).read_newest()
    changes_by_oid = _describe_received_changes(subscription, catalog)
    tables, cuts = subscription.tables(catalog), Cuts(lake, subscription.name).read_all()
    definitions_by_name = {
        name: subscription.definition(replicated_table, catalog) for name, replicated_table in tables.items()
    }
    changes_by_name = {
        name: describe_changes_since_copy(states_by_name.get(name), definition)
        for name, definition in definitions_by_name.items()
    }
    names_to_copy = [
        name
        for name in tables
        if changes_by_name[name] or name not in states_by_name or not states_by_name[name].is_applied
    ]
    sources_by_name = dict[Name, str | None]()
    if names_to_copy:
        refilter = Refilter(subscription, [(source, catalog) for source in find_sources()], lake, catalog)
        sources_by_name = {plan.name: plan.source for plan in refilter.plan(names_to_copy)}

    def describe_table(table: Name, replicated_table: ReplicatedTable) -> ReceivedTable:
        replica_names = {name: subscription.replica_name(name) for name in replicated_table.columns}
        state, last_cut = states_by_name.get(table), cuts[-1] if cuts else None
        histories = describe_histories(subscription, lake, table, state, definitions_by_name[table], last_cut)
        return ReceivedTable(
            *table,
            columns=replicated_table.columns,
            row_filter=_join_filters(replicated_table.row_filters),
            changes=tuple(changes_by_oid.get(replicated_table.table.oid, ())),
            since_copy=changes_by_name[table],
            metadata=subscription.metadata(replicated_table.table),
            renamed={
                publisher_name: replica_name
                for publisher_name, replica_name in replica_names.items()
                if replica_name != publisher_name
            },
            histories=tuple(histories),
            refilter_from=sources_by_name.get(table),
        )

    return ReceivedTables(
        subscription.name,
        tuple(starmap(describe_table, tables.items())),
        list_sequences(sequences_by_subscription[subscription.name]),
        format_lsn(cuts[0].lsn) if cuts else None,
    )


def _describe_received_changes(
    subscription: Subscription, catalog: Catalog
) -> dict[int, list[ReceivedChanges]]:
    """Maps the oid of each replicated table to the changes that a subscription will receive for it.

    A table and its partitions may have different row filters. Tables with the same row filters and the same replica
    identity share an entry.
    """
    publications = subscription.slot_stream.publications(catalog, subscription.name)
    changes_by_oid: dict[int, dict[tuple[object, ...], ReceivedChanges]] = {}
    for table in sorted(list_relations_with_rows(catalog), key=lambda table: (table.schema, table.name)):
        if (relation := find_published_relation(table, publications, catalog)) is None:
            continue
        name, filters_by_operation = (
            quote_qualified(table.schema, table.name),
            _find_filters_by_operation(relation),
        )
        update_results = _list_update_results(filters_by_operation, subscription.slot_stream)
        relation_changes = ReceivedChanges(
            (name,), filters_by_operation, _describe_identity(table), update_results
        )
        changes_by_filter = changes_by_oid.setdefault(relation.publish_as.oid, {})
        key = (*relation_changes.row_filters.items(), relation_changes.identity)
        earlier_changes = changes_by_filter.get(key)
        changes_by_filter[key] = (
            relation_changes
            if earlier_changes is None
            else replace(earlier_changes, relations=(*earlier_changes.relations, name))
        )
    return {oid: list(changes_by_filter.values()) for oid, changes_by_filter in changes_by_oid.items()}


def _find_filters_by_operation(relation: PublishedRelation) -> dict[str, str | None]:
    """Maps each operation that is published to its row filter; None means that every row is sent."""
    return {
        operation: _join_filters(relation.filters.get(operation))
        for operation in OPERATIONS
        if operation in relation.operations
    }


def _list_update_results(
    filters_by_operation: Mapping[str, str | None], slot_stream: SlotStream
) -> tuple[str, ...]:
    """What an UPDATE may become before the subscription receives it: `insert`, `update`, `delete` or `nothing`.

    For example, an UPDATE after which the row no longer matches the row filter becomes a DELETE. If the publisher
    evaluates the row filters, it has already turned such an UPDATE into a DELETE. The UPDATEs that it sends are
    received as UPDATEs.
    """
    if "update" not in filters_by_operation:
        return () if slot_stream.filtered else ("nothing",)
    if slot_stream.filtered or filters_by_operation["update"] is None:
        return ("update",)
    return (
        *sorted(operation for operation in UPDATE_TRANSFORMATION.values() if operation is not None),
        "nothing",
    )


def _join_filters(row_filters: Sequence[str] | None) -> str | None:
    """Join row filters with OR, since a row is sent if it matches one of them. None means that every row is sent."""
    return " OR ".join(row_filters) if row_filters is not None else None


def _describe_identity(table: Table) -> str:
    """Describe the replica identity of a table as psql does."""
    if table.replica_identity == "f":
        return "FULL"
    if not table.identity:
        return "DEFAULT, without a primary key" if table.replica_identity == "d" else "NOTHING"
    columns = ", ".join(quote_identifier(column) for column in table.identity)
    return f"{'INDEX' if table.replica_identity == 'i' else 'PRIMARY KEY'} ({columns})"


def _describe_publication(
    source_name: str, publication: Publication, catalog: Catalog
) -> PublicationDescription:
    r"""Describe a publication with the facts that psql shows for `\dRp+`."""
    entries_with_tables = [
        (entry, catalog.tables[entry.oid]) for entry in publication.tables if entry.oid in catalog.tables
    ]
    tables = [
        ListedTable(
            table.schema,
            table.name,
            None
            if entry.columns is None
            else tuple(a.name for a in table.attributes if a.name in entry.columns),
            entry.where,
        )
        for entry, table in entries_with_tables
    ]
    return PublicationDescription(
        source=source_name,
        name=publication.name,
        owner=publication.owner,
        all_tables=publication.all_tables,
        operations=tuple(o for o in OPERATIONS if o in publication.operations),
        generated_columns="stored" if publication.generated_columns == "s" else "none",
        via_root=publication.via_root,
        tables=tuple(sorted(tables, key=lambda t: (t.schema, t.name))),
        schemas=tuple(sorted(publication.schemas)),
        excluded=tuple(
            sorted((t.schema, t.name) for oid, t in catalog.tables.items() if oid in publication.excluded)
        ),
    )
