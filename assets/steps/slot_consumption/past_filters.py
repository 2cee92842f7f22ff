"""Reads a slot although the row filters of some tables fail at the publisher.

A table whose filter has failed is set aside: it gets no more changes until it is copied again. But pgoutput would still
evaluate its filter, and fail again. So pgsieve creates a publication that lists these tables without a filter. If a
session requests this publication, too, pgoutput sends all changes of the tables and evaluates no filter. pgsieve's
query of the slot leaves these changes out. Before such a table is copied again, it is removed from the publication.

In: the states of the tables of a stream (a slot with its subscriptions), and how its slot is read
Out: the publication, and a `Peek` (a reading of the slot that confirms nothing) with it

Raises SourceError and LakeError.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.appending import Peek
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.publications.catalog import Catalog, Table
from pgsieve.decoding.publications.published_tables import ReplicatedTable, find_replicated_tables
from pgsieve.decoding.publications.routing import find_routes
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.capture import find_own_publications
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.failing_filter import (
    find_failing_table,
    make_unfiltered_statements,
    publish_unfiltered,
)
from pgsieve.resources.postgres.peeks import find_decoding_error
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.waits import BRIEF_SECONDS, limit_wait


def publish_set_aside_tables(
    connection: psycopg.Connection[Any], slot_stream: SlotStream, lake: Lake, catalog: Catalog, log: Log
) -> None:
    """Make the publication list the tables that are set aside and have a row filter. If there are none, drop it.

    If the role may not alter the publication, or if the user has a publication of this name, that is only logged. In
    that case a transaction in which a filter fails makes pgsieve copy all tables again.
    """
    (subscription,) = slot_stream.subscriptions
    tables = [
        replicated.table
        for replicated in _find_set_aside_tables(slot_stream, lake, catalog).values()
        if replicated.row_filters is not None
    ]
    publications = slot_stream.publications(catalog, subscription)
    statements = make_unfiltered_statements(slot_stream.unfiltered_publication, tables, publications, catalog)
    if not statements:
        return
    if slot_stream.unfiltered_publication in catalog.publications and not find_own_publications(
        connection, [slot_stream.unfiltered_publication]
    ):
        if tables:
            log(
                f'publication "{slot_stream.unfiltered_publication}" is not pgsieve\'s: until it is renamed, each transaction in which a row filter fails makes'
                f" pgsieve copy all tables of {subscription} again"
            )
        return
    try:
        with limit_wait(slot_stream.source, connection, BRIEF_SECONDS):
            publish_unfiltered(
                connection, slot_stream.source.name, slot_stream.unfiltered_publication, statements
            )
    except SourceError as error:
        log(
            f"{error.message}: without this publication, each transaction in which a row filter fails makes pgsieve copy all tables of {subscription}"
            f" again; run as the tables' owner: {'; '.join(statements)}"
        )


def find_peek_past_filters(
    connection: psycopg.Connection[Any], peek: Peek, lake: Lake, end: int
) -> Peek | None:
    """Find out how to read the slot up to `end` without the tables that are set aside.

    Returns None in three cases: there is no publication for it; the publication lists a table that is no longer set
    aside; or the server refuses this query, too.
    """
    slot_stream, catalog = peek.slot_stream, read_present_catalog(connection)
    publication = catalog.publications.get(slot_stream.unfiltered_publication)
    if not slot_stream.filtered or publication is None:
        return None
    set_aside_tables = {
        replicated.table.oid: replicated.table
        for replicated in _find_set_aside_tables(slot_stream, lake, catalog).values()
    }
    listed_oids = {entry.oid for entry in publication.tables}
    if not listed_oids <= set_aside_tables.keys():
        return None  # A listed table is in use again, and has to be sent with its filter.
    excluded_oids = frozenset(
        oid for listed_oid in listed_oids for oid in _list_oids(set_aside_tables[listed_oid])
    )
    options = replace(
        peek.options, publications=(*peek.options.publications, slot_stream.unfiltered_publication)
    )
    unfiltered_peek = replace(peek, options=options, excluded_oids=excluded_oids)
    error = find_decoding_error(
        connection, slot_stream.source.name, slot_stream.slot, unfiltered_peek.query(end)
    )
    return unfiltered_peek if error is None else None


def find_failing_table_name(connection: psycopg.Connection[Any], peek: Peek, end: int) -> Name | None:
    """Find the table of the subscription whose row filter fails before `end`. None if that is not certain."""
    if (failing_name := find_failing_table(connection, peek.query(end))) is None:
        return None
    (subscription,) = peek.slot_stream.subscriptions
    catalog = read_present_catalog(connection)
    relations_by_oid = find_routes(catalog, peek.slot_stream.publications(catalog, subscription))
    names = {
        (relation.publish_as.schema, relation.publish_as.name)
        for oid, relation in relations_by_oid.items()
        if catalog.tables[oid].qualified_name == failing_name
    }
    return names.pop() if len(names) == 1 else None


def _find_set_aside_tables(
    slot_stream: SlotStream, lake: Lake, catalog: Catalog
) -> Mapping[Name, ReplicatedTable]:
    """Map the name of each table that is set aside, and is still published, to the table."""
    (subscription,) = slot_stream.subscriptions
    states = TableStates(lake, subscription).read_newest()
    set_aside_tables = {name for name, state in states.items() if state.state == SyncState.SET_ASIDE}
    if not set_aside_tables:
        return {}
    tables = find_replicated_tables(slot_stream.publications(catalog, subscription), catalog)
    return {name: replicated for name, replicated in tables.items() if name in set_aside_tables}


def _list_oids(table: Table) -> Sequence[int]:
    """The oids of a table and of its leaf partitions."""
    return table.oid, *table.leaves
