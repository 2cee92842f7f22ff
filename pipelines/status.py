"""`pgsieve status`: the slots and replica tables as they stand. In: the configuration. Out: a `StatusReport`."""

from assets.steps.change_log import durable_position
from assets.steps.replica_tables import last_cut
from assets.steps.subscription import Feed, Subscription
from assets.steps.table_states import MEANING, READY, table_states
from decoding.lsn import format_lsn
from decoding.publication import Catalog
from pipelines.config import Config
from pipelines.project import project
from pipelines.results import SlotStatus, StatusReport, SubscriptionStatus, TableStatus
from resources.delta import Lake
from resources.postgres import read_catalog
from resources.slot import slot_state


def status(config: Config) -> StatusReport:
    """Read slots from the sources and table states from the lake; changes nothing."""
    declared = project(config)
    lake = declared.lake.open()
    slots, subscriptions = [], []
    for feed in declared.feeds.values():
        with feed.source.connect() as connection:
            catalog = feed.with_defined(read_catalog(connection))
            state = slot_state(connection, feed.slot)
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
            )
        )
        subscriptions += [_subscription(lake, feed, s, catalog) for s in declared.reading(feed)]
    return StatusReport(tuple(slots), tuple(subscriptions))


def _subscription(lake: Lake, feed: Feed, subscription: Subscription, catalog: Catalog) -> SubscriptionStatus:
    states = table_states(lake, subscription.name)
    published = subscription.tables(catalog)
    cut = last_cut(lake, subscription)
    tables = []
    for name in sorted(published.keys() | states.keys()):
        state, table = states.get(name), published.get(name)
        filters = table.row_filters if table else None
        ready = state is not None and state.state == READY
        path = lake.replica(subscription.name, *name)
        tables.append(
            TableStatus(
                schema=name[0],
                name=name[1],
                state=MEANING[state.state] if state else MEANING["i"],
                row_filter=" OR ".join(filters) if filters is not None else None,
                lsn=format_lsn(max(cut.lsn if cut else 0, state.lsn)) if state and ready else None,
                version=cut.tables.get(name) if cut else None,
                rows=lake.records.count(path) if lake.records.exists(path) else None,
                problem=state.reason if state else None,
            )
        )
    return SubscriptionStatus(
        name=subscription.name,
        source=feed.source.name,
        row_filter="publisher" if feed.filtered else "pipeline",
        tables=tuple(tables),
    )
