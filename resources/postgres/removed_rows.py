"""Rows of system catalogs that are gone and that the server still keeps: no query shows them, their indexes do.

In: a connection, and parts of catalogs. Out: whether an index has more entries for a part than the part has rows.

A slot keeps the rows of system catalogs by which the changes are decided that it has not been confirmed for
(catalog_xmin, section 53.19). It also keeps those that were deleted meanwhile, and those that came and went in one
transaction. An entry of an index goes no earlier than its row (section 62.4). A bitmap index scan counts entries, and the
heap scan above it counts rows that are there. EXPLAIN ANALYZE tells both numbers, to every role, on a standby as well.
Equal numbers prove that nothing of the part came and went. Other numbers prove nothing: what is not committed yet, or was
rolled back, or is kept for another reason, counts as gone, too. Which rows these are, halving tells.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

_BITMAP_SCANS = (
    "set local enable_seqscan = off; set local enable_indexscan = off; set local enable_indexonlyscan = off;"
    " set local enable_bitmapscan = on; set local max_parallel_workers_per_gather = 0;"
)
#: They mark the entries whose rows no transaction and no slot needs any more, and bitmap scans pass those over.
_INDEX_SCANS = (
    "set local enable_seqscan = off; set local enable_indexscan = on; set local enable_indexonlyscan = on;"
    " set local enable_bitmapscan = off;"
)

#: Into so many pieces a range is cut; more rows than this are not told apart.
_PIECES, _MOST = 16, 16


def removed_rows(connection: psycopg.Connection[Any], parts: Sequence[str]) -> list[bool]:
    """Whether rows of each part may be kept that are gone; a part is what follows FROM, by a column of an index."""
    removed = _counted(connection, parts)
    if any(removed):
        _last(connection, _INDEX_SCANS + ";".join(f"select count(*) from {part}" for part in parts))
        removed = _counted(connection, parts)
    return removed


def removed_oids(connection: psycopg.Connection[Any], relation: str) -> list[int] | None:
    """The object identifiers of the rows of a catalog that may be gone; None where they are many.

    None of them is given to another row as long as it is there (GetNewOidWithIndex() in src/backend/catalog/catalog.c).
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
    if len(scans) != len(parts):  # Another plan than was asked for counts nothing.
        return [True] * len(parts)
    return scans


def _scans(node: dict[str, Any]) -> Iterator[bool]:
    """Of each bitmap scan of a plan, in order, whether its index has more than its heap."""
    below = node.get("Plans", [])
    if node["Node Type"] == "Bitmap Heap Scan" and [b["Node Type"] for b in below] == ["Bitmap Index Scan"]:
        yield below[0]["Actual Rows"] != node["Actual Rows"]
    for each in below:
        yield from _scans(each)


def _last(connection: psycopg.Connection[Any], statements: str) -> Any:
    """The only value of the last statement; all are one transaction, as one message without parameters has them."""
    cursor = connection.execute(statements.encode())
    while cursor.nextset():
        pass
    row = cursor.fetchone()
    assert row is not None
    return row[0]
