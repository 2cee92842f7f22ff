"""Partition roots and other replica tables as assets: changes are applied to them in parallel, then a cut is written.

Changes come keyed by the published table already. The UPDATE transformation has routed those of partitions to their
root (`pgsieve.assets.steps.update_transformation.slice_contents`, `pgsieve.decoding.publications.routing`).

A run materialises the tables that it changed. One that had nothing to do, or is set aside, stays as it was; the check
`sync_state` tells them apart. Tables that somebody chose by name are materialised as long as they are ready.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg

from pgsieve.assets.dagster_names import Name, output_names
from pgsieve.assets.metadata import KINDS, replica_key, standard, table_changes_key
from pgsieve.assets.steps.apply.applied import Applied
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import ReplicatedTable
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake, LakeResource


def replica_tables_asset(
    subscription: Subscription,
    tables: Mapping[Name, ReplicatedTable],
    tell: Callable[[ApplyResult], None] | None = None,
    done: ApplyResult | None = None,
) -> dg.AssetsDefinition:
    """The assets `<subscription>/<schema>/<table>`: the changes of each published table, applied to its replica.

    `tell` gets what was done, in the process that does it. `done` is what a continuous run has applied already: there
    is nothing left but to tell it.
    """
    keys = {replica_key(subscription, name): name for name in tables}
    outs = {
        output: dg.AssetOut(
            key=key,
            kinds=KINDS,
            group_name=subscription.name,
            is_required=False,
            dagster_type=dg.Nothing,
            description=_description(tables[keys[key]]),
        )
        for key, output in output_names(keys).items()
    }

    @dg.multi_asset(
        outs=outs,
        deps=[table_changes_key(subscription)],
        name=f"{subscription.name}_replica_tables",
        can_subset=True,
        pool=f"subscription_{subscription.name}",
    )
    def replica_tables(
        context: dg.AssetExecutionContext, lake: LakeResource
    ) -> Iterator[dg.MaterializeResult[None]]:
        opened = lake.open()
        selected = {keys[key]: key for key in sorted(context.selected_asset_keys)}
        everything, before = len(selected) == len(keys), Cuts(opened, subscription.name).last()
        only = None if everything else list(selected)
        result = apply(subscription, opened, context.log.info, only) if done is None else done
        if tell:
            tell(result)
        states = TableStates(opened, subscription.name).newest()
        for name, key in selected.items():
            state = states.get(name)
            if state is None or state.state != SyncState.READY:
                context.log.error(f"{quote_qualified(*name)} is {_meaning(state)}: {_reason(state)}")
            elif not everything or is_changed(name, result, before):
                yield dg.MaterializeResult(
                    asset_key=key, metadata=_metadata(opened, subscription, tables[name], result, state)
                )

    return replica_tables


def is_changed(name: Name, result: ApplyResult, before: Cut | None) -> bool:
    """Whether a table got changes, or has another version than before: it was copied, or followed its definition."""
    version = before.tables.get(name) if before else None
    return name in result.tables or (result.cut is not None and result.cut.tables.get(name) != version)


def _meaning(state: TableState | None) -> str:
    return state.state.meaning if state else "not copied yet"


def _reason(state: TableState | None) -> str:
    return (state.reason if state else None) or "the next copy brings it"


def _description(replicated: ReplicatedTable) -> str:
    filters = " OR ".join(replicated.row_filters) if replicated.row_filters is not None else "none"
    return f"Replica of {quote_qualified(replicated.table.schema, replicated.table.name)}. Publications: {', '.join(replicated.publications)}. Row filter: {filters}"


def _metadata(
    lake: Lake,
    subscription: Subscription,
    replicated: ReplicatedTable,
    result: ApplyResult,
    state: TableState,
) -> dict[str, Any]:
    table = replicated.table
    name = (table.schema, table.name)
    applied = result.tables.get(name, Applied(*name))
    path = lake.replica(subscription.name, *name)
    cut = result.cut
    version = cut.tables.get(name) if cut else None
    return {
        "state": state.state.meaning,
        "inserted": applied.inserted,
        "updated": applied.updated,
        "deleted": applied.deleted,
        "truncated": applied.truncated,
        "update_missing and delete_missing": applied.missing,
        "insert_exists": applied.insert_exists,
        "update_exists": applied.update_exists,
        "LSN": format_lsn(cut.lsn) if cut else "none yet",
        "Delta version": version if version is not None else "none yet",
        "row filter": " OR ".join(replicated.row_filters) if replicated.row_filters is not None else "none",
        **standard(
            rows=lake.records.count(path),
            columns=state.definition.columns if state.definition else None,
            table=quote_qualified(*name),
            uri=path,
        ),
    }
