"""Metadata of assets, under the standard names of Dagster where there are any.

A replica is the copy of one of the publisher's tables. A cut names a version of each replica of a subscription;
together these versions equal the publisher at one LSN.

Dagster plots the numbers of an entry over the runs, so an entry has the same name in each run.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import dagster as dg

from pgsieve.assets.steps.apply.replica_tables import ApplyResult
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.records.cuts import Cut
from pgsieve.decoding.changes.sent_as import (
    SentCounts,
    count_by_result,
    count_received,
    group_by_origin,
    sum_counts,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.postgres.comments import Comments
from pgsieve.resources.work import Work

NO_COMMENTS = Comments()

#: The text that is shown for a table without a row filter.
NO_FILTER = "none"
#: A table of metadata lists at most this many relations, those with the most changes. A partition tree may have
#: thousands.
MAX_RELATIONS = 100
#: The names of the entries for the duration of a step, for how far the replicas are behind, and for how much WAL a slot
#: retains.
SECONDS, LAG_SECONDS, LAG_BYTES = "seconds", "lag in seconds", "lag in bytes"


def replica_version(lsn: int, version: int | None) -> dg.DataVersion:
    """The data version of a replica.

    It changes only if rows of the replica may have changed. Otherwise Dagster would show the assets that read the
    replica as stale for no reason.
    """
    return dg.DataVersion(f"{format_lsn(lsn)} {version}")


def work_metadata(work: Work) -> dict[str, Any]:
    """What the work of a step has cost: its engine, tasks, bytes written, and seconds."""
    return {
        "engine": work.engine_text,
        "tasks": work.task_count,
        "bytes": work.written_bytes,
        SECONDS: round(work.seconds, 2),
    }


def replica_metadata(table_result: TableResult, sent_as: SentCounts) -> dict[str, Any]:
    """Entries about what a run has changed in a replica, and about the UPDATE transformation of these changes.

    In the run that copies a table for the first time, all of these numbers are 0.
    """
    return {
        "inserted": table_result.inserted,
        "updated": table_result.updated,
        "deleted": table_result.deleted,
        "truncated": table_result.truncated,
        "update_missing and delete_missing": table_result.missing,
        "insert_exists": table_result.insert_exists,
        "update_exists": table_result.update_exists,
        **transformation_metadata(sent_as, table_result.through),
    }


def cut_metadata(cut: Cut, result: ApplyResult) -> dict[str, Any]:
    """Entries about a cut: its LSN, and how much a run has changed in all replicas together.

    For a run that has changed nothing, the numbers are 0. They are not left out, because Dagster plots them.
    """
    table_results = result.tables.values()
    return {
        "LSN": format_lsn(cut.lsn),
        "tables": len(cut.tables),
        "tables changed": len(table_results),
        "inserted": sum(table_result.inserted for table_result in table_results),
        "updated": sum(table_result.updated for table_result in table_results),
        "deleted": sum(table_result.deleted for table_result in table_results),
        "truncated": sum(table_result.truncated for table_result in table_results),
        **transformation_metadata(
            sum_counts(*result.sent_as.values()),
            (name for table_result in table_results for name in table_result.through),
        ),
    }


def transformation_metadata(counts: SentCounts, partition_names: Iterable[str]) -> dict[str, Any]:
    """Entries about the UPDATE transformation, which may turn an UPDATE into an INSERT or a DELETE.

    One number for each operation says how many UPDATEs were sent as this operation. Another is the number of relations
    (the table itself, or partitions) that had changes. `partitions` is the number of leaf partitions through which the
    changes of partition roots came, also if the publisher sends the changes as the root's. A further entry is a table with
    the counts for each relation.
    """
    counts_of_origins = group_by_origin(counts)
    records = [
        dg.TableRecord(
            {
                "through": escape_controls(relation),
                "row filter": escape_controls(row_filter or NO_FILTER),
                **{f"{operation}s": count for operation, count in count_received(origin_counts).items()},
                **_make_update_entries(origin_counts),
            }
        )
        for (relation, row_filter), origin_counts in sorted(
            counts_of_origins.items(), key=_count_changes, reverse=True
        )[:MAX_RELATIONS]
    ]
    return {
        **_make_update_entries(counts),
        "relations": len({relation for relation, _ in counts_of_origins}),
        "partitions": len({*partition_names}),
        **({"UPDATE transformation": dg.MetadataValue.table(records)} if records else {}),
    }


def _count_changes(origin: tuple[object, SentCounts]) -> int:
    return sum(origin[1].values())


def _make_update_entries(counts: SentCounts) -> dict[str, int]:
    """Make entries about how many UPDATEs were sent as INSERT, UPDATE and DELETE, and how many were not sent."""
    count_by_operation = count_by_result(counts)
    entries = {
        f"UPDATEs sent as {operation.upper()}": count
        for operation, count in count_by_operation.items()
        if operation is not None
    }
    return {**entries, "UPDATEs not sent": count_by_operation[None]}


def column_schema(
    columns: Iterable[tuple[str, str]], comments: Mapping[str, str] = MappingProxyType({})
) -> dg.TableSchema:
    """Columns and their Spark types as Dagster shows them, with the publisher's comments."""
    return dg.TableSchema(
        [
            dg.TableColumn(name, spark_type, description=_escape_comment(comments.get(name)))
            for name, spark_type in columns
        ]
    )


def _escape_comment(comment: str | None) -> str | None:
    return None if comment is None else escape_controls(comment)


def column_metadata(
    columns: Iterable[tuple[str, str]],
    source: dg.AssetKey,
    comments: Comments,
    published_names: Mapping[str, str],
) -> dict[str, Any]:
    """Entries about the columns of a replica, with the publisher's comments.

    They also have the lineage: for each column, the column of the asset `source` from which it comes. `published_names`
    maps each column of the replica to its name at the publisher. Metadata columns are not in this mapping.
    """
    comments_by_column = {
        name: comments.comment_by_column[published_name]
        for name, published_name in published_names.items()
        if published_name in comments.comment_by_column
    }
    comment = {} if comments.table_comment is None else {"comment": escape_controls(comments.table_comment)}
    return {
        **comment,
        "dagster/column_schema": column_schema(columns, comments_by_column),
        "dagster/column_lineage": dg.TableColumnLineage(
            {
                name: [dg.TableColumnDep(source, published_name)]
                for name, published_name in published_names.items()
            }
        ),
    }


def standard_metadata(
    *, rows: int | None = None, table: str | None = None, uri: str | None = None
) -> dict[str, Any]:
    """The standard entries of Dagster. An entry that is None is left out."""
    entries: Mapping[str, Any] = {"dagster/row_count": rows, "dagster/table_name": table, "dagster/uri": uri}
    return {key: value for key, value in entries.items() if value is not None}
