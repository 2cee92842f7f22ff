"""Partition-root routing and apply as assets: one per replica table, applied in parallel, then a cut."""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from assets.metadata import KINDS, replica_key, standard, table_changes_key
from assets.steps.replica_tables import ApplyResult, apply
from assets.steps.replica_writer import Applied
from assets.steps.subscription import Subscription
from assets.steps.table_states import MEANING, READY, TableState, table_states
from decoding.lsn import format_lsn
from decoding.publication import ReplicatedTable
from resources.delta import Lake, LakeResource

Name = tuple[str, str]


def replica_tables_asset(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable]
) -> dg.AssetsDefinition:
    """The assets `<subscription>/<schema>/<table>`: route each change to its published root and apply it."""
    keys = {replica_key(subscription, name): name for name in tables}
    specs = [
        dg.AssetSpec(
            key,
            deps=[table_changes_key(subscription)],
            kinds=KINDS,
            group_name=subscription.name,
            skippable=True,
            description=_description(tables[name]),
        )
        for key, name in keys.items()
    ]

    @dg.multi_asset(
        specs=specs,
        name=f"{subscription.name}_replica_tables",
        can_subset=True,
        pool=f"subscription_{subscription.name}",
    )
    def replica_tables(
        context: dg.AssetExecutionContext, lake: LakeResource
    ) -> Iterator[dg.MaterializeResult[None]]:
        opened = lake.open()
        selected = [keys[key] for key in context.selected_asset_keys]
        only = None if len(selected) == len(keys) else selected
        result = apply(subscription, opened, context.log.info, only)
        states = table_states(opened, subscription.name)
        for key in sorted(context.selected_asset_keys):
            name = keys[key]
            yield dg.MaterializeResult(
                asset_key=key,
                metadata=_metadata(opened, subscription, tables[name], result, states.get(name)),
            )

    return replica_tables


def _description(replicated: ReplicatedTable) -> str:
    filters = " OR ".join(replicated.row_filters) if replicated.row_filters is not None else "none"
    return f"Replica of {replicated.table.qualified}. Publications: {', '.join(replicated.publications)}. Row filter: {filters}"


def _metadata(
    lake: Lake,
    subscription: Subscription,
    replicated: ReplicatedTable,
    result: ApplyResult,
    state: TableState | None,
) -> dict[str, Any]:
    table = replicated.table
    name = (table.schema, table.name)
    applied = result.tables.get(name, Applied(*name))
    path = lake.replica(subscription.name, *name)
    cut = result.cut
    # Counting reads the table: only those that this run changed.
    changed = name in result.tables and state is not None and state.state == READY
    version = cut.tables.get(name) if cut else None
    return {
        "state": MEANING[state.state] if state else "not copied yet",
        "reason": (state.reason if state else None) or "",
        "inserted": applied.inserted,
        "updated": applied.updated,
        "deleted": applied.deleted,
        "truncated": applied.truncated,
        "update_missing and delete_missing": applied.missing,
        "LSN": format_lsn(cut.lsn) if cut else "none yet",
        "Delta version": version if version is not None else "none yet",
        "row filter": " OR ".join(replicated.row_filters) if replicated.row_filters is not None else "none",
        **standard(
            rows=lake.records.count(path) if changed else None,
            columns=state.definition.columns if state and state.definition else None,
            table=table.qualified,
            uri=path,
        ),
    }
