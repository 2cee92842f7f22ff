"""Makes sure that a problem only affects its table or its subscription, and the others of the stream go on.

In: a slot stream (a slot with its subscriptions) or a subscription, and the catalog of its publisher
Out: - the stream without the subscriptions that are refused
     - the catalog of a subscription, and the problems of its tables

A table with a problem waits in state `i` (to be copied), with the reason. If all subscriptions have a problem, it is
raised.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import psycopg

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import SlotStream, Subscription
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


def sound_part(
    connection: psycopg.Connection[Any], slot_stream: SlotStream, server: Catalog
) -> tuple[SlotStream, Catalog]:
    """The stream without the subscriptions that are refused now, and the catalog with the publications that have no problem.

    A refused subscription is treated as if pgsieve.yaml did not have it. When its problem is solved, its tables are
    copied again. Raises the first problem if all subscriptions are refused.
    """
    examination = Examination(connection, slot_stream, server)
    obstacles = {name: examination.obstacle(name) for name in slot_stream.subscriptions}
    sound_subscriptions = {
        name: slot_stream.subscriptions[name] for name, obstacle in obstacles.items() if obstacle is None
    }
    for obstacle in obstacles.values():
        if obstacle is not None and not sound_subscriptions:
            raise obstacle
    return replace(slot_stream, subscriptions=sound_subscriptions), examination.catalog


def sound_catalog(
    connection: psycopg.Connection[Any], subscription: Subscription, server: Catalog
) -> Catalog:
    """The catalog, with the publications that pgsieve.yaml defines for a subscription.

    Raises the problem if the subscription is refused now.
    """
    slot_stream = subscription.slot_stream
    names = slot_stream.subscriptions[subscription.name]
    definitions = {name: slot_stream.defined[name] for name in names if name in slot_stream.defined}
    own_slot_stream = replace(slot_stream, subscriptions={subscription.name: names}, defined=definitions)
    return sound_part(connection, own_slot_stream, server)[1]


def table_problems(subscription: Subscription, catalog: Catalog) -> dict[Name, PgsieveError]:
    """Maps each table of a subscription that cannot be replicated to an error."""
    problems: dict[Name, PgsieveError] = {}
    for name, replicated in subscription.tables(catalog).items():
        try:
            subscription.definition(replicated, catalog)
        except PgsieveError as error:
            problems[name] = error
    problems |= shared_folders(subscription, subscription.tables(catalog))
    problems |= dict(locked_tables(subscription.slot_stream, subscription.name, catalog))
    for table, problem in unevaluable_filters(subscription.slot_stream, subscription.name, catalog):
        problems.setdefault((table.schema, table.name), problem)
    for name, problem in unfound_tables(subscription.slot_stream, subscription.name, catalog):
        problems.setdefault(name, problem)
    return problems


def unreadable_tables(
    connection: psycopg.Connection[Any], subscription: Subscription, tables: Collection[ReplicatedTable]
) -> dict[Name, PgsieveError]:
    """Maps each table that cannot be copied, because the role lacks a right, to an error."""
    return denied_tables(connection, tables) if tables and subscription.copy_data else {}


def hold_back(subscription: Subscription, lake: Lake, problems: Mapping[Name, PgsieveError]) -> bool:
    """Record that the tables with problems have to be copied, with the reason.

    Returns true if the subscription was disabled. The changes of these tables are left out until the problem is solved;
    after that they are copied. A table that is ready and only locked does not wait. With `disable_on_error`, a problem
    disables the subscription.
    """
    states, waiting_states = TableStates(lake, subscription.name).newest(), []
    lasting_problems = {
        name: error for name, error in problems.items() if not isinstance(error, LockedTableError)
    }
    for name, error in problems.items():
        state = states.get(name, TableState(*name, SyncState.REMOVED))
        reason = waiting_reason(error)
        if name not in lasting_problems and state.state == SyncState.READY:
            continue
        if state.state != SyncState.SET_ASIDE and (state.state, state.reason) != (
            SyncState.INITIALIZE,
            reason,
        ):
            waiting_states.append(replace(state, state=SyncState.INITIALIZE, reason=reason))
    TableStates(lake, subscription.name).append(waiting_states)
    if is_disabled := bool(lasting_problems) and subscription.disable_on_error:
        SubscriptionRecord(lake, subscription.name).disable(next(iter(lasting_problems.values())).message)
    return is_disabled


def waiting_reason(error: PgsieveError) -> str:
    """The reason that is recorded for a table that waits because of an error."""
    hint = f"; {error.hint}" if error.hint else ""
    return f"{error.message}{hint}; it is copied by the first run after that is mended"
