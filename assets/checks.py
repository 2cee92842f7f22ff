"""Asset checks: consistency, row filters, freshness and state of replica tables, health of slots.

One op evaluates a check for all tables of a subscription. There are several ops if Dagster would give two tables the
same name. Each run evaluates some checks within its steps (`assets/slot_consumption.py`,
`assets/partition_roots.py`), which take the results from the functions here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import dagster as dg
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from pgsieve.assets.dagster_names import Name, groups_of_distinct_names
from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import LAG_BYTES, LAG_SECONDS
from pgsieve.assets.outcome import as_step
from pgsieve.assets.published import Tables
from pgsieve.assets.steps.checks.conformity import TableConformity, check_conformity, is_checkable
from pgsieve.assets.steps.checks.consistency import TableConsistency, check_consistency
from pgsieve.assets.steps.checks.freshness import Freshness, check_freshness
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, SubscriptionState
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.translator import AssetKind, Naming, feed_asset, replica_asset
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.decoding.wording import quantity
from pgsieve.resources.postgres.slot import SlotState, slot_state

Keys = Mapping[dg.AssetKey, Name]

#: The names of the checks that each run evaluates.
SYNC_STATE, FRESHNESS = "sync_state", "freshness"
#: The metadata entry of a cut's check `sync_state` with the problems for which runs have failed.
_REPORTED = "runs have failed for"

#: The check `slot_health` and the lag sensor report a slot that retains this many bytes of WAL.
LAG_ALARM_BYTES = 1024 * 1024 * 1024


def _specs(name: str, keys: Iterable[dg.AssetKey], description: str) -> list[dg.AssetCheckSpec]:
    return [dg.AssetCheckSpec(name, asset=key, description=description) for key in keys]


def _tables_by_key(subscription: Subscription, tables: Tables, naming: Naming) -> Keys:
    return {naming.key(replica_asset(subscription, table)): name for name, table in tables.items()}


def _checks_in_ops(
    name: str, keys: Keys, checks: Callable[[str, Keys], dg.AssetChecksDefinition]
) -> list[dg.AssetChecksDefinition]:
    """The checks of some tables, in ops called `name`, `<name>_2`, ..., each without two tables of the same Dagster name."""
    return [
        checks(name if number == 1 else f"{name}_{number}", group)
        for number, group in enumerate(groups_of_distinct_names(keys), 1)
    ]


def _selected_keys(context: dg.AssetCheckExecutionContext) -> list[dg.AssetKey]:
    return sorted(check.asset_key for check in context.selected_asset_check_keys)


def consistency_checks(
    subscription: Subscription, tables: Tables, naming: Naming
) -> list[dg.AssetChecksDefinition]:
    """`subscriber_consistency`: the replica equals the publisher's filtered table at the same LSN."""
    tables_by_key = _tables_by_key(subscription, tables, naming)

    def checks(name: str, keys: Keys) -> dg.AssetChecksDefinition:
        specs = _specs(
            "subscriber_consistency",
            keys,
            "The replica holds just the rows that the publisher selects with the row filter at the same LSN.",
        )

        @dg.multi_asset_check(
            specs=specs,
            name=name,
            can_subset=True,
            required_resource_keys=naming.resources,
            pool=f"slot_{subscription.feed.slot}",
        )
        def consistency(
            context: dg.AssetCheckExecutionContext,
        ) -> Iterator[dg.AssetCheckResult]:
            names = [keys[key] for key in _selected_keys(context)]
            by_name = {name: key for key, name in keys.items()}
            with as_step(context):
                lake = open_lake(context, naming)
                compared_tables = check_consistency(
                    subscription, lake, context.log.info, names, context.log.warning
                )
                for compared in compared_tables:
                    yield _consistency_result(by_name[compared.schema, compared.table], compared)

        return consistency

    return _checks_in_ops(naming.name(f"{subscription.name}_consistency"), tables_by_key, checks)


def _consistency_result(key: dg.AssetKey, compared: TableConsistency) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="subscriber_consistency",
        asset_key=key,
        passed=compared.equal,
        severity=dg.AssetCheckSeverity.ERROR,
        description=compared.problem or _difference(compared),
        metadata={
            "LSN": format_lsn(compared.lsn),
            "rows at the publisher": compared.publisher_rows,
            "rows in the replica": compared.replica_rows,
            "differing rows": compared.differing,
            "keys": list(map(escape_controls, compared.keys)),
        },
    )


def _difference(compared: TableConsistency) -> str | None:
    """The number of differing rows, the keys of some, and the command that repairs them; None if no row differs."""
    if compared.equal:
        return None
    keys = escape_controls(", ".join(compared.keys))
    ellipsis = ", …" if len(compared.keys) < compared.differing else ""
    rows = f"{quantity(compared.differing, 'row')} {'differs' if compared.differing == 1 else 'differ'}"
    return f"{rows}: {keys}{ellipsis}. `pgsieve check --repair` writes what the publisher has."


