"""The metadata people look for, in Dagster's standard names; what Dagster plots has the same name in every run."""

from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from pgsieve.resources.work import Work

#: How long a step took, how far it is behind, and how much WAL its slot retains.
SECONDS, LAG_SECONDS, LAG_BYTES = "seconds", "lag in seconds", "lag in bytes"


def spent(work: Work) -> dict[str, Any]:
    """What a step's work took: who ran it, in how many tasks, how many bytes they wrote, how long."""
    return {"engine": work.engine, "tasks": work.tasks, "bytes": work.bytes, SECONDS: work.seconds}


def column_schema(columns: Iterable[tuple[str, str]]) -> dg.TableSchema:
    """Columns and Spark types as Dagster shows them."""
    return dg.TableSchema([dg.TableColumn(name, spark) for name, spark in columns])


def standard(
    *,
    rows: int | None = None,
    columns: Iterable[tuple[str, str]] | None = None,
    table: str | None = None,
    uri: str | None = None,
) -> dict[str, Any]:
    """Dagster's standard metadata entries, those that are known."""
    entries: Mapping[str, Any] = {
        "dagster/row_count": rows,
        "dagster/column_schema": None if columns is None else column_schema(columns),
        "dagster/table_name": table,
        "dagster/uri": uri,
    }
    return {key: value for key, value in entries.items() if value is not None}
