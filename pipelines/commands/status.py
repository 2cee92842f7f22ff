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
from pgsieve.assets.steps.checks.freshness import (
    compute_seconds_since,
    find_unapplied_commit,
    find_unread_time,
)
from pgsieve.assets.steps.operations.resync import describe_present_changes
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.databases import OtherDatabaseError
from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates, add_copy_command
from pgsieve.assets.steps.slot_consumption.slot import OtherClusterError, refuse_other_publisher
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.validation.examination import Examination
from pgsieve.assets.steps.validation.warnings import find_unsent_leaves
from pgsieve.assets.translator import AssetKind, subscription_asset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.commands.results import (
    UNKNOWN,
    SlotStatus,
    StatusReport,
    SubscriptionStatus,
    TableStatus,
)
from pgsieve.pipelines.commands.sequences import list_sequences
from pgsieve.pipelines.commands.ui import find_dagster_home
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.slot import SlotState, read_slot_state
from pgsieve.resources.postgres.source import is_decoding_switched

_logger = logging.getLogger(__name__)

#: To find the commit time of the first transaction that waits in a slot, the server has to decode WAL. After this time the
#: query is cancelled, and the status does not have the commit time.
_DECODE_TIMEOUT = "10s"
#: The values of `SlotStatus.decoding`: the key True is for servers on which logical slots switch logical decoding on and
#: off, the key False for other servers.
_DECODING_MODES: Mapping[bool | None, str] = {True: "while a slot exists", False: "always"}


@dataclass(frozen=True, slots=True)
class _SourceState:
    """What a source says: its publications, its slot, and how long the first transaction has been waiting in the slot.

    If the source does not answer, or is another publisher than before, only `problem` is set. `is_decoding_switched` is
    true if the server switches logical decoding on with the first logical slot, and off with the last.
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
    return _make_report(
        project, lake, _read_last_transformation_times(config, project.subscriptions.values())
    )


def make_brief_status_reader(config: Config) -> Callable[[], StatusReport]:
    """A function that reads the status at little cost: it counts no rows, and lets the server decode no WAL.

    The function uses a lake object of its own, so a thread may call it while other threads work.
    """
    project = build_project(config)
    lake = project.lake.open()
    return lambda: _make_report(project, lake, None)


def _make_report(project: Project, lake: Lake, last_run_times: Mapping[str, datetime] | None) -> StatusReport:
    """Make the report. `last_run_times` has the time of each subscription's last run; if it is None, the report is a brief one."""
    slot_statuses, subscription_statuses = [], []
    is_brief, last_run_times = last_run_times is None, last_run_times or {}
    for slot_stream in project.slot_streams.values():
        source_state = _read_source(lake, slot_stream, can_decode=not is_brief)
        change_log_position, log_problem = _read_change_log_position(lake, slot_stream)
        slot = source_state.slot
        slot_statuses.append(
            SlotStatus(
                source=slot_stream.source.name,
                subscription=next(iter(slot_stream.subscriptions)) if slot_stream.filtered else None,
                slot=slot_stream.slot,
                exists=UNKNOWN if source_state.problem else slot is not None,
                active=UNKNOWN if source_state.problem else slot is not None and slot.is_active,
                wal_status=slot.wal_status if slot else None,
                confirmed_lsn=format_lsn(slot.confirmed_lsn) if slot else None,
                lag_bytes=slot.lag_bytes if slot else None,
                change_log_lsn=None if change_log_position is None else format_lsn(change_log_position),
                problem=source_state.problem or log_problem,
                lag_seconds=source_state.waiting_seconds,
                retained_bytes=slot.retained_bytes if slot else None,
                safe_wal_bytes=slot.safe_bytes if slot else None,
                decoding=_DECODING_MODES.get(source_state.is_decoding_switched),
            )
        )
        for subscription in project.find_subscriptions(slot_stream):
            try:
                subscription_status = _read_subscription_status(
                    lake, slot_stream, subscription, source_state.examination, count_rows=not is_brief
                )
                delay_and_success = _measure_delay(
                    lake, subscription, source_state, last_run_times.get(subscription.name)
                )
            except LakeError as error:
                # This call is for its errors: it raises `error` if the lake itself has failed, and not only these tables.
                describe_error(lake, error)
                subscription_status = replace(
                    _make_configured_status(slot_stream, subscription), problem=str(error)
                )
                delay_and_success = (None, None)
            subscription_statuses.append(
                replace(
                    subscription_status,
                    seconds_behind=delay_and_success[0],
                    last_success=delay_and_success[1],
                )
            )
    return StatusReport(tuple(slot_statuses), tuple(subscription_statuses))


