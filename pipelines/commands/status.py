"""`pgsieve status`: reports the state of the slots and of the replicas.

In: the configuration
Out: a `StatusReport`
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import psycopg

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.checks.freshness import find_unapplied, find_unread_time, seconds_since
from pgsieve.assets.steps.operations.resync import present_changes
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.databases import OtherDatabaseError
from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates, add_copy_command
from pgsieve.assets.steps.slot_consumption.slot import OtherClusterError, refuse_other_publisher
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.steps.validation.examination import Examination
from pgsieve.assets.steps.validation.warnings import unsent_leaves
from pgsieve.assets.translator import AssetKind, subscription_asset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.pipelines.commands.in_process import instance
from pgsieve.pipelines.commands.results import (
    UNKNOWN,
    SlotStatus,
    StatusReport,
    SubscriptionStatus,
    TableStatus,
)
from pgsieve.pipelines.commands.sequences import listed_sequences
from pgsieve.pipelines.commands.ui import dagster_home
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.slot import SlotState, slot_state
from pgsieve.resources.postgres.source import is_decoding_switched

_logger = logging.getLogger(__name__)

#: To find the commit time of the first transaction that waits in a slot, the server has to decode WAL. It may take this
#: long.
_DECODE_TIMEOUT = "10s"
#: Maps whether logical slots switch logical decoding on and off to the value of `SlotStatus.decoding`.
_DECODING_MODES: Mapping[bool | None, str] = {True: "while a slot exists", False: "always"}


@dataclass(frozen=True, slots=True)
class _SourceState:
    """What a source says: its publications, its slot, and how long the first transaction has been waiting in the slot.

    If the source does not answer, only `problem` is set. `is_decoding_switched` is true if the server switches logical
    decoding on with the first logical slot, and off with the last.
    """

    examination: Examination | None = None
    slot: SlotState | None = None
    waiting_seconds: float | None = None
    problem: str | None = None
    is_decoding_switched: bool | None = None


def status(config: Config) -> StatusReport:
    """Read the slots from the sources, and the table states from the lake. Nothing is changed.

    If a source does not answer, the report has the problem, and what the lake has recorded about the source.
    """
    project = build_project(config)
    lake = project.lake.open()
    return _report(project, lake, _last_transformations(config, project.subscriptions.values()))


def brief_status(config: Config) -> Callable[[], StatusReport]:
    """A function that reads the status at little cost: it counts no rows, and lets the server decode no WAL.

    The function uses a lake object of its own, so a thread may call it while other threads work.
    """
    project = build_project(config)
    lake = project.lake.open()
    return lambda: _report(project, lake, None)


def _report(project: Project, lake: Lake, last_runs: Mapping[str, datetime] | None) -> StatusReport:
    """Make the report. `last_runs` has the time of each subscription's last run; if it is None, the report is a brief one."""
    slots, subscriptions = [], []
    brief, last_runs = last_runs is None, last_runs or {}
    for feed in project.feeds.values():
        source_state, position = (
            _read_source(lake, feed, may_decode=not brief),
            ChangeLog(lake, feed).position(),
        )
        state = source_state.slot
        slots.append(
            SlotStatus(
                source=feed.source.name,
                subscription=next(iter(feed.subscriptions)) if feed.filtered else None,
                slot=feed.slot,
                exists=UNKNOWN if source_state.problem else state is not None,
                active=UNKNOWN if source_state.problem else state is not None and state.is_active,
                wal_status=state.wal_status if state else None,
                confirmed_lsn=format_lsn(state.confirmed_lsn) if state else None,
                lag_bytes=state.lag_bytes if state else None,
                change_log_lsn=None if position is None else format_lsn(position),
                problem=source_state.problem,
                lag_seconds=source_state.waiting_seconds,
                retained_bytes=state.retained_bytes if state else None,
                safe_wal_bytes=state.safe_bytes if state else None,
                decoding=_DECODING_MODES.get(source_state.is_decoding_switched),
            )
        )
        for subscription in project.subscriptions_of(feed):
            try:
                entry = _subscription_status(
                    lake, feed, subscription, source_state.examination, count_rows=not brief
                )
                progress = _progress_of(lake, subscription, source_state, last_runs.get(subscription.name))
            except LakeError as error:
                # If the whole lake fails, and not only this subscription, the call raises the error.
                describe_error(lake, error)
                entry, progress = (
                    replace(_configured_status(feed, subscription), problem=str(error)),
                    (None, None),
                )
            subscriptions.append(replace(entry, seconds_behind=progress[0], last_success=progress[1]))
    return StatusReport(tuple(slots), tuple(subscriptions))


