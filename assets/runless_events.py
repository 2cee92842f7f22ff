"""Events in Dagster's records for assets that no run has planned: changed tables, their checks, an unchanged cut.

When a run fails, Dagster shows the assets that the run has planned, and not materialised, as failed. An increment
knows only at its end which tables it has changed. So it plans no tables, and reports the changed tables by the
events of this module. A run of Dagster costs 0.2 s, an event without a run some milliseconds.

In: results, or a subscription that has nothing to apply. Out: events in Dagster's records.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)
from dagster._core.definitions.data_version import (
    CODE_VERSION_TAG,
    DATA_VERSION_IS_USER_PROVIDED_TAG,
    DATA_VERSION_TAG,
    DEFAULT_DATA_VERSION,
    NULL_EVENT_POINTER,
    extract_data_provenance_from_entry,
    extract_data_version_from_entry,
    get_input_data_version_tag,
    get_input_event_pointer_tag,
)
from dagster._core.events import AssetMaterializationPlannedData, DagsterEvent
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from pgsieve.assets.checks import (
    FRESHNESS,
    SYNC_STATE,
    cut_sync_state_result,
    freshness_result,
    reported_problems,
)
from pgsieve.assets.metadata import LAG_SECONDS, cut_metadata, work_metadata
from pgsieve.assets.outcome import cut_obstacles, subscription_problems
from pgsieve.assets.steps.apply.replica_tables import ApplyResult
from pgsieve.assets.steps.checks.freshness import Freshness, check_freshness
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.translator import AssetKind, Naming, subscription_asset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import Work

#: How often an unchanged cut is reported within a subscription's `freshness`: so no freshness policy fails.
_REPORTS_PER_FRESHNESS = 4
#: A run repeats the recorded versions of inputs that it does not materialise, if they are no more than this.
_MAX_INPUTS = 100


def cut_data_version(cut: Cut) -> dg.DataVersion:
    """The data version of a cut: it changes only with the replicas."""
    return dg.DataVersion(f"{format_lsn(cut.lsn)} {cut.at.isoformat()}")


def measured_freshness(subscription: Subscription, lake: Lake) -> Freshness | str:
    """How far the replicas are behind; a text with the reason if that cannot be measured."""
    try:
        return check_freshness(subscription, lake)
    except PgsieveError as error:
        return error.message


def lag_metadata(lag: Freshness | str) -> dict[str, float]:
    """The lag as metadata; empty if it is not known."""
    return {} if isinstance(lag, str) or lag.problem else {LAG_SECONDS: round(lag.seconds, 2)}


def report_checks(dagster: dg.DagsterInstance, results: Sequence[dg.AssetCheckResult]) -> None:
    """Record results of checks that are not part of a run.

    Each result names the materialization that it checks. Otherwise Dagster compares times, which SQLite stores in
    whole seconds, and shows a check as "not evaluated" if it came within a second of its table.
    """
    keys = {result.asset_key for result in results if result.asset_key is not None}
    records = dagster.get_asset_records(sorted(keys)) if keys else ()
    targets = {r.asset_entry.asset_key: r.asset_entry.last_materialization_record for r in records}
    for result in results:
        assert result.asset_key is not None
        assert result.check_name is not None
        target = targets.get(result.asset_key)
        dagster.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=result.asset_key,
                check_name=result.check_name,
                passed=result.passed,
                severity=result.severity,
                description=result.description,
                metadata=result.metadata,
                target_materialization_data=target
                and AssetCheckEvaluationTargetMaterializationData(
                    storage_id=target.storage_id, run_id=target.run_id, timestamp=target.timestamp
                ),
            )
        )


def tables_with_failed_check(dagster: dg.DagsterInstance, keys: Collection[dg.AssetKey]) -> set[dg.AssetKey]:
    """The tables whose last check `sync_state` failed; a run of another Dagster instance may have made some ready since."""
    checks = [dg.AssetCheckKey(key, SYNC_STATE) for key in sorted(keys)]
    last = dagster.event_log_storage.get_latest_asset_check_execution_by_key(checks) if checks else {}
    failed = AssetCheckExecutionRecordStatus.FAILED
    return {key.asset_key for key, record in last.items() if record.status == failed}


def report_cut(
    dagster: dg.DagsterInstance,
    subscription: Subscription,
    lake: Lake,
    naming: Naming,
    lag: Freshness | None = None,
) -> None:
    """Report the cut and its checks for a subscription that has nothing to apply, as an increment's run does.

    Each report makes Dagster's records grow. So nothing is reported unless a fourth of `freshness` has passed since
    the last report, or the cut or a table's state has changed. `lag` is how far the replicas are behind, if the
    caller has measured it.
    """
    cuts, states_of = Cuts(lake, subscription.name), TableStates(lake, subscription.name)
    record = SubscriptionRecord(lake, subscription.name)
    with lake.consistent_read(cuts.path, states_of.path, record.path):
        cut = cuts.last()
        if cut is None:
            return
        states, subscription_state = states_of.newest(), record.state()
    key = naming.key(subscription_asset(subscription, AssetKind.CUT))
    version = cut_data_version(cut)
    problems = subscription_problems(subscription.name, lake, states, subscription_state)
    # Problems for which no run has failed are left out: the next run has to fail for them.
    former_problems = reported_problems(dagster, key).intersection(problems.values()) if problems else set()
    state = cut_sync_state_result(key, states, subscription_state, former_problems)
    if _is_reported(dagster, subscription, state, version):
        return
    measured = measured_freshness(subscription, lake) if lag is None else lag
    if not cut_obstacles(problems):
        dagster.report_runless_asset_event(
            dg.AssetMaterialization(
                key,
                metadata={
                    **cut_metadata(cut, ApplyResult()),
                    **work_metadata(Work()),
                    **lag_metadata(measured),
                },
                tags={DATA_VERSION_TAG: version.value, **_renewed_input_tags(dagster, key)},
            )
        )
    report_checks(dagster, [state, freshness_result(key, subscription, measured)])


def report_if_disabled(
    dagster: dg.DagsterInstance, subscription: Subscription, lake: Lake, naming: Naming
) -> bool:
    """Report the check `sync_state` if a subscription is disabled; returns whether an earlier run has failed for that."""
    subscription_state = SubscriptionRecord(lake, subscription.name).state()
    if subscription_state.enabled:
        return False
    states = TableStates(lake, subscription.name).newest()
    key = naming.key(subscription_asset(subscription, AssetKind.CUT))
    problems = subscription_problems(subscription.name, lake, states, subscription_state)
    former_problems = reported_problems(dagster, key)
    failed_for = former_problems.intersection(problems.values()) | {problems[None]}
    report_checks(dagster, [cut_sync_state_result(key, states, subscription_state, failed_for)])
    return problems[None] in former_problems


def recorded_input_tags(
    dagster: dg.DagsterInstance, key: dg.AssetKey, inputs: Collection[dg.AssetKey]
) -> dict[str, str]:
    """The tags with the versions of some inputs from the asset's last materialization; none for too many inputs.

    A materialization repeats them for inputs that its run does not materialise. Without them Dagster calls the asset
    "unsynced", as if these inputs were new. Dagster stores two tags per input with each materialization, hence
    `_MAX_INPUTS`.
    """
    if not 0 < len(inputs) <= _MAX_INPUTS:
        return {}
    newest = dagster.get_latest_data_version_record(key)
    former_tags = (newest and newest.event_log_entry.tags) or {}
    names = [
        tag(each) for each in inputs for tag in (get_input_data_version_tag, get_input_event_pointer_tag)
    ]
    return {name: former_tags[name] for name in names if name in former_tags}


def current_input_tags(
    dagster: dg.DagsterInstance, inputs: Mapping[dg.AssetKey, dg.DataVersion] | Iterable[dg.AssetKey]
) -> dict[str, str]:
    """A materialization's tags with the versions of its inputs; `inputs` has the version of one never materialised."""
    versions = inputs if isinstance(inputs, Mapping) else dict.fromkeys(inputs, DEFAULT_DATA_VERSION)
    tags = {}
    for each, version in versions.items():
        record = dagster.get_latest_data_version_record(each)
        present = record and extract_data_version_from_entry(record.event_log_entry)
        tags[get_input_data_version_tag(each)] = (present or version).value
        tags[get_input_event_pointer_tag(each)] = str(record.storage_id) if record else NULL_EVENT_POINTER
    return tags


