"""`pgsieve status`: the present state of slots and replica tables. In: the configuration. Out: a `StatusReport`."""

from dataclasses import replace

from pgsieve.assets.steps.operations.resync import present_changes
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import copy_again, reason
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.steps.validation.examination import Examination
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.pipelines.commands.results import SlotStatus, StatusReport, SubscriptionStatus, TableStatus
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import project
from pgsieve.resources.lake.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.slot import SlotState, slot_state
from pgsieve.resources.postgres.source import SourceError, read_catalog


def status(config: Config) -> StatusReport:
    """Read slots from the sources and table states from the lake; changes nothing.

    Of a source that cannot be asked there is what the lake knows, and the problem.
    """
    declared = project(config)
    lake = declared.lake.open()
    slots, subscriptions = [], []
    for feed in declared.feeds.values():
        examined, state, problem = _asked(feed)
        position = ChangeLog(lake, feed).position()
        slots.append(
            SlotStatus(
                source=feed.source.name,
                subscription=next(iter(feed.subscriptions)) if feed.filtered else None,
                slot=feed.slot,
                exists=state is not None,
                active=state is not None and state.active,
                wal_status=state.wal_status if state else None,
                confirmed_lsn=format_lsn(state.confirmed_lsn) if state else None,
                lag_bytes=state.lag if state else None,
                change_log_lsn=None if position is None else format_lsn(position),
                problem=problem,
            )
        )
        subscriptions += [_shown(lake, feed, s, examined) for s in declared.reading(feed)]
    return StatusReport(tuple(slots), tuple(subscriptions))


def _asked(feed: Feed) -> tuple[Examination | None, SlotState | None, str | None]:
    """What the source publishes, and its slot; or why it does not say."""
    try:
        with feed.source.connect() as connection:
            examined = Examination(connection, feed, read_catalog(connection))
            return examined, slot_state(connection, feed.slot), None
    except SourceError as error:
        return None, None, str(error)


def _rows(lake: Lake, subscription: Subscription, name: Name) -> tuple[int | None, str | None]:
    """How many rows a replica has, None where there is none; or why they cannot be counted."""
    path = lake.replica(subscription.name, *name)
    try:
        return lake.records.count(path) if lake.records.exists(path) else None, None
    except LakeError as error:
        return None, copy_again(subscription.name, name, reason(lake, error))


def _shown(
    lake: Lake, feed: Feed, subscription: Subscription, examined: Examination | None
) -> SubscriptionStatus:
    """A subscription as its source and the lake tell; one that cannot be replicated as the lake alone does."""
    obstacle = examined.obstacle(subscription.name) if examined else None
    catalog = examined.catalog if examined and obstacle is None else None
    shown = _subscription(lake, feed, subscription, catalog)
    return shown if obstacle is None else replace(shown, problem=str(obstacle))


def _subscription(
    lake: Lake, feed: Feed, subscription: Subscription, catalog: Catalog | None
) -> SubscriptionStatus:
    states = TableStates(lake, subscription.name).newest()
    published = subscription.tables(catalog) if catalog else {}
    cut, whole = Cuts(lake, subscription.name).last(), SubscriptionRecord(lake, subscription.name).state()
    tables = []
    for name in sorted(published.keys() | states.keys()):
        state, table = states.get(name), published.get(name)
        filters = table.row_filters if table else None
        ready = state is not None and state.state == SyncState.READY
        rows, problem = _rows(lake, subscription, name)
        tables.append(
            TableStatus(
                schema=name[0],
                name=name[1],
                state=(state.state if state else SyncState.INITIALIZE).meaning,
                row_filter=" OR ".join(filters) if filters is not None else None,
                lsn=format_lsn(max(cut.lsn if cut else 0, state.lsn)) if state and ready else None,
                version=cut.tables.get(name) if cut else None,
                rows=rows,
                problem=state.reason if state and state.reason else problem,
                since_copy=present_changes(subscription, state, table, catalog)
                if ready and table and catalog
                else (),
            )
        )
    return SubscriptionStatus(
        name=subscription.name,
        source=feed.source.name,
        row_filter="publisher" if feed.filtered else "pipeline",
        tables=tuple(tables),
        enabled=whole.enabled,
        reason=whole.reason,
        skip_lsn=None if whole.skip_lsn is None else format_lsn(whole.skip_lsn),
        notice=whole.notice,
    )
