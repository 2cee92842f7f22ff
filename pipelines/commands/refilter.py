"""`pgsieve refilter`: makes replicas from other replicas of the same source, without reading the publisher's tables.

This is possible if a replica of some subscription has all rows and columns that the table needs, for example because its
row filter matches more rows. That replica may also be the table's own, made with the former row filter.

In: the configuration, a subscription, tables, and optionally the subscription from which to make them
Out: a `RefilterReport`

The command reads the publisher's catalog and the slot. Raises PgsieveError if it cannot do its work.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.operations.refilter import Refilter, RefilterPlan
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.assets.steps.validation.waiting import make_subscription_catalog
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.pipelines.commands.moment_results import RefilteredTable, RefilterReport
from pgsieve.pipelines.commands.results import Progress
from pgsieve.pipelines.config.file import suggest_name
from pgsieve.pipelines.config.identifiers import parse_table_name
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.wal import read_flushed_lsn


def refilter(
    config: Config,
    subscription_config: SubscriptionConfig,
    tables: Sequence[str],
    source_name: str | None,
    progress: Progress,
    *,
    is_plan_only: bool,
) -> RefilterReport:
    """Make the replicas of `tables`, or of all published tables if `tables` is empty.

    With `is_plan_only`, no table is made, and the report says from which replica each could be made, and at which LSN.
    """
    project = build_project(config)
    subscription, lake = project.subscriptions[subscription_config.name], project.lake.open()
    names_to_plan = [parse_table_name(text) for text in tables]
    source_subscriptions = find_possible_sources(project, subscription, lake, source_name)
    lake.access.check_writable()
    SubscriptionRecord(lake, subscription.name).require_enabled()
    planner = _prepare_refilter(subscription, source_subscriptions, lake)
    plans = planner.plan(names_to_plan)
    lsn, names_to_make = None, [plan.name for plan in plans if plan.source is not None]
    if names_to_make and not is_plan_only:
        chosen_sources = [
            source_subscription
            for source_subscription in source_subscriptions
            if source_subscription.name in {plan.source for plan in plans}
        ]
        for source_subscription in chosen_sources:
            if source_subscription.name != subscription.name:
                _bring_up_to_date(source_subscription, lake, progress)
        with ExitStack() as locks:
            for name in sorted(
                {subscription.name, *(source_subscription.name for source_subscription in chosen_sources)}
            ):
                locks.enter_context(subscription.slot_stream.source.hold_lock(name))
            SubscriptionRecord(lake, subscription.name).record_folders()
            # `make_replicas` plans again, because the catalog may have changed before the locks were taken.
            plans_by_name = {
                plan.name: plan
                for plan in _prepare_refilter(subscription, chosen_sources, lake).make_replicas(names_to_make)
            }
            plans = [plans_by_name.get(plan.name, plan) for plan in plans]
            lsn = max((plan.lsn for plan in plans_by_name.values() if plan.lsn is not None), default=None)
    return RefilterReport(
        subscription.name,
        is_plan_only,
        None if lsn is None else format_lsn(lsn),
        tuple(_make_refiltered_table(plan) for plan in plans),
    )


def _prepare_refilter(
    subscription: Subscription, source_subscriptions: Sequence[Subscription], lake: Lake
) -> Refilter:
    """Make the `Refilter` of a subscription by the publisher's present catalog. It plans and makes replicas."""
    with subscription.slot_stream.source.connect() as connection:
        refuse_other_publisher(connection, subscription.slot_stream, lake)
        present_lsn = read_flushed_lsn(connection)
        server_catalog = read_present_catalog(connection)
        sources_with_catalogs = [
            (source_subscription, make_subscription_catalog(connection, source_subscription, server_catalog))
            for source_subscription in source_subscriptions
        ]
        catalog = make_subscription_catalog(connection, subscription, server_catalog)
    return Refilter(subscription, sources_with_catalogs, lake, catalog, present_lsn)


def find_possible_sources(
    project: Project, subscription: Subscription, lake: Lake, source_name: str | None = None
) -> list[Subscription]:
    """Find the subscriptions that have replicas of the same source. If `subscription` itself has some, it is the first.

    If `source_name` is given, the result is only the subscription of this name. Raises PgsieveError if that subscription
    does not read the same source.
    """
    subscriptions_by_name = {
        name: candidate
        for name, candidate in project.subscriptions.items()
        if candidate.slot_stream.source.name == subscription.slot_stream.source.name
    }
    if source_name is not None:
        if source_name not in subscriptions_by_name:
            raise PgsieveError(
                f'no subscription "{source_name}" reads the source of "{subscription.name}"',
                hint=suggest_name(source_name, tuple(subscriptions_by_name)),
                sqlstate="42704",
            )
        return [subscriptions_by_name[source_name]]
    other_subscriptions = [
        candidate for candidate in subscriptions_by_name.values() if candidate.name != subscription.name
    ]
    return [
        candidate
        for candidate in [subscription, *other_subscriptions]
        if TableStates(lake, candidate.name).may_have_replicas()
    ]


def _bring_up_to_date(subscription: Subscription, lake: Lake, progress: Progress) -> None:
    """Apply all changes to the replicas of a subscription, so that they are at least as new as the publisher's catalog.

    Otherwise a column that was just added could be missing in them.
    """
    task = f"bring {subscription.name} up to date"
    progress.start(task)
    try:
        drain_slot(subscription.slot_stream, lake, [subscription], progress.tell)
        transform(subscription, lake, progress.tell)
        apply(subscription, lake, progress.tell)
    finally:
        progress.finish(task)


def _make_refiltered_table(plan: RefilterPlan) -> RefilteredTable:
    return RefilteredTable(
        *plan.name, plan.source, plan.reason, plan.rows, None if plan.lsn is None else format_lsn(plan.lsn)
    )
