"""Makes sure that a problem affects only its table or its subscription, while the others of the stream go on.

In: a slot stream (a slot with its subscriptions) or a subscription, and the catalog of its publisher
Out: - the stream without the subscriptions that are refused
     - the catalog of a subscription, and the problems of its tables

A table with a problem waits in state `i` (to be copied), with the reason. If all subscriptions are refused, the first
problem is raised.
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
    find_locked_tables,
    find_tables_without_identity,
    find_unevaluable_filters,
)
from pgsieve.assets.steps.validation.layouts import find_shared_folders
from pgsieve.assets.steps.validation.rights import find_denied_tables
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import LockedTableError


def select_sound_subscriptions(
    connection: psycopg.Connection[Any], slot_stream: SlotStream, server_catalog: Catalog
) -> tuple[SlotStream, Catalog]:
    """Select the subscriptions of a stream that are not refused now.

    Out: - the stream with only these subscriptions
         - the catalog of the server, with those publications of pgsieve.yaml that have no problem

    A refused subscription is treated as if pgsieve.yaml did not have it. When its problem is solved, its tables are
    copied again. Raises the first problem if all subscriptions are refused.
    """
    examination = Examination(connection, slot_stream, server_catalog)
    sound_slot_stream = examination.select_sound_subscriptions()
    if not sound_slot_stream.subscriptions:
        for name in slot_stream.subscriptions:
            if (obstacle := examination.find_obstacle(name)) is not None:
                raise obstacle
    return sound_slot_stream, examination.catalog


def make_subscription_catalog(
    connection: psycopg.Connection[Any], subscription: Subscription, server_catalog: Catalog
) -> Catalog:
    """Return the server's catalog with the publications that pgsieve.yaml defines for a subscription.

    If the subscription is refused, its problem is raised.
    """
    slot_stream = subscription.slot_stream
    names = slot_stream.subscriptions[subscription.name]
    definitions = {
        name: slot_stream.defined_publications[name]
        for name in names
        if name in slot_stream.defined_publications
    }
    own_slot_stream = replace(
        slot_stream, subscriptions={subscription.name: names}, defined_publications=definitions
    )
    return select_sound_subscriptions(connection, own_slot_stream, server_catalog)[1]


def find_table_problems(subscription: Subscription, catalog: Catalog) -> dict[Name, PgsieveError]:
    """Map each table of a subscription that cannot be replicated to an error."""
    problem_by_table: dict[Name, PgsieveError] = {}
    for name, replicated_table in subscription.tables(catalog).items():
        try:
            # Raises the reason why the table cannot be replicated.
            subscription.definition(replicated_table, catalog)
        except PgsieveError as error:
            problem_by_table[name] = error
    problem_by_table |= find_shared_folders(subscription, subscription.tables(catalog))
    problem_by_table |= dict(find_locked_tables(subscription.slot_stream, subscription.name, catalog))
    for table, problem in find_unevaluable_filters(subscription.slot_stream, subscription.name, catalog):
        problem_by_table.setdefault((table.schema, table.name), problem)
    for name, problem in find_tables_without_identity(subscription.slot_stream, subscription.name, catalog):
        problem_by_table.setdefault(name, problem)
    return problem_by_table


def find_unreadable_tables(
    connection: psycopg.Connection[Any], subscription: Subscription, tables: Collection[ReplicatedTable]
) -> dict[Name, PgsieveError]:
    """Map each table that cannot be copied, because the role lacks a right, to an error."""
    return find_denied_tables(connection, tables) if tables and subscription.copy_data else {}


def hold_back_tables(
    subscription: Subscription, lake: Lake, problem_by_table: Mapping[Name, PgsieveError]
) -> bool:
    """Record that the tables with problems have to be copied, with the reason.

    The changes of these tables are left out until the problem is solved. After that, the tables are copied. A table
    that another session has locked does not have to wait if it is ready. A table that is set aside after a failure
    stays so. With `disable_on_error`, a problem other than a lock disables the subscription. Returns True in that case.
    """
    state_by_table, waiting_states = TableStates(lake, subscription.name).read_newest(), []
    lasting_problem_by_table = {
        name: error for name, error in problem_by_table.items() if not isinstance(error, LockedTableError)
    }
    for name, error in problem_by_table.items():
        state = state_by_table.get(name, TableState(*name, SyncState.REMOVED))
        reason = describe_waiting_reason(error)
        if name not in lasting_problem_by_table and state.state == SyncState.READY:
            continue
        if state.state != SyncState.SET_ASIDE and (state.state, state.reason) != (
            SyncState.INITIALIZE,
            reason,
        ):
            waiting_states.append(replace(state, state=SyncState.INITIALIZE, reason=reason))
    # If another process writes a state of a table meanwhile, this table is left out, and the next run holds it back.
    TableStates(lake, subscription.name).append_unless_changed(waiting_states)
    if is_disabled := bool(lasting_problem_by_table) and subscription.disable_on_error:
        SubscriptionRecord(lake, subscription.name).disable(
            next(iter(lasting_problem_by_table.values())).message
        )
    return is_disabled


def describe_waiting_reason(error: PgsieveError) -> str:
    """Describe why a table waits, if it waits because of an error. This text is recorded for the table."""
    hint = f"; {error.hint}" if error.hint else ""
    return f"{error.message}{hint}; it is copied by the first run after that is mended"
