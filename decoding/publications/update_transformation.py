"""The operation that a publication sends for an UPDATE under a row filter.

In: whether the old row and the new row match the filter. A row for which the filter is NULL does not match.
Out: the operation that is sent. For example, an UPDATE that moves a row out of the filter becomes a DELETE.

If a message has no old tuple, the UPDATE did not change the columns of the replica identity. PostgreSQL lets the
row filter of an updated table use only these columns. So the old row matches exactly if the new row does.

PostgreSQL documentation, Row Filters: UPDATE Transformations; pgoutput_row_filter() in
src/backend/replication/pgoutput/pgoutput.c.
"""

from __future__ import annotations

#: Maps (old row matches, new row matches) to the operation that is sent, or to None if nothing is sent.
UPDATE_TRANSFORMATION: dict[tuple[bool, bool], str | None] = {
    (False, False): None,
    (False, True): "insert",
    (True, False): "delete",
    (True, True): "update",
}
