"""`pgsieve run`: materialise a subscription's assets up to the source's current LSN, and return what was done.

The same assets that the UI materialises, through Dagster, in this process: first the initial sync of the tables
that need one, then change log, transformation and replicas. Runs are recorded where `pgsieve ui` shows them. An
error ends the part of the subscriptions that it concerns, and no other's.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import dagster as dg
from dagster_shared.error import SerializableErrorInfo

from pgsieve.assets.dagster_names import table_partition
from pgsieve.assets.initial_sync import LACKING, initial_sync_asset, range_tags, stretches, tables_partitions
from pgsieve.assets.lake import resources
from pgsieve.assets.outcome import IncompleteError, StepFailedError, set_aside
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import Tables, partitioned
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply, tables_beyond_cut
from pgsieve.assets.steps.done import Done
from pgsieve.assets.steps.initial_sync.copy import tables_to_copy
from pgsieve.assets.steps.initial_sync.one_table import Copied
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.operations.registration import Registration
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, disabled_error
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.records.transformed import TableChanges, Transformed
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.assets.translator import Naming
from pgsieve.assets.unrun_events import report_cut
from pgsieve.assets.update_transformation import table_changes_asset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import counted
from pgsieve.pipelines.commands.dagster_runs import COMMAND, keep_one_idle, tagged
from pgsieve.pipelines.commands.event_log import connections_kept
from pgsieve.pipelines.commands.failures import Failures, never
from pgsieve.pipelines.commands.results import (
    AppliedTable,
    CopiedTable,
    Progress,
    RunSummary,
    SubscriptionRun,
)
from pgsieve.pipelines.commands.ui import dagster_home
from pgsieve.pipelines.commands.work_ahead import worked_ahead
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import Project, project
from pgsieve.pipelines.published import published_tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.shared_reads import reads_shared
from pgsieve.resources.postgres.kept_sessions import sessions_kept
from pgsieve.resources.tracing import finished_span, is_traced, span

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_STEP_ENDS = {dg.DagsterEventType.STEP_SUCCESS, dg.DagsterEventType.STEP_FAILURE}
_INTERRUPTS = {dg.DagsterExecutionInterruptedError.__name__, KeyboardInterrupt.__name__}
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
#: The commands' own assets have the keys that they have without a translation.
NAMING = Naming()
#: A table whose columns change while it is drained is copied again at once, so often at most.
_ROUNDS = 3
#: So many subscriptions are named where it is told what is done.
_NAMED = 3


def run(config: Config, selected: Sequence[SubscriptionConfig], progress: Progress) -> RunSummary:
    """Run the selected subscriptions; everything durable is kept, whatever failed.

    Disabled ones are left out, and named; where there is no other, SubscriptionDisabledError is raised.
    """
    declared = project(config)
    subscriptions, failures = [declared.subscriptions[s.name] for s in selected], Failures()
    lake = declared.lake.open()
    with lake.one_moment(*_asked_first(lake, subscriptions)):
        enabled = enabled_ones(declared, subscriptions, failures)
    with instance(config) as dagster, sessions_kept():
        with lake.one_moment(*_of_whole(lake, subscriptions)):
            results = failures.each(subscriptions, lambda s: Materializer(declared, s, dagster, progress))
        for feed in declared.feeds_of(enabled):
            run_feed(feed, [r for r in results if r.subscription.feed.name == feed.name], failures)
        failures.each(results, Materializer.register)
        return RunSummary(summaries(results, failures), failures.listed())


def _of_whole(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The tables of pgsieve's own that tell of subscriptions as a whole."""
    return [
        table.path for s in subscriptions for table in (Cuts(lake, s.name), SubscriptionRecord(lake, s.name))
    ]


