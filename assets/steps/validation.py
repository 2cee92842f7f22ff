"""What PostgreSQL or pgsieve would refuse, found before anything is created.

In: a feed's subscriptions and its publisher. Out: errors: definitions in pgsieve.yaml that CREATE PUBLICATION
would refuse, publications that are missing or disagree, changes that the publisher would refuse for the sake of
the replica identity, and row filters that Spark cannot evaluate exactly.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psycopg

from assets.steps.row_filters import row_filter, table_filter
from assets.steps.subscription import Feed
from decoding.definition import DefinedPublication
from decoding.errors import PgsieveError, UnsupportedFilterError
from decoding.generated_columns import expanded
from decoding.publication import (
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    PublishedRelation,
    Table,
    published_relation,
    replicated_tables,
)
from decoding.replica_identity import refused_changes
from decoding.routing import changed_relations
from resources.expressions import RejectedFilterError, UncheckedFilterError, analysis, filter_columns
from resources.postgres import why_missing

#: The columns that the row filters of pgsieve.yaml read, as the publisher analysed them.
_Read = dict[tuple[int, str], frozenset[str]]


class Examination:
    """One look at a feed's publisher; `catalog` has the publications of pgsieve.yaml that are sound, too."""

    def __init__(self, connection: psycopg.Connection[Any], feed: Feed, server: Catalog) -> None:
        self._feed = feed
        self._read: _Read = {}
        self.unchecked: UncheckedFilterError | None = None
        self.refused: list[PgsieveError] = []
        sound = {}
        for name, defined in feed.defined.items():
            problems = list(self._definition_problems(connection, defined, server))
            self.refused += problems
            if not problems:
                sound[name] = self._analysed(defined.resolve(server), server)
        self.catalog = replace(server, publications={**server.publications, **sound})

    def _definition_problems(
        self, connection: psycopg.Connection[Any], defined: DefinedPublication, server: Catalog
    ) -> Iterator[PgsieveError]:
        missing = defined.missing(server)
        for table in missing:
            yield why_missing(connection, defined.name, table.schema, table.name)
        if missing:
            return
        if not any(table.where for table in defined.tables):
            yield from defined.problems(server, lambda _table, _where: None)
            return

        def verdict(table: Table, where: str) -> PublicationError | None:
            try:
                self._read[table.oid, where] = filter_columns(connection, table, where)
            except RejectedFilterError as error:
                return error
            return None

        try:
            with analysis(connection):
                yield from list(defined.problems(server, verdict))
        except UncheckedFilterError as error:
            self.unchecked = error
            yield from defined.problems(server, lambda _table, _where: None)

    def _analysed(self, publication: Publication, catalog: Catalog) -> Publication:
        return replace(publication, tables=tuple(self._entry(entry, catalog) for entry in publication.tables))

    def _entry(self, entry: PublicationTable, catalog: Catalog) -> PublicationTable:
        if entry.where is None:
            return entry
        read = self._read.get((entry.oid, entry.where))
        if read is None:
            with suppress(PgsieveError):
                read = table_filter(catalog.tables[entry.oid], entry.where).columns
        return replace(entry, filter_columns=read)

    def subscription_problems(self, subscription: str) -> Iterator[PgsieveError]:
        """What stands in the way of a subscription whose publications are there."""
        catalog = self.catalog
        names = self._feed.subscriptions[subscription]
        if any(name in self._feed.defined and name not in catalog.publications for name in names):
            return  # what is wrong with its definition is in `refused`
        try:
            publications = catalog.select(names)
            replicated_tables(publications, catalog)
        except PublicationError as error:
            yield error
            return
        for table in changed_relations(catalog):
            try:
                sent = published_relation(table, publications, catalog)
            except PublicationError as error:
                yield error
                continue
            if sent is not None and not self._feed.filtered:
                yield from _filters_beyond_spark(sent)

    def refused_changes(self, subscription: str) -> Iterator[tuple[Publication, PgsieveError]]:
        """The publications because of which the publisher refuses UPDATE or DELETE of a table, each with its error."""
        for name in self._feed.subscriptions[subscription]:
            if (publication := self.catalog.publications.get(name)) is not None:
                for table in changed_relations(self.catalog):
                    for error in refused_changes(table, publication, self.catalog):
                        yield publication, error

    def problems(self, subscription: str) -> Iterator[PgsieveError]:
        """Everything that stands in the way of a subscription, each problem once."""
        named = self._feed.subscriptions[subscription]
        missing = self.catalog.missing(n for n in named if n not in self._feed.defined)
        found = [
            *([missing] if missing else []),
            *self.subscription_problems(subscription),
            *(e for _, e in self.refused_changes(subscription)),
        ]
        yield from {str(error): error for error in found}.values()


def refuse_unsound(connection: psycopg.Connection[Any], feed: Feed, server: Catalog) -> Catalog:
    """The catalog with the publications of pgsieve.yaml; raises the first problem that has to be mended.

    The publisher itself refuses an UPDATE that its own publication does not allow; a publication that
    pgsieve.yaml defines is held to the same rule here.
    """
    examined = Examination(connection, feed, server)
    for error in examined.refused:
        raise error
    for subscription in feed.subscriptions:
        for error in examined.subscription_problems(subscription):
            raise error
        for publication, error in examined.refused_changes(subscription):
            if publication.name in feed.defined:
                raise error
    return examined.catalog


def _filters_beyond_spark(sent: PublishedRelation) -> Iterator[PgsieveError]:
    for operation, texts in sent.filters.items():
        for text in texts or ():
            try:
                read = row_filter(sent, text).columns
                if operation != "insert" and expanded(text, sent.publish_as) != text:
                    _refuse_uncomputable(sent, read)
            except PgsieveError as error:
                yield error


def _refuse_uncomputable(sent: PublishedRelation, read: frozenset[str]) -> None:
    """Raise where an old tuple lacks what a stored generated column of the replica identity is computed from."""
    if lacking := read - set(sent.relation.identity):
        raise UnsupportedFilterError(
            f"row filter of {sent.publish_as.qualified} cannot be evaluated outside PostgreSQL: it reads a generated"
            f" column, and old rows come without what that is computed from ({', '.join(sorted(lacking))})",
            hint="use row_filter: publisher, or REPLICA IDENTITY FULL",
        )
