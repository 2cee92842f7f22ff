"""Partition roots and other replica tables as assets: changes are applied to them in parallel, then a cut is written.

Changes come keyed by the published table already. The UPDATE transformation has routed those of partitions to their
root (`pgsieve.assets.steps.update_transformation.slice_contents`, `pgsieve.decoding.publications.routing`).

A run is asked for the cut, and records the tables that it changed: Dagster shows every asset as failed that a failing run was
asked for. One that had nothing to do, or is set aside, stays as it was; the check `sync_state` tells them apart. Tables that a
person chose are materialised as long as they are ready. The cut is materialised by every run that has brought all tables up to
date, whether or not there was anything to do.

The checks `sync_state` and `freshness` of the cut speak for all tables, and are evaluated in each run. Those of single tables
are reported where they have something new to say: for what the run recorded, and for what has become unwell. A table that
is set aside, or a disabled subscription, ends one run as failed once everything else is done, and each run that a person asks for it.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import dagster as dg

from pgsieve.assets.checks import (
    FRESHNESS,
    SYNC_STATE,
    check_of_freshness,
    check_of_freshness_of,
    check_of_state,
    check_of_states,
    told_before,
)
from pgsieve.assets.dagster_names import Name, output_names
from pgsieve.assets.lake import opened
from pgsieve.assets.metadata import NO_COMMENTS, of_columns, replica_version, spent, standard
from pgsieve.assets.outcome import IncompleteError, as_step, of_tables, telling, wrong_with
from pgsieve.assets.published import PublishedTable, Tables, written_filter
from pgsieve.assets.steps.apply.applied import Applied
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.checks.freshness import Freshness
from pgsieve.assets.steps.done import Done
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.translator import AssetKind, Naming, of_replica, of_source_table, of_subscription
from pgsieve.assets.unrun_events import (
    data_version,
    inputs_of_before,
    inputs_of_now,
    lag,
    measured_freshness,
    plan,
    report_checks,
    shown_as_unwell,
    unasked,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.comments import Comments, read_comments
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.work import Work, measured

#: What the op yields.
Event = dg.MaterializeResult[None] | dg.AssetMaterialization | dg.AssetCheckResult


def replica_tables_asset(
    subscription: Subscription,
    tables: Tables,
    naming: Naming,
    *,
    unchanged: Tables = MappingProxyType({}),
    freshness_policy: dg.FreshnessPolicy | None = None,
    tell: Callable[[ApplyResult], None] | None = None,
    fail: Callable[[Exception], None] | None = None,
    done: Done[tuple[Cut | None, ApplyResult]] | None = None,
    spend: Callable[[Work], None] | None = None,
) -> dg.AssetsDefinition:
    """The assets `<subscription>/<schema>/<table>`, and `<subscription>/cut`: changes are applied to each replica.

    `tell` gets what was done, in the process that does it, `fail` what fails the step, and `spend` what it took. `done` is what a command applies outside of the step,
    all of it, and the cut before that: there is nothing left but to tell it. `unchanged` are tables that the cut is made of as well, but have nothing new to tell. `freshness_policy`
    is the cut's.
    """
    keys = {naming.key(of_replica(subscription, table)): name for name, table in tables.items()}
    cut_data = of_subscription(subscription, AssetKind.CUT)
    cut_key = naming.key(cut_data)
    outputs = output_names([*keys, cut_key])
    changes_key = naming.key(of_subscription(subscription, AssetKind.TABLE_CHANGES))
    others = {naming.key(of_replica(subscription, table)) for table in unchanged.values()}
    source = subscription.feed.source.name
    specs = {
        key: naming.spec(
            of_replica(subscription, tables[name]), [changes_key, naming.key(of_source_table(source, name))]
        )
        for key, name in keys.items()
    }
    specs[cut_key] = naming.spec(cut_data, [changes_key, *keys])
    if freshness_policy is not None:
        specs[cut_key] = specs[cut_key].replace_attributes(freshness_policy=freshness_policy)
    upstream = {
        outputs[key]: {dep.asset_key for dep in spec.deps if dep.asset_key != key}
        for key, spec in specs.items()
    }

    @dg.multi_asset(
        outs={
            outputs[key]: dg.AssetOut.from_spec(
                spec.replace_attributes(deps=[]), dagster_type=dg.Nothing, is_required=False
            )
            for key, spec in specs.items()
        },
        # Named here: names that Dagster makes of keys may meet.
        ins={
            name: dg.AssetIn(key=key, dagster_type=dg.Nothing)
            for key, name in output_names(sorted(set().union(*upstream.values()) - specs.keys())).items()
        },
        internal_asset_deps=upstream,
        check_specs=[
            dg.AssetCheckSpec(SYNC_STATE, asset=cut_key, description="Every table is ready."),
            dg.AssetCheckSpec(FRESHNESS, asset=cut_key, description=limit_of(subscription)),
        ],
        name=naming.name(f"{subscription.name}_replica_tables"),
        can_subset=True,
        required_resource_keys=naming.resources,
        pool=f"subscription_{subscription.name}",
    )
    def replica_tables(context: dg.AssetExecutionContext) -> Iterator[Event]:
        with as_step(context), telling(fail):
            yield from materialized(context)

    def materialized(context: dg.AssetExecutionContext) -> Iterator[Event]:
        lake = opened(context, naming)
        chosen = {keys[key]: key for key in sorted(context.selected_asset_keys & keys.keys())}
        with_cut = cut_key in context.selected_asset_keys
        everything = with_cut or len(chosen) == len(keys)
        if done is not None:
            (before, result), work = done(context.log.info)
        else:
            before, result = Cuts(lake, subscription.name).last(), ApplyResult()
            with measured() as work:
                if context.selected_asset_keys:
                    only = None if everything else list(chosen)
                    result = apply(subscription, lake, context.log.info, only)
        if spend:
            spend(work)
        if tell and context.selected_asset_keys:
            tell(result)
        states = TableStates(lake, subscription.name).newest()
        whole = SubscriptionRecord(lake, subscription.name).state()
        wrong = wrong_with(subscription.name, lake, states, whole)
        told = told_before(context.instance, cut_key) if wrong else set()
        failing = _failing(wrong, chosen, told if everything else None) if context.selected_asset_keys else {}
        asked = {name: key for key, name in keys.items()} if with_cut else chosen
        unwell = shown_as_unwell(context.instance, set(asked.values()))
        new = {
            name: state
            for name, state in states.items()
            if name in asked
            and state.state == SyncState.READY
            and (
                is_changed(name, result, before)
                or asked[name] in unwell
                or (name in chosen and bool(failing or not everything))
            )
        }
        behind = measured_freshness(subscription, lake)
        yield from replicas(context, lake, result, {**spent(work), **lag(behind)}, new)
        silent = _ready(states) - new.keys() | (wrong.keys() - failing.keys() - chosen.keys())
        checked = {name: states.get(name) for name in asked if name not in silent}
        report_checks(context.instance, list(table_checks(context, checked, behind)))
        if with_cut and result.cut and not of_tables(wrong):
            yield dg.MaterializeResult(
                asset_key=cut_key,
                data_version=data_version(result.cut),
                tags=inputs_of_before(context.instance, cut_key, others)
                | inputs_of_now(context.instance, [asked[name] for name in new if name not in chosen]),
                metadata={**_totals(result, result.cut), **spent(work), **lag(behind)},
            )
        for check in sorted(context.selected_asset_check_keys):
            if check.name == SYNC_STATE:
                told_now = told.intersection(wrong.values()) | set(failing.values())
                yield check_of_states(cut_key, states, whole, told_now)
            else:
                yield check_of_freshness(cut_key, subscription, behind)
        if failing:
            plan(context, [key for name, key in asked.items() if name in failing and name not in chosen])
            raise IncompleteError(subscription.name, list(failing.values()))

    def replicas(
        context: dg.AssetExecutionContext,
        lake: Lake,
        result: ApplyResult,
        told: Mapping[str, Any],
        new: Mapping[Name, TableState],
    ) -> Iterator[Event]:
        """What a run has materialised, whether or not it was asked for it; `told` is the same of each."""
        comments = _comments(subscription, list(new))
        with lake.one_moment(*(lake.paths.replica(subscription.name, *name) for name in new)):
            versions = {
                name: replica_version(
                    state.lsn, lake.records.version(lake.paths.replica(subscription.name, *name))
                )
                for name, state in new.items()
            }
            metadata = {
                name: {
                    **_metadata(lake, subscription, tables[name], result, state),
                    **of_columns(
                        state.definition.columns if state.definition else (),
                        naming.key(of_source_table(source, name)),
                        comments.get(name, NO_COMMENTS),
                    ),
                }
                for name, state in new.items()
            }
        by_name = {name: key for key, name in keys.items()}
        for name, version in versions.items():
            made = dg.MaterializeResult[None](
                asset_key=by_name[name], data_version=version, metadata={**metadata[name], **told}
            )
            is_asked = by_name[name] in context.selected_asset_keys
            yield made if is_asked else unasked(context, made, upstream[outputs[by_name[name]]])

    def table_checks(
        context: dg.AssetExecutionContext, states: Mapping[Name, TableState | None], behind: Freshness | str
    ) -> Iterator[dg.AssetCheckResult]:
        for key, name in keys.items():
            if name in states:
                state = states[name]
                if state is None or state.state != SyncState.READY:
                    context.log.error(f"{quote_qualified(*name)} is {_meaning(state)}: {_reason(state)}")
                yield check_of_state(key, state)
                yield check_of_freshness_of(key, subscription, behind, state)

    return replica_tables


def _comments(subscription: Subscription, names: Sequence[Name]) -> Mapping[Name, Comments]:
    """The publisher's comments on tables and their columns; none where it does not answer, as they explain and no more."""
    if not names:
        return {}
    try:
        with subscription.feed.source.connect() as connection:
            return read_comments(connection, names)
    except SourceError:
        return {}


