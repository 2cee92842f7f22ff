"""The targets of the sales department: a file that dlt loads, as assets of another integration beside pgsieve's."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import dlt
from dagster_dlt import DagsterDltResource, dlt_assets
from dlt.extract.resource import DltResource

PROJECT = Path(__file__).parents[1]


@dlt.source
def sales_plans() -> DltResource:
    """The targets of targets.csv, a row for each region."""

    @dlt.resource(write_disposition="replace")
    def targets() -> Iterator[dict[str, Any]]:
        with (PROJECT / "targets.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield {"region": row["region"], "target": int(row["target"])}

    return targets


@dlt_assets(
    dlt_source=sales_plans(),
    dlt_pipeline=dlt.pipeline(
        "plans",
        pipelines_dir=str(PROJECT / ".pgsieve" / "dlt"),
        destination=dlt.destinations.filesystem(bucket_url=str(PROJECT / "warehouse")),
        dataset_name="plans",
    ),
    name="plans",
    group_name="plans",
)
def plans(context: dg.AssetExecutionContext, dlt_pipelines: DagsterDltResource) -> Iterator[Any]:
    """Load the plans into the warehouse's folder, as Parquet."""
    yield from dlt_pipelines.run(context=context, loader_file_format="parquet")
