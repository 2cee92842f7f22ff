"""The assets of the replicas. Their step applies changes to all replicas of a subscription, and then writes a cut.

A replica is the copy of one of the publisher's tables. A cut names a version of each replica of a subscription;
together these versions equal the publisher at one LSN. The step before has routed the changes of a partition: to the
replica of the partition or, if the partition is published as an ancestor, to the ancestor's replica
(`pgsieve.assets.steps.update_transformation.slice_contents`, `pgsieve.decoding.publications.routing`).

If a run fails, Dagster shows all assets that the run has planned as failed. So runs plan only the cut, and report the
replicas that they have changed. A replica without changes keeps its last materialization. So does a replica that is set
aside (its changes are not applied, because of an error). The check `sync_state` shows which of the two is the case.
Replicas that a user selects are materialised if they are ready. A run that has brought all replicas up to date
materialises the cut, even if there were no changes.

Each run of the cut evaluates its checks `sync_state` and `freshness`, which cover all tables. The checks of a single
table are reported only if the run has materialised the table, or if the table has a new problem. If a table is set
aside or a subscription is disabled, one run fails for that, at its end. A run for which a user
selects the table fails, too.
"""

from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType

import dagster as dg

from pgsieve.assets.checks import (
    FRESHNESS,
    SYNC_STATE,
    cut_sync_state_result,
    freshness_description,
    freshness_result,
    read_reported_problems,
    sync_state_result,
    table_freshness_result,
)
from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import (
    cut_metadata,
    work_metadata,
)
from pgsieve.assets.outcome import (
    NO_CALLBACKS,
    IncompleteError,
    StepCallbacks,
    find_cut_obstacles,
    find_subscription_problems,
    run_as_step,
)
from pgsieve.assets.published import Tables
from pgsieve.assets.replicas import ReplicaAssets, describe_replicas, is_changed
from pgsieve.assets.runless_events import (
    cut_data_version,
    find_assets_with_failed_check,
    lag_metadata,
    make_unplanned_event,
    measure_freshness,
    plan_assets,
    read_current_input_tags,
    read_recorded_input_tags,
    report_checks,
)
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.prefetched import PrefetchedWork
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.translator import (
    DagsterNames,
)
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import Work, measure_work

#: What the op yields to Dagster.
Event = dg.MaterializeResult[None] | dg.AssetMaterialization | dg.AssetCheckResult


def replica_tables_asset(
    subscription: Subscription,
    tables: Tables,
    dagster_names: DagsterNames,
    *,
    unchanged_tables: Tables = MappingProxyType({}),
    freshness_policy: dg.FreshnessPolicy | None = None,
    wait_for_prefetched_work: PrefetchedWork[tuple[Cut | None, ApplyResult]] | None = None,
    callbacks: StepCallbacks[ApplyResult] = NO_CALLBACKS,
) -> dg.AssetsDefinition:
    """Make the assets `<subscription>/<schema>/<table>` and `<subscription>/cut`. Their step applies the changes.

    - `tables`: the tables with an asset
    - `unchanged_tables`: the tables of the cut that are not among `tables`
    - `freshness_policy`: the policy of the cut, if any
    - `wait_for_prefetched_work`: a function that waits for changes that a thread applies before the step begins. It
      returns the cut from before these changes, the result, and the cost of the work; the step only reports them.
    """
    assets = ReplicaAssets(subscription, tables, dagster_names, unchanged_tables, freshness_policy)

    @dg.multi_asset(
        outs=assets.outs(),
        ins=assets.ins(),
        internal_asset_deps=assets.upstream_by_output,
        check_specs=[
            dg.AssetCheckSpec(SYNC_STATE, asset=assets.cut_key, description="Every table is ready."),
            dg.AssetCheckSpec(
                FRESHNESS, asset=assets.cut_key, description=freshness_description(subscription)
            ),
        ],
        name=dagster_names.prefixed_name(f"{subscription.name}_replica_tables"),
        can_subset=True,
        required_resource_keys=dagster_names.resource_keys,
        pool=f"subscription_{subscription.name}",
    )
    def replica_tables(context: dg.AssetExecutionContext) -> Iterator[Event]:
        with run_as_step(context), callbacks.report_errors():
            lake, request = open_lake(context, dagster_names), _Request(assets, context)
            (former_cut, result), work = (
                request.apply_changes(lake)
                if wait_for_prefetched_work is None
                else wait_for_prefetched_work(context.log.info)
            )
            callbacks.add_work(work)
            if request.has_assets:
                callbacks.report(result)
            yield from _RunReport(request, lake, former_cut, result, work).events()

    return replica_tables


