"""Asset checks: on replica tables subscriber consistency, row filters, freshness, sync state; on change logs slot health.

The checks of a subscription's tables are one op, or a few where Dagster would mistake one table for another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import dagster as dg

from pgsieve.assets.dagster_names import Name, told_apart
from pgsieve.assets.metadata import change_log_key, replica_key
from pgsieve.assets.steps.checks.conformity import TableConformity, check_conformity, is_checkable
from pgsieve.assets.steps.checks.consistency import TableConsistency, check_consistency
from pgsieve.assets.steps.checks.freshness import check_freshness
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import ReplicatedTable
from pgsieve.resources.lake.lake import LakeResource
from pgsieve.resources.postgres.slot import slot_state

Keys = Mapping[dg.AssetKey, Name]

#: A slot that retains more WAL than this is reported by the slot-health check and the lag sensor.
LAG_ALARM_BYTES = 1024 * 1024 * 1024


def _specs(name: str, keys: Iterable[dg.AssetKey], description: str) -> list[dg.AssetCheckSpec]:
    return [dg.AssetCheckSpec(name, asset=key, description=description) for key in keys]


def _each_apart(
    name: str, keys: Keys, checks: Callable[[str, Keys], dg.AssetChecksDefinition]
) -> list[dg.AssetChecksDefinition]:
    """The checks of some tables, in as many ops as it takes to tell the tables apart: `name`, `<name>_2`."""
    return [
        checks(name if number == 1 else f"{name}_{number}", group)
        for number, group in enumerate(told_apart(keys), 1)
    ]


def _selected(context: dg.AssetCheckExecutionContext) -> list[dg.AssetKey]:
    return sorted(check.asset_key for check in context.selected_asset_check_keys)


def consistency_checks(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable]
) -> list[dg.AssetChecksDefinition]:
    """`subscriber_consistency`: the replica equals the publisher's filtered table at the same LSN."""
    tables_by_key = {replica_key(subscription, name): name for name in tables}

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
            pool=f"slot_{subscription.feed.slot}",
        )
        def consistency(
            context: dg.AssetCheckExecutionContext, lake: LakeResource
        ) -> Iterator[dg.AssetCheckResult]:
            names = [keys[key] for key in _selected(context)]
            for compared in check_consistency(subscription, lake.open(), context.log.info, names):
                yield _result(subscription, compared)

        return consistency

    return _each_apart(f"{subscription.name}_consistency", tables_by_key, checks)


def _result(subscription: Subscription, compared: TableConsistency) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="subscriber_consistency",
        asset_key=replica_key(subscription, (compared.schema, compared.table)),
        passed=compared.equal,
        severity=dg.AssetCheckSeverity.ERROR,
        description=compared.problem,
        metadata={
            "LSN": format_lsn(compared.lsn),
            "rows at the publisher": compared.publisher_rows,
            "rows in the replica": compared.replica_rows,
            "differing rows": compared.differing,
            "keys": list(compared.keys),
        },
    )


def conformity_checks(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable]
) -> list[dg.AssetChecksDefinition]:
    """`row_filter_conformity`: no row fails the row filter; none for tables without one that Spark can evaluate."""
    tables_by_key = {
        replica_key(subscription, name): name
        for name, table in tables.items()
        if is_checkable(subscription, table)
    }

    def checks(name: str, keys: Keys) -> dg.AssetChecksDefinition:
        specs = _specs("row_filter_conformity", keys, "No row of the replica fails the row filter.")

        @dg.multi_asset_check(specs=specs, name=name, can_subset=True)
        def conformity(
            context: dg.AssetCheckExecutionContext, lake: LakeResource
        ) -> Iterator[dg.AssetCheckResult]:
            opened = lake.open()
            for key in _selected(context):
                yield _conformity(key, check_conformity(subscription, opened, keys[key]))

        return conformity

    return _each_apart(f"{subscription.name}_conformity", tables_by_key, checks)


#: Why rows may fail that nobody has to mend.
_ALTERED = (
    "the row filter or its publications were altered since the table was copied: rows that were there before stay, as in"
    " PostgreSQL, until `pgsieve resync`"
)