def _failing(
    wrong: Mapping[Name | None, str], chosen: Container[Name], told: Container[str] | None
) -> dict[Name | None, str]:
    """For what of all that is wrong a run fails: what it was asked for, and what no run has failed for yet.

    `told` is None for a run of chosen tables alone: the others are not its concern, but the subscription is.
    """
    return {
        name: problem
        for name, problem in wrong.items()
        if (name is not None and name in chosen) or (name is None if told is None else problem not in told)
    }


def _ready(states: Mapping[Name, TableState]) -> set[Name | None]:
    return {name for name, state in states.items() if state.state == SyncState.READY}


def limit_of(subscription: Subscription) -> str:
    """What the check `freshness` claims."""
    limit = subscription.freshness.total_seconds()
    return f"No commit has been waiting for longer than {limit:.0f} s to be applied."


def _totals(result: ApplyResult, cut: Cut) -> dict[str, Any]:
    done = result.tables.values()
    return {
        "LSN": format_lsn(cut.lsn),
        "tables": len(cut.tables),
        "tables changed": len(done),
        "inserted": sum(a.inserted for a in done),
        "updated": sum(a.updated for a in done),
        "deleted": sum(a.deleted for a in done),
        "truncated": sum(a.truncated for a in done),
    }


def is_changed(name: Name, result: ApplyResult, before: Cut | None) -> bool:
    """Whether a table got changes, or has another version than before: it was copied, or followed its definition."""
    version = before.tables.get(name) if before else None
    return name in result.tables or (result.cut is not None and result.cut.tables.get(name) != version)


