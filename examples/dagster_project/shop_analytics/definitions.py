"""The project's own definitions, merged with pgsieve's."""

from pathlib import Path

import dagster as dg
from dagster_dlt import DagsterDltResource

import pgsieve
from shop_analytics.assets import Warehouse, every_order_has_a_region, revenue_by_region, targets_met
from shop_analytics.plans import plans

PROJECT = Path(__file__).parents[1]


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions of the project."""
    own = dg.Definitions(
        assets=[plans, revenue_by_region, targets_met],
        asset_checks=[every_order_has_a_region],
        jobs=[dg.define_asset_job("shop_increments", [revenue_by_region, targets_met])],
        sensors=[
            dg.AutomationConditionSensorDefinition(
                "automation",
                target=[revenue_by_region, targets_met],
                default_status=dg.DefaultSensorStatus.RUNNING,
            )
        ],
        resources={
            "lake": Warehouse(folder=str(PROJECT / "warehouse")),
            "dlt_pipelines": DagsterDltResource(),
        },
        executor=dg.multiprocess_executor,
    )
    return dg.Definitions.merge(own, pgsieve.build_definitions(PROJECT / "pgsieve.yaml"))
