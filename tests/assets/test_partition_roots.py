"""All replicas in one op: each table is an asset with its own upstream tables, whatever the names of the tables."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import PublishedTable
from pgsieve.assets.translator import DagsterNames, source_table_asset
from pgsieve.pipelines.config.model import parse_config
from pgsieve.pipelines.project import build_project

LEAST = """
lake: ./lake
sources: {shop: {conninfo: dbname=shop}}
subscriptions: {sales: {source: shop, publications: [p]}}
"""


def test_tables_with_the_same_dagster_name_keep_their_own_upstream_tables(tmp_path: Path) -> None:
    subscription = build_project(parse_config(LEAST, tmp_path / "pgsieve.yaml", {})).subscriptions["sales"]
    names = [("a_b", "c"), ("a", "b_c"), ("a__b", "c"), ("a", "b__c"), ("a-", "b"), ("A", "b_c")]
    tables = {name: PublishedTable(*name, ("p",), None) for name in names}
    asset = replica_tables_asset(subscription, tables, DagsterNames())
    cut = dg.AssetKey(["sales", "cut"])
    changes = dg.AssetKey(["sales", "table_changes"])
    replicas = set(asset.keys) - {cut}
    assert len(replicas) == len(names)
    upstream = {DagsterNames().asset_key(source_table_asset("shop", name)) for name in names}
    assert set().union(*(asset.asset_deps[key] for key in replicas)) == upstream | {changes}
    for key in replicas:
        assert asset.asset_deps[key] == {changes, dg.AssetKey(["shop", "tables", *key.path[1:]])}
    assert asset.asset_deps[cut] == replicas | {changes}
    dg.Definitions.validate_loadable(
        dg.Definitions(
            [asset],
            resources=dict.fromkeys(DagsterNames().resource_keys, dg.ResourceDefinition.none_resource()),
        )
    )
