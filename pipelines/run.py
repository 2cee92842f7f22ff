"""`pgsieve run`: materialise a subscription's assets up to the source's current LSN, and tell what was done.

The same assets that the UI materialises, through Dagster, in this process: first the initial sync of the tables
that need one, then change log, transformation and replicas. Runs are recorded where `pgsieve ui` shows them. An
error ends the part of the subscriptions that it concerns, and no other's.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import dagster as dg

from assets.change_log import change_log_asset
from assets.initial_sync import initial_sync_asset, tables_partitions
from assets.metadata import replica_key, table_partition
from assets.replica_tables import replica_tables_asset
from assets.steps.cuts import last_cut
from assets.steps.feed_slot import durable_position
from assets.steps.initial_sync import tables_to_copy
from assets.steps.subscription import Feed, Subscription
from assets.steps.subscription_state import disabled_error, subscription_state
from assets.steps.table_states import MEANING, READY, REMOVED, table_states
from assets.table_changes import table_changes_asset
from decoding.errors import PgsieveError
from decoding.lsn import format_lsn
from pipelines.config import Config, SubscriptionConfig
from pipelines.definitions import published_tables
from pipelines.failures import Failures
from pipelines.project import Project, project
from pipelines.results import AppliedTable, CopiedTable, Progress, RunSummary, SubscriptionRun
from pipelines.ui import dagster_home
from resources.delta import Lake

_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
#: A table whose columns change while it is drained is copied again at once, so often at most.
_ROUNDS = 3


def run(config: Config, selected: Sequence[SubscriptionConfig], progress: Progress) -> RunSummary:
    """Run the selected subscriptions; everything durable is kept, whatever failed.

    Disabled ones are left out, and told of; where there is no other, SubscriptionDisabledError is raised.
    """
    declared = project(config)
    subscriptions, failures = [declared.subscriptions[s.name] for s in selected], Failures()
    enabled = enabled_ones(declared, subscriptions, failures)
    with instance(config) as dagster:
        results = failures.each(subscriptions, lambda s: Materializer(declared, s, dagster, progress))
        for feed in declared.feeds_of(enabled):
            run_feed(feed, [r for r in results if r.subscription.feed.name == feed.name], failures)
        return RunSummary(summaries(results, failures), failures.listed())


def enabled_ones(
    declared: Project, subscriptions: Sequence[Subscription], failures: Failures
) -> list[Subscription]:
    """Those of the subscriptions that are enabled; raises SubscriptionDisabledError where they are all disabled."""
    lake = declared.lake.open()
    states = failures.each(subscriptions, lambda s: (s, subscription_state(lake, s.name)))
    enabled = [subscription for subscription, state in states if state.enabled]
    if not enabled and len(states) == len(subscriptions):
        subscription, state = states[0]
        raise disabled_error(subscription.name, state)
    return enabled


def run_feed(feed: Feed, reading: Sequence["Materializer"], failures: Failures) -> None:
    """Copy what needs it, drain the feed's slot, and apply, until no table has to be copied again."""
    for _ in range(_ROUNDS):
        failures.each(reading, Materializer.copy)
        if not (going := [r for r in reading if r.name not in failures]):
            return
        first = going[0]
        with failures.of(*(result.name for result in going)):
            assets = [change_log_asset(feed, first.declared.reading(feed))]
            materialize(first.dagster, first.declared, assets, first.progress, f"drain {feed.slot}")
        failures.each(reading, Materializer.apply)
        if not any(failures.each(reading, Materializer.unfinished)):
            break


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
        with dg.DagsterInstance.get() as dagster:
            yield dagster
    finally:
        if before is None:
            del os.environ["DAGSTER_HOME"]
        else:
            os.environ["DAGSTER_HOME"] = before


