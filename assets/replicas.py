"""The assets of a subscription's replicas: their keys, their dependencies, and what a materialization says about them.

A replica is the copy of one of the publisher's tables. The step that applies changes (`pgsieve.assets.partition_roots`) and the
consistency check report the same about replicas.

In: the subscription and its tables; for a materialization, the states of the tables and what was applied to them.
Out: outputs and inputs of an op, data versions, and metadata entries. A publisher that does not answer is no error: the comments
of its tables are left out.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import dagster as dg

from pgsieve.assets.encoded_names import name_outputs
from pgsieve.assets.metadata import (
    NO_COMMENTS,
    column_metadata,
    replica_metadata,
    replica_version,
    standard_metadata,
)
from pgsieve.assets.published import PublishedTable, Tables, format_filter
from pgsieve.assets.steps.apply.replica_tables import ApplyResult
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.records.cuts import Cut
from pgsieve.assets.steps.records.table_states import TableState
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.table_groups import group_paths
from pgsieve.assets.translator import (
    AssetKind,
    DagsterNames,
    replica_asset,
    source_table_asset,
    subscription_asset,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.comments import Comments, read_comments
from pgsieve.resources.postgres.errors import SourceError


class ReplicaAssets:
    """The assets of a subscription's replicas and of its cut: their keys, specs, outputs and inputs."""

    def __init__(
        self,
        subscription: Subscription,
        tables: Tables,
        dagster_names: DagsterNames,
        unchanged: Tables = MappingProxyType({}),
        freshness_policy: dg.FreshnessPolicy | None = None,
    ) -> None:
        self.subscription, self.tables, self.dagster_names = subscription, tables, dagster_names
        #: Maps the asset key of each table to its name.
        self.table_by_key = {
            dagster_names.asset_key(replica_asset(subscription, table)): name
            for name, table in tables.items()
        }
        #: The asset keys of the tables of the cut that have no output in this op.
        self.unchanged_keys = {
            dagster_names.asset_key(replica_asset(subscription, table)) for table in unchanged.values()
        }
        cut_asset = subscription_asset(subscription, AssetKind.CUT)
        self.cut_key = dagster_names.asset_key(cut_asset)
        #: Maps each asset key to the name of its output.
        self.output_by_key = name_outputs([*self.table_by_key, self.cut_key])
        changes = dagster_names.asset_key(subscription_asset(subscription, AssetKind.TABLE_CHANGES))
        groups = group_paths(tables)
        self._spec_by_key = {
            key: dagster_names.asset_spec(
                replica_asset(subscription, tables[name], groups[name]), [changes, self.find_source_key(name)]
            )
            for key, name in self.table_by_key.items()
        }
        cut_spec = dagster_names.asset_spec(cut_asset, [changes, *self.table_by_key])
        self._spec_by_key[self.cut_key] = (
            cut_spec
            if freshness_policy is None
            else cut_spec.replace_attributes(freshness_policy=freshness_policy)
        )
        #: Maps the name of each output to the keys of the assets upstream of it.
        self.upstream_by_output = {
            self.output_by_key[key]: {dep.asset_key for dep in spec.deps if dep.asset_key != key}
            for key, spec in self._spec_by_key.items()
        }

    def find_source_key(self, name: TableName) -> dg.AssetKey:
        """Find the key of the asset that stands for the table at the publisher."""
        return self.dagster_names.asset_key(
            source_table_asset(self.subscription.slot_stream.source.name, name)
        )

    def outs(self) -> dict[str, dg.AssetOut]:
        """Maps the name of each output of the op to its definition."""
        return {
            self.output_by_key[key]: dg.AssetOut.from_spec(
                spec.replace_attributes(deps=[]), dagster_type=dg.Nothing, is_required=False
            )
            for key, spec in self._spec_by_key.items()
        }

    def ins(self) -> dict[str, dg.AssetIn]:
        """Maps the name of each input of the op to its definition.

        The names are made here, because Dagster might give two inputs the same name.
        """
        keys = set().union(*self.upstream_by_output.values()) - self._spec_by_key.keys()
        return {
            name: dg.AssetIn(key=key, dagster_type=dg.Nothing)
            for key, name in name_outputs(sorted(keys)).items()
        }


def describe_replicas(
    assets: ReplicaAssets, lake: Lake, states: Mapping[TableName, TableState], result: ApplyResult
) -> dict[TableName, tuple[dg.DataVersion, dict[str, Any]]]:
    """Map each table to the data version of its replica, and to the metadata entries of a materialization.

    `states` has the states of the tables, and `result` what was applied to them.
    """
    comments = _read_comments(assets.subscription, list(states))
    paths = {name: lake.paths.replica(assets.subscription.name, *name) for name in states}
    with lake.consistent_read(*paths.values()):
        return {
            name: (
                replica_version(state.lsn, lake.records.version(paths[name])),
                {
                    **_make_replica_metadata(lake, paths[name], assets.tables[name], result, state),
                    **column_metadata(
                        state.definition.columns if state.definition else (),
                        assets.find_source_key(name),
                        comments.get(name, NO_COMMENTS),
                        _find_publisher_names(assets, name, state),
                    ),
                },
            )
            for name, state in states.items()
        }


def _find_publisher_names(assets: ReplicaAssets, name: TableName, state: TableState) -> Mapping[str, str]:
    """Map each column of a replica to its name at the publisher."""
    replicated_table = assets.tables[name].replicated
    column_names = assets.subscription.published_names(replicated_table.table) if replicated_table else {}
    columns = state.definition.table_columns if state.definition else ()
    return {column: column_names.get(column, column) for column, _ in columns}


def _read_comments(subscription: Subscription, names: Sequence[TableName]) -> Mapping[TableName, Comments]:
    """The publisher's comments on tables and their columns.

    Empty if the publisher does not answer, because the report can do without comments.
    """
    if not names:
        return {}
    try:
        with subscription.slot_stream.source.connect() as connection:
            return read_comments(connection, names)
    except SourceError:
        return {}


def is_changed(name: TableName, result: ApplyResult, former_cut: Cut | None) -> bool:
    """True if a table got changes, or if a copy or a new definition gave it another Delta version."""
    version = former_cut.tables.get(name) if former_cut else None
    return name in result.tables or (result.cut is not None and result.cut.tables.get(name) != version)


def _make_replica_metadata(
    lake: Lake, path: str, table: PublishedTable, result: ApplyResult, state: TableState
) -> dict[str, Any]:
    """Entries about a replica: how much was changed, the row filter, and the Delta version."""
    name = (table.schema, table.name)
    table_result = result.tables.get(name, TableResult(*name))
    cut = result.cut
    version = cut.tables.get(name) if cut else None
    publication_record = state.definition.published if state.definition else None
    row_filter = table.row_filter or (
        format_filter(publication_record.row_filters) if publication_record else None
    )
    properties = {
        "LSN": format_lsn(cut.lsn) if cut else None,
        # The version is a text, because Dagster would plot a number.
        "Delta version": None if version is None else str(version),
        "row filter": row_filter,
        "changes came through": escape_controls(", ".join(table_result.through)) or None,
    }
    return {
        "state": state.state.meaning,
        **replica_metadata(table_result, result.sent_as.get(name, {})),
        **{name: value for name, value in properties.items() if value is not None},
        **standard_metadata(rows=lake.count_rows(path), table=quote_qualified(*name), uri=path),
    }
