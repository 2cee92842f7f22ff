"""The asset check `subscriber_consistency`, and the reports of what a check has changed in the replicas.

A check applies the changes up to the LSN of the comparison. Without a report, Dagster would not know of these changes,
and would show neither the replicas nor the cut as materialised.

In: the tables of a subscription, or the results of `pgsieve check`
Out: the checks; and events in Dagster's records
"""

from collections.abc import Iterable, Iterator

import dagster as dg

from pgsieve.assets.checks import (
    TableByKey,
    TableCheck,
    make_table_checks,
    sync_state_result,
    table_freshness_result,
)
from pgsieve.assets.lake import open_lake
from pgsieve.assets.outcome import run_as_step
from pgsieve.assets.published import Tables
from pgsieve.assets.replicas import ReplicaAssets, describe_replicas, is_changed
from pgsieve.assets.runless_events import measure_freshness, report_checks, report_cut, report_materialization
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, combine_results
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.checks.consistency import TableConsistency, check_consistency
from pgsieve.assets.steps.checks.repair import RepairResult
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.translator import DagsterNames
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.visible import escape_controls
from pgsieve.decoding.wording import quantity
from pgsieve.resources.lake.lake import Lake


class CheckReporter:
    """Reports to Dagster what the checks of a subscription find, and what they change in its replicas.

    It must be made before the first check. `tables` are the tables that have an asset.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        subscription: Subscription,
        lake: Lake,
        tables: Tables,
        dagster_names: DagsterNames,
    ) -> None:
        self._instance, self._subscription, self._lake = instance, subscription, lake
        self._dagster_names = dagster_names
        self._assets = ReplicaAssets(subscription, tables, dagster_names)
        self._former_cut = Cuts(lake, subscription.name).read_last()
        self._applied = ApplyResult()

    def add_applied(self, result: ApplyResult) -> None:
        """Add changes that were applied, for the next `send_replicas`."""
        self._applied = combine_results(self._applied, result)

    def add_repaired(self, result: RepairResult) -> None:
        """Add the rows of a repair, for the next `send_replicas`."""
        if result.inserted or result.deleted:
            table = TableResult(result.schema, result.table, inserted=result.inserted, deleted=result.deleted)
            self.add_applied(ApplyResult({table.name: table}))

    def send_replicas(self) -> None:
        """Report the replicas that have changed since the last call, with their checks, and the cut."""
        name = self._subscription.name
        cut = Cuts(self._lake, name).read_last()
        result = combine_results(self._applied, ApplyResult(cut=cut))
        states = {
            table: state
            for table, state in TableStates(self._lake, name).read_newest().items()
            if table in self._assets.tables
            and state.state == SyncState.READY
            and is_changed(table, result, self._former_cut)
        }
        self._former_cut, self._applied = cut, ApplyResult()
        if not states:
            return
        key_by_table = {table: key for key, table in self._assets.table_by_key.items()}
        for table, (version, metadata) in describe_replicas(self._assets, self._lake, states, result).items():
            report_materialization(self._instance, key_by_table[table], version, metadata)
        freshness = measure_freshness(self._subscription, self._lake, cut)
        results = [
            check_result
            for table, state in states.items()
            for check_result in (
                sync_state_result(key_by_table[table], state),
                table_freshness_result(key_by_table[table], self._subscription, freshness, state),
            )
        ]
        report_checks(self._instance, results)
        report_cut(self._instance, self._subscription, self._lake, self._dagster_names)

    def send_results(self, results: Iterable[TableConsistency]) -> None:
        """Report the results of the check `subscriber_consistency`."""
        key_by_table = {table: key for key, table in self._assets.table_by_key.items()}
        report_checks(
            self._instance,
            [
                make_consistency_result(key_by_table[result.schema, result.table], result)
                for result in results
                if (result.schema, result.table) in key_by_table
            ],
        )


def consistency_checks(
    subscription: Subscription, tables: Tables, dagster_names: DagsterNames
) -> list[dg.AssetChecksDefinition]:
    """Make the check `subscriber_consistency`: the replica equals the publisher's filtered table at the same LSN."""

    def evaluate(
        context: dg.AssetCheckExecutionContext, table_by_key: TableByKey
    ) -> Iterator[dg.AssetCheckResult]:
        key_by_table = {table: key for key, table in table_by_key.items()}
        with run_as_step(context):
            lake = open_lake(context, dagster_names)
            reporter = CheckReporter(context.instance, subscription, lake, tables, dagster_names)
            compared_tables = check_consistency(
                subscription,
                lake,
                context.log.info,
                list(key_by_table),
                context.log.warning,
                reporter.add_applied,
            )
            reporter.send_replicas()
            for result in compared_tables:
                yield make_consistency_result(key_by_table[result.schema, result.table], result)

    check = TableCheck(
        "subscriber_consistency",
        "consistency",
        "The replica holds just the rows that the publisher selects with the row filter at the same LSN.",
        reads_slot=True,
    )
    return make_table_checks(check, subscription, tables, dagster_names, evaluate)


def make_consistency_result(key: dg.AssetKey, result: TableConsistency) -> dg.AssetCheckResult:
    """The result of the check `subscriber_consistency` for a table."""
    return dg.AssetCheckResult(
        check_name="subscriber_consistency",
        asset_key=key,
        passed=result.equal,
        severity=dg.AssetCheckSeverity.ERROR,
        description=result.problem or _describe_difference(result),
        metadata={
            "LSN": format_lsn(result.lsn),
            "rows at the publisher": result.publisher_rows,
            "rows in the replica": result.replica_rows,
            "differing rows": result.differing,
            "rows only at the publisher": result.counts.only_publisher,
            "rows only in the replica": result.counts.only_replica,
            "rows with other values": result.counts.different,
            "keys": list(map(escape_controls, result.keys)),
        },
    )


def _describe_difference(result: TableConsistency) -> str | None:
    """Describe in a sentence how many rows differ, with the keys of some, and the command that repairs them.

    None if no row differs.
    """
    if result.equal:
        return None
    keys = escape_controls(", ".join(result.keys))
    ellipsis = ", …" if len(result.keys) < result.differing else ""
    rows = f"{quantity(result.differing, 'row')} {'differs' if result.differing == 1 else 'differ'}"
    return f"{rows}: {keys}{ellipsis}. `pgsieve check --repair` writes what the publisher has."
