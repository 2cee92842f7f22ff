"""Asset checks: subscriber consistency on every replica table, slot health on every change log."""

from collections.abc import Iterator, Mapping

import dagster as dg

from assets.metadata import change_log_key, replica_key
from assets.steps.consistency import TableConsistency, check_consistency
from assets.steps.subscription import Feed, Subscription
from decoding.lsn import format_lsn
from decoding.publication import ReplicatedTable
from resources.delta import LakeResource
from resources.slot import slot_state

Name = tuple[str, str]

#: A slot that retains more WAL than this is reported by the slot-health check and the lag sensor.
LAG_ALARM_BYTES = 1024 * 1024 * 1024


def consistency_checks(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable]
) -> dg.AssetChecksDefinition:
    """`subscriber_consistency`: the replica equals the publisher's filtered table at the same LSN."""
    keys = {replica_key(subscription, name): name for name in tables}
    specs = [
        dg.AssetCheckSpec(
            "subscriber_consistency",
            asset=key,
            description="The replica holds just the rows that the publisher selects with the row filter at the same LSN.",
        )
        for key in keys
    ]

    @dg.multi_asset_check(
        specs=specs,
        name=f"{subscription.name}_consistency",
        can_subset=True,
        pool=f"slot_{subscription.feed.slot}",
    )
    def consistency(
        context: dg.AssetCheckExecutionContext, lake: LakeResource
    ) -> Iterator[dg.AssetCheckResult]:
        selected = {check.asset_key for check in context.selected_asset_check_keys}
        names = [keys[key] for key in selected]
        for compared in check_consistency(subscription, lake.open(), context.log.info, names):
            yield _result(subscription, compared)

    return consistency


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