def _read_source(lake: Lake, feed: Feed, *, may_decode: bool) -> _SourceState:
    """Ask a source for its publications and its slot. If it does not answer, only the problem is returned."""
    try:
        with feed.source.connect() as connection:
            examination = Examination(connection, feed, read_catalog(connection))
            state = slot_state(connection, feed.slot)
            # A LakeError would be about pgsieve's own tables, and other parts of the report show it.
            with suppress(LakeError):
                refuse_other_publisher(connection, feed, lake)
            seconds = (
                None if state is None else _seconds_waiting_in_slot(connection, lake, feed, state, may_decode)
            )
            return _SourceState(
                examination, state, seconds, is_decoding_switched=is_decoding_switched(connection)
            )
    except (SourceError, OtherClusterError, OtherDatabaseError) as error:
        return _SourceState(problem=str(error))


def _seconds_waiting_in_slot(
    connection: psycopg.Connection[tuple[object, ...]],
    lake: Lake,
    feed: Feed,
    state: SlotState,
    may_decode: bool,
) -> float | None:
    """For how many seconds the first transaction has been waiting in the slot.

    None if the slot has not been read yet, or if the server does not answer in time.
    """
    if ChangeLog(lake, feed).position() is None:
        return None
    try:
        connection.execute(f"set statement_timeout = '{_DECODE_TIMEOUT}'")
        return round(
            seconds_since(connection, find_unread_time(connection, lake, feed, state, can_peek=may_decode)), 3
        )
    except PgsieveError:
        # There is too much WAL to decode, the slot is lost, or a publication is missing. Other parts of the report show
        # which of these it is.
        return None
    finally:
        connection.execute("set statement_timeout = 0")


def _progress_of(
    lake: Lake, subscription: Subscription, source_state: _SourceState, last_run: datetime | None
) -> tuple[float | None, str | None]:
    """For how many seconds a subscription has been behind, and when all changes had been applied the last time."""
    cut, log_position = Cuts(lake, subscription.name).last(), ChangeLog(lake, subscription.feed).position()
    success_time = cut.at if cut else None
    if log_position is None:
        return None, None if success_time is None else _iso(success_time)
    try:
        applied, waiting_since = find_unapplied(ReplicaProgress(subscription, lake), log_position)
    except PgsieveError:  # The lake is damaged, and other parts of the report show where.
        return None, None if success_time is None else _iso(success_time)
    seconds = source_state.waiting_seconds
    if applied < log_position:
        present_time = datetime.now(UTC)
        seconds = max(
            seconds or 0.0, round((present_time - waiting_since).total_seconds(), 3) if waiting_since else 0.0
        )
    else:
        # All changes are applied. If the last run found no changes, the lake has no record of it, but Dagster has.
        is_followed = source_state.slot is not None and source_state.slot.is_active and seconds == 0
        success_time = max(
            (t for t in (success_time, last_run, datetime.now(UTC) if is_followed else None) if t),
            default=None,
        )
    return seconds, None if success_time is None else _iso(success_time)


