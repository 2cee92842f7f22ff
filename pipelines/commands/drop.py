"""`pgsieve drop`: removes a subscription from the server, and on request from the lake.

In: the configuration and the subscription's name. Out: a `DropReport`. Raises PgsieveError.
"""

from pgsieve.assets.steps.operations.drop import drop_subscription
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import DropReport
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.errors import SourceUnreachableError


def drop(config: Config, name: str, *, delete_tables: bool, leave_slot: bool) -> DropReport:
    """Drop a subscription; a second call changes nothing."""
    project = build_project(config)
    lake = project.lake.open()
    if name not in project.subscriptions and TableStates(lake, name).is_in_use():
        raise PgsieveError(
            f"subscription {name!r} was taken out of {config.path.name}, but was not dropped",
            hint=f"put it back as it was, `pgsieve drop {name}`, then take it out",
        )
    (selected,) = config.select([name])
    subscription = project.subscriptions[selected.name]
    feed = subscription.feed
    try:
        dropped = drop_subscription(subscription, lake, leave_slot=leave_slot, delete_tables=delete_tables)
    except SourceUnreachableError as error:
        raise SourceUnreachableError(
            error.message,
            hint="if the server is gone for good, `--leave-slot` drops the subscription without it",
            sqlstate=error.sqlstate,
        ) from error
    captured = "" if feed.filtered else f" and the publications {feed.capture}*"
    left = f"replication slot {feed.slot}{captured}" if leave_slot and not dropped.kept_for else None
    if dropped.foreign:
        left = f"publication {', '.join(dropped.foreign)}, which pgsieve did not create: DROP PUBLICATION, if nothing else needs it"
    return DropReport(
        subscription=name,
        slot=dropped.slot,
        altered=dropped.altered,
        publications=dropped.publications,
        kept_for=dropped.kept_for,
        folders=dropped.folders,
        unregistered=dropped.unregistered,
        left=left,
    )