def _read_change_log_position(lake: Lake, slot_stream: SlotStream) -> tuple[int | None, str | None]:
    """Read the LSN up to which the change log has the slot's messages. The second result says why it cannot be read.

    If the whole lake fails, and not only the change log, the error is raised.
    """
    try:
        return ChangeLog(lake, slot_stream).read_position(), None
    except LakeError as error:
        describe_error(lake, error)
        return None, str(error)


def _read_source(lake: Lake, slot_stream: SlotStream, *, can_decode: bool) -> _SourceState:
    """Ask a source for its publications and its slot.

    If it does not answer, or if the lake has data of another publisher, only the problem is returned.
    """
    try:
        with slot_stream.source.connect() as connection:
            examination = Examination(connection, slot_stream, read_catalog(connection))
            slot = read_slot_state(connection, slot_stream.slot)
            # A LakeError would be about pgsieve's own tables, and other parts of the report show it.
            with suppress(LakeError):
                refuse_other_publisher(connection, slot_stream, lake)
            waiting_seconds = (
                None
                if slot is None
                else _measure_wait_in_slot(connection, lake, slot_stream, slot, can_decode)
            )
            return _SourceState(
                examination, slot, waiting_seconds, is_decoding_switched=is_decoding_switched(connection)
            )
    except (SourceError, OtherClusterError, OtherDatabaseError) as error:
        return _SourceState(problem=str(error))


def _measure_wait_in_slot(
    connection: psycopg.Connection[tuple[object, ...]],
    lake: Lake,
    slot_stream: SlotStream,
    slot: SlotState,
    can_decode: bool,
) -> float | None:
    """Return for how many seconds the first transaction has been waiting in the slot.

    None if the slot has not been read yet, or if the server cannot say, for example because there is too much WAL.
    """
    if _read_change_log_position(lake, slot_stream)[0] is None:
        return None
    try:
        connection.execute(f"set statement_timeout = '{_DECODE_TIMEOUT}'")
        return round(
            compute_seconds_since(
                connection, find_unread_time(connection, lake, slot_stream, slot, can_peek=can_decode)
            ),
            3,
        )
    except PgsieveError:
        # There is too much WAL to decode, the slot is lost, or a publication is missing. Other parts of the report show
        # which of these it is.
        return None
    finally:
        connection.execute("set statement_timeout = 0")


def _measure_delay(
    lake: Lake, subscription: Subscription, source_state: _SourceState, last_run_time: datetime | None
) -> tuple[float | None, str | None]:
    """Return for how many seconds a subscription has been behind, and when all changes were last applied."""
    last_cut = Cuts(lake, subscription.name).read_last()
    log_position, _ = _read_change_log_position(lake, subscription.slot_stream)
    success_time = last_cut.at if last_cut else None
    if log_position is None:
        return None, None if success_time is None else _format_iso(success_time)
    try:
        applied_position, waiting_since = find_unapplied_commit(
            ReplicaProgress(subscription, lake), log_position
        )
    except PgsieveError:  # The lake is damaged, and other parts of the report show where.
        return None, None if success_time is None else _format_iso(success_time)
    delay_seconds = source_state.waiting_seconds
    if applied_position < log_position:
        current_time = datetime.now(UTC)
        delay_seconds = max(
            delay_seconds or 0.0,
            round((current_time - waiting_since).total_seconds(), 3) if waiting_since else 0.0,
        )
    else:
        # All changes are applied. If the last run found no changes, the lake has no record of it, but Dagster has.
        is_up_to_date = source_state.slot is not None and source_state.slot.is_active and delay_seconds == 0
        success_time = max(
            (
                time
                for time in (success_time, last_run_time, datetime.now(UTC) if is_up_to_date else None)
                if time
            ),
            default=None,
        )
    return delay_seconds, None if success_time is None else _format_iso(success_time)