def _iso(time: datetime) -> str:
    """The time in UTC as ISO 8601 text."""
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _last_transformations(config: Config, subscriptions: Iterable[Subscription]) -> Mapping[str, datetime]:
    """Maps each subscription to the time at which a run last transformed its changes. Empty if Dagster has no records."""
    if not dagster_home(config, make=False).exists():
        return {}
    names = {subscription_asset(s, AssetKind.TABLE_CHANGES).key: s.name for s in subscriptions}
    try:
        with instance(config) as dagster:
            events = dagster.get_latest_materialization_events(list(names))
    except Exception as error:  # noqa: BLE001 - from Dagster, or from any kind of database with its records
        _logger.warning("Dagster's records cannot be read: %s", type(error).__name__)
        return {}
    return {names[key]: datetime.fromtimestamp(e.timestamp, UTC) for key, e in events.items() if e}


def _rows(lake: Lake, subscription: Subscription, name: Name) -> tuple[int | None, str | None]:
    """The number of rows of a replica, or None if there is no replica; and the reason if they cannot be counted."""
    path = lake.paths.replica(subscription.name, *name)
    try:
        return lake.count_rows(path) if lake.records.exists(path) else None, None
    except LakeError as error:
        return None, add_copy_command(subscription.name, name, describe_error(lake, error))


def _subscription_status(
    lake: Lake, feed: Feed, subscription: Subscription, examination: Examination | None, *, count_rows: bool
) -> SubscriptionStatus:
    """The state of a subscription, by its source and the lake. If it cannot be replicated, only by the lake."""
    obstacle = examination.obstacle(subscription.name) if examination else None
    catalog = examination.catalog if examination and obstacle is None else None
    entry = _read_subscription(lake, feed, subscription, catalog, count_rows=count_rows)
    return entry if obstacle is None else replace(entry, problem=str(obstacle))


def _read_subscription(
    lake: Lake, feed: Feed, subscription: Subscription, catalog: Catalog | None, *, count_rows: bool
) -> SubscriptionStatus:
    """Read the state of a subscription from the lake; `catalog` is None if its source does not answer."""
    states = TableStates(lake, subscription.name).newest()
    published_tables = subscription.tables(catalog) if catalog else {}
    cut, record = (
        Cuts(lake, subscription.name).last(),
        SubscriptionRecord(lake, subscription.name).read_state(),
    )
    tables = []
    for name in sorted(published_tables.keys() | states.keys()):
        state, table = states.get(name), published_tables.get(name)
        filters = table.row_filters if table else None
        is_ready = state is not None and state.state == SyncState.READY
        rows, problem = _rows(lake, subscription, name) if count_rows else (None, None)
        tables.append(
            TableStatus(
                schema=name[0],
                name=name[1],
                state=(state.state if state else SyncState.INITIALIZE).meaning,
                row_filter=UNKNOWN
                if catalog is None
                else " OR ".join(filters)
                if filters is not None
                else None,
                lsn=format_lsn(max(cut.lsn if cut else 0, state.lsn)) if state and is_ready else None,
                version=cut.tables.get(name) if cut else None,
                rows=rows,
                problem=state.reason if state and state.reason else problem,
                since_copy=present_changes(subscription, state, table, catalog)
                if is_ready and table and catalog
                else (),
            )
        )
    return replace(
        _configured_status(feed, subscription),
        tables=tuple(tables),
        enabled=record.enabled,
        reason=record.reason,
        skip_lsn=None if record.skip_lsn is None else format_lsn(record.skip_lsn),
        notice=record.notice,
        sequences=listed_sequences(Sequences(lake, subscription.name).newest().values()),
        warnings=tuple(warning.message for warning in unsent_leaves(subscription, catalog))
        if catalog
        else (),
    )


def _configured_status(feed: Feed, subscription: Subscription) -> SubscriptionStatus:
    """The part of the status that pgsieve.yaml alone determines."""
    row_filter = "publisher" if feed.filtered else "pipeline"
    return SubscriptionStatus(subscription.name, feed.source.name, row_filter, tables=())
