"""The asset checks: row filters, freshness and sync state of the replicas, and the health of slots.

A replica is the copy of one of the publisher's tables. A cut names a version of each replica of a subscription;
together these versions equal the publisher at one LSN.

One op evaluates a check for all tables of a subscription. If Dagster would give two of the tables the same name, several
ops divide the tables. The steps of each run evaluate the check of the slot, and some checks of tables and cuts.
These steps (`assets/slot_consumption.py`, `assets/partition_roots.py`) get the results from functions in this module.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from pgsieve.assets.encoded_names import group_by_distinct_names
from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import LAG_BYTES, LAG_SECONDS
from pgsieve.assets.outcome import run_as_step
from pgsieve.assets.published import Tables
from pgsieve.assets.steps.checks.conformity import TableConformity, check_conformity, is_checkable
from pgsieve.assets.steps.checks.freshness import Freshness, check_freshness
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, SubscriptionState
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.translator import AssetKind, DagsterNames, replica_asset, slot_stream_asset
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.postgres.slot import SlotState, read_slot_state

TableByKey = Mapping[dg.AssetKey, TableName]

#: The names of the checks that each run evaluates for the cut.
SYNC_STATE, FRESHNESS = "sync_state", "freshness"
#: The result of the check `sync_state` of a cut has a metadata entry of this name. It lists the problems for which a
#: run has already failed.
_REPORTED_PROBLEMS = "runs have failed for"

#: If the server has this many bytes of WAL after the LSN up to which a slot is confirmed, the check `slot_health` and the
#: sensor of the slot report it.
LAG_ALARM_BYTES = 1024 * 1024 * 1024


def make_specs(name: str, keys: Iterable[dg.AssetKey], description: str) -> list[dg.AssetCheckSpec]:
    """Make the spec of a check for each of the assets."""
    return [dg.AssetCheckSpec(name, asset=key, description=description) for key in keys]


def map_keys_to_tables(subscription: Subscription, tables: Tables, dagster_names: DagsterNames) -> TableByKey:
    """Maps the asset key of each replica to the name of its table."""
    return {
        dagster_names.asset_key(replica_asset(subscription, table)): name for name, table in tables.items()
    }


@dataclass(frozen=True)
class TableCheck:
    """A check of replicas.

    - `name`: the name of the check
    - `op_suffix`: what the names of its ops have after the subscription's name
    - `description`: what the replica has to meet
    - `reads_slot`: whether the check reads the slot, so that it must not run while another op reads it
    """

    name: str
    op_suffix: str
    description: str
    reads_slot: bool


def make_table_checks(
    check: TableCheck,
    subscription: Subscription,
    tables: Tables,
    dagster_names: DagsterNames,
    evaluate: Callable[[dg.AssetCheckExecutionContext, TableByKey], Iterator[dg.AssetCheckResult]],
) -> list[dg.AssetChecksDefinition]:
    """Make a check of some tables.

    `evaluate` gets the context of an op and the tables whose check the run selects, in the order of their keys. It yields
    the results. No op has two tables to which Dagster gives the same name. The second op and later ones have `_2` and so on
    after their names.
    """
    op_name = dagster_names.prefixed_name(f"{subscription.name}_{check.op_suffix}")

    def make_op(name: str, tables_of_op: TableByKey) -> dg.AssetChecksDefinition:
        @dg.multi_asset_check(
            specs=make_specs(check.name, tables_of_op, check.description),
            name=name,
            can_subset=True,
            required_resource_keys=dagster_names.resource_keys,
            pool=f"slot_{subscription.slot_stream.slot}" if check.reads_slot else None,
        )
        def evaluate_selected(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
            keys = sorted(selected.asset_key for selected in context.selected_asset_check_keys)
            yield from evaluate(context, {key: tables_of_op[key] for key in keys})

        return evaluate_selected

    table_by_key = map_keys_to_tables(subscription, tables, dagster_names)
    return [
        make_op(op_name if number == 1 else f"{op_name}_{number}", group)
        for number, group in enumerate(group_by_distinct_names(table_by_key), 1)
    ]


def conformity_checks(
    subscription: Subscription, tables: Tables, dagster_names: DagsterNames
) -> list[dg.AssetChecksDefinition]:
    """Make the check `row_filter_conformity`: each row of the replica matches the row filter.

    Only tables with a row filter that pgsieve can evaluate have this check.
    """
    checkable_tables = {
        name: table
        for name, table in tables.items()
        if table.replicated and is_checkable(subscription, table.replicated)
    }

    def evaluate(
        context: dg.AssetCheckExecutionContext, table_by_key: TableByKey
    ) -> Iterator[dg.AssetCheckResult]:
        with run_as_step(context):
            lake = open_lake(context, dagster_names)
            for key, table in table_by_key.items():
                yield _make_conformity_result(key, check_conformity(subscription, lake, table))

    check = TableCheck(
        "row_filter_conformity", "conformity", "No row of the replica fails the row filter.", reads_slot=False
    )
    return make_table_checks(check, subscription, checkable_tables, dagster_names, evaluate)


#: The reason why rows of a correct replica may not match its row filter.
_ALTERED_FILTER = (
    "the row filter or its publications were altered since the table was copied: earlier rows stay, as in"
    " PostgreSQL, until `pgsieve resync`"
)


def _make_conformity_result(key: dg.AssetKey, conformity: TableConformity) -> dg.AssetCheckResult:
    """The result of the check `row_filter_conformity` for a table."""
    is_uncertain = conformity.altered or conformity.problem is not None
    return dg.AssetCheckResult(
        check_name="row_filter_conformity",
        asset_key=key,
        passed=conformity.failing == 0 and conformity.problem is None,
        severity=dg.AssetCheckSeverity.WARN if is_uncertain else dg.AssetCheckSeverity.ERROR,
        description=conformity.problem
        or (_ALTERED_FILTER if conformity.failing and conformity.altered else None),
        metadata={
            "rows": conformity.rows,
            "failing rows": conformity.failing,
            "keys": list(map(escape_controls, conformity.keys)),
        },
    )


def freshness_description(subscription: Subscription) -> str:
    """The description of the check `freshness`."""
    max_seconds = subscription.freshness.total_seconds()
    return f"No commit has been waiting for longer than {max_seconds:.0f} s to be applied."


def freshness_checks(
    subscription: Subscription, tables: Tables, dagster_names: DagsterNames
) -> list[dg.AssetChecksDefinition]:
    """Make the check `freshness`: it fails if a commit has been waiting too long to be applied. It reads no rows."""

    def evaluate(
        context: dg.AssetCheckExecutionContext, table_by_key: TableByKey
    ) -> Iterator[dg.AssetCheckResult]:
        with run_as_step(context):
            lake = open_lake(context, dagster_names)
            freshness = check_freshness(subscription, lake)
            states = TableStates(lake, subscription.name).read_newest()
        for key, table in table_by_key.items():
            yield table_freshness_result(key, subscription, freshness, states.get(table))

    check = TableCheck(FRESHNESS, FRESHNESS, freshness_description(subscription), reads_slot=True)
    return make_table_checks(check, subscription, tables, dagster_names, evaluate)


def sync_state_checks(
    subscription: Subscription, tables: Tables, dagster_names: DagsterNames
) -> list[dg.AssetChecksDefinition]:
    """Make the check `sync_state`: the table is ready, and the subscription is enabled. The check reads no rows."""

    def evaluate(
        context: dg.AssetCheckExecutionContext, table_by_key: TableByKey
    ) -> Iterator[dg.AssetCheckResult]:
        with run_as_step(context):
            lake = open_lake(context, dagster_names)
            states = TableStates(lake, subscription.name).read_newest()
            subscription_state = SubscriptionRecord(lake, subscription.name).read_state()
        for key, table in table_by_key.items():
            yield sync_state_result(key, states.get(table), subscription_state)

    check = TableCheck(
        SYNC_STATE,
        SYNC_STATE,
        "Changes are applied to the replica: it was copied, and no error has set it aside.",
        reads_slot=False,
    )
    return make_table_checks(check, subscription, tables, dagster_names, evaluate)


def sync_state_result(
    key: dg.AssetKey, state: TableState | None, subscription_state: SubscriptionState | None = None
) -> dg.AssetCheckResult:
    """The result of the check `sync_state` for a table.

    With `subscription_state`, the check also requires that the subscription is enabled.
    """
    is_enabled = subscription_state is None or subscription_state.enabled
    reason = subscription_state.reason if subscription_state else None
    return dg.AssetCheckResult(
        check_name=SYNC_STATE,
        asset_key=key,
        passed=is_enabled and state is not None and state.state == SyncState.READY,
        description=reason or (state.reason if state else None),
        metadata={"state": (state.state if state else SyncState.INITIALIZE).meaning},
    )


def cut_sync_state_result(
    key: dg.AssetKey,
    states: Mapping[TableName, TableState],
    subscription_state: SubscriptionState,
    reported_problems: Iterable[str] = (),
) -> dg.AssetCheckResult:
    """The result of the check `sync_state` for a cut, which concerns all tables of the subscription.

    If tables only wait for a copy, the result is a warning. `reported_problems` lists the problems for which a run has
    already failed (see `read_reported_problems`).
    """
    waiting_tables = {
        name: state
        for name, state in states.items()
        if state.state not in {SyncState.READY, SyncState.REMOVED}
    }
    tables_set_aside = [name for name, state in waiting_tables.items() if state.state == SyncState.SET_ASIDE]
    is_enabled, reason = subscription_state.enabled, subscription_state.reason
    reasons = [reason] if reason and not is_enabled else []
    reasons += [
        f"{quote_qualified(*name)} is {state.state.meaning}" + (f": {state.reason}" if state.reason else "")
        for name, state in sorted(waiting_tables.items())
    ]
    return dg.AssetCheckResult(
        check_name=SYNC_STATE,
        asset_key=key,
        passed=is_enabled and not waiting_tables,
        severity=dg.AssetCheckSeverity.ERROR
        if tables_set_aside or not is_enabled
        else dg.AssetCheckSeverity.WARN,
        description="; ".join(reasons) or None,
        metadata={
            "tables ready": sum(state.state == SyncState.READY for state in states.values()),
            "tables waiting": len(waiting_tables) - len(tables_set_aside),
            "tables set aside": len(tables_set_aside),
            **(
                {_REPORTED_PROBLEMS: dg.MetadataValue.json(sorted(reported_problems))}
                if reported_problems
                else {}
            ),
        },
    )


def read_reported_problems(dagster: dg.DagsterInstance, key: dg.AssetKey) -> set[str]:
    """Read the problems for which an earlier run has failed.

    They are recorded in the last result of the check `sync_state` of the cut; `key` is the cut's asset.
    """
    outcomes = {AssetCheckExecutionRecordStatus.SUCCEEDED, AssetCheckExecutionRecordStatus.FAILED}
    records = dagster.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(key, SYNC_STATE), limit=1, status=outcomes
    )
    evaluation = records[0].evaluation if records else None
    entry = evaluation.metadata.get(_REPORTED_PROBLEMS) if evaluation else None
    if isinstance(entry, dg.JsonMetadataValue) and isinstance(entry.value, list):
        return set(entry.value)
    return set()


def freshness_result(
    key: dg.AssetKey, subscription: Subscription, measured: Freshness | str
) -> dg.AssetCheckResult:
    """The result of the check `freshness`.

    `measured` is how far the replicas are behind. If that could not be measured, it is a text with the reason.
    """
    is_fresh, description = False, measured if isinstance(measured, str) else measured.problem
    metadata: dict[str, float | str] = {}
    if not isinstance(measured, str):
        is_fresh = measured.problem is None and measured.seconds <= subscription.freshness.total_seconds()
        metadata = {LAG_SECONDS: measured.seconds, "LSN": format_lsn(measured.lsn)}
    return dg.AssetCheckResult(
        check_name=FRESHNESS,
        asset_key=key,
        passed=is_fresh,
        severity=dg.AssetCheckSeverity.WARN,
        description=description,
        metadata=metadata,
    )


def table_freshness_result(
    key: dg.AssetKey, subscription: Subscription, measured: Freshness | str, state: TableState | None
) -> dg.AssetCheckResult:
    """The result of the check `freshness` for one table. It fails if the table is not ready, since it receives no changes."""
    if state is not None and state.state == SyncState.READY:
        return freshness_result(key, subscription, measured)
    meaning = state.state.meaning if state else "not copied yet"
    reason = f": {state.reason}" if state and state.reason else ""
    return freshness_result(key, subscription, f"nothing is applied: the table is {meaning}{reason}")


def describe_slot_problem(slot: str, state: SlotState | None) -> str | None:
    """The problem of a replication slot; None if it has none.

    A slot has a problem if it does not exist, has lost WAL, or lags too far behind.
    """
    if state is None:
        return f'replication slot "{slot}" does not exist'
    if state.wal_status not in {"reserved", "extended"}:
        return f'replication slot "{slot}" has wal_status {state.wal_status}: the server removes, or has removed, WAL that it needs'
    if state.lag_bytes >= LAG_ALARM_BYTES:
        return f'replication slot "{slot}" lags {state.lag_bytes} bytes'
    return None


def slot_health_spec(slot_stream: SlotStream, dagster_names: DagsterNames) -> dg.AssetCheckSpec:
    """The spec of the check `slot_health`: the slot exists, has the WAL that it needs, and does not lag too far behind."""
    return dg.AssetCheckSpec(
        "slot_health",
        asset=dagster_names.asset_key(slot_stream_asset(slot_stream, AssetKind.CHANGE_LOG)),
        description="The replication slot exists, holds its WAL, and lags less than 1 GiB.",
    )


def check_slot_health(slot_stream: SlotStream, dagster_names: DagsterNames) -> dg.AssetCheckResult:
    """Evaluate the check `slot_health` for the slot as it is now."""
    with slot_stream.source.connect() as connection:
        state = read_slot_state(connection, slot_stream.slot)
    metadata: dict[str, Any] = (
        {}
        if state is None
        else {
            "slot": slot_stream.slot,
            "wal_status": state.wal_status,
            LAG_BYTES: state.lag_bytes,
            "confirmed LSN": format_lsn(state.confirmed_lsn),
            "active": state.is_active,
        }
    )
    problem = describe_slot_problem(slot_stream.slot, state)
    return dg.AssetCheckResult(
        check_name="slot_health",
        asset_key=dagster_names.asset_key(slot_stream_asset(slot_stream, AssetKind.CHANGE_LOG)),
        passed=problem is None,
        description=problem,
        metadata=metadata,
    )
