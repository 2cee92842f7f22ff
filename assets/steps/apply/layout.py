"""Sets the Delta properties of replicas as the layout in pgsieve.yaml says, before changes are applied.

In: a subscription with its layout, and the states of its tables. Out: commits that change only metadata of the replicas;
and a record of the properties in the lake's table `_subscription`. If the properties recorded there equal those in
pgsieve.yaml, no replica is read. Raises LakeError.
"""

from collections.abc import Iterable
from dataclasses import replace

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableState
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.delta.layout import (
    DEFAULT_FILE_BYTES,
    FILE_BYTES_PROPERTY,
    PROPERTIES,
    TableName,
    parse_recorded_properties,
)
from pgsieve.resources.lake.lake import Lake


def follow_layout(
    subscription: Subscription, lake: Lake, states: Iterable[TableState]
) -> dict[TableName, tuple[int, int]]:
    """Set the properties of the replicas if the layout has changed.

    Maps each table whose replica was changed to the Delta versions before and after the change.
    """
    record, layout = SubscriptionRecord(lake, subscription.name), subscription.layout
    state, properties_json = record.read_state(), layout.format_properties()
    if state.properties == properties_json:
        return {}
    versions_by_table = {}
    # A property that pgsieve.yaml no longer sets gets its default value.
    default_by_property = {name: _find_default(name) for name in parse_recorded_properties(state.properties)}
    for table_state in states:
        path = lake.paths.replica(subscription.name, *table_state.name)
        if table_state.is_applied and lake.records.exists(path):
            columns = dict(table_state.definition.columns if table_state.definition else ())
            properties = {
                **default_by_property,
                **layout.find_table_layout(table_state.name).make_delta_properties(columns),
            }
            old_version = retry_after_conflict(lake.set_properties)(path, properties)
            if old_version is not None:
                versions_by_table[table_state.name] = old_version, lake.records.version(path)
    record.change_state(lambda newest_state: replace(newest_state, properties=properties_json))
    return versions_by_table


def _find_default(name: str) -> str:
    return str(DEFAULT_FILE_BYTES) if name == FILE_BYTES_PROPERTY else PROPERTIES[name].default
