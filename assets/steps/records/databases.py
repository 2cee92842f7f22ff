"""Records the database of a subscription's replicas, and compares it with the database of the connection.

Two configurations may use the same lake and the same name for their subscriptions. The record keeps each from writing
to the other's replicas. In: subscriptions, and a connection to their publisher. Raises OtherDatabaseError.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import psycopg

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, SubscriptionState
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.database import Database, name_of, present_database


class OtherDatabaseError(PgsieveError):
    """The replicas of a subscription are of another database than its source."""


def record_database(connection: psycopg.Connection[Any], record: SubscriptionRecord) -> None:
    """Record that the replicas of a subscription are of this database; raises OtherDatabaseError if they are of another."""
    present = present_database(connection)
    state = _checked_state(connection, record, present)
    record.set(replace(state, database=str(present)))


def refuse_other_database(
    connection: psycopg.Connection[Any], lake: Lake, subscriptions: Collection[str]
) -> None:
    """Raise OtherDatabaseError if the replicas of a subscription are of another database."""
    present = present_database(connection)
    for name in subscriptions:
        _checked_state(connection, SubscriptionRecord(lake, name), present)


def _checked_state(
    connection: psycopg.Connection[Any], record: SubscriptionRecord, present: Database
) -> SubscriptionState:
    """A subscription's state; raises OtherDatabaseError where its replicas are of another database that still exists."""
    subscription, state = record.subscription, record.state()
    states = TableStates(record.lake, subscription)
    if state.database in {None, str(present)} or not states.may_have_replicas():
        return state
    recorded_database = Database.parse(state.database)
    if recorded_database.system_identifier == present.system_identifier:
        if (name := name_of(connection, recorded_database)) is None:
            return state
        owner = f'of the database "{name}" of this cluster'
    else:
        owner = f"of a database of the cluster with system identifier {recorded_database.system_identifier}"
    raise OtherDatabaseError(
        f'subscription "{subscription}": its replicas are {owner}, and not of "{connection.info.dbname}"',
        hint="give the subscription another name, or take another `lake`; or where the replicas are not needed any more:"
        f" `pgsieve drop {subscription} --leave-slot --delete-tables`, then `pgsieve run`",
        sqlstate="55000",
    )
