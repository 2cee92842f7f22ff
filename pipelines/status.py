"""`pgsieve status`: the slots and replica tables as they stand. In: the configuration. Out: a `StatusReport`."""

from assets.steps.cuts import last_cut
from assets.steps.failures import copy_again, reason
from assets.steps.feed_slot import durable_position
from assets.steps.resync import changes_since_copy
from assets.steps.subscription import Feed, Subscription
from assets.steps.subscription_state import subscription_state
from assets.steps.table_states import MEANING, READY, Name, table_states
from decoding.lsn import format_lsn
from decoding.publication import Catalog
from pipelines.config import Config
from pipelines.project import project
from pipelines.results import SlotStatus, StatusReport, SubscriptionStatus, TableStatus
from resources.delta import Lake
from resources.lake_errors import LakeError
from resources.postgres import SourceError, read_catalog
from resources.slot import SlotState, slot_state


def status(config: Config) -> StatusReport:
    """Read slots from the sources and table states from the lake; changes nothing.

    Of a source that cannot be asked there is what the lake knows, and the problem.
    """
    declared = project(config)
    lake = declared.lake.open()
    slots, subscriptions = [], []
    for feed in declared.feeds.values():
        catalog, state, problem = _asked(feed)
        position = durable_position(lake, feed)
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
        subscriptions += [_subscription(lake, feed, s, catalog) for s in declared.reading(feed)]
    return StatusReport(tuple(slots), tuple(subscriptions))


def _asked(feed: Feed) -> tuple[Catalog | None, SlotState | None, str | None]:
    """What the source publishes, and its slot; or why it does not say."""
    try:
        with feed.source.connect() as connection:
            catalog = feed.with_defined(read_catalog(connection))
            return catalog, slot_state(connection, feed.slot), None
    except SourceError as error:
        return None, None, str(error)


def _rows(lake: Lake, subscription: Subscription, name: Name) -> tuple[int | None, str | None]:
    """How many rows a replica has, None where there is none; or why they cannot be counted."""
    path = lake.replica(subscription.name, *name)
    try:
        return lake.records.count(path) if lake.records.exists(path) else None, None
    except LakeError as error:
        return None, copy_again(subscription.name, name, reason(lake, error))


def _subscription(
    lake: Lake, feed: Feed, subscription: Subscription, catalog: Catalog | None
) -> SubscriptionStatus:
    states = table_states(lake, subscription.name)
    published = subscription.tables(catalog) if catalog else {}
    cut, whole = last_cut(lake, subscription), subscription_state(lake, subscription.name)
    tables = []
    for name in sorted(published.keys() | states.keys()):
        state, table = states.get(name), published.get(name)
        filters = table.row_filters if table else None
        ready = state is not None and state.state == READY
        rows, problem = _rows(lake, subscription, name)
        tables.append(
            TableStatus(
                schema=name[0],
                name=name[1],
                state=MEANING[state.state] if state else MEANING["i"],
                row_filter=" OR ".join(filters) if filters is not None else None,
                lsn=format_lsn(max(cut.lsn if cut else 0, state.lsn)) if state and ready else None,
                version=cut.tables.get(name) if cut else None,
                rows=rows,
                problem=state.reason if state and state.reason else problem,
                since_copy=changes_since_copy(state, subscription.definition(table, catalog))
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
