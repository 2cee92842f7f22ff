"""`pgsieve run`: brings the replicas of subscriptions up to the current LSN of their sources.

In: the configuration
Out: a `RunSummary`

The command materialises Dagster assets in this process. Dagster's web interface shows the same assets, and also these
runs. The order is: copies of tables that need one, the change log (the slot's messages), the changes after row filters,
the replicas, the cut. A cut names a version of each replica; together these versions equal the publisher at one LSN. An
error ends the work only for the subscriptions that it concerns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import TypeVar

import dagster as dg

from pgsieve.assets.published import Tables
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.prefetched import PrefetchedWork
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, disabled_error
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.slot_consumption.slot import claim_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.commands.dagster_runs import COMMAND_TAG
from pgsieve.pipelines.commands.event_log import store_reports_together
from pgsieve.pipelines.commands.failures import Failures, is_never_fatal
from pgsieve.pipelines.commands.in_process import (
    DEFAULT_NAMES,
    make_run_error,
    materialize,
    open_instance,
    unwrap_step_errors,
)
from pgsieve.pipelines.commands.materializer import Materializer
from pgsieve.pipelines.commands.prefetched_work import prefetch_work
from pgsieve.pipelines.commands.results import Progress, RunSummary, SubscriptionRun
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import Project, build_project
from pgsieve.pipelines.published import find_published_tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.shared_jobs import share_jobs
from pgsieve.resources.lake.stores.batch_cache import share_batch_cache
from pgsieve.resources.postgres.session_pool import pool_sessions

Result = TypeVar("Result")

#: The largest number of rounds. A round copies tables, reads the slot, and applies the changes. Another round follows
#: if a table needs a copy after that, for example because its columns have changed.
_MAX_ROUNDS = 3
#: The largest number of subscriptions that are named in a line of progress; more are only counted.
_MAX_NAMES_IN_TASK = 3


class RunInterruptedError(KeyboardInterrupt):
    """A run was interrupted. `summary` has the subscriptions for which it had copied or applied something before."""

    def __init__(self, summary: RunSummary) -> None:
        super().__init__()
        self.summary = summary


def take_over(config: Config, subscription_configs: Sequence[SubscriptionConfig]) -> None:
    """Claim the slots of the selected subscriptions for this lake, even if another lake has read them before.

    Raises PgsieveError if this lake has replicas of another database.
    """
    project = build_project(config)
    lake = project.lake.open()
    lake.access.check_writable()
    for slot_stream in project.find_slot_streams(
        [project.subscriptions[s.name] for s in subscription_configs]
    ):
        with slot_stream.hold_lock(), slot_stream.source.connect() as connection:
            claim_slot(connection, slot_stream, lake)


def run(config: Config, subscription_configs: Sequence[SubscriptionConfig], progress: Progress) -> RunSummary:
    """Run the selected subscriptions. If one of them fails, its commits stay, and the others go on.

    Disabled subscriptions do not run, and the summary names them. Raises SubscriptionDisabledError if all are disabled,
    and RunInterruptedError after SIGINT.
    """
    project = build_project(config)
    subscriptions, failures = [project.subscriptions[s.name] for s in subscription_configs], Failures()
    materializers: list[Materializer] = []
    lake = project.lake.open()
    with lake.consistent_read(*_list_paths_to_read_first(lake, subscriptions)):
        subscriptions_to_run = select_enabled(project, subscriptions, failures)
    with _raise_with_summary(materializers), open_instance(config) as instance, pool_sessions():
        with lake.consistent_read(*_list_record_paths(lake, subscriptions)):
            materializers += failures.for_each(
                subscriptions, lambda s: Materializer(project, s, instance, progress)
            )
        for slot_stream in project.find_slot_streams(subscriptions_to_run):
            run_slot_stream(
                slot_stream,
                [
                    materializer
                    for materializer in materializers
                    if materializer.subscription.slot_stream.name == slot_stream.name
                ],
                failures,
            )
        failures.for_each(materializers, Materializer.register)
        return RunSummary(summarize_runs(materializers, failures), failures.group_by_error())


@contextmanager
def _raise_with_summary(materializers: Sequence[Materializer]) -> Iterator[None]:
    """If the block is interrupted, raise RunInterruptedError with what the materializers have done."""
    try:
        yield
    except KeyboardInterrupt:
        subscription_runs = []
        for materializer in materializers:
            # The interrupt may also have ended what the summary needs, such as Spark.
            with suppress(Exception):
                subscription_runs.append(materializer.summarize())
        changed_runs = tuple(
            subscription_run for subscription_run in subscription_runs if subscription_run.changed
        )
        raise RunInterruptedError(RunSummary(changed_runs)) from None


def _list_record_paths(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The paths of pgsieve's own tables that have records about whole subscriptions."""
    return [
        record.path
        for s in subscriptions
        for record in (Cuts(lake, s.name), SubscriptionRecord(lake, s.name))
    ]