def _renewed_input_tags(dagster: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, str]:
    """A materialization's tags for the inputs of its asset's last materialization as they are now; empty if it had none.

    Without them Dagster compares times, and calls the asset "unsynced" once an input is materialised again.
    """
    newest = dagster.get_latest_data_version_record(key)
    former_tags = newest and extract_data_provenance_from_entry(newest.event_log_entry)
    if not former_tags:
        return {}
    return _version_tags(former_tags.code_version) | current_input_tags(
        dagster, former_tags.input_data_versions
    )


def _version_tags(code_version: str) -> dict[str, str]:
    return {CODE_VERSION_TAG: code_version, DATA_VERSION_IS_USER_PROVIDED_TAG: "true"}


def unplanned_event(
    context: dg.AssetExecutionContext, result: dg.MaterializeResult[None], inputs: Iterable[dg.AssetKey]
) -> dg.AssetMaterialization:
    """The event for an asset that a step has materialised although its run did not plan it; `inputs` are its inputs.

    An asset that Dagster shows as failed stays so until a run that has planned it materialises it. So this run adds
    such an asset to its plan.
    """
    assert result.asset_key is not None
    assert result.data_version is not None
    if _is_shown_failed(context.instance, result.asset_key):
        plan_assets(context, [result.asset_key])
    tags = {DATA_VERSION_TAG: result.data_version.value, **_version_tags(context.run_id)}
    tags |= current_input_tags(context.instance, inputs)
    return dg.AssetMaterialization(result.asset_key, metadata=result.metadata, tags=tags)


