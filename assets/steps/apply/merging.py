"""The MERGE of a net change into a replica by Spark, and the clauses for a table without a key.

`pgsieve.resources.lake.delta.merge` has the clauses for a table with a key, and what both engines share. delta-rs
merges in `Commits.merge`.
"""

from collections.abc import Mapping, Sequence
from uuid import uuid4

from pyspark.sql import DataFrame

from pgsieve.assets.steps.apply.equal_rows import same_row_sql
from pgsieve.resources.lake.delta.merge import Clauses, keyless_clauses, refuse_reserved_columns
from pgsieve.resources.lake.delta.records import quoted
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.version_guard import with_version_guard
from pgsieve.resources.work import add_costs, engine_of


def keyless_merge(source: DataFrame, columns: Sequence[str]) -> Clauses:
    """The clauses that delete and insert rows in a table without a key; `source` has the columns `action` and `row`.

    `action` is `delete` or `insert`.
    """
    return keyless_clauses(same_row_sql(source, "row", "t", "s.row"), columns)


def merge_by_spark(
    lake: Lake, path: str, source: DataFrame, clauses: Clauses, base: int
) -> Mapping[str, int]:
    """Run a MERGE into the version `base` of a table.

    Returns the number of rows by kind of change; empty if the table has reached the position already. Raises LakeError
    if the table has a column whose name the MERGE uses for its own.
    """
    refuse_reserved_columns(lake.columns(path))
    view = f"pgsieve_{uuid4().hex}"
    with_version_guard(source, path, base, lake.store).createOrReplaceTempView(view)
    session = lake.spark
    add_costs(engine_of(session), 1, 0)
    result = session.sql(clauses.statement(f"delta.{quoted(path)}", view)).collect()
    session.catalog.dropTempView(view)
    counts = result[0].asDict() if result else {}
    return {kind: counts[f"num_{kind}_rows"] for kind in ("inserted", "updated", "deleted") if counts}
