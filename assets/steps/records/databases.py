"""Records the database to which the replicas of a subscription belong, and compares it with the database of a connection.

Two configurations may use the same lake, and the same name for a subscription. Because of the record, neither of them
writes to the replicas of the other.

In: subscriptions, and a connection to their publisher
Out: nothing. Raises OtherDatabaseError if the replicas are of another database.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import psycopg

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.database import Database, find_database_name, read_present_database


class OtherDatabaseError(PgsieveError):
    """The replicas of a subscription belong to a database, and its source connects to another database."""


def record_database(connection: psycopg.Connection[Any], record: SubscriptionRecord) -> None:
    """Record that the replicas of a subscription belong to the connection's database.

    Raises OtherDatabaseError if they are of another one.
    """
    present_database = read_present_database(connection)
    _refuse_replicas_of_other_database(connection, record, present_database)
    record.change_state(lambda state: replace(state, database=str(present_database)))


def refuse_other_database(
    connection: psycopg.Connection[Any], lake: Lake, subscriptions: Collection[str]
) -> None:
    """Raise OtherDatabaseError if a subscription has replicas of another database than the connection's."""
    present_database = read_present_database(connection)
    for name in subscriptions:
        _refuse_replicas_of_other_database(connection, SubscriptionRecord(lake, name), present_database)


def _refuse_replicas_of_other_database(
    connection: psycopg.Connection[Any], record: SubscriptionRecord, connected_database: Database
) -> None:
    """Raise OtherDatabaseError if the replicas of a subscription are of another database that still exists."""
    subscription, state = record.subscription, record.read_state()
    table_states = TableStates(record.lake, subscription)
    if state.database in {None, str(connected_database)} or not table_states.may_have_replicas():
        return
    recorded_database = Database.parse(state.database)
    if recorded_database.system_identifier == connected_database.system_identifier:
        if (name := find_database_name(connection, recorded_database)) is None:
            return
        owner = f'of the database "{name}" of this cluster'
    else:
        owner = f"of a database of the cluster with system identifier {recorded_database.system_identifier}"
    raise OtherDatabaseError(
        f'subscription "{subscription}": its replicas are {owner}, and not of "{connection.info.dbname}"',
        hint="give the subscription another name, or take another `lake`; or where the replicas are not needed any more:"
        f" `pgsieve drop {subscription} --leave-slot --delete-tables`, then `pgsieve run`",
        sqlstate="55000",
    )
