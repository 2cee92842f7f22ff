"""Limits the effect of a problem: only its table or its subscription waits, and the others of the feed continue.

In: a feed or a subscription, and its publisher's catalog. Out: the feed without refused subscriptions, a subscription's
catalog, and the problems of its tables. A table with a problem waits in state `i` with the reason. Raises a problem
that all subscriptions have.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import psycopg

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.steps.validation.examination import (
    Examination,
    locked_tables,
    unevaluable_filters,
    unfound_tables,
)
from pgsieve.assets.steps.validation.layouts import shared_folders
from pgsieve.assets.steps.validation.rights import denied_tables
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import LockedTableError


def sound_part(connection: psycopg.Connection[Any], feed: Feed, server: Catalog) -> tuple[Feed, Catalog]:
    """The feed without the subscriptions that are refused now, and the catalog with the publications without a problem.

    A refused subscription counts as missing in pgsieve.yaml: once its problem is solved, its tables are copied again.
    Raises the first problem if every subscription is refused.
    """
    examination = Examination(connection, feed, server)
    obstacles = {name: examination.obstacle(name) for name in feed.subscriptions}
    sound = {name: feed.subscriptions[name] for name, obstacle in obstacles.items() if obstacle is None}
    for obstacle in obstacles.values():
        if obstacle is not None and not sound:
            raise obstacle
    return replace(feed, subscriptions=sound), examination.catalog


def sound_catalog(
    connection: psycopg.Connection[Any], subscription: Subscription, server: Catalog
) -> Catalog:
    """The catalog with the publications that pgsieve.yaml defines for a subscription; raises a problem of one of them."""
    feed = subscription.feed
    names = feed.subscriptions[subscription.name]
    definitions = {name: feed.defined[name] for name in names if name in feed.defined}
    own_feed = replace(feed, subscriptions={subscription.name: names}, defined=definitions)
    return sound_part(connection, own_feed, server)[1]


def table_problems(subscription: Subscription, catalog: Catalog) -> dict[Name, PgsieveError]:
    """The errors of single tables of a subscription that cannot be replicated."""
    problems: dict[Name, PgsieveError] = {}
    for name, replicated in subscription.tables(catalog).items():
        try:
            subscription.definition(replicated, catalog)
        except PgsieveError as error:
            problems[name] = error
    problems |= shared_folders(subscription, subscription.tables(catalog))
    problems |= dict(locked_tables(subscription.feed, subscription.name, catalog))
    for table, problem in unevaluable_filters(subscription.feed, subscription.name, catalog):
        problems.setdefault((table.schema, table.name), problem)
    for name, problem in unfound_tables(subscription.feed, subscription.name, catalog):
        problems.setdefault(name, problem)
    return problems


def unreadable_tables(
    connection: psycopg.Connection[Any], subscription: Subscription, tables: Collection[ReplicatedTable]
) -> dict[Name, PgsieveError]:
    """The tables that cannot be copied because the role lacks a right, each with its error."""
    return denied_tables(connection, tables) if tables and subscription.copy_data else {}


def hold_back(subscription: Subscription, lake: Lake, problems: Mapping[Name, PgsieveError]) -> bool:
    """Mark the tables with problems as to be copied, with the reason; returns whether the subscription was disabled.

    Their changes are left out until the problem is solved; then they are copied. A ready table that is only locked does
    not wait. With `disable_on_error` a problem disables the subscription.
    """
    states, waiting = TableStates(lake, subscription.name).newest(), []
    lasting = {name: error for name, error in problems.items() if not isinstance(error, LockedTableError)}
    for name, error in problems.items():
        state = states.get(name, TableState(*name, SyncState.REMOVED))
        reason = waiting_reason(error)
        if name not in lasting and state.state == SyncState.READY:
            continue
        if state.state != SyncState.SET_ASIDE and (state.state, state.reason) != (
            SyncState.INITIALIZE,
            reason,
        ):
            waiting.append(replace(state, state=SyncState.INITIALIZE, reason=reason))
    TableStates(lake, subscription.name).append(waiting)
    if is_disabled := bool(lasting) and subscription.disable_on_error:
        SubscriptionRecord(lake, subscription.name).disable(next(iter(lasting.values())).message)
    return is_disabled


def waiting_reason(error: PgsieveError) -> str:
    """The reason in the state of a table that waits because of an error."""
    hint = f"; {error.hint}" if error.hint else ""
    return f"{error.message}{hint}; it is copied by the first run after that is mended"
