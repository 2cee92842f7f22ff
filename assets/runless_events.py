"""Reports assets to Dagster that no run has planned: changed tables, their checks, unchanged cuts.

A cut names a version of each replica of a subscription; together these versions equal the publisher at one LSN.

If a run fails, Dagster shows the assets as failed that the run has planned and not materialised. A run that applies
changes learns only at its end which tables it has changed. So it plans no tables, and reports the changed tables by
events of this module. A Dagster run costs 0.2 seconds, and an event without a run only some milliseconds.

In: results, or a subscription that has nothing to apply
Out: events in Dagster's records
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

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
    read_reported_problems,
)
from pgsieve.assets.metadata import LAG_SECONDS, cut_metadata, work_metadata
from pgsieve.assets.outcome import find_cut_obstacles, find_subscription_problems
from pgsieve.assets.steps.apply.replica_tables import ApplyResult
from pgsieve.assets.steps.checks.freshness import Freshness, check_freshness
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.translator import AssetKind, DagsterNames, subscription_asset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import Work

#: How many times an unchanged cut is reported within the time that a subscription's `freshness` allows. So a Dagster
#: freshness policy that allows this time finds a report that is recent enough.
_REPORTS_PER_FRESHNESS = 4
#: A run repeats the recorded versions of inputs that it does not materialise, but only if there are at most this many.
_MAX_INPUTS = 100


def cut_data_version(cut: Cut) -> dg.DataVersion:
    """The data version of a cut, which changes only if its rows may have changed.

    A run writes a cut only if a replica has changed. Maintenance writes the newest cut again if it is old, or if replicas
    were compacted. That cut has the same rows, and so the same data version.
    """
    return dg.DataVersion(f"{format_lsn(cut.lsn)} {cut.rows_time.isoformat()}")


def measure_freshness(subscription: Subscription, lake: Lake, last_cut: Cut | None = None) -> Freshness | str:
    """Measure how far the replicas are behind. If that cannot be measured, return a text with the reason.

    `last_cut` is the newest cut. Without it, the cut is read.
    """
    try:
        return check_freshness(subscription, lake, last_cut)
    except PgsieveError as error:
        return error.message


def lag_metadata(freshness: Freshness | str) -> dict[str, float]:
    """The metadata entry about how far the replicas are behind. Empty if that is not known."""
    return (
        {} if isinstance(freshness, str) or freshness.problem else {LAG_SECONDS: round(freshness.seconds, 2)}
    )


def report_checks(dagster: dg.DagsterInstance, results: Sequence[dg.AssetCheckResult]) -> None:
    """Record results of checks that are not part of a run.

    Each result names the materialization that it checks. Otherwise Dagster would compare times, which SQLite stores in
    whole seconds. If a check came within a second of the materialization, Dagster would show it as "not evaluated".
    """
    keys = {result.asset_key for result in results if result.asset_key is not None}
    records = dagster.get_asset_records(sorted(keys)) if keys else ()
    materialization_by_key = {
        record.asset_entry.asset_key: record.asset_entry.last_materialization_record for record in records
    }
    for result in results:
        assert result.asset_key is not None
        assert result.check_name is not None
        materialization = materialization_by_key.get(result.asset_key)
        dagster.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=result.asset_key,
                check_name=result.check_name,
                passed=result.passed,
                severity=result.severity,
                description=result.description,
                metadata=result.metadata,
                target_materialization_data=materialization
                and AssetCheckEvaluationTargetMaterializationData(
                    storage_id=materialization.storage_id,
                    run_id=materialization.run_id,
                    timestamp=materialization.timestamp,
                ),
            )
        )


def find_assets_with_failed_check(
    dagster: dg.DagsterInstance, keys: Collection[dg.AssetKey]
) -> set[dg.AssetKey]:
    """Find the assets among `keys` with a failed check `sync_state`. Only the last result of the check counts.

    The reason for the failure may be gone. For example, a run of another Dagster instance may have copied the table.
    """
    checks = [dg.AssetCheckKey(key, SYNC_STATE) for key in sorted(keys)]
    records = dagster.event_log_storage.get_latest_asset_check_execution_by_key(checks) if checks else {}
    failed_status = AssetCheckExecutionRecordStatus.FAILED
    return {key.asset_key for key, record in records.items() if record.status == failed_status}


def report_cut(
    dagster: dg.DagsterInstance,
    subscription: Subscription,
    lake: Lake,
    dagster_names: DagsterNames,
    known_freshness: Freshness | None = None,
) -> None:
    """Report the cut and its checks for a subscription that has nothing to apply, in the same form as a run does.

    Each report makes Dagster's records grow. So the cut is reported only if the cut or the state of a table has changed,
    or if a fourth of the setting `freshness` has passed since the last report. `known_freshness` is how far the
    replicas are behind, if the caller has measured it.
    """
    cuts, table_states = Cuts(lake, subscription.name), TableStates(lake, subscription.name)
    record = SubscriptionRecord(lake, subscription.name)
    with lake.consistent_read(cuts.path, table_states.path, record.path):
        cut = cuts.read_last()
        if cut is None:
            return
        states, subscription_state = table_states.read_newest(), record.read_state()
    key = dagster_names.asset_key(subscription_asset(subscription, AssetKind.CUT))
    version = cut_data_version(cut)
    problems = find_subscription_problems(subscription.name, lake, states, subscription_state)
    # A problem that is not reported yet is left to the next run, which fails for it.
    reported_problems = (
        read_reported_problems(dagster, key).intersection(problems.values()) if problems else set()
    )
    state_result = cut_sync_state_result(key, states, subscription_state, reported_problems)
    if _is_reported(dagster, subscription, state_result, version):
        return
    measured_freshness = measure_freshness(subscription, lake) if known_freshness is None else known_freshness
    if not find_cut_obstacles(problems):
        metadata = {
            **cut_metadata(cut, ApplyResult()),
            **work_metadata(Work()),
            **lag_metadata(measured_freshness),
        }
        report_materialization(dagster, key, version, metadata)
    report_checks(dagster, [state_result, freshness_result(key, subscription, measured_freshness)])


def report_materialization(
    dagster: dg.DagsterInstance, key: dg.AssetKey, version: dg.DataVersion, metadata: Mapping[str, Any]
) -> None:
    """Report the materialization of an asset that no run has made."""
    tags = {DATA_VERSION_TAG: version.value, **_renew_input_tags(dagster, key)}
    dagster.report_runless_asset_event(dg.AssetMaterialization(key, metadata=metadata, tags=tags))


def report_if_disabled(
    dagster: dg.DagsterInstance, subscription: Subscription, lake: Lake, dagster_names: DagsterNames
) -> bool:
    """If a subscription is disabled, report that by its check `sync_state`.

    Returns True if it is disabled, and a run has already failed for that.
    """
    subscription_state = SubscriptionRecord(lake, subscription.name).read_state()
    if subscription_state.enabled:
        return False
    states = TableStates(lake, subscription.name).read_newest()
    key = dagster_names.asset_key(subscription_asset(subscription, AssetKind.CUT))
    problems = find_subscription_problems(subscription.name, lake, states, subscription_state)
    former_problems = read_reported_problems(dagster, key)
    reported_problems = former_problems.intersection(problems.values()) | {problems[None]}
    report_checks(dagster, [cut_sync_state_result(key, states, subscription_state, reported_problems)])
    return problems[None] in former_problems


def read_recorded_input_tags(
    dagster: dg.DagsterInstance, key: dg.AssetKey, input_keys: Collection[dg.AssetKey]
) -> dict[str, str]:
    """Read the tags with the versions of some inputs, as they were recorded with the asset's last materialization.

    A materialization repeats these tags for inputs that its run does not materialise. Otherwise Dagster would show the
    asset as unsynced, because it would take the inputs for new. Dagster stores two tags for each input with each
    materialization, so for more than `_MAX_INPUTS` inputs there are no tags.
    """
    if not 0 < len(input_keys) <= _MAX_INPUTS:
        return {}
    last_record = dagster.get_latest_data_version_record(key)
    former_tags = (last_record and last_record.event_log_entry.tags) or {}
    tag_names = [
        make_tag_name(input_key)
        for input_key in input_keys
        for make_tag_name in (get_input_data_version_tag, get_input_event_pointer_tag)
    ]
    return {name: former_tags[name] for name in tag_names if name in former_tags}


def read_current_input_tags(
    dagster: dg.DagsterInstance, inputs: Mapping[dg.AssetKey, dg.DataVersion] | Iterable[dg.AssetKey]
) -> dict[str, str]:
    """Read the present versions of an asset's inputs, and make tags of them.

    An input that was never materialised has no version. For it, the version in `inputs` is used, or Dagster's default
    version if `inputs` has only keys.
    """
    versions = inputs if isinstance(inputs, Mapping) else dict.fromkeys(inputs, DEFAULT_DATA_VERSION)
    tags = {}
    for input_key, version in versions.items():
        record = dagster.get_latest_data_version_record(input_key)
        present_version = record and extract_data_version_from_entry(record.event_log_entry)
        tags[get_input_data_version_tag(input_key)] = (present_version or version).value
        tags[get_input_event_pointer_tag(input_key)] = (
            str(record.storage_id) if record else NULL_EVENT_POINTER
        )
    return tags


def _renew_input_tags(dagster: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, str]:
    """Make tags with the present versions of the inputs that the last materialization of an asset had.

    Empty if the asset had no materialization with inputs. Without these tags, Dagster would compare times, and show the
    asset as unsynced as soon as an input is materialised again.
    """
    last_record = dagster.get_latest_data_version_record(key)
    provenance = last_record and extract_data_provenance_from_entry(last_record.event_log_entry)
    if not provenance:
        return {}
    return _make_version_tags(provenance.code_version) | read_current_input_tags(
        dagster, provenance.input_data_versions
    )


def _make_version_tags(code_version: str) -> dict[str, str]:
    return {CODE_VERSION_TAG: code_version, DATA_VERSION_IS_USER_PROVIDED_TAG: "true"}


def make_unplanned_event(
    context: dg.AssetExecutionContext, result: dg.MaterializeResult[None], inputs: Iterable[dg.AssetKey]
) -> dg.AssetMaterialization:
    """Make the materialization of an asset that a step has made, although its run did not plan the asset.

    `inputs` are the inputs of the asset. Dagster shows an asset as failed until a run that has planned the asset
    materialises it. So such an asset is added to the plan of this run.
    """
    assert result.asset_key is not None
    assert result.data_version is not None
    if _is_shown_failed(context.instance, result.asset_key):
        plan_assets(context, [result.asset_key])
    # The asset has no code version. Dagster itself uses the run's id in its place.
    tags = {DATA_VERSION_TAG: result.data_version.value, **_make_version_tags(context.run_id)}
    tags |= read_current_input_tags(context.instance, inputs)
    return dg.AssetMaterialization(result.asset_key, metadata=result.metadata, tags=tags)


def plan_assets(context: dg.AssetExecutionContext, keys: Iterable[dg.AssetKey]) -> None:
    """Add assets to the plan of this run. If the run fails before it materialises them, Dagster shows them as failed."""
    step = context.get_step_execution_context().step.key
    for key in keys:
        plan_event = DagsterEvent.build_asset_materialization_planned_event(
            context.job_name, step, AssetMaterializationPlannedData(key)
        )
        context.instance.report_dagster_event(plan_event, context.run_id)


def _is_shown_failed(dagster: dg.DagsterInstance, key: dg.AssetKey) -> bool:
    """True if the last run that had planned an asset has failed, and has not materialised it."""
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
    state_result: dg.AssetCheckResult,
    version: dg.DataVersion,
) -> bool:
    """True if Dagster's records of the cut are recent, and are still true."""
    assert state_result.asset_key is not None
    checks = [dg.AssetCheckKey(state_result.asset_key, name) for name in (SYNC_STATE, FRESHNESS)]
    records = dagster.event_log_storage.get_latest_asset_check_execution_by_key(checks)
    oldest_time = (
        datetime.now(UTC).timestamp() - subscription.freshness.total_seconds() / _REPORTS_PER_FRESHNESS
    )
    for check in checks:
        record = records.get(check)
        if record is None or record.event is None or record.event.timestamp < oldest_time:
            return False
        if record.status == AssetCheckExecutionRecordStatus.PLANNED:
            return True  # A run of another process will report the check in a moment.
        evaluation = record.evaluation
        if check.name == SYNC_STATE and (
            evaluation is None
            or (evaluation.passed, evaluation.description) != (state_result.passed, state_result.description)
        ):
            return False
    if not state_result.passed:
        return True
    last_event = dagster.get_latest_materialization_event(state_result.asset_key)
    materialization = last_event and last_event.asset_materialization
    return (
        last_event is not None
        and last_event.timestamp >= oldest_time
        and materialization is not None
        and (materialization.tags or {}).get(DATA_VERSION_TAG) == version.value
    )
