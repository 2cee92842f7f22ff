"""`pgsieve refilter`: makes replicas from other replicas, without reading the publisher's tables.

In: the configuration, a subscription, tables, and optionally the subscription to make them from. Out: a
`RefilterReport`. The command reads the publisher's catalog and the slot. Raises PgsieveError.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.operations.refilter import Refilter, Refiltering, applied_lsn
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.assets.steps.validation.waiting import sound_catalog
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.pipelines.commands.moment_results import RefilteredTable, RefilterReport
from pgsieve.pipelines.commands.results import Progress
from pgsieve.pipelines.config.file import name_hint
from pgsieve.pipelines.config.identifiers import parse_table_name
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.present_catalog import present_catalog


def refilter(
    config: Config,
    selected: SubscriptionConfig,
    tables: Sequence[str],
    source: str | None,
    progress: Progress,
    *,
    planning: bool,
) -> RefilterReport:
    """Make the tables, by default all; with `planning` only report from which subscriptions."""
    project = build_project(config)
    subscription, lake = project.subscriptions[selected.name], project.lake.open()
    names = [parse_table_name(text) for text in tables]
    sources = possible_sources(project, subscription, lake, source)
    lake.access.check_writable()
    SubscriptionRecord(lake, subscription.name).refuse_disabled()
    refiltering = _prepare_refilter(subscription, sources, lake)
    plans = refiltering.plan(names)
    lsn, possible = None, [plan.name for plan in plans if plan.source is not None]
    if possible and not planning:
        chosen = [each for each in sources if each.name in {plan.source for plan in plans}]
        for each in chosen:
            if each.name != subscription.name:
                _bring_up_to_date(each, lake, progress)
        with ExitStack() as locked:
            for name in sorted({subscription.name, *(each.name for each in chosen)}):
                locked.enter_context(subscription.feed.source.hold_lock(name))
            SubscriptionRecord(lake, subscription.name).record_folders()
            # `done` plans again, as the catalog may have changed before the locks were taken.
            made = {plan.name: plan for plan in _prepare_refilter(subscription, chosen, lake).make(possible)}
            plans = [made.get(plan.name, plan) for plan in plans]
            lsn = max(applied_lsn(lake, each) for each in chosen)
    return RefilterReport(
        subscription.name,
        planning,
        None if lsn is None else format_lsn(lsn),
        tuple(_result_of(plan) for plan in plans),
    )


def _prepare_refilter(subscription: Subscription, sources: Sequence[Subscription], lake: Lake) -> Refilter:
    """The `Refilter` of a subscription by the publisher's current catalog."""
    with subscription.feed.source.connect() as connection:
        refuse_other_publisher(connection, subscription.feed, lake)
        server = present_catalog(connection)
        with_catalogs = [(each, sound_catalog(connection, each, server)) for each in sources]
        catalog = sound_catalog(connection, subscription, server)
    return Refilter(subscription, with_catalogs, lake, catalog)


def possible_sources(
    project: Project, subscription: Subscription, lake: Lake, named: str | None = None
) -> list[Subscription]:
    """The subscriptions with replicas of the same source, this one first; with `named` only the named one."""
    same = {
        name: each
        for name, each in project.subscriptions.items()
        if each.feed.source.name == subscription.feed.source.name
    }
    if named is not None:
        if named not in same:
            raise PgsieveError(
                f'no subscription "{named}" reads the source of "{subscription.name}"',
                hint=name_hint(named, tuple(same)),
                sqlstate="42704",
            )
        return [same[named]]
    others = [each for each in same.values() if each.name != subscription.name]
    return [each for each in [subscription, *others] if TableStates(lake, each.name).may_have_replicas()]


def _bring_up_to_date(source: Subscription, lake: Lake, progress: Progress) -> None:
    """Bring replicas up to date, so that they are as new as the catalog with its latest ALTER."""
    task = f"bring {source.name} up to date"
    progress.start(task)
    try:
        drain(source.feed, lake, [source], progress.tell)
        transform(source, lake, progress.tell)
        apply(source, lake, progress.tell)
    finally:
        progress.finish(task)


def _result_of(plan: Refiltering) -> RefilteredTable:
    return RefilteredTable(*plan.name, plan.source, plan.reason, plan.rows)