def conformity_checks(
    subscription: Subscription, tables: Tables, naming: Naming
) -> list[dg.AssetChecksDefinition]:
    """`row_filter_conformity`: no row of the replica fails the row filter.

    Only tables with a row filter that pgsieve can evaluate have this check.
    """
    checkable = {
        name: table
        for name, table in tables.items()
        if table.replicated and is_checkable(subscription, table.replicated)
    }
    tables_by_key = _tables_by_key(subscription, checkable, naming)

    def checks(name: str, keys: Keys) -> dg.AssetChecksDefinition:
        specs = _specs("row_filter_conformity", keys, "No row of the replica fails the row filter.")

        @dg.multi_asset_check(
            specs=specs, name=name, can_subset=True, required_resource_keys=naming.resources
        )
        def conformity(
            context: dg.AssetCheckExecutionContext,
        ) -> Iterator[dg.AssetCheckResult]:
            with as_step(context):
                lake = open_lake(context, naming)
                for key in _selected_keys(context):
                    yield _conformity_result(key, check_conformity(subscription, lake, keys[key]))

        return conformity

    return _checks_in_ops(naming.name(f"{subscription.name}_conformity"), tables_by_key, checks)


#: Why rows of a correct replica may fail its row filter.
_ALTERED_FILTER = (
    "the row filter or its publications were altered since the table was copied: earlier rows stay, as in"
    " PostgreSQL, until `pgsieve resync`"
)


def _conformity_result(key: dg.AssetKey, conformity: TableConformity) -> dg.AssetCheckResult:
    uncertain = conformity.altered or conformity.problem is not None
    return dg.AssetCheckResult(
        check_name="row_filter_conformity",
        asset_key=key,
        passed=conformity.failing == 0 and conformity.problem is None,
        severity=dg.AssetCheckSeverity.WARN if uncertain else dg.AssetCheckSeverity.ERROR,
        description=conformity.problem
        or (_ALTERED_FILTER if conformity.failing and conformity.altered else None),
        metadata={"rows": conformity.rows, "failing rows": conformity.failing, "keys": list(conformity.keys)},
    )


def freshness_checks(
    subscription: Subscription, tables: Tables, naming: Naming
) -> list[dg.AssetChecksDefinition]:
    """`freshness`: how long the oldest commit that the replicas lack has been waiting. No replica is read."""
    tables_by_key = _tables_by_key(subscription, tables, naming)
    limit = subscription.freshness.total_seconds()

    def checks(name: str, keys: Keys) -> dg.AssetChecksDefinition:
        specs = _specs(
            "freshness", keys, f"No commit has been waiting for longer than {limit:.0f} s to be applied."
        )

        @dg.multi_asset_check(
            specs=specs,
            name=name,
            can_subset=True,
            required_resource_keys=naming.resources,
            pool=f"slot_{subscription.feed.slot}",
        )
        def freshness(
            context: dg.AssetCheckExecutionContext,
        ) -> Iterator[dg.AssetCheckResult]:
            with as_step(context):
                lake = open_lake(context, naming)
                measured = check_freshness(subscription, lake)
                states = TableStates(lake, subscription.name).newest()
            for key in _selected_keys(context):
                yield table_freshness_result(key, subscription, measured, states.get(keys[key]))

        return freshness

    return _checks_in_ops(naming.name(f"{subscription.name}_freshness"), tables_by_key, checks)


def sync_state_checks(
    subscription: Subscription, tables: Tables, naming: Naming
) -> list[dg.AssetChecksDefinition]:
    """`sync_state`: the table is ready, and the subscription is enabled. No rows are read."""
    tables_by_key = _tables_by_key(subscription, tables, naming)

    def checks(name: str, keys: Keys) -> dg.AssetChecksDefinition:
        specs = _specs(
            "sync_state",
            keys,
            "Changes are applied to the replica: it was copied, and no error has set it aside.",
        )

        @dg.multi_asset_check(
            specs=specs, name=name, can_subset=True, required_resource_keys=naming.resources
        )
        def sync_state(
            context: dg.AssetCheckExecutionContext,
        ) -> Iterator[dg.AssetCheckResult]:
            with as_step(context):
                lake = open_lake(context, naming)
                states = TableStates(lake, subscription.name).newest()
                subscription_state = SubscriptionRecord(lake, subscription.name).state()
            for key in _selected_keys(context):
                yield sync_state_result(key, states.get(keys[key]), subscription_state)

        return sync_state

    return _checks_in_ops(naming.name(f"{subscription.name}_sync_state"), tables_by_key, checks)


