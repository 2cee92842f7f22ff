"""Partition roots and other replica tables as assets: changes are applied to them in parallel, then a cut is written.

A cut is a version of each replica of a subscription, so that together they equal the publisher at one LSN. The
UPDATE transformation has already routed changes of partitions to their root
(`pgsieve.assets.steps.update_transformation.slice_contents`, `pgsieve.decoding.publications.routing`).

If a run fails, Dagster shows every asset that the run has planned as failed. So runs plan only the cut, and report the
tables that they changed. A table without changes, or one that is set aside, keeps its last materialization; the check
`sync_state` tells them apart. Tables that a user selects are materialised if they are ready. Every run that has
brought all tables up to date materialises the cut, even without changes.

Each run evaluates the checks `sync_state` and `freshness` of the cut, which cover all tables. It reports the checks of
a single table only if it has materialised the table, or if the table has a new problem. A table that is set aside, or
a disabled subscription, fails one run, at its end, and every later run in which a user selects it.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import dagster as dg

from pgsieve.assets.checks import (
    FRESHNESS,
    SYNC_STATE,
    cut_sync_state_result,
    freshness_result,
    reported_problems,
    sync_state_result,
    table_freshness_result,
)
from pgsieve.assets.dagster_names import Name, output_names
from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import (
    NO_COMMENTS,
    column_metadata,
    cut_metadata,
    replica_metadata,
    replica_version,
    standard_metadata,
    work_metadata,
)
from pgsieve.assets.outcome import (
    NO_CALLBACKS,
    IncompleteError,
    StepCallbacks,
    as_step,
    cut_obstacles,
    subscription_problems,
)
from pgsieve.assets.published import PublishedTable, Tables, filter_text
from pgsieve.assets.runless_events import (
    current_input_tags,
    cut_data_version,
    lag_metadata,
    measured_freshness,
    plan_assets,
    recorded_input_tags,
    report_checks,
    tables_with_failed_check,
    unplanned_event,
)
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.prefetched import PrefetchedWork
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.table_groups import group_paths
from pgsieve.assets.translator import AssetKind, Naming, replica_asset, source_table_asset, subscription_asset
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.comments import Comments, read_comments
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.work import Work, measure

#: The events of the op.
Event = dg.MaterializeResult[None] | dg.AssetMaterialization | dg.AssetCheckResult


def replica_tables_asset(
    subscription: Subscription,
    tables: Tables,
    naming: Naming,
    *,
    unchanged: Tables = MappingProxyType({}),
    freshness_policy: dg.FreshnessPolicy | None = None,
    prefetched: PrefetchedWork[tuple[Cut | None, ApplyResult]] | None = None,
    callbacks: StepCallbacks[ApplyResult] = NO_CALLBACKS,
) -> dg.AssetsDefinition:
    """The assets `<subscription>/<schema>/<table>`, and `<subscription>/cut`: changes are applied to each replica.

    `prefetched` returns the cut before an apply that ran before the step, and the result of that apply; the step then only
    reports them. `unchanged` are the tables of the cut that are not among `tables`. `freshness_policy` is the cut's.
    """
    assets = _ReplicaAssets(subscription, tables, naming, unchanged, freshness_policy)

    @dg.multi_asset(
        outs=assets.outs(),
        ins=assets.ins(),
        internal_asset_deps=assets.upstream,
        check_specs=[
            dg.AssetCheckSpec(SYNC_STATE, asset=assets.cut, description="Every table is ready."),
            dg.AssetCheckSpec(FRESHNESS, asset=assets.cut, description=freshness_description(subscription)),
        ],
        name=naming.name(f"{subscription.name}_replica_tables"),
        can_subset=True,
        required_resource_keys=naming.resources,
        pool=f"subscription_{subscription.name}",
    )
    def replica_tables(context: dg.AssetExecutionContext) -> Iterator[Event]:
        with as_step(context), callbacks.reporting_errors():
            lake, request = open_lake(context, naming), _Request(assets, context)
            (former_cut, result), work = (
                request.apply(lake) if prefetched is None else prefetched(context.log.info)
            )
            callbacks.add_work(work)
            if request.has_assets:
                callbacks.report(result)
            yield from _Increment(request, lake, former_cut, result, work).events()

    return replica_tables


class _ReplicaAssets:
    """The assets of a subscription's replicas and of its cut: their keys, specs, outputs and inputs."""

    def __init__(
        self,
        subscription: Subscription,
        tables: Tables,
        naming: Naming,
        unchanged: Tables,
        freshness_policy: dg.FreshnessPolicy | None,
    ) -> None:
        self.subscription, self.tables, self.naming = subscription, tables, naming
        #: The tables by their assets' keys, and the keys of the assets of tables without changes.
        self.names = {naming.key(replica_asset(subscription, table)): name for name, table in tables.items()}
        self.unchanged = {naming.key(replica_asset(subscription, table)) for table in unchanged.values()}
        cut_data = subscription_asset(subscription, AssetKind.CUT)
        self.cut = naming.key(cut_data)
        #: The names of the outputs by key.
        self.outputs = output_names([*self.names, self.cut])
        changes = naming.key(subscription_asset(subscription, AssetKind.TABLE_CHANGES))
        groups = group_paths(tables)
        self._specs = {
            key: naming.spec(
                replica_asset(subscription, tables[name], groups[name]), [changes, self.source(name)]
            )
            for key, name in self.names.items()
        }
        cut = naming.spec(cut_data, [changes, *self.names])
        self._specs[self.cut] = (
            cut if freshness_policy is None else cut.replace_attributes(freshness_policy=freshness_policy)
        )
        #: The assets upstream of each output.
        self.upstream = {
            self.outputs[key]: {dep.asset_key for dep in spec.deps if dep.asset_key != key}
            for key, spec in self._specs.items()
        }

    def source(self, name: Name) -> dg.AssetKey:
        """The asset of the table at the publisher."""
        return self.naming.key(source_table_asset(self.subscription.feed.source.name, name))

    def outs(self) -> dict[str, dg.AssetOut]:
        """The outputs of the op by their names."""
        return {
            self.outputs[key]: dg.AssetOut.from_spec(
                spec.replace_attributes(deps=[]), dagster_type=dg.Nothing, is_required=False
            )
            for key, spec in self._specs.items()
        }

    def ins(self) -> dict[str, dg.AssetIn]:
        """The inputs of the op, named here: Dagster's names for two keys may be equal."""
        keys = set().union(*self.upstream.values()) - self._specs.keys()
        return {
            name: dg.AssetIn(key=key, dagster_type=dg.Nothing)
            for key, name in output_names(sorted(keys)).items()
        }


