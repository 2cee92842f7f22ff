"""Deleted rows of system catalogs that the server still keeps: no query shows them, but their indexes do.

In: a connection, and parts of catalogs. Out: whether an index has more entries for a part than the part has
rows.

A slot keeps the system catalogs' rows that decide changes which are not confirmed yet (catalog_xmin, section
53.19). That includes rows that were deleted meanwhile, and rows that one transaction both inserted and
deleted. An index entry is not removed before its row (section 62.4). A bitmap index scan counts entries, and
the heap scan above it counts present rows. EXPLAIN ANALYZE shows both numbers, to every role, on a standby as
well. Equal numbers prove that no row of the part was inserted or deleted. Different numbers prove nothing:
rows of uncommitted or aborted transactions, or kept for another reason, count as deleted too. Halving the
range finds out which rows they are.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

_BITMAP_SCANS = (
    "set local enable_seqscan = off; set local enable_indexscan = off; set local enable_indexonlyscan = off;"
    " set local enable_bitmapscan = on; set local max_parallel_workers_per_gather = 0;"
)
#: They mark entries whose rows no transaction and no slot needs any more, and bitmap scans skip those.
_INDEX_SCANS = (
    "set local enable_seqscan = off; set local enable_indexscan = on; set local enable_indexonlyscan = on;"
    " set local enable_bitmapscan = off;"
)

#: A range is divided into this many pieces; more rows than this are not identified.
_PIECES, _MOST = 16, 16


def removed_rows(connection: psycopg.Connection[Any], parts: Sequence[str]) -> list[bool]:
    """Whether deleted rows of each part may still be kept; a part is what follows FROM, by an indexed column."""
    removed = _counted(connection, parts)
    if any(removed):
        _last(connection, _INDEX_SCANS + ";".join(f"select count(*) from {part}" for part in parts))
        removed = _counted(connection, parts)
    return removed


def removed_oids(connection: psycopg.Connection[Any], relation: str) -> list[int] | None:
    """The object identifiers of a catalog's rows that may be deleted; None where they are many.

    While such a row is kept, its identifier is given to no other row (GetNewOidWithIndex() in
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
    if len(scans) != len(parts):  # Another plan than the intended one counts nothing.
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

    All statements are one transaction, as one message without parameters.
    """
    cursor = connection.execute(statements.encode())
    while cursor.nextset():
        pass
    row = cursor.fetchone()
    assert row is not None
    return row[0]