def plan_assets(context: dg.AssetExecutionContext, keys: Iterable[dg.AssetKey]) -> None:
    """Plan these assets for this run: if it fails before it materialises them, Dagster shows them as failed."""
    step = context.get_step_execution_context().step.key
    for key in keys:
        plan_event = DagsterEvent.build_asset_materialization_planned_event(
            context.job_name, step, AssetMaterializationPlannedData(key)
        )
        context.instance.report_dagster_event(plan_event, context.run_id)


def _is_shown_failed(dagster: dg.DagsterInstance, key: dg.AssetKey) -> bool:
    """Whether the last run that planned an asset has failed without materialising it."""
    plan = dagster.get_latest_planned_materialization_info(key)
    run = dagster.get_run_by_id(plan.run_id) if plan else None
    materialization = dagster.get_latest_materialization_event(key)
    return (
        run is not None
        and run.is_failure
        and (materialization is None or materialization.run_id != run.run_id)
    )


def _is_reported(
    dagster: dg.DagsterInstance,
    subscription: Subscription,
    state: dg.AssetCheckResult,
    version: dg.DataVersion,
) -> bool:
    """Whether Dagster's records of the cut are recent and still true."""
    assert state.asset_key is not None
    checks = [dg.AssetCheckKey(state.asset_key, name) for name in (SYNC_STATE, FRESHNESS)]
    last = dagster.event_log_storage.get_latest_asset_check_execution_by_key(checks)
    oldest_time = (
        datetime.now(UTC).timestamp() - subscription.freshness.total_seconds() / _REPORTS_PER_FRESHNESS
    )
    for check in checks:
        record = last.get(check)
        if record is None or record.event is None or record.event.timestamp < oldest_time:
            return False
        if record.status == AssetCheckExecutionRecordStatus.PLANNED:
            return True  # The run of another process is about to report it.
        evaluation = record.evaluation
        if check.name == SYNC_STATE and (
            evaluation is None
            or (evaluation.passed, evaluation.description) != (state.passed, state.description)
        ):
            return False
    if not state.passed:
        return True
    newest = dagster.get_latest_materialization_event(state.asset_key)
    materialization = newest and newest.asset_materialization
    return (
        newest is not None
        and newest.timestamp >= oldest_time
        and materialization is not None
        and (materialization.tags or {}).get(DATA_VERSION_TAG) == version.value
    )
