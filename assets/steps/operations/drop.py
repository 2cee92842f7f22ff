"""Drops a subscription: what pgsieve has created for it on the server, and its progress in the lake.

In: a subscription, and the other subscriptions of its stream (the readers of the same slot) that are in use
Out: a `DropResult`. Nothing of the subscription is left on the server. Its tables in the lake stay, unless their
     deletion is requested.

Capture publications are pgsieve's own publications, with which it reads a slot. The server's objects are dropped before
the lake records that, so a drop that was killed can be repeated. Raises SourceError if the server does not answer or
refuses, and OtherClusterError or OtherDatabaseError if the source is another cluster or database than before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg

from pgsieve.assets.steps.operations.registration import unregister
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.databases import refuse_other_database
from pgsieve.assets.steps.records.registered_names import RegisteredNames
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, SubscriptionState
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.slot_consumption.slot import (
    record_dropped_slot,
    refuse_other_cluster,
    refuse_slot_ahead,
    refuse_slot_of_another_lake,
)
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.validation.waiting import select_sound_subscriptions
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.routing import CapturePublication
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.paths import OWN_FOLDER
from pgsieve.resources.postgres.capture import (
    drop_publications,
    find_foreign_publications,
    find_own_publications,
    shrink_capture_publications,
)
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.slot import drop_slot


@dataclass(frozen=True)
class DropResult:
    """What was dropped; a field is None or empty if there was nothing.

    `kept_for` has the subscriptions that still need the slot.
    """

    slot: str | None
    altered: tuple[str, ...] = ()
    publications: tuple[str, ...] = ()
    #: Publications that have the name of a capture publication, although pgsieve has not created them. They stay.
    foreign: tuple[str, ...] = ()
    kept_for: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    unregistered: tuple[str, ...] = ()


def drop_subscription(
    subscription: Subscription, lake: Lake, *, leave_slot: bool, delete_tables: bool
) -> DropResult:
    """Drop a subscription. If it was already dropped, nothing happens.

    With `leave_slot`, the server is not contacted, as after ALTER SUBSCRIPTION ... SET (slot_name = NONE).
    """
    slot_stream, name = subscription.slot_stream, subscription.name
    if delete_tables:
        lake.require_delta_rs(
            PgsieveError(
                f'subscription "{name}": a lake that only Spark reaches cannot be deleted from here',
                hint=f"drop it without --delete-tables, then remove {lake.uri}/{name} with the store's own tools",
                sqlstate="0A000",
            )
        )
        _refuse_nested_lake(lake, name)
    other_subscriptions = tuple(
        other_name
        for other_name in slot_stream.subscriptions
        if other_name != name and TableStates(lake, other_name).is_in_use()
    )
    # If the lake cannot be written, this fails, before anything is dropped.
    if TableStates(lake, name).is_in_use():
        lake.access.try_writing()
    result = DropResult(None, kept_for=other_subscriptions)
    if not leave_slot:
        with slot_stream.source.connect() as connection:
            refuse_other_cluster(connection, slot_stream, lake)
            refuse_other_database(connection, lake, [name])
            refuse_slot_of_another_lake(connection, slot_stream, lake)
            command = f"SELECT pg_drop_replication_slot('{slot_stream.slot}')"
            refuse_slot_ahead(
                connection,
                slot_stream,
                lake,
                f"leave the slot to the other lake: `pgsieve drop {name} --leave-slot`; if there is no other lake, also run `{command}`",
            )
            lake.access.make_durable()
            result = _drop_on_server(connection, slot_stream, other_subscriptions)
    retry_after_conflict(lambda: _record_removed_tables(TableStates(lake, name)))()
    if lake.records.exists(SubscriptionRecord(lake, name).path):
        # The record of the folders stays, so that the replicas can still be read.
        SubscriptionRecord(lake, name).change_state(
            lambda state: SubscriptionState(folders=state.folders, deleted_up_to=state.deleted_up_to)
        )
    if not other_subscriptions and lake.records.exists(ChangeLog(lake, slot_stream).path):
        record_dropped_slot(lake, slot_stream)
    result = replace(result, unregistered=unregister(RegisteredNames(lake, name)))
    if delete_tables:
        folders = [
            f"{lake.uri}/{name}",
            *([] if other_subscriptions else [ChangeLog(lake, slot_stream).path.rpartition("/")[0]]),
        ]
        result = replace(result, folders=tuple(folder for folder in folders if lake.remove(folder)))
    return result


def _record_removed_tables(record: TableStates) -> None:
    """Record that all tables are removed. Raises OvertakenError if another process writes a state meanwhile."""
    base_version = record.read_version()
    record.append(
        [
            TableState(*state.name, SyncState.REMOVED)
            for state in record.read_newest().values()
            if state.state != SyncState.REMOVED
        ],
        base_version,
    )


def _refuse_nested_lake(lake: Lake, name: str) -> None:
    """Raise PgsieveError if another lake is in the folder of a subscription. It would be deleted with the folder."""
    folder = f"{lake.uri}/{name}"
    with lake.access.translate_errors(folder):
        has_lake = lake.store.has_folder(folder, OWN_FOLDER)
    if has_lake:
        raise PgsieveError(
            f'subscription "{name}": another lake is in its folder "{folder}", and would be deleted with it',
            hint="drop it without --delete-tables, then remove the folders of its tables with the store's own tools",
            sqlstate="55006",
        )


def _drop_on_server(
    connection: psycopg.Connection[tuple[object, ...]],
    slot_stream: SlotStream,
    other_subscriptions: Sequence[str],
) -> DropResult:
    """Drop the slot and the capture publications. If other subscriptions need them, only reduce the publications."""
    catalog = read_catalog(connection)
    if other_subscriptions:
        remaining_slot_stream = replace(
            slot_stream, subscriptions={s: slot_stream.subscriptions[s] for s in other_subscriptions}
        )
        altered_publications, dropped_publications = _reduce_publications_to_remaining(
            connection, remaining_slot_stream, catalog
        )
        return DropResult(
            None, altered_publications, dropped_publications, kept_for=tuple(other_subscriptions)
        )
    dropped_slot = (
        slot_stream.slot if drop_slot(connection, slot_stream.source.name, slot_stream.slot) else None
    )
    # This is read before publications are dropped, because their comments say which of them pgsieve has created.
    foreign_publications = (
        () if slot_stream.filtered else find_foreign_publications(connection, slot_stream.capture, catalog)
    )
    altered_publications, dropped_publications = _reduce_publications(connection, slot_stream, (), catalog)
    return DropResult(dropped_slot, altered_publications, dropped_publications, tuple(foreign_publications))


def _reduce_publications_to_remaining(
    connection: psycopg.Connection[tuple[object, ...]], remaining_slot_stream: SlotStream, catalog: Catalog
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reduce the capture publications to what the remaining subscriptions need.

    Nothing is changed if one of these subscriptions is refused now, because its needs are unknown then.
    """
    try:
        sound_stream, catalog = select_sound_subscriptions(connection, remaining_slot_stream, catalog)
    except PgsieveError:
        return (), ()
    if sound_stream.subscriptions.keys() < remaining_slot_stream.subscriptions.keys():
        return (), ()
    return _reduce_publications(
        connection, remaining_slot_stream, remaining_slot_stream.planned_capture(catalog), catalog
    )


def _reduce_publications(
    connection: psycopg.Connection[tuple[object, ...]],
    slot_stream: SlotStream,
    planned_publications: Sequence[CapturePublication],
    catalog: Catalog,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reduce the capture publications to the planned ones. Returns the names of the altered and of the dropped ones."""
    if slot_stream.filtered:
        names_to_drop = find_own_publications(connection, [slot_stream.unfiltered_publication])
        drop_publications(connection, slot_stream.source.name, names_to_drop)
        return (), tuple(names_to_drop)
    altered_publications, dropped_publications = shrink_capture_publications(
        connection, slot_stream.source.name, slot_stream.capture, planned_publications, catalog
    )
    return tuple(altered_publications), tuple(dropped_publications)