def _format_iso(time: datetime) -> str:
    """The time in UTC as ISO 8601 text."""
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _read_last_transformation_times(
    config: Config, subscriptions: Iterable[Subscription]
) -> Mapping[str, datetime]:
    """Maps each subscription to the time at which a run last decoded its changes. Empty if Dagster has no records."""
    if not find_dagster_home(config, creates_folder=False).exists():
        return {}
    names_by_key = {
        subscription_asset(subscription, AssetKind.TABLE_CHANGES).key: subscription.name
        for subscription in subscriptions
    }
    try:
        with open_instance(config) as instance:
            events = instance.get_latest_materialization_events(list(names_by_key))
    except Exception as error:  # noqa: BLE001 - from Dagster, or from any kind of database with its records
        _logger.warning("Dagster's records cannot be read: %s", type(error).__name__)
        return {}
    return {
        names_by_key[key]: datetime.fromtimestamp(event.timestamp, UTC)
        for key, event in events.items()
        if event
    }


def _count_rows(lake: Lake, subscription: Subscription, name: Name) -> tuple[int | None, str | None]:
    """Count the rows of a replica; None if there is no replica. The second result says why they cannot be counted."""
    path = lake.paths.replica(subscription.name, *name)
    try:
        return lake.count_rows(path) if lake.records.exists(path) else None, None
    except LakeError as error:
        return None, add_copy_command(subscription.name, name, describe_error(lake, error))


def _read_subscription_status(
    lake: Lake,
    slot_stream: SlotStream,
    subscription: Subscription,
    examination: Examination | None,
    *,
    count_rows: bool,
) -> SubscriptionStatus:
    """Read the state of a subscription from its source and the lake; if it cannot be replicated, only from the lake."""
    obstacle = examination.find_obstacle(subscription.name) if examination else None
    catalog = examination.catalog if examination and obstacle is None else None
    subscription_status = _read_recorded_status(
        lake, slot_stream, subscription, catalog, count_rows=count_rows
    )
    return subscription_status if obstacle is None else replace(subscription_status, problem=str(obstacle))


def _read_recorded_status(
    lake: Lake,
    slot_stream: SlotStream,
    subscription: Subscription,
    catalog: Catalog | None,
    *,
    count_rows: bool,
) -> SubscriptionStatus:
    """Read the state of a subscription from the lake.

    `catalog` is None if its source does not answer, or if the subscription cannot be replicated.
    """
    states_by_name = TableStates(lake, subscription.name).read_newest()
    published_tables = subscription.tables(catalog) if catalog else {}
    cut = Cuts(lake, subscription.name).read_last()
    subscription_state = SubscriptionRecord(lake, subscription.name).read_state()
    table_statuses = []
    for name in sorted(published_tables.keys() | states_by_name.keys()):
        table_state, replicated_table = states_by_name.get(name), published_tables.get(name)
        row_filters = replicated_table.row_filters if replicated_table else None
        state = table_state.state if table_state else SyncState.INITIALIZE
        is_ready = state == SyncState.READY
        rows, problem = _count_rows(lake, subscription, name) if count_rows else (None, None)
        table_statuses.append(
            TableStatus(
                schema=name[0],
                name=name[1],
                state=state.meaning,
                row_filter=UNKNOWN
                if catalog is None
                else " OR ".join(row_filters)
                if row_filters is not None
                else None,
                lsn=format_lsn(max(cut.lsn if cut else 0, table_state.lsn))
                if table_state and is_ready
                else None,
                version=cut.tables.get(name) if cut else None,
                rows=rows,
                problem=table_state.reason if table_state and table_state.reason else problem,
                since_copy=describe_present_changes(subscription, table_state, replicated_table, catalog)
                if is_ready and replicated_table and catalog
                else (),
                behind=state in {SyncState.SET_ASIDE, SyncState.INITIALIZE, SyncState.DATA_SYNC},
            )
        )
    return replace(
        _make_configured_status(slot_stream, subscription),
        tables=tuple(table_statuses),
        enabled=subscription_state.enabled,
        reason=subscription_state.reason,
        skip_lsn=None if subscription_state.skip_lsn is None else format_lsn(subscription_state.skip_lsn),
        notice=subscription_state.notice,
        sequences=list_sequences(Sequences(lake, subscription.name).read_newest().values()),
        warnings=tuple(warning.message for warning in find_unsent_leaves(subscription, catalog))
        if catalog
        else (),
    )


def _make_configured_status(slot_stream: SlotStream, subscription: Subscription) -> SubscriptionStatus:
    """The part of the status that pgsieve.yaml alone determines."""
    row_filter = "publisher" if slot_stream.filtered else "pipeline"
    return SubscriptionStatus(subscription.name, slot_stream.source.name, row_filter, tables=())