class _Request:
    """The assets that a run has planned: some tables, the cut, or both."""

    def __init__(self, assets: ReplicaAssets, context: dg.AssetExecutionContext) -> None:
        self.assets, self.context = assets, context
        selected_keys = context.selected_asset_keys
        self.has_assets = bool(selected_keys)
        #: Maps each selected table to its asset key.
        self.selected_tables = {
            assets.table_by_key[key]: key for key in sorted(selected_keys & assets.table_by_key.keys())
        }
        self.has_cut = assets.cut_key in selected_keys
        self.has_all_tables = self.has_cut or len(self.selected_tables) == len(assets.table_by_key)
        #: Maps each table that the run may materialise to its asset key.
        self.key_by_table = (
            {name: key for key, name in assets.table_by_key.items()} if self.has_cut else self.selected_tables
        )

    def apply_changes(self, lake: Lake) -> tuple[tuple[Cut | None, ApplyResult], Work]:
        """Apply the changes of the selected tables.

        Returns the cut from before these changes, and the result of `apply`; and the cost of the work.
        """
        subscription = self.assets.subscription
        former_cut, result = Cuts(lake, subscription.name).read_last(), ApplyResult()
        with measure_work() as work:
            if self.has_assets:
                names = None if self.has_all_tables else list(self.selected_tables)
                result = apply(subscription, lake, self.context.log.info, names)
        return (former_cut, result), work