def _meaning(state: TableState | None) -> str:
    return state.state.meaning if state else "not copied yet"


def _reason(state: TableState | None) -> str:
    return (state.reason if state else None) or "the next copy brings it"


def _metadata(
    lake: Lake,
    subscription: Subscription,
    table: PublishedTable,
    result: ApplyResult,
    state: TableState,
) -> dict[str, Any]:
    name = (table.schema, table.name)
    applied = result.tables.get(name, Applied(*name))
    path = lake.paths.replica(subscription.name, *name)
    cut = result.cut
    version = cut.tables.get(name) if cut else None
    copied = state.definition.published if state.definition else None
    row_filter = table.row_filter or (written_filter(copied.row_filters) if copied else None)
    known = {
        "LSN": format_lsn(cut.lsn) if cut else None,
        # As text: Dagster plots each number.
        "Delta version": None if version is None else str(version),
        "row filter": row_filter,
    }
    return {
        "state": state.state.meaning,
        "inserted": applied.inserted,
        "updated": applied.updated,
        "deleted": applied.deleted,
        "truncated": applied.truncated,
        "update_missing and delete_missing": applied.missing,
        "insert_exists": applied.insert_exists,
        "update_exists": applied.update_exists,
        **{name: value for name, value in known.items() if value is not None},
        **standard(rows=lake.count(path), table=quote_qualified(*name), uri=path),
    }
