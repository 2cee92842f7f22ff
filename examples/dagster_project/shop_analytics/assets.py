"""The project's own assets: the shop's revenue by region, from replicas as of one LSN."""

from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import pgsieve


class Warehouse(dg.ConfigurableResource["Warehouse"]):
    """The folder of the results; the project calls this resource `lake`."""

    folder: str

    def write(self, name: str, table: pa.Table) -> str:
        """Write a table; returns its path."""
        path = Path(self.folder) / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        return str(path)

    def read(self, name: str) -> pa.Table:
        """Read a table: a file, or a folder of files."""
        path = Path(self.folder) / name
        return pq.read_table(path if path.is_dir() else path.with_suffix(".parquet"))


@dg.asset(
    deps=[
        dg.AssetKey(["sales", "public", "orders"]),
        dg.AssetKey(["sales", "public", "customers"]),
    ],
    automation_condition=pgsieve.at_cut("sales"),
    kinds={"arrow"},
)
def revenue_by_region(lake: Warehouse, pgsieve_lake: pgsieve.PgsieveLake) -> dg.MaterializeResult[None]:
    """The revenue of each region; each order has its customer, since both tables are as of one LSN."""
    tables = pgsieve_lake.tables_at_cut("sales")
    orders = tables["public.orders"].to_pyarrow_table()
    customers = tables["public.customers"].to_pyarrow_table()
    sold = orders.join(customers, keys="customer_id", right_keys="id", join_type="left outer")
    revenue = sold.group_by("region").aggregate([("amount", "sum")]).sort_by("region")
    return dg.MaterializeResult(
        metadata={"regions": revenue.num_rows, "path": lake.write("revenue_by_region", revenue)}
    )


@dg.asset(
    deps=[revenue_by_region, dg.AssetKey("dlt_sales_plans_targets")],
    automation_condition=dg.AutomationCondition.eager(),
    kinds={"arrow"},
)
def targets_met(lake: Warehouse) -> dg.MaterializeResult[None]:
    """The regions that reached their target: joins pgsieve's replicas with a table that dlt has loaded."""
    planned = lake.read("plans/targets").select(["region", "target"])
    sold = lake.read("revenue_by_region").join(planned, keys="region", join_type="inner")
    met = sold.filter(pc.greater_equal(pc.cast(sold["amount_sum"], pa.float64()), sold["target"]))
    return dg.MaterializeResult(
        metadata={
            "regions": ", ".join(sorted(met["region"].to_pylist())),
            "path": lake.write("targets_met", met),
        }
    )


@dg.asset_check(asset=revenue_by_region)
def every_order_has_a_region(lake: Warehouse) -> dg.AssetCheckResult:
    """Each order has a customer, and so a region."""
    regions = lake.read("revenue_by_region")["region"]
    return dg.AssetCheckResult(passed=regions.null_count == 0)
