"""`pgsieve drop`: removes a subscription from the server, and on request its tables from the lake.

In: the configuration and the name of a subscription
Out: a `DropReport`. Raises PgsieveError if the subscription cannot be dropped.
"""

from pgsieve.assets.steps.operations.drop import drop_subscription
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import DropReport
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.errors import SourceUnreachableError


def drop(config: Config, subscription_name: str, *, delete_tables: bool, leave_slot: bool) -> DropReport:
    """Drop a subscription. If it was already dropped, nothing changes.

    - `delete_tables`: true if the replicas are deleted, too
    - `leave_slot`: true to leave the server as it is, for example because it no longer exists
    """
    project = build_project(config)
    lake = project.lake.open()
    if subscription_name not in project.subscriptions and TableStates(lake, subscription_name).is_in_use():
        raise PgsieveError(
            f"subscription {subscription_name!r} was taken out of {config.path.name}, but was not dropped",
            hint=f"put it back as it was, run `pgsieve drop {subscription_name}`, then take it out",
        )
    (subscription_config,) = config.select([subscription_name])
    subscription = project.subscriptions[subscription_config.name]
    slot_stream = subscription.slot_stream
    try:
        dropped_objects = drop_subscription(
            subscription, lake, leave_slot=leave_slot, delete_tables=delete_tables
        )
    except SourceUnreachableError as error:
        raise SourceUnreachableError(
            error.message,
            hint="if the server is gone for good, `--leave-slot` drops the subscription without it",
            sqlstate=error.sqlstate,
        ) from error
    capture_clause = "" if slot_stream.filtered else f" and the publications {slot_stream.capture}*"
    remaining_objects = (
        f"replication slot {slot_stream.slot}{capture_clause}"
        if leave_slot and not dropped_objects.kept_for
        else None
    )
    if dropped_objects.foreign:
        remaining_objects = f"publication {', '.join(dropped_objects.foreign)}, which pgsieve did not create: run DROP PUBLICATION if nothing else needs it"
    return DropReport(
        subscription=subscription_name,
        slot=dropped_objects.slot,
        altered=dropped_objects.altered,
        publications=dropped_objects.publications,
        kept_for=dropped_objects.kept_for,
        folders=dropped_objects.folders,
        unregistered=dropped_objects.unregistered,
        left=remaining_objects,
    )
