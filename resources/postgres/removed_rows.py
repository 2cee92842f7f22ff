"""Detects deleted rows of system catalogs by their index entries, while the server still stores them.

In: - a connection
    - selections; a selection is the text after FROM of a query of one catalog, with a condition on an indexed
      column
Out: whether the index has more entries for a selection than the selection has rows.

A slot makes the server keep the rows of system catalogs that unconfirmed changes need (catalog_xmin; PostgreSQL
documentation, view pg_replication_slots). So it keeps rows that were deleted after these changes. It also keeps
rows that one transaction both inserted and deleted. As long as it keeps such a row for a slot, it keeps the index entry
of the row, too: VACUUM removes the entry of a row only if no transaction and no slot needs the row.

A bitmap index scan counts index entries, and the heap scan above it counts rows that exist. EXPLAIN ANALYZE shows
both numbers to every role, even on a standby. If the numbers are equal, the index has no entry of a deleted row of
the selection. If they differ, this proves nothing: rows of uncommitted or aborted transactions, and rows that are
stored for another reason, have index entries, too.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

#: Settings with which the server chooses bitmap scans, which count index entries.
_BITMAP_SCAN_SETTINGS = (
    "set local enable_seqscan = off; set local enable_indexscan = off; set local enable_indexonlyscan = off;"
    " set local enable_bitmapscan = on; set local max_parallel_workers_per_gather = 0;"
)
#: Settings with which the server chooses index scans. An index scan marks the entries of rows that no transaction or
#: slot needs any more. Later bitmap scans do not count the marked entries.
_INDEX_SCAN_SETTINGS = (
    "set local enable_seqscan = off; set local enable_indexscan = on; set local enable_indexonlyscan = on;"
    " set local enable_bitmapscan = off;"
)

#: The number of pieces into which a range of oids is divided.
_PIECES_PER_RANGE = 16
#: The largest number of deleted rows whose oids are listed.
_MAX_OIDS = 16


def check_for_removed_rows(connection: psycopg.Connection[Any], selections: Sequence[str]) -> list[bool]:
    """For each selection True if the server may still store deleted rows of it."""
    have_removed_rows = _compare_entries(connection, selections)
    if any(have_removed_rows):
        _fetch_last_value(
            connection,
            _INDEX_SCAN_SETTINGS + ";".join(f"select count(*) from {selection}" for selection in selections),
        )
        have_removed_rows = _compare_entries(connection, selections)
    return have_removed_rows


def find_removed_oids(connection: psycopg.Connection[Any], catalog: str) -> list[int] | None:
    """The oids of rows of a catalog that may have been deleted; None if there are more than `_MAX_OIDS`.

    The range of all oids is divided again and again, and pieces without deleted rows are dropped, until each piece
    is one oid. As long as the server stores a deleted row, it gives the row's oid to no other row
    (GetNewOidWithIndex() in src/backend/catalog/catalog.c).
    """
    oid_ranges = [range(2**32)]
    while oid_ranges and len(oid_ranges[0]) > 1:
        pieces = [
            oid_range[index : index + len(oid_range) // _PIECES_PER_RANGE]
            for oid_range in oid_ranges
            for index in range(0, len(oid_range), len(oid_range) // _PIECES_PER_RANGE)
        ]
        have_removed_rows = _compare_entries(
            connection, [f"{catalog} where oid between '{piece[0]}' and '{piece[-1]}'" for piece in pieces]
        )
        oid_ranges = [
            piece for piece, has_removed in zip(pieces, have_removed_rows, strict=True) if has_removed
        ]
        if len(oid_ranges) > _MAX_OIDS:
            return None
    return [oid_range[0] for oid_range in oid_ranges]


def _compare_entries(connection: psycopg.Connection[Any], selections: Sequence[str]) -> list[bool]:
    """For each selection True if its index has more entries than the selection has rows."""
    counts = " union all ".join(f"select count(*) from {selection}" for selection in selections)
    statement = "explain (analyze, costs off, timing off, summary off, format json) " + counts
    plan = _fetch_last_value(connection, _BITMAP_SCAN_SETTINGS + statement)
    plans = json.loads(plan) if isinstance(plan, str) else plan
    have_more_entries = list(_compare_bitmap_scans(plans[0]["Plan"]))
    if len(have_more_entries) != len(
        selections
    ):  # The server has chosen another plan, which does not count index entries.
        return [True] * len(selections)
    return have_more_entries


def _compare_bitmap_scans(node: dict[str, Any]) -> Iterator[bool]:
    """For each bitmap scan of a plan, in order, True if it counted more index entries than rows."""
    children = node.get("Plans", [])
    if node["Node Type"] == "Bitmap Heap Scan" and [child["Node Type"] for child in children] == [
        "Bitmap Index Scan"
    ]:
        yield children[0]["Actual Rows"] != node["Actual Rows"]
    for child_plan in children:
        yield from _compare_bitmap_scans(child_plan)


def _fetch_last_value(connection: psycopg.Connection[Any], statements: str) -> Any:
    """The only value in the result of the last statement.

    All statements are sent in one message, so they run in one transaction.
    """
    cursor = connection.execute(statements.encode())
    while cursor.nextset():
        pass
    row = cursor.fetchone()
    assert row is not None
    return row[0]
