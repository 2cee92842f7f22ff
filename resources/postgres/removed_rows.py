"""Detects deleted rows of system catalogs that the server still keeps: no query returns them, but indexes have them.

In: a connection, and parts of catalogs. Out: whether an index has more entries for a part than the part has
rows.

A slot keeps the rows of system catalogs that unconfirmed changes need (catalog_xmin, section 53.19). That
includes rows that were deleted since, and rows that one transaction both inserted and deleted. An index entry
is not removed before its row (section 62.4). A bitmap index scan counts entries, and the heap scan above it
counts present rows. EXPLAIN ANALYZE shows both numbers, to every role, also on a standby. Equal numbers prove
that no row of the part was deleted. Different numbers prove nothing: rows of uncommitted or aborted
transactions, and rows that are kept for another reason, count as deleted, too. Dividing the range repeatedly
identifies the rows.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

_BITMAP_SCANS = (
    "set local enable_seqscan = off; set local enable_indexscan = off; set local enable_indexonlyscan = off;"
    " set local enable_bitmapscan = on; set local max_parallel_workers_per_gather = 0;"
)
#: Index scans mark the entries of rows that no transaction or slot needs any more; bitmap scans skip marked
#: entries.
_INDEX_SCANS = (
    "set local enable_seqscan = off; set local enable_indexscan = on; set local enable_indexonlyscan = on;"
    " set local enable_bitmapscan = off;"
)

#: The pieces that a range is divided into, and the largest number of rows that are identified.
_PIECES, _MOST = 16, 16


def removed_rows(connection: psycopg.Connection[Any], parts: Sequence[str]) -> list[bool]:
    """For each part, whether it may still keep deleted rows.

    A part is the text after FROM, by an indexed column.
    """
    removed = _counted(connection, parts)
    if any(removed):
        _last(connection, _INDEX_SCANS + ";".join(f"select count(*) from {part}" for part in parts))
        removed = _counted(connection, parts)
    return removed


def removed_oids(connection: psycopg.Connection[Any], relation: str) -> list[int] | None:
    """The object identifiers of a catalog's rows that may be deleted; None if they are many.

    While such a row is kept, no other row gets its identifier (GetNewOidWithIndex() in
    src/backend/catalog/catalog.c).
    """
    ranges = [range(2**32)]
    while ranges and len(ranges[0]) > 1:
        pieces = [
            each[at : at + len(each) // _PIECES]
            for each in ranges
            for at in range(0, len(each), len(each) // _PIECES)
        ]
        counted = _counted(
            connection, [f"{relation} where oid between '{r[0]}' and '{r[-1]}'" for r in pieces]
        )
        ranges = [piece for piece, removed in zip(pieces, counted, strict=True) if removed]
        if len(ranges) > _MOST:
            return None
    return [each[0] for each in ranges]


def _counted(connection: psycopg.Connection[Any], parts: Sequence[str]) -> list[bool]:
    counts = " union all ".join(f"select count(*) from {part}" for part in parts)
    explained = "explain (analyze, costs off, timing off, summary off, format json) " + counts
    plan = _last(connection, _BITMAP_SCANS + explained)
    read = json.loads(plan) if isinstance(plan, str) else plan
    scans = list(_scans(read[0]["Plan"]))
    if len(scans) != len(parts):  # The server has chosen another plan, which counts no entries.
        return [True] * len(parts)
    return scans


def _scans(node: dict[str, Any]) -> Iterator[bool]:
    """For each bitmap scan of a plan, in order, whether its index has more entries than its heap has rows."""
    below = node.get("Plans", [])
    if node["Node Type"] == "Bitmap Heap Scan" and [b["Node Type"] for b in below] == ["Bitmap Index Scan"]:
        yield below[0]["Actual Rows"] != node["Actual Rows"]
    for each in below:
        yield from _scans(each)


def _last(connection: psycopg.Connection[Any], statements: str) -> Any:
    """The only value of the last statement.

    The server runs all statements in one transaction, because they come in one message without parameters.
    """
    cursor = connection.execute(statements.encode())
    while cursor.nextset():
        pass
    row = cursor.fetchone()
    assert row is not None
    return row[0]