class _Request:
    """The assets that a run has planned: some tables, the cut, or both."""

    def __init__(self, assets: _ReplicaAssets, context: dg.AssetExecutionContext) -> None:
        self.assets, self.context = assets, context
        selected_keys = context.selected_asset_keys
        self.has_assets = bool(selected_keys)
        #: The keys of the selected tables, by table.
        self.chosen = {assets.names[key]: key for key in sorted(selected_keys & assets.names.keys())}
        self.has_cut = assets.cut in selected_keys
        self.has_all_tables = self.has_cut or len(self.chosen) == len(assets.names)
        #: The keys of the tables that the run may materialise, by table.
        self.tables = {name: key for key, name in assets.names.items()} if self.has_cut else self.chosen

    def apply(self, lake: Lake) -> tuple[tuple[Cut | None, ApplyResult], Work]:
        """Apply the changes of the tables; returns the cut before the apply and its result, and the costs."""
        subscription = self.assets.subscription
        former_cut, result = Cuts(lake, subscription.name).last(), ApplyResult()
        with measure() as work:
            if self.has_assets:
                chosen_tables = None if self.has_all_tables else list(self.chosen)
                result = apply(subscription, lake, self.context.log.info, chosen_tables)
        return (former_cut, result), work


class _Increment:
    """The report of a run whose changes are applied: materializations, check results, and a failure."""

    def __init__(
        self, request: _Request, lake: Lake, former_cut: Cut | None, result: ApplyResult, work: Work
    ) -> None:
        self._request, self._assets, self._context = request, request.assets, request.context
        self._lake, self._result, self._subscription = lake, result, request.assets.subscription
        name, instance = self._subscription.name, self._context.instance
        self._states = TableStates(lake, name).newest()
        self._subscription_state = SubscriptionRecord(lake, name).state()
        self._problems = subscription_problems(name, lake, self._states, self._subscription_state)
        self._reported = reported_problems(instance, self._assets.cut) if self._problems else set[str]()
        former_problems = self._reported if request.has_all_tables else None
        self._failing = (
            _failing_problems(self._problems, request.chosen, former_problems) if request.has_assets else {}
        )
        self._materialised = self._choose_materialised(
            former_cut, tables_with_failed_check(instance, set(request.tables.values()))
        )
        self._behind = measured_freshness(self._subscription, lake)
        #: Metadata of all assets of the run.
        self._run_metadata = {**work_metadata(work), **lag_metadata(self._behind)}

    def _choose_materialised(
        self, former_cut: Cut | None, failed: Container[dg.AssetKey]
    ) -> dict[Name, TableState]:
        """The ready tables that have changed or that a user selected."""
        request, tables = self._request, self._request.tables
        return {
            name: state
            for name, state in self._states.items()
            if name in tables
            and state.state == SyncState.READY
            and (
                is_changed(name, self._result, former_cut)
                or tables[name] in failed
                or (name in request.chosen and bool(self._failing or not request.has_all_tables))
            )
        }

    def events(self) -> Iterator[Event]:
        """The run's events for Dagster.

        Raises IncompleteError after the last event if a problem fails the run.
        """
        yield from self._replica_events()
        report_checks(self._context.instance, list(self._checks_of_tables()))
        if self._request.has_cut and self._result.cut and not cut_obstacles(self._problems):
            yield self._cut_event(self._result.cut)
        yield from self._checks_of_cut()
        if self._failing:
            chosen_names, tables = self._request.chosen, self._request.tables
            failing = [
                key for name, key in tables.items() if name in self._failing and name not in chosen_names
            ]
            plan_assets(self._context, failing)
            raise IncompleteError(self._subscription.name, list(self._failing.values()))

    def _replica_events(self) -> Iterator[Event]:
        """The materializations of replicas, with those that the run did not plan."""
        lake, assets, tables = self._lake, self._assets, self._request.tables
        comments = _comments(self._subscription, list(self._materialised))
        paths = {name: lake.paths.replica(self._subscription.name, *name) for name in self._materialised}
        with lake.consistent_read(*paths.values()):
            versions = {
                name: replica_version(state.lsn, lake.records.version(paths[name]))
                for name, state in self._materialised.items()
            }
            metadata = {
                name: {
                    **_replica_metadata(lake, paths[name], assets.tables[name], self._result, state),
                    **column_metadata(
                        state.definition.columns if state.definition else (),
                        assets.source(name),
                        comments.get(name, NO_COMMENTS),
                        self._published_names(name, state),
                    ),
                }
                for name, state in self._materialised.items()
            }
        for name, version in versions.items():
            key = tables[name]
            event = dg.MaterializeResult[None](
                asset_key=key, data_version=version, metadata={**metadata[name], **self._run_metadata}
            )
            is_asked = key in self._context.selected_asset_keys
            yield (
                event
                if is_asked
                else unplanned_event(self._context, event, assets.upstream[assets.outputs[key]])
            )

    def _published_names(self, name: Name, state: TableState) -> Mapping[str, str]:
        """The publisher's names of a replica's columns."""
        replicated = self._assets.tables[name].replicated
        column_names = self._subscription.published_names(replicated.table) if replicated else {}
        columns = state.definition.table_columns if state.definition else ()
        return {column: column_names.get(column, column) for column, _ in columns}

    def _checks_of_tables(self) -> Iterator[dg.AssetCheckResult]:
        """The checks of tables whose results have changed."""
        of_others = self._problems.keys() - self._failing.keys() - self._request.chosen.keys()
        unreported = (_ready_tables(self._states) - self._materialised.keys()) | of_others
        for name, key in self._request.tables.items():
            if name in unreported:
                continue
            state = self._states.get(name)
            if state is None or state.state != SyncState.READY:
                self._context.log.error(f"{quote_qualified(*name)} is {_meaning(state)}: {_reason(state)}")
            yield sync_state_result(key, state)
            yield table_freshness_result(key, self._subscription, self._behind, state)

    def _cut_event(self, cut: Cut) -> Event:
        """The materialization of the cut; its tags repeat the versions of inputs that this run has not materialised."""
        instance, key, request = self._context.instance, self._assets.cut, self._request
        unchosen_tables = [request.tables[name] for name in self._materialised if name not in request.chosen]
        return dg.MaterializeResult(
            asset_key=key,
            data_version=cut_data_version(cut),
            tags=recorded_input_tags(instance, key, self._assets.unchanged)
            | current_input_tags(instance, unchosen_tables),
            metadata={**cut_metadata(cut, self._result), **self._run_metadata},
        )

    def _checks_of_cut(self) -> Iterator[dg.AssetCheckResult]:
        """The selected checks of the cut."""
        for check in sorted(self._context.selected_asset_check_keys):
            if check.name == SYNC_STATE:
                reported_problems = self._reported.intersection(self._problems.values()) | set(
                    self._failing.values()
                )
                yield cut_sync_state_result(
                    self._assets.cut, self._states, self._subscription_state, reported_problems
                )
            else:
                yield freshness_result(self._assets.cut, self._subscription, self._behind)


