"""The operation that a publication sends for an UPDATE under a row filter.

In: whether the old and the new row match. Out: the operation. If the filter is NULL, the row does not match.
An UPDATE without an old tuple did not change the identity columns. The row filter of an updated table may use
only these columns, so the verdict on the new row also holds for the old row.

PostgreSQL documentation, Row Filters: UPDATE Transformations; pgoutput_row_filter() in
src/backend/replication/pgoutput/pgoutput.c.
"""

from __future__ import annotations

#: By (old row matches, new row matches) the operation that is sent; None if nothing is sent.
UPDATE_TRANSFORMATION: dict[tuple[bool, bool], str | None] = {
    (False, False): None,
    (False, True): "insert",
    (True, False): "delete",
    (True, True): "update",
}
