"""Partition roots and other replica tables as assets: changes are applied to them in parallel, then a cut is written.

Changes come keyed by the published table already. The UPDATE transformation has routed those of partitions to their
root (`pgsieve.assets.steps.update_transformation.slice_contents`, `pgsieve.decoding.publications.routing`).

A run materialises the tables that it changed. One that had nothing to do, or is set aside, stays as it was; the check
`sync_state` tells them apart. Tables that somebody chose by name are materialised as long as they are ready. The cut is
materialised by every run that has brought all tables up to date, whether or not there was anything to do.

The checks `sync_state` and `freshness` of the cut speak for all tables, and are evaluated in each run. Those of single tables
are reported where they have something new to say: for what the run materialised, and for what is not ready. A table that
is set aside, or a disabled subscription, ends the run as failed once everything else is done.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import dagster as dg

from pgsieve.assets.checks import FRESHNESS, SYNC_STATE, check_of_freshness, check_of_state, check_of_states
from pgsieve.assets.dagster_names import Name, output_names
from pgsieve.assets.lake import opened
from pgsieve.assets.metadata import spent, standard
from pgsieve.assets.outcome import as_step, problems, refuse_incomplete, telling
from pgsieve.assets.published import PublishedTable, Tables, written_filter
from pgsieve.assets.steps.apply.applied import Applied
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.done import Done
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.translator import AssetKind, Naming, of_replica, of_source_table, of_subscription
from pgsieve.assets.unrun_events import (
    data_version,
    inputs_of_before,
    lag,
    measured_freshness,
    report_checks,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import Work, measured

#: What the op yields.
Event = dg.MaterializeResult[None] | dg.AssetCheckResult


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
        behind = measured_freshness(subscription, lake)
        states, checks = TableStates(lake, subscription.name).newest(), list[dg.AssetCheckResult]()
        told = [
            name
            for name in chosen
            if (state := states.get(name)) is not None
            and state.state == SyncState.READY
            and (not everything or is_changed(name, result, before))
        ]
        with lake.one_moment(*(lake.paths.replica(subscription.name, *name) for name in told)):
            metadata = {
                name: _metadata(lake, subscription, tables[name], result, states[name]) for name in told
            }
        for name, key in chosen.items():
            state = states.get(name)
            if state is None or state.state != SyncState.READY:
                context.log.error(f"{quote_qualified(*name)} is {_meaning(state)}: {_reason(state)}")
                checks.append(check_of_state(key, state))
            elif name in metadata:
                yield dg.MaterializeResult(
                    asset_key=key, metadata={**metadata[name], **spent(work), **lag(behind)}
                )
                checks += [check_of_state(key, state), check_of_freshness(key, subscription, behind)]
        report_checks(context.instance, checks)
        if with_cut and result.cut and not problems(subscription, lake):
            yield dg.MaterializeResult(
                asset_key=cut_key,
                data_version=data_version(result.cut),
                tags=inputs_of_before(context.instance, cut_key, others),
                metadata={**_totals(result, result.cut), **spent(work), **lag(behind)},
            )
        whole = SubscriptionRecord(lake, subscription.name).state()
        for check in sorted(context.selected_asset_check_keys):
            if check.name == SYNC_STATE:
                yield check_of_states(cut_key, states, whole)
            else:
                yield check_of_freshness(cut_key, subscription, behind)
        if context.selected_asset_keys:
            refuse_incomplete(subscription, lake, None if everything else chosen)

    return replica_tables


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
        **standard(
            rows=lake.count(path),
            columns=state.definition.columns if state.definition else None,
            table=quote_qualified(*name),
            uri=path,
        ),
    }