def _list_paths_to_read_first(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The paths of pgsieve's own tables that each run reads first. The caller opens them together, in parallel."""
    state_paths = [
        record_type(lake, s.name).path
        for s in subscriptions
        for record_type in (TableStates, TransformedSlices)
    ]
    slot_streams = {s.slot_stream.name: s.slot_stream for s in subscriptions}.values()
    return [
        *_list_record_paths(lake, subscriptions),
        *state_paths,
        *(
            record_type(lake, slot_stream).path
            for slot_stream in slot_streams
            for record_type in (ChangeLog, Catalogs, SlotStreamRecord)
        ),
    ]


def select_enabled(
    project: Project, subscriptions: Sequence[Subscription], failures: Failures
) -> list[Subscription]:
    """Return the subscriptions that are enabled. Raises SubscriptionDisabledError if none is enabled."""
    lake = project.lake.open()
    subscriptions_with_states = failures.for_each(
        subscriptions, lambda s: (s, SubscriptionRecord(lake, s.name).require_same_folders())
    )
    subscriptions_to_run = [
        subscription for subscription, state in subscriptions_with_states if state.enabled
    ]
    if not subscriptions_to_run and len(subscriptions_with_states) == len(subscriptions):
        subscription, state = subscriptions_with_states[0]
        raise disabled_error(subscription.name, state)
    return subscriptions_to_run


def run_slot_stream(
    slot_stream: SlotStream, materializers: Sequence[Materializer], failures: Failures
) -> None:
    """Do the work of a run for a slot stream (a slot with its subscriptions), until no table has to be copied again.

    A round copies tables that need it, reads the slot, and applies the changes. If the copy of a table has to wait for
    other transactions, it is tried once more after the changes of the other tables were applied.
    """
    for _ in range(_MAX_ROUNDS):
        if not _run_round(slot_stream, materializers, failures):
            return
        if not any(failures.for_each(materializers, lambda materializer: materializer.needs_another_copy())):
            break
    if waiting_materializers := [
        materializer
        for materializer in materializers
        if any(materializer.waiting_tables.values()) and materializer.name not in failures
    ]:
        for materializer in waiting_materializers:
            materializer.retry(list(materializer.waiting_tables))
        _run_round(slot_stream, materializers, failures)


def _run_round(slot_stream: SlotStream, materializers: Sequence[Materializer], failures: Failures) -> bool:
    """Copy tables, read the slot, and apply the changes once. Returns false if all subscriptions have failed."""
    failures.for_each(materializers, lambda materializer: materializer.copy())
    if not (
        remaining_materializers := [
            materializer for materializer in materializers if materializer.name not in failures
        ]
    ):
        return False
    first_materializer = remaining_materializers[0]
    with failures.catch(*(materializer.name for materializer in remaining_materializers)):
        assets = [
            change_log_asset(
                slot_stream, first_materializer.project.find_subscriptions(slot_stream), DEFAULT_NAMES
            )
        ]
        materialize(
            first_materializer.instance,
            first_materializer.project,
            assets,
            first_materializer.progress,
            f"drain {slot_stream.slot}",
        )
    transform_and_apply(materializers, failures)
    return True


def transform_and_apply(
    materializers: Sequence[Materializer],
    failures: Failures,
    *,
    is_fatal: Callable[[Exception], bool] = is_never_fatal,
) -> None:
    """Materialise the filtered changes, and then the replicas that have new changes or a new copy.

    There is one Dagster run for the changes of all subscriptions, and one for all replicas, because a run costs more
    than most of its steps. For a subscription whose replicas have nothing new, only the cut is made and reported,
    without a run. An error of one subscription does not end the work for the others. If `is_fatal` is true for an
    error, it is raised.
    """
    enabled_materializers = [
        materializer
        for materializer in failures.for_each(materializers, Materializer.get_if_enabled, is_fatal=is_fatal)
        if materializer is not None
    ]
    with ExitStack() as shared_resources:
        if len(enabled_materializers) > 1:
            shared_resources.enter_context(share_batch_cache())
            shared_resources.enter_context(share_jobs())
            shared_resources.enter_context(
                enabled_materializers[0].subscription.slot_stream.source.share_lock_session()
            )
        asset_makers = {
            materializer: materializer.make_table_changes_asset for materializer in enabled_materializers
        }
        _materialize_each("transform for", asset_makers, Materializer.transform_changes, failures, is_fatal)

    @cache
    def read_published_tables() -> Mapping[str, Tables]:
        return find_published_tables(
            enabled_materializers[0].project,
            [materializer.subscription for materializer in enabled_materializers],
        )

    tables_by_materializer = dict(
        failures.for_each(
            enabled_materializers,
            lambda materializer: (materializer, materializer.split_published_tables(read_published_tables)),
            is_fatal=is_fatal,
        )
    )
    replica_asset_makers = {
        materializer: partial(materializer.make_replica_tables_asset, *changed_and_unchanged)
        for materializer, changed_and_unchanged in tables_by_materializer.items()
        if changed_and_unchanged[0]
    }
    _materialize_each("apply to", replica_asset_makers, Materializer.apply_changes, failures, is_fatal)
    failures.for_each(
        [materializer for materializer in tables_by_materializer if materializer not in replica_asset_makers],
        Materializer.report_cut,
        is_fatal=is_fatal,
    )


#: A function that makes the asset of a subscription. Its parameters are those of `Materializer.make_table_changes_asset`.
_AssetMaker = Callable[[Callable[[Exception], None], PrefetchedWork[Result] | None], dg.AssetsDefinition]


def _materialize_each(
    task: str,
    asset_makers: Mapping[Materializer, _AssetMaker[Result]],
    do_work: Callable[[Materializer, Log], Result],
    failures: Failures,
    is_fatal: Callable[[Exception], bool],
) -> None:
    """Materialise an asset for each subscription, in one Dagster run.

    - `task`: names the work in messages
    - `do_work`: does the work of one step. If there are several steps, it runs while Dagster records the step before.
    """
    if not asset_makers:
        return
    first_materializer = next(iter(asset_makers))
    names = [materializer.name for materializer in asset_makers]
    errors_by_name = dict[str, Exception]()
    with (
        failures.catch(*names, is_fatal=is_fatal),
        prefetch_work(
            first_materializer.lake,
            {materializer: partial(do_work, materializer) for materializer in asset_makers},
        ) as prefetched_work_by_materializer,
        store_reports_together(first_materializer.instance.event_log_storage)
        if prefetched_work_by_materializer
        else nullcontext(),
    ):
        result = materialize(
            first_materializer.instance,
            first_materializer.project,
            [
                make_asset(
                    partial(errors_by_name.__setitem__, materializer.name),
                    prefetched_work_by_materializer.get(materializer),
                )
                for materializer, make_asset in asset_makers.items()
            ],
            first_materializer.progress,
            f"{task} {', '.join(names) if len(names) <= _MAX_NAMES_IN_TASK else quantity(len(names), 'subscription')}",
            {COMMAND_TAG: f"{task} {', '.join(names)}"},
            raise_on_error=False,
        )
        if result is not None and not result.success and not errors_by_name:
            raise make_run_error(result)
    for name, error in errors_by_name.items():
        with failures.catch(name, is_fatal=is_fatal), unwrap_step_errors():
            raise error


def summarize_runs(materializers: Sequence[Materializer], failures: Failures) -> tuple[SubscriptionRun, ...]:
    """Summarize the runs of subscriptions. A failed subscription is left out, unless it has changed something before."""
    subscription_runs = []
    for materializer in materializers:
        with failures.catch(materializer.name):
            subscription_run = materializer.summarize()
            if subscription_run.changed or materializer.name not in failures:
                subscription_runs.append(subscription_run)
    return tuple(subscription_runs)