def _asked_first(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The tables of pgsieve's own that a run asks, whatever there is to do: on an object store they are opened side by side."""
    states = [each(lake, s.name).path for s in subscriptions for each in (TableStates, Transformed)]
    feeds = {s.feed.name: s.feed for s in subscriptions}.values()
    return [
        *_of_whole(lake, subscriptions),
        *states,
        *(each(lake, feed).path for feed in feeds for each in (ChangeLog, Catalogs, FeedRecord)),
    ]


def enabled_ones(
    declared: Project, subscriptions: Sequence[Subscription], failures: Failures
) -> list[Subscription]:
    """Those of the subscriptions that are enabled; raises SubscriptionDisabledError where they are all disabled."""
    lake = declared.lake.open()
    states = failures.each(
        subscriptions, lambda s: (s, SubscriptionRecord(lake, s.name).refuse_other_folders())
    )
    enabled = [subscription for subscription, state in states if state.enabled]
    if not enabled and len(states) == len(subscriptions):
        subscription, state = states[0]
        raise disabled_error(subscription.name, state)
    return enabled


def run_feed(feed: Feed, reading: Sequence["Materializer"], failures: Failures) -> None:
    """Copy what needs it, drain the feed's slot, and apply, until no table has to be copied again."""
    for _ in range(_ROUNDS):
        failures.each(reading, lambda each: each.copy())
        if not (going := [r for r in reading if r.name not in failures]):
            return
        first = going[0]
        with failures.of(*(result.name for result in going)):
            assets = [change_log_asset(feed, first.declared.reading(feed), NAMING)]
            materialize(first.dagster, first.declared, assets, first.progress, f"drain {feed.slot}")
        apply_together(reading, failures)
        if not any(failures.each(reading, lambda each: each.unfinished())):
            break


def apply_together(
    materializers: Sequence["Materializer"],
    failures: Failures,
    *,
    unless: Callable[[Exception], bool] = never,
) -> None:
    """Materialise the transformations, and the replica tables that they, or a copy, have something new for.

    One run of Dagster for all subscriptions, as a run costs more than most steps; an error of one ends no other's.
    Raises an error for which `unless` holds.
    """
    going = [m for m in failures.each(materializers, Materializer.if_enabled, unless=unless) if m is not None]
    with reads_shared() if len(going) > 1 else nullcontext():
        assets = {m: m.table_changes for m in going}
        _materialize_each("transform for", assets, Materializer.transformed, failures, unless)
    told = dict(failures.each(going, lambda m: (m, m.tables_to_tell()), unless=unless))
    applying = {m: partial(m.replica_tables, *tables) for m, tables in told.items() if tables[0]}
    _materialize_each("apply to", applying, Materializer.brought_up_to_date, failures, unless)
    failures.each([m for m in told if m not in applying], Materializer.report, unless=unless)


#: Makes an asset of a subscription; it tells what fails its step, and gets what is done outside of it.
_Asset = Callable[[Callable[[Exception], None], Done[T] | None], dg.AssetsDefinition]


def _materialize_each(
    what: str,
    assets: Mapping["Materializer", _Asset[T]],
    work: Callable[["Materializer", Log], T],
    failures: Failures,
    unless: Callable[[Exception], bool],
) -> None:
    """Materialise an asset of each subscription, in one run; `what` is done for, or to, their names.

    The `work` of an asset's step is done while those of others are recorded.
    """
    if not assets:
        return
    first, names, errors = next(iter(assets)), [m.name for m in assets], dict[str, Exception]()
    with (
        failures.of(*names, unless=unless),
        worked_ahead(first.lake, {m: partial(work, m) for m in assets}) as done,
    ):
        result = materialize(
            first.dagster,
            first.declared,
            [asset(partial(errors.__setitem__, m.name), done.get(m)) for m, asset in assets.items()],
            first.progress,
            f"{what} {', '.join(names) if len(names) <= _NAMED else counted(len(names), 'subscription')}",
            {COMMAND: f"{what} {', '.join(names)}"},
            raise_on_error=False,
        )
        if result is not None and not result.success and not errors:
            raise _failed(result)
    for name, error in errors.items():
        with failures.of(name, unless=unless), _refused_by_dagster():
            raise error


def summaries(materializers: Sequence["Materializer"], failures: Failures) -> tuple[SubscriptionRun, ...]:
    """What was done: all of it for the subscriptions that have not failed, for the others what changed."""
    done = []
    for each in materializers:
        with failures.of(each.name):
            summary = each.summary()
            if summary.changed or each.name not in failures:
                done.append(summary)
    return tuple(done)


@contextmanager
def instance(config: Config) -> Iterator[dg.DagsterInstance]:
    """The Dagster instance that records the runs: DAGSTER_HOME's, or the one of `pgsieve ui`."""
    home = dagster_home(config)
    home.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("DAGSTER_HOME")
    os.environ["DAGSTER_HOME"] = str(home)
    try:
        with _opened(home) as dagster:
            yield dagster
    finally:
        if before is None:
            del os.environ["DAGSTER_HOME"]
        else:
            os.environ["DAGSTER_HOME"] = before


@contextmanager
def _opened(home: Path) -> Iterator[dg.DagsterInstance]:
    """Dagster's instance, whose databases one process makes, and others wait for.

    Where two make them at the same time, Dagster's migrations of one fail, or leave a version that the next run meets.
    """
    with ExitStack() as stack:
        with (home / ".opening").open("ab") as lock:
            with suppress(OSError):  # A file system without locks.
                fcntl.flock(lock, fcntl.LOCK_EX)
            dagster = stack.enter_context(dg.DagsterInstance.get())
            dagster.get_runs_count()
            dagster.has_asset_key(dg.AssetKey("any"))
            dagster.all_instigator_state()
        stack.enter_context(connections_kept(dagster.event_log_storage))
        yield dagster


def materialize(
    dagster: dg.DagsterInstance,
    declared: Project,
    assets: Sequence[dg.AssetsDefinition],
    progress: Progress,
    task: str,
    tags: dict[str, str] | None = None,
    *,
    raise_on_error: bool = True,
) -> dg.ExecuteInProcessResult | None:
    """Materialise assets in this process; raises PgsieveError for whatever fails.

    What ends as failed since a table is set aside, or a subscription disabled, has done all that it can: Dagster's
    record says so, and the command's result. None is returned then.
    """
    progress.start(task)
    result = None
    try:
        with span(task), _refused_by_dagster():
            result = dg.materialize(
                list(assets),
                instance=dagster,
                resources=resources(declared.lake, NAMING),
                run_config=_QUIET,
                tags=tagged(task, tags),
                raise_on_error=raise_on_error,
            )
            if is_traced():
                _trace_steps(dagster, result.run_id)
    finally:
        progress.finish(task)
    if result is None:
        return None
    if any(error.cls_name in _INTERRUPTS for error in _errors(result)):
        raise KeyboardInterrupt
    keep_one_idle(dagster, result)
    return result


@contextmanager
def _refused_by_dagster() -> Iterator[None]:
    """What fails a step as the commands tell it; of what ends as failed but has done all that it can nothing is raised."""
    error = None
    try:
        yield
    except IncompleteError as incomplete:
        _logger.info(incomplete.description)
    except dg.DagsterExecutionInterruptedError:
        raise KeyboardInterrupt from None
    except StepFailedError as failed:
        error = failed.error
    except dg.Failure as failure:
        raise PgsieveError(failure.description or str(failure)) from failure
    if error is not None:  # Not as one that came while Dagster's was handled: it is the same.
        raise error


def _failed(result: dg.ExecuteInProcessResult) -> PgsieveError:
    """Why a run failed of which no step of ours has."""
    messages = [" ".join(error.message.split()) for error in _errors(result)]
    return PgsieveError(messages[-1] if messages else f"Dagster's run {result.run_id} failed")


def _errors(result: dg.ExecuteInProcessResult) -> list[SerializableErrorInfo]:
    """What Dagster tells of the errors of a run."""
    errors = [getattr(event.event_specific_data, "error", None) for event in result.all_events]
    return [error for error in errors if error is not None]


def _trace_steps(dagster: dg.DagsterInstance, run_id: str) -> None:
    """A span for each of Dagster's steps, within the one that is open."""
    began: dict[str, float] = {}
    for entry in dagster.all_logs(run_id, {dg.DagsterEventType.STEP_START, *_STEP_ENDS}):
        event, key = entry.get_dagster_event(), entry.step_key
        if key is None:
            continue
        if event.event_type == dg.DagsterEventType.STEP_START:
            began[key] = entry.timestamp
        elif key in began:
            failed = event.event_type == dg.DagsterEventType.STEP_FAILURE
            finished_span(key, began.pop(key), entry.timestamp, failed=failed, step=key)


class Materializer:
    """One subscription's part of a run."""

    def __init__(
        self, declared: Project, subscription: Subscription, dagster: dg.DagsterInstance, progress: Progress
    ) -> None:
        self.declared, self.subscription, self.dagster, self.progress = (
            declared,
            subscription,
            dagster,
            progress,
        )
        self.lake: Lake = declared.lake.open()
        self.before = Cuts(self.lake, subscription.name).last()
        self.noticed = SubscriptionRecord(self.lake, subscription.name).state().notice
        self.copied: list[CopiedTable] = []
        self.applied: dict[tuple[str, str], AppliedTable] = {}

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self.subscription.name

    @property
    def enabled(self) -> bool:
        """Whether the subscription is enabled; an error may have disabled it a moment ago."""
        return SubscriptionRecord(self.lake, self.subscription.name).state().enabled

    def copy(self, chosen: Sequence[tuple[str, str]] = ()) -> None:
        """Materialise the initial sync of the chosen tables, or of those that need one."""
        if not self.enabled:
            return
        names = chosen or tables_to_copy(self.subscription, self.lake)
        if not names:
            return
        asset = initial_sync_asset(self.subscription, NAMING, tell=self.progress.tell, report=self._copied)
        lacking = {} if chosen else {LACKING: "true"}
        partitions = tables_partitions(self.subscription)
        assert partitions.name is not None
        keys = {table_partition(name) for name in names}
        self.dagster.add_dynamic_partitions(partitions.name, sorted(keys))
        order = list(partitions.get_partition_keys(dynamic_partitions_store=self.dagster))
        for stretch in stretches(order, keys):
            task = f"copy {counted(len(stretch), 'table')} of {self.subscription.name}"
            materialize(
                self.dagster, self.declared, [asset], self.progress, task, range_tags(stretch) | lacking
            )

    def _copied(self, copied: Sequence[Copied]) -> None:
        self.copied += [CopiedTable(c.schema, c.table, c.rows, c.seconds) for c in copied if not c.problem]

    def has_to_copy(self) -> bool:
        """Whether some table needs a copy."""
        return self.enabled and bool(tables_to_copy(self.subscription, self.lake))

    def if_enabled(self) -> "Materializer | None":
        """None where the subscription is disabled."""
        return self if self.enabled else None

    def table_changes(
        self, fail: Callable[[Exception], None], done: Done[Sequence[TableChanges]] | None
    ) -> dg.AssetsDefinition:
        """The asset of the transformation."""
        return table_changes_asset(self.subscription, NAMING, fail=fail, done=done)

    def transformed(self, log: Log) -> Sequence[TableChanges]:
        """The work of `table_changes`."""
        return transform(self.subscription, self.lake, log)

    def replica_tables(
        self,
        tables: Tables,
        unchanged: Tables,
        fail: Callable[[Exception], None],
        done: Done[tuple[Cut | None, ApplyResult]] | None,
    ) -> dg.AssetsDefinition:
        """The assets of some replica tables, and of a cut that is made of the others as well."""
        return replica_tables_asset(
            self.subscription, tables, NAMING, unchanged=unchanged, tell=self._applied, fail=fail, done=done
        )

    def brought_up_to_date(self, log: Log) -> tuple[Cut | None, ApplyResult]:
        """The work of `replica_tables`, and the cut before."""
        return Cuts(self.lake, self.name).last(), apply(self.subscription, self.lake, log)

    def tables_to_tell(self) -> tuple[Tables, Tables]:
        """The replica tables that have something new, and the others; neither where nothing is new.

        Also where an error has just disabled the subscription: what committed before is transformed, and applied. What is set
        aside has nothing to apply, but the run has to end as failed.
        """
        name = self.subscription.name
        asked = [each(self.lake, name).path for each in (Cuts, Transformed, TableStates)]
        with self.lake.one_moment(*asked):
            stale = tables_beyond_cut(self.subscription, self.lake) | set_aside(self.subscription, self.lake)
        if not stale:
            return {}, {}
        published = published_tables(self.declared, [self.subscription])[self.subscription.name]
        return partitioned(published, stale)

    def report(self) -> None:
        """Where no asset has anything new the cut may: a table that was dropped is not in the next one."""
        self._applied(apply(self.subscription, self.lake, _logger.info))
        report_cut(self.dagster, self.subscription, self.lake, NAMING)

    def apply_slice(self) -> tuple[list[TableChanges], ApplyResult] | None:
        """Transform and apply without a run of Dagster's; what was done, None for a subscription that is disabled."""
        if not self.enabled:
            return None
        with span("transform", subscription=self.name):
            changes = transform(self.subscription, self.lake, _logger.info)
        with span("apply", subscription=self.name):
            result = apply(self.subscription, self.lake, _logger.info)
        self._applied(result)
        return changes, result

    def _applied(self, result: ApplyResult) -> None:
        for name, done in result.tables.items():
            if not (done.inserted or done.updated or done.deleted or done.truncated):
                continue
            before = self.applied.get(name)
            self.applied[name] = AppliedTable(
                *name,
                inserted=done.inserted + (before.inserted if before else 0),
                updated=done.updated + (before.updated if before else 0),
                deleted=done.deleted + (before.deleted if before else 0),
                truncated=done.truncated or bool(before and before.truncated),
                version=result.cut.tables.get(name, done.standing.version)
                if result.cut
                else done.standing.version,
            )

    def register(self) -> None:
        """Register the replicas in the catalog, where the configuration says under which names."""
        if self.declared.names is not None and self.enabled:
            Registration(self.subscription, self.lake, self.declared.names).register()

    def unfinished(self) -> bool:
        """Whether a table has to be copied again, its columns having changed under way; not those that wait."""
        states = TableStates(self.lake, self.subscription.name).newest().values()
        return (
            any(s.state not in {SyncState.READY, SyncState.REMOVED, SyncState.SET_ASIDE} for s in states)
            and self.has_to_copy()
        )

    def summary(self) -> SubscriptionRun:
        """What was done."""
        name = self.subscription.name
        cuts, states_of = Cuts(self.lake, name), TableStates(self.lake, name)
        record, change_log = SubscriptionRecord(self.lake, name), ChangeLog(self.lake, self.subscription.feed)
        with self.lake.one_moment(cuts.path, states_of.path, record.path, change_log.path):
            cut, states, state = cuts.last(), states_of.newest().values(), record.state()
            position = change_log.position() or 0
            cut_version = self.lake.records.version(cuts.path) if cut else None
        problems = tuple(
            f"{quote_qualified(*s.name)} is {s.state.meaning}: {s.reason}"
            for s in states
            if s.reason and s.state not in {SyncState.READY, SyncState.REMOVED}
        )
        if not state.enabled:
            problems += (str(disabled_error(self.subscription.name, state).message),)
        return SubscriptionRun(
            name=self.subscription.name,
            copied=tuple(self.copied),
            tables=tuple(self.applied.values()),
            from_lsn=format_lsn(self.before.lsn if self.before else 0),
            to_lsn=format_lsn(max(position, cut.lsn if cut else 0)),
            cut_version=cut_version,
            changed=bool(self.copied or self.applied),
            problems=problems,
            notice=state.notice if state.notice != self.noticed else None,
        )