def _comments(subscription: Subscription, names: Sequence[Name]) -> Mapping[Name, Comments]:
    """The publisher's comments on tables and their columns; empty if the publisher does not answer, as comments are optional."""
    if not names:
        return {}
    try:
        with subscription.feed.source.connect() as connection:
            return read_comments(connection, names)
    except SourceError:
        return {}


def _failing_problems(
    problems: Mapping[Name | None, str], chosen: Container[Name], reported: Container[str] | None
) -> dict[Name | None, str]:
    """The problems for which a run fails: those of selected tables, and those that are not in `reported`.

    `reported` are the problems for which a run has failed. It is None for a run of selected tables, which fails only
    for problems of these tables and of the subscription itself.
    """
    return {
        name: problem
        for name, problem in problems.items()
        if (name is not None and name in chosen)
        or (name is None if reported is None else problem not in reported)
    }


def _ready_tables(states: Mapping[Name, TableState]) -> set[Name | None]:
    return {name for name, state in states.items() if state.state == SyncState.READY}


def freshness_description(subscription: Subscription) -> str:
    """The description of the check `freshness`."""
    limit = subscription.freshness.total_seconds()
    return f"No commit has been waiting for longer than {limit:.0f} s to be applied."


def is_changed(name: Name, result: ApplyResult, former_cut: Cut | None) -> bool:
    """Whether a table got changes, or got another Delta version by a copy or a new definition."""
    version = former_cut.tables.get(name) if former_cut else None
    return name in result.tables or (result.cut is not None and result.cut.tables.get(name) != version)


def _meaning(state: TableState | None) -> str:
    return state.state.meaning if state else "not copied yet"


def _reason(state: TableState | None) -> str:
    return (state.reason if state else None) or "the next copy brings it"


def _replica_metadata(
    lake: Lake, path: str, table: PublishedTable, result: ApplyResult, state: TableState
) -> dict[str, Any]:
    name = (table.schema, table.name)
    table_result = result.tables.get(name, TableResult(*name))
    cut = result.cut
    version = cut.tables.get(name) if cut else None
    published_columns = state.definition.published if state.definition else None
    row_filter = table.row_filter or (
        filter_text(published_columns.row_filters) if published_columns else None
    )
    properties = {
        "LSN": format_lsn(cut.lsn) if cut else None,
        # As text: Dagster plots each number.
        "Delta version": None if version is None else str(version),
        "row filter": row_filter,
        "changes came through": escape_controls(", ".join(table_result.through)) or None,
    }
    return {
        "state": state.state.meaning,
        **replica_metadata(table_result, result.sent_as.get(name, {})),
        **{name: value for name, value in properties.items() if value is not None},
        **standard_metadata(rows=lake.count(path), table=quote_qualified(*name), uri=path),
    }
