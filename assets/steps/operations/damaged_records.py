"""Removes record tables of pgsieve that are damaged. Later runs make them again, and copy tables again if necessary.

A record table is a Delta table of pgsieve's own, for example with the states of a subscription's tables. A stream is a
slot with the subscriptions that read it. A slice is the changes from one position of the slot to another. A cut names a
version of each replica; together these versions equal the publisher at one LSN.

In: a subscription
Out: the paths of the tables that were removed

Raises LakeError if only Spark reaches the lake; in that case the user has to remove the folders. A damaged change log
(the slot's messages) is not removed here: it is removed together with its slot.
"""

from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.own_versions import (
    find_put_back_tables,
    list_slot_stream_records,
    list_subscription_records,
    read_newest_cuts,
)
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.registered_names import RegisteredNames
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.slices import Slices
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, SubscriptionState
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.slot_consumption.slot import forget_copies
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.lake import Lake


def remove_damaged_records(subscription: Subscription, lake: Lake) -> list[str]:
    """Remove the record tables of a subscription and its stream that cannot be read, or were put back to earlier versions.

    A table is put back by RESTORE, or if its folder comes from a backup.

    All tables of the subscription are copied again if its sync states (`_table_states`) or its summaries of slices
    (`_transformed`) are removed. All tables of the stream are copied again if a record table of the stream, other than
    `slices`, is removed.

    If the state of the subscription is removed, the subscription is like a new one: it is enabled, and skips nothing.
    If only cuts, slices, registered names or sequences are removed, nothing is copied: these tables begin again.
    """
    slot_stream, name = subscription.slot_stream, subscription.name
    record, states, cuts = SubscriptionRecord(lake, name), TableStates(lake, name), Cuts(lake, name)
    transformed_slices_path = TransformedSlices(lake, name).path
    slot_stream_paths = [
        *list_slot_stream_records(lake, slot_stream),
        PreparedTransactions(lake, slot_stream).path,
    ]
    other_paths = [
        record.path,
        Slices(lake, slot_stream).path,
        *(record_class(lake, name).path for record_class in (Cuts, RegisteredNames, Sequences)),
    ]
    with slot_stream.hold_lock(), slot_stream.source.hold_lock(name):
        damaged_paths = [
            path
            for path in (states.path, transformed_slices_path, *slot_stream_paths, *other_paths)
            if _is_damaged(lake, path)
        ]
        if cuts.path not in damaged_paths:
            readable_paths = [
                path
                for path in (
                    *list_slot_stream_records(lake, slot_stream),
                    *list_subscription_records(lake, name),
                )
                if path not in damaged_paths
            ]
            damaged_paths += find_put_back_tables(lake, readable_paths, read_newest_cuts(lake, slot_stream))
        if states.path not in damaged_paths and _is_put_back(states, cuts):
            damaged_paths.append(states.path)
        if states.path in damaged_paths:
            lake.remove_log(states.path)
        # The replicas are marked as to be copied again before the other record tables are removed. If this process dies
        # in between, the next one finds the damage again.
        if not set(slot_stream_paths).isdisjoint(damaged_paths):
            forget_copies(lake, slot_stream.subscriptions)
        elif transformed_slices_path in damaged_paths:
            forget_copies(lake, [name])
        for path in damaged_paths:
            if path != states.path:
                lake.remove_log(path)
        if record.path in damaged_paths:
            record.write_state(
                SubscriptionState(folders=lake.paths.folder_template(name), deleted_up_to=None)
            )
    return damaged_paths


def _is_put_back(states: TableStates, cuts: Cuts) -> bool:
    """True if the table states were put back, because the newest cut records a later version of them."""
    if _is_damaged(cuts.lake, cuts.path) or (cut := cuts.read_last()) is None:
        return False
    try:
        cut.refuse_earlier_states(states)
    except DamagedTableError:
        return True
    return False


def _is_damaged(lake: Lake, path: str) -> bool:
    """True if a table cannot be read because it is damaged."""
    try:
        lake.records.rows(path)
    except DamagedTableError:
        return True
    return False
