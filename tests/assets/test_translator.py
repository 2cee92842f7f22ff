"""The names and descriptions of assets before a user translates them."""

from __future__ import annotations

import dagster as dg
import pytest

from pgsieve.assets.translator import AssetKind, DagsterNames, PgsieveAsset, PgsieveTranslator
from pgsieve.decoding.errors import PgsieveError

CHANGE_LOG = PgsieveAsset(AssetKind.CHANGE_LOG, "shop", "shop", "pgsieve_shop")
CUT = PgsieveAsset(AssetKind.CUT, "shop", "sales", "pgsieve_shop", "sales")
OF_TABLE = {"schema": "public", "table": "order items"}


@pytest.mark.parametrize(
    ("asset", "key", "group"),
    [
        (CHANGE_LOG, "shop/change_log", "shop_replication"),
        (CUT, "sales/cut", "sales"),
        (PgsieveAsset(AssetKind.INITIAL_SYNC, "shop", "sales"), "sales/initial_sync", "shop_replication"),
        (PgsieveAsset(AssetKind.TABLE_CHANGES, "shop", "sales"), "sales/table_changes", "shop_replication"),
        (PgsieveAsset(AssetKind.MAINTENANCE, "shop", "sales"), "sales/maintenance", "shop_replication"),
        (
            PgsieveAsset(AssetKind.CHANGE_LOG_MAINTENANCE, "shop", "pgsieve_shop_sales"),
            "pgsieve_shop_sales/change_log_maintenance",
            "shop_replication",
        ),
        (
            PgsieveAsset(AssetKind.REPLICA, "shop", "sales", **OF_TABLE),
            "sales/public/order-20-items",
            "sales",
        ),
        (
            PgsieveAsset(AssetKind.SOURCE_TABLE, "shop", "shop", **OF_TABLE),
            "shop/tables/public/order-20-items",
            "shop",
        ),
    ],
)
def test_keys_and_groups_of_assets(asset: PgsieveAsset, key: str, group: str) -> None:
    spec = PgsieveTranslator().get_asset_spec(asset)
    assert (spec.key.to_user_string(), spec.group_name) == (key, group)
    assert spec.description
    assert spec.kinds


def test_a_subscription_with_its_sources_name_shares_no_key_with_it() -> None:
    dagster_names = DagsterNames()
    for kind in (AssetKind.SOURCE_TABLE, AssetKind.REPLICA):
        dagster_names.asset_key(PgsieveAsset(kind, "shop", "shop", **OF_TABLE))


@pytest.mark.parametrize(
    ("prefix", "job", "lake"),
    [("", "shop_increments", "pgsieve_lake"), ("crm", "crm_shop_increments", "crm_lake")],
)
def test_a_prefix_begins_all_names(prefix: str, job: str, lake: str) -> None:
    dagster_names = DagsterNames(prefix)
    assert (dagster_names.prefixed_name("shop_increments"), dagster_names.lake_resource_key) == (job, lake)


@pytest.mark.parametrize("prefix", ["my-own", "a b", "ä", "a.b"])
def test_a_prefix_that_begins_no_name_in_dagster_is_refused(prefix: str) -> None:
    with pytest.raises(PgsieveError, match="cannot begin a name") as refused:
        DagsterNames(prefix)
    assert refused.value.hint == "use letters, digits and underscores"


def test_a_steps_inputs_are_added_to_the_users_deps() -> None:
    class Mine(PgsieveTranslator):
        def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
            return super().get_asset_spec(data).replace_attributes(deps=["upstream", "shop"])

    spec = DagsterNames(translator=Mine()).asset_spec(CHANGE_LOG, [dg.AssetKey("shop"), dg.AssetKey("copy")])
    assert [dep.asset_key.to_user_string() for dep in spec.deps] == ["upstream", "shop", "copy"]
