"""Examines a publisher for all that PostgreSQL or pgsieve would refuse, before anything is created.

In: the subscriptions of a stream (the readers of the same slot), and their publisher
Out: - errors of subscriptions: definitions in pgsieve.yaml that CREATE PUBLICATION would refuse; publications that are
       missing or contradict each other; changes that the publisher would refuse because of the replica identity
     - errors of single tables: row filters that cannot be evaluated exactly; UPDATEs and DELETEs whose rows the replica
       could not find; locks
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import psycopg

from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.errors import PgsieveError, UnsupportedFilterError
from pgsieve.decoding.publications.catalog import (
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    Table,
)
from pgsieve.decoding.publications.definition import DefinedPublication
from pgsieve.decoding.publications.filters import has_unsent_columns, parse_table_filter
from pgsieve.decoding.publications.published_tables import (
    PublishedRelation,
    find_published_relation,
    find_replicated_tables,
)
from pgsieve.decoding.publications.replica_identity import find_publisher_errors, find_subscriber_error
from pgsieve.decoding.publications.routing import list_relations_with_rows
from pgsieve.decoding.row_filters.letter_case import MappingRequests
from pgsieve.resources.postgres.case_mappings import add_case_mappings
from pgsieve.resources.postgres.catalog import make_missing_relation_error
from pgsieve.resources.postgres.errors import LOCK_TIMEOUT_SQLSTATE, LockedTableError
from pgsieve.resources.postgres.filter_analysis import (
    RejectedFilterError,
    UncheckedFilterError,
    begin_analysis,
    read_filter_columns,
)

#: Maps the oid of a table and a row filter of pgsieve.yaml to the columns that the filter reads, as the publisher says.
_ColumnsByFilter = dict[tuple[int, str], frozenset[str]]


class Examination:
    """The examination of a stream's publisher.

    - `catalog`: the catalog of the server, with those publications of pgsieve.yaml that have no problem
    - `problems_by_publication`: maps the other publications of pgsieve.yaml to their problems
    - `check_failure`: the reason why the publisher could not check the row filters of pgsieve.yaml; None if it could
    """

    def __init__(
        self, connection: psycopg.Connection[Any], slot_stream: SlotStream, server_catalog: Catalog
    ) -> None:
        self._slot_stream = slot_stream
        self._columns_by_filter: _ColumnsByFilter = {}
        self.check_failure: UncheckedFilterError | None = None
        self.problems_by_publication: dict[str, list[PgsieveError]] = {}
        sound_publications = {}
        for name, definition in slot_stream.defined_publications.items():
            problems = list(self._find_definition_problems(connection, definition, server_catalog))
            if problems:
                self.problems_by_publication[name] = problems
            else:
                sound_publications[name] = self._add_filter_columns(
                    definition.resolve(server_catalog), server_catalog
                )
        catalog = replace(server_catalog, publications={**server_catalog.publications, **sound_publications})
        if not slot_stream.filtered:
            subscribed_names = {name for names in slot_stream.subscriptions.values() for name in names}
            catalog = add_case_mappings(connection, catalog, subscribed_names)
        self.catalog = catalog

    @property
    def definition_problems(self) -> list[PgsieveError]:
        """The problems of all publications that pgsieve.yaml defines."""
        return [problem for problems in self.problems_by_publication.values() for problem in problems]

    def _find_definition_problems(
        self, connection: psycopg.Connection[Any], definition: DefinedPublication, server_catalog: Catalog
    ) -> Iterator[PgsieveError]:
        """Yields the problems of a publication that pgsieve.yaml defines."""
        missing_tables = definition.list_missing_tables(server_catalog)
        for schema, name in missing_tables:
            is_excluded = (schema, name) in definition.excluded
            yield make_missing_relation_error(
                connection, definition.name, schema, name, is_excluded=is_excluded
            )
        if missing_tables:
            return
        if not any(table.where for table in definition.tables):
            yield from definition.list_errors(server_catalog, lambda _table, _where: None)
            return

        def check_filter(table: Table, where: str) -> PublicationError | None:
            try:
                self._columns_by_filter[table.oid, where] = read_filter_columns(connection, table, where)
            except RejectedFilterError as error:
                return error
            return None

        try:
            with begin_analysis(connection):
                yield from list(definition.list_errors(server_catalog, check_filter))
        except UncheckedFilterError as error:
            self.check_failure = error
            yield from definition.list_errors(server_catalog, lambda _table, _where: None)

    def _add_filter_columns(self, publication: Publication, catalog: Catalog) -> Publication:
        """Return a publication with the names of the columns that its row filters read."""
        return replace(
            publication,
            tables=tuple(self._add_columns_to_entry(entry, catalog) for entry in publication.tables),
        )

    def _add_columns_to_entry(self, entry: PublicationTable, catalog: Catalog) -> PublicationTable:
        """Return a table of a publication with the names of the columns that its row filter reads."""
        if entry.where is None:
            return entry
        columns = self._columns_by_filter.get((entry.oid, entry.where))
        if columns is None:
            with suppress(PgsieveError):
                columns = parse_table_filter(
                    catalog.tables[entry.oid], entry.where, MappingRequests()
                ).columns
        return replace(entry, filter_columns=columns)

    def find_obstacle(self, subscription: str) -> PgsieveError | None:
        """Find the reason why nothing of a subscription can be replicated.

        None if there is no such reason; single tables may have problems even then. UPDATEs or DELETEs that a table's
        replica identity does not cover are such a reason only in a publication of pgsieve.yaml. In a publication of the
        server, the server itself refuses these statements.
        """
        for name in self._slot_stream.subscriptions[subscription]:
            for refusal in self.problems_by_publication.get(name, ()):
                return refusal
        for problem in self.find_publication_problems(subscription):
            return problem
        for publication, problem in self.find_refused_changes(subscription):
            if publication.name in self._slot_stream.defined_publications:
                return problem
        return None

    def select_sound_subscriptions(self) -> SlotStream:
        """The stream with only those subscriptions for which `find_obstacle` finds nothing."""
        return replace(
            self._slot_stream,
            subscriptions={
                name: publications
                for name, publications in self._slot_stream.subscriptions.items()
                if self.find_obstacle(name) is None
            },
        )

    def find_publication_problems(self, subscription: str) -> Iterator[PgsieveError]:
        """Yields the problems of a subscription's publications.

        Yields nothing if `problems_by_publication` already has a problem of one of them.
        """
        catalog = self.catalog
        names = self._slot_stream.subscriptions[subscription]
        if any(
            name in self._slot_stream.defined_publications and name not in catalog.publications
            for name in names
        ):
            return  # The problems of the publication are in `problems_by_publication`.
        try:
            publications = catalog.select_publications(names)
            # Only an error of this call matters, not its result.
            find_replicated_tables(publications, catalog)
        except PublicationError as error:
            yield error
            return
        for table in list_relations_with_rows(catalog):
            try:
                find_published_relation(table, publications, catalog)
            except PublicationError as error:
                yield error

    def find_filter_problems(self, subscription: str) -> Iterator[PgsieveError]:
        """Yields the errors of row filters that cannot be evaluated; nothing if a publication has problems."""
        with suppress(PublicationError):
            for _, error in find_unevaluable_filters(self._slot_stream, subscription, self.catalog):
                yield error

    def find_lock_problems(self, subscription: str) -> Iterator[PgsieveError]:
        """Yields the errors of tables that are locked; nothing if a publication has problems."""
        with suppress(PublicationError):
            for _, error in find_locked_tables(self._slot_stream, subscription, self.catalog):
                yield error

    def find_identity_problems(self, subscription: str) -> Iterator[PgsieveError]:
        """Yields the errors of tables whose replicas could not find the rows that UPDATEs and DELETEs change.

        Yields nothing if a publication has problems.
        """
        with suppress(PublicationError):
            for _, error in find_tables_without_identity(self._slot_stream, subscription, self.catalog):
                yield error

    def find_refused_changes(self, subscription: str) -> Iterator[tuple[Publication, PgsieveError]]:
        """Yields the publications for which the publisher refuses UPDATEs or DELETEs of a table, each with the error."""
        for name in self._slot_stream.subscriptions[subscription]:
            if (publication := self.catalog.publications.get(name)) is not None:
                for table in list_relations_with_rows(self.catalog):
                    for error in find_publisher_errors(table, publication, self.catalog):
                        yield publication, error

    def find_problems(self, subscription: str) -> Iterator[PgsieveError]:
        """Yields all problems of a subscription, each once, except `definition_problems`."""
        names = self._slot_stream.subscriptions[subscription]
        missing_error = self.catalog.make_missing_publication_error(
            name for name in names if name not in self._slot_stream.defined_publications
        )
        problems = [
            *([missing_error] if missing_error else []),
            *self.find_publication_problems(subscription),
            *self.find_lock_problems(subscription),
            *self.find_filter_problems(subscription),
            *self.find_identity_problems(subscription),
            *(error for _, error in self.find_refused_changes(subscription)),
        ]
        yield from {str(error): error for error in problems}.values()


def find_unevaluable_filters(
    slot_stream: SlotStream, subscription: str, catalog: Catalog
) -> Iterator[tuple[Table, PgsieveError]]:
    """Yields the tables of a subscription with a row filter that pgsieve cannot evaluate, each with the error.

    Yields nothing if the publisher filters the stream's changes.
    """
    if slot_stream.filtered:
        return
    publications = slot_stream.publications(catalog, subscription)
    for table in list_relations_with_rows(catalog):
        with suppress(PublicationError):
            published_relation = find_published_relation(table, publications, catalog)
            if published_relation is not None and published_relation.publish_as.oid not in catalog.locked:
                yield from (
                    (published_relation.publish_as, error)
                    for error in _find_filter_errors(published_relation)
                )


def find_locked_tables(
    slot_stream: SlotStream, subscription: str, catalog: Catalog
) -> Iterator[tuple[Name, LockedTableError]]:
    """Yields the tables of a subscription that another session has locked, each with the error.

    Because of the lock, their row filters or generated columns cannot be read.
    """
    if not catalog.locked:
        return
    publications = slot_stream.publications(catalog, subscription)
    for name, replicated_table in find_replicated_tables(publications, catalog).items():
        table = replicated_table.table
        for oid in {table.oid, *table.ancestors, *table.leaves} & catalog.locked.keys():
            yield (
                name,
                LockedTableError(
                    f'table "{table.qualified_name}": its row filters and generated columns cannot be read while'
                    f' "{catalog.tables[oid].qualified_name}" is locked exclusively by {catalog.locked[oid]}',
                    hint="end the transaction, or wait until it has ended",
                    sqlstate=LOCK_TIMEOUT_SQLSTATE,
                ),
            )


def find_tables_without_identity(
    slot_stream: SlotStream, subscription: str, catalog: Catalog
) -> Iterator[tuple[Name, PgsieveError]]:
    """Yields the tables whose replicas could not find the rows that UPDATEs and DELETEs change, each with the error."""
    publications = slot_stream.publications(catalog, subscription)
    for name, replicated_table in find_replicated_tables(publications, catalog).items():
        with suppress(PublicationError):
            if (error := find_subscriber_error(replicated_table, publications, catalog)) is not None:
                yield name, error


def _find_filter_errors(published_relation: PublishedRelation) -> Iterator[PgsieveError]:
    """Yields an error for each row filter of a relation that pgsieve cannot evaluate."""
    for operation, texts in published_relation.filters.items():
        for text in texts or ():
            columns = _find_filter_columns(published_relation.publish_as, text)
            if isinstance(columns, PgsieveError):
                yield columns
                continue
            try:
                if operation != "insert" and has_unsent_columns(published_relation.publish_as, text):
                    _refuse_incomplete_old_tuples(published_relation, columns)
            except PgsieveError as error:
                yield error


@lru_cache(maxsize=4096)  # `pgsieve run --follow` calls this again and again.
def _find_filter_columns(table: Table, text: str) -> frozenset[str] | PgsieveError:
    """Find the columns that a row filter reads. Returns the error if the filter cannot be evaluated."""
    try:
        return parse_table_filter(table, text).columns
    except PgsieveError as error:
        return error


def _refuse_incomplete_old_tuples(published_relation: PublishedRelation, columns: frozenset[str]) -> None:
    """Raise UnsupportedFilterError if old tuples do not have the columns from which a generated column is computed."""
    if missing_columns := columns - set(published_relation.relation.identity):
        raise UnsupportedFilterError(
            f"row filter of {published_relation.publish_as.quoted_name} cannot be evaluated outside PostgreSQL: it reads a generated"
            f" column, and old rows lack the columns from which it is computed ({', '.join(sorted(missing_columns))})",
            # `row_filter: publisher` would not help, so the hint does not name it. With it PostgreSQL demands that the
            # generated column is in the replica identity. Changes do not have the column's value, so pgsieve could not
            # find the rows that they update or delete.
            hint="use REPLICA IDENTITY FULL, or publish only inserts",
        )