def materialize(
    dagster: dg.DagsterInstance,
    declared: Project,
    assets: Sequence[dg.AssetsDefinition],
    progress: Progress,
    task: str,
    tags: dict[str, str] | None = None,
) -> dg.ExecuteInProcessResult:
    """Materialise assets in this process; raises PgsieveError for whatever fails."""
    progress.start(task, None)
    try:
        return dg.materialize(
            list(assets), instance=dagster, resources={"lake": declared.lake}, run_config=_QUIET, tags=tags
        )
    except PgsieveError:
        raise
    except dg.Failure as failure:
        raise PgsieveError(failure.description or str(failure)) from failure
    finally:
        progress.finish(task)


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
        self.before = last_cut(self.lake, subscription)
        self.noticed = subscription_state(self.lake, subscription.name).notice
        self.copied: list[CopiedTable] = []
        self.applied: dict[tuple[str, str], AppliedTable] = {}

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self.subscription.name

    @property
    def enabled(self) -> bool:
        """Whether the subscription is enabled; an error may have disabled it a moment ago."""
        return subscription_state(self.lake, self.subscription.name).enabled

    def copy(self, chosen: Sequence[tuple[str, str]] = ()) -> None:
        """Materialise the initial sync of the chosen tables, or of those that need one."""
        if not self.enabled:
            return
        names = chosen or tables_to_copy(self.subscription, self.lake)
        if not names:
            return
        asset = initial_sync_asset(self.subscription)
        partitions = tables_partitions(self.subscription)
        assert partitions.name is not None
        keys = {table_partition(name) for name in names}
        self.dagster.add_dynamic_partitions(partitions.name, sorted(keys))
        # A run covers a range of Dagster partitions: one run a stretch of the tables to copy.
        order = list(partitions.get_partition_keys(dynamic_partitions_store=self.dagster))
        for wanted, stretch in groupby(order, key=lambda key: key in keys):
            if not wanted:
                continue
            listed = list(stretch)
            tags = {
                "dagster/asset_partition_range_start": listed[0],
                "dagster/asset_partition_range_end": listed[-1],
            }
            result = materialize(
                self.dagster,
                self.declared,
                [asset],
                self.progress,
                f"copy {len(listed)} tables of {self.subscription.name}",
                tags,
            )
            self.copied += _copied(result)

    def has_to_copy(self) -> bool:
        """Whether some table needs a copy."""
        return self.enabled and bool(tables_to_copy(self.subscription, self.lake))

    def apply(self) -> None:
        """Materialise the transformation and the replica tables."""
        if not self.enabled:
            return
        tables = published_tables(self.declared, [self.subscription])[self.subscription.name]
        assets = [table_changes_asset(self.subscription)]
        if tables:
            assets.append(replica_tables_asset(self.subscription, tables))
        result = materialize(
            self.dagster, self.declared, assets, self.progress, f"apply to {self.subscription.name}"
        )
        for name in tables:
            self._applied(name, result)

    def _applied(self, name: tuple[str, str], result: dg.ExecuteInProcessResult) -> None:
        key = replica_key(self.subscription, name)
        for event in result.get_asset_materialization_events():
            if event.asset_key != key:
                continue
            values = {k: v.value for k, v in event.materialization.metadata.items()}
            rows = {k: int(str(values[k])) for k in ("inserted", "updated", "deleted")}
            if any(rows.values()) or values["truncated"]:
                known = self.applied.get(name)
                self.applied[name] = AppliedTable(
                    *name,
                    inserted=rows["inserted"] + (known.inserted if known else 0),
                    updated=rows["updated"] + (known.updated if known else 0),
                    deleted=rows["deleted"] + (known.deleted if known else 0),
                    truncated=bool(values["truncated"]) or bool(known and known.truncated),
                    version=int(values["Delta version"]) if isinstance(values["Delta version"], int) else 0,
                )

    def unfinished(self) -> bool:
        """Whether a table has to be copied again, its columns having changed under way."""
        states = table_states(self.lake, self.subscription.name).values()
        return self.enabled and any(s.state not in {READY, REMOVED, "e"} for s in states)

    def summary(self) -> SubscriptionRun:
        """What was done."""
        cut = last_cut(self.lake, self.subscription)
        states = table_states(self.lake, self.subscription.name).values()
        problems = tuple(
            f"{s.schema}.{s.table} is {MEANING[s.state]}: {s.reason}"
            for s in states
            if s.reason and s.state != READY
        )
        state = subscription_state(self.lake, self.subscription.name)
        if not state.enabled:
            problems += (str(disabled_error(self.subscription.name, state).message),)
        position = durable_position(self.lake, self.subscription.feed) or 0
        return SubscriptionRun(
            name=self.subscription.name,
            copied=tuple(self.copied),
            tables=tuple(self.applied.values()),
            from_lsn=format_lsn(self.before.lsn if self.before else 0),
            to_lsn=format_lsn(max(position, cut.lsn if cut else 0)),
            cut_version=self.lake.records.version(self.lake.cuts(self.subscription.name)) if cut else None,
            changed=bool(self.copied or self.applied),
            problems=problems,
            notice=state.notice if state.notice != self.noticed else None,
        )


def _copied(result: dg.ExecuteInProcessResult) -> list[CopiedTable]:
    """The tables that an initial sync copied, from the metadata of its materialization."""
    found: dict[tuple[str, str], CopiedTable] = {}
    for event in result.get_asset_materialization_events():
        records: Any = event.materialization.metadata["tables"]
        for record in getattr(records, "records", []):
            data = record.data
            schema, _, name = str(data["table"]).partition(".")
            if not data["problem"]:
                found[schema, name] = CopiedTable(schema, name, int(data["rows"]), float(data["seconds"]))
    return list(found.values())
