"""The result of an UPDATE under a row filter (section 29.4.3, pgoutput_row_filter()).

In: whether the old and the new row match. Out: the operation that is sent. A result of NULL counts as no
match. For an UPDATE without an old tuple only the new row is evaluated: its identity columns did not change,
and a row filter over an updated table may use only these.
"""

from __future__ import annotations

#: (old row matches, new row matches) -> the operation that is sent; None: nothing is sent.
UPDATE_TRANSFORMATION: dict[tuple[bool, bool], str | None] = {
    (False, False): None,
    (False, True): "insert",
    (True, False): "delete",
    (True, True): "update",
}