class _RunReport:
    """What a run reports to Dagster after it has applied the changes: materializations, check results, and a failure."""

    def __init__(
        self, request: _Request, lake: Lake, former_cut: Cut | None, result: ApplyResult, work: Work
    ) -> None:
        self._request, self._assets, self._context = request, request.assets, request.context
        self._lake, self._result, self._subscription = lake, result, request.assets.subscription
        name, instance = self._subscription.name, self._context.instance
        self._states = TableStates(lake, name).read_newest()
        self._subscription_state = SubscriptionRecord(lake, name).read_state()
        self._problems = find_subscription_problems(name, lake, self._states, self._subscription_state)
        self._reported_problems = (
            read_reported_problems(instance, self._assets.cut_key) if self._problems else set[str]()
        )
        reported_problems = self._reported_problems if request.has_all_tables else None
        self._failing_problems = (
            _select_failing_problems(self._problems, request.selected_tables, reported_problems)
            if request.has_assets
            else {}
        )
        self._states_to_report = self._choose_states(
            former_cut, find_assets_with_failed_check(instance, set(request.key_by_table.values()))
        )
        self._freshness = measure_freshness(self._subscription, lake, result.cut)
        #: The metadata entries that all assets of the run get.
        self._run_metadata = {**work_metadata(work), **lag_metadata(self._freshness)}

    def _choose_states(
        self, former_cut: Cut | None, keys_with_failed_check: Container[dg.AssetKey]
    ) -> dict[TableName, TableState]:
        """Choose the ready tables that have changed; returns their states.

        If the run fails, or has not selected all tables, its selected tables that are ready are chosen, too.
        `keys_with_failed_check` has the assets with a failed check `sync_state`. If such a table is ready by now, it is
        chosen, too, so that Dagster no longer shows the failure.
        """
        request, tables = self._request, self._request.key_by_table
        return {
            name: state
            for name, state in self._states.items()
            if name in tables
            and state.state == SyncState.READY
            and (
                is_changed(name, self._result, former_cut)
                or tables[name] in keys_with_failed_check
                or (
                    name in request.selected_tables
                    and bool(self._failing_problems or not request.has_all_tables)
                )
            )
        }

    def events(self) -> Iterator[Event]:
        """Yields the events of the run for Dagster.

        If a problem fails the run, raises IncompleteError after the last event.
        """
        yield from self._replica_events()
        report_checks(self._context.instance, list(self._checks_of_tables()))
        if self._request.has_cut and self._result.cut and not find_cut_obstacles(self._problems):
            yield self._cut_event(self._result.cut)
        yield from self._checks_of_cut()
        if self._failing_problems:
            selected_tables, tables = self._request.selected_tables, self._request.key_by_table
            keys = [
                key
                for name, key in tables.items()
                if name in self._failing_problems and name not in selected_tables
            ]
            plan_assets(self._context, keys)
            raise IncompleteError(self._subscription.name, list(self._failing_problems.values()))

    def _replica_events(self) -> Iterator[Event]:
        """Yields the materializations of the replicas, including those that the run did not plan."""
        assets, tables = self._assets, self._request.key_by_table
        descriptions = describe_replicas(assets, self._lake, self._states_to_report, self._result)
        for name, (version, metadata) in descriptions.items():
            key = tables[name]
            event = dg.MaterializeResult[None](
                asset_key=key, data_version=version, metadata={**metadata, **self._run_metadata}
            )
            is_planned = key in self._context.selected_asset_keys
            yield (
                event
                if is_planned
                else make_unplanned_event(
                    self._context, event, assets.upstream_by_output[assets.output_by_key[key]]
                )
            )

    def _checks_of_tables(self) -> Iterator[dg.AssetCheckResult]:
        """Yields the checks of the tables that the run reports, and of tables that are not ready.

        Tables that are not selected are left out if an earlier run has failed for their problem.
        """
        other_problems = (
            self._problems.keys() - self._failing_problems.keys() - self._request.selected_tables.keys()
        )
        skipped_names = (_find_ready_tables(self._states) - self._states_to_report.keys()) | other_problems
        for name, key in self._request.key_by_table.items():
            if name in skipped_names:
                continue
            state = self._states.get(name)
            if state is None or state.state != SyncState.READY:
                self._context.log.error(
                    f"{quote_qualified(*name)} is {_describe_state(state)}: {_describe_reason(state)}"
                )
            yield sync_state_result(key, state)
            yield table_freshness_result(key, self._subscription, self._freshness, state)

    def _cut_event(self, cut: Cut) -> Event:
        """The materialization of the cut.

        Its tags repeat the recorded versions of inputs that this run has not materialised. Otherwise Dagster would show
        the cut as unsynced, because it would take these inputs for new.
        """
        instance, key, request = self._context.instance, self._assets.cut_key, self._request
        unselected_keys = [
            request.key_by_table[name]
            for name in self._states_to_report
            if name not in request.selected_tables
        ]
        return dg.MaterializeResult(
            asset_key=key,
            data_version=cut_data_version(cut),
            tags=read_recorded_input_tags(instance, key, self._assets.unchanged_keys)
            | read_current_input_tags(instance, unselected_keys),
            metadata={**cut_metadata(cut, self._result), **self._run_metadata},
        )

    def _checks_of_cut(self) -> Iterator[dg.AssetCheckResult]:
        """Yields those checks of the cut that the run evaluates."""
        for check in sorted(self._context.selected_asset_check_keys):
            if check.name == SYNC_STATE:
                problems = self._reported_problems.intersection(self._problems.values()) | set(
                    self._failing_problems.values()
                )
                yield cut_sync_state_result(
                    self._assets.cut_key, self._states, self._subscription_state, problems
                )
            else:
                yield freshness_result(self._assets.cut_key, self._subscription, self._freshness)


def _select_failing_problems(
    problems: Mapping[TableName | None, str],
    selected_tables: Container[TableName],
    reported_problems: Container[str] | None,
) -> dict[TableName | None, str]:
    """Select the problems for which a run fails: those of selected tables, and those for which no run has failed yet.

    `reported_problems` has the problems for which a run has already failed. It is None if a user has selected some tables
    for the run. Such a run fails only for problems of these tables and of the subscription itself.
    """
    return {
        name: problem
        for name, problem in problems.items()
        if (name is not None and name in selected_tables)
        or (name is None if reported_problems is None else problem not in reported_problems)
    }


def _find_ready_tables(states: Mapping[TableName, TableState]) -> set[TableName | None]:
    """Find the names of the tables that are ready: changes are applied to these."""
    return {name for name, state in states.items() if state.state == SyncState.READY}


def _describe_state(state: TableState | None) -> str:
    return state.state.meaning if state else "not copied yet"


def _describe_reason(state: TableState | None) -> str:
    return (state.reason if state else None) or "the next copy makes it ready"