def _conformity(key: dg.AssetKey, conformity: TableConformity) -> dg.AssetCheckResult:
    uncertain = conformity.altered or conformity.problem is not None
    return dg.AssetCheckResult(
        check_name="row_filter_conformity",
        asset_key=key,
        passed=conformity.failing == 0 and conformity.problem is None,
        severity=dg.AssetCheckSeverity.WARN if uncertain else dg.AssetCheckSeverity.ERROR,
        description=conformity.problem or (_ALTERED if conformity.failing and conformity.altered else None),
        metadata={"rows": conformity.rows, "failing rows": conformity.failing, "keys": list(conformity.keys)},
    )


def freshness_checks(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable]
) -> list[dg.AssetChecksDefinition]:
    """`freshness`: for how long the oldest commit that the replicas lack has been waiting; reads no replica."""
    tables_by_key = {replica_key(subscription, name): name for name in tables}
    limit = subscription.freshness.total_seconds()

    def checks(name: str, keys: Keys) -> dg.AssetChecksDefinition:
        specs = _specs(
            "freshness", keys, f"No commit has been waiting for longer than {limit:.0f} s to be applied."
        )

        @dg.multi_asset_check(
            specs=specs,
            name=name,
            can_subset=True,
            pool=f"slot_{subscription.feed.slot}",
        )
        def freshness(
            context: dg.AssetCheckExecutionContext, lake: LakeResource
        ) -> Iterator[dg.AssetCheckResult]:
            measured = check_freshness(subscription, lake.open())
            for key in _selected(context):
                yield dg.AssetCheckResult(
                    check_name="freshness",
                    asset_key=key,
                    passed=measured.problem is None and measured.seconds <= limit,
                    severity=dg.AssetCheckSeverity.WARN,
                    description=measured.problem,
                    metadata={"seconds behind": measured.seconds, "LSN": format_lsn(measured.lsn)},
                )

        return freshness

    return _each_apart(f"{subscription.name}_freshness", tables_by_key, checks)


def sync_state_checks(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable]
) -> list[dg.AssetChecksDefinition]:
    """`sync_state`: the table is ready, and the subscription enabled; reads no rows."""
    tables_by_key = {replica_key(subscription, name): name for name in tables}

    def checks(name: str, keys: Keys) -> dg.AssetChecksDefinition:
        specs = _specs(
            "sync_state",
            keys,
            "Changes are applied to the replica: it was copied, and no error has set it aside.",
        )

        @dg.multi_asset_check(specs=specs, name=name, can_subset=True)
        def sync_state(
            context: dg.AssetCheckExecutionContext, lake: LakeResource
        ) -> Iterator[dg.AssetCheckResult]:
            opened = lake.open()
            states, whole = (
                TableStates(opened, subscription.name).newest(),
                SubscriptionRecord(opened, subscription.name).state(),
            )
            for key in _selected(context):
                state = states.get(keys[key])
                yield dg.AssetCheckResult(
                    check_name="sync_state",
                    asset_key=key,
                    passed=whole.enabled and state is not None and state.state == SyncState.READY,
                    description=whole.reason or (state.reason if state else None),
                    metadata={"state": (state.state if state else SyncState.INITIALIZE).meaning},
                )

        return sync_state

    return _each_apart(f"{subscription.name}_sync_state", tables_by_key, checks)


def slot_health_check(feed: Feed) -> dg.AssetChecksDefinition:
    """`slot_health`: the slot exists, its WAL is there, and it does not lag too far behind."""

    @dg.asset_check(
        asset=change_log_key(feed),
        name="slot_health",
        description="The replication slot exists, holds its WAL, and lags less than 1 GiB.",
    )
    def slot_health() -> dg.AssetCheckResult:
        with feed.source.connect() as connection:
            state = slot_state(connection, feed.slot)
        if state is None:
            return dg.AssetCheckResult(
                passed=False, description=f'replication slot "{feed.slot}" does not exist'
            )
        healthy = state.wal_status in {"reserved", "extended"} and state.lag < LAG_ALARM_BYTES
        return dg.AssetCheckResult(
            passed=healthy,
            metadata={
                "slot": feed.slot,
                "wal_status": state.wal_status,
                "lag in bytes": state.lag,
                "confirmed LSN": format_lsn(state.confirmed_lsn),
                "active": state.active,
            },
        )

    return slot_health
