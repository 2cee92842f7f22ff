"""The project's definitions, with pgsieve's beside them."""

from pathlib import Path

import dagster as dg

import pgsieve
from shop_analytics.assets import Warehouse, every_order_has_a_region, revenue_by_region

PROJECT = Path(__file__).parents[1]


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions of the project."""
    own = dg.Definitions(
        assets=[revenue_by_region],
        asset_checks=[every_order_has_a_region],
        jobs=[dg.define_asset_job("shop_increments", [revenue_by_region])],
        sensors=[
            dg.AutomationConditionSensorDefinition(
                "automation", target=[revenue_by_region], default_status=dg.DefaultSensorStatus.RUNNING
            )
        ],
        resources={"lake": Warehouse(folder=str(PROJECT / "warehouse"))},
        executor=dg.multiprocess_executor,
    )
    return dg.Definitions.merge(own, pgsieve.build_definitions(PROJECT / "pgsieve.yaml"))