def sync_state_result(
    key: dg.AssetKey, state: TableState | None, subscription_state: SubscriptionState | None = None
) -> dg.AssetCheckResult:
    """`sync_state` of one table; with `subscription_state`, the subscription has to be enabled too."""
    enabled = subscription_state is None or subscription_state.enabled
    reason = subscription_state.reason if subscription_state else None
    return dg.AssetCheckResult(
        check_name=SYNC_STATE,
        asset_key=key,
        passed=enabled and state is not None and state.state == SyncState.READY,
        description=reason or (state.reason if state else None),
        metadata={"state": (state.state if state else SyncState.INITIALIZE).meaning},
    )


def cut_sync_state_result(
    key: dg.AssetKey,
    states: Mapping[Name, TableState],
    subscription_state: SubscriptionState,
    reported: Iterable[str] = (),
) -> dg.AssetCheckResult:
    """`sync_state` of all tables of a subscription together; only a warning if tables merely wait for a copy.

    `reported` are the problems for which a run has failed; see `reported_problems`.
    """
    waiting = {n: s for n, s in states.items() if s.state not in {SyncState.READY, SyncState.REMOVED}}
    set_aside = [n for n, s in waiting.items() if s.state == SyncState.SET_ASIDE]
    enabled, reason = subscription_state.enabled, subscription_state.reason
    reasons = [reason] if reason and not enabled else []
    reasons += [
        f"{quote_qualified(*name)} is {state.state.meaning}" + (f": {state.reason}" if state.reason else "")
        for name, state in sorted(waiting.items())
    ]
    return dg.AssetCheckResult(
        check_name=SYNC_STATE,
        asset_key=key,
        passed=enabled and not waiting,
        severity=dg.AssetCheckSeverity.ERROR if set_aside or not enabled else dg.AssetCheckSeverity.WARN,
        description="; ".join(reasons) or None,
        metadata={
            "tables ready": sum(s.state == SyncState.READY for s in states.values()),
            "tables waiting": len(waiting) - len(set_aside),
            "tables set aside": len(set_aside),
            **({_REPORTED: dg.MetadataValue.json(sorted(reported))} if reported else {}),
        },
    )


def reported_problems(dagster: dg.DagsterInstance, key: dg.AssetKey) -> set[str]:
    """The problems for which an earlier run has failed, as the last result of the cut's check `sync_state` records them."""
    outcomes = {AssetCheckExecutionRecordStatus.SUCCEEDED, AssetCheckExecutionRecordStatus.FAILED}
    records = dagster.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(key, SYNC_STATE), limit=1, status=outcomes
    )
    evaluation = records[0].evaluation if records else None
    entry = evaluation.metadata.get(_REPORTED) if evaluation else None
    if isinstance(entry, dg.JsonMetadataValue) and isinstance(entry.value, list):
        return set(entry.value)
    return set()


def freshness_result(
    key: dg.AssetKey, subscription: Subscription, measured: Freshness | str
) -> dg.AssetCheckResult:
    """The result of `freshness`; `measured` is a text with the reason if the freshness could not be measured."""
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
    """`freshness` of one table; a table that is not ready receives no changes."""
    if state is not None and state.state == SyncState.READY:
        return freshness_result(key, subscription, measured)
    meaning = state.state.meaning if state else "not copied yet"
    reason = f": {state.reason}" if state and state.reason else ""
    return freshness_result(key, subscription, f"nothing is applied: the table is {meaning}{reason}")


def slot_problem(slot: str, state: SlotState | None) -> str | None:
    """The problem of a replication slot: it is missing, has lost WAL, or lags too far behind; None if it has none."""
    if state is None:
        return f'replication slot "{slot}" does not exist'
    if state.wal_status not in {"reserved", "extended"}:
        return f'replication slot "{slot}" has wal_status {state.wal_status}: the server removes, or has removed, WAL that it needs'
    if state.lag >= LAG_ALARM_BYTES:
        return f'replication slot "{slot}" lags {state.lag} bytes'
    return None


def slot_health_spec(feed: Feed, naming: Naming) -> dg.AssetCheckSpec:
    """`slot_health`: the slot exists, has the WAL that it needs, and does not lag too far behind."""
    return dg.AssetCheckSpec(
        "slot_health",
        asset=naming.key(feed_asset(feed, AssetKind.CHANGE_LOG)),
        description="The replication slot exists, holds its WAL, and lags less than 1 GiB.",
    )


def slot_health_result(feed: Feed, naming: Naming) -> dg.AssetCheckResult:
    """The result of `slot_health` for the slot as it is now."""
    with feed.source.connect() as connection:
        state = slot_state(connection, feed.slot)
    metadata: dict[str, Any] = (
        {}
        if state is None
        else {
            "slot": feed.slot,
            "wal_status": state.wal_status,
            LAG_BYTES: state.lag,
            "confirmed LSN": format_lsn(state.confirmed_lsn),
            "active": state.active,
        }
    )
    problem = slot_problem(feed.slot, state)
    return dg.AssetCheckResult(
        check_name="slot_health",
        asset_key=naming.key(feed_asset(feed, AssetKind.CHANGE_LOG)),
        passed=problem is None,
        description=problem,
        metadata=metadata,
    )
