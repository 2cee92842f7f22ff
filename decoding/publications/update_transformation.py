"""The result of an UPDATE under a row filter (section 29.4.3, pgoutput_row_filter()).

In: whether the old and the new row match. Out: the operation that is sent. A NULL match counts as none. An
UPDATE without an old tuple is judged by its new row alone: its identity columns did not change, and a row
filter over an updated table may use only those.
"""

from __future__ import annotations

#: (old row matches, new row matches) -> operation sent; None is: not replicated.
UPDATE_TRANSFORMATION: dict[tuple[bool, bool], str | None] = {
    (False, False): None,
    (False, True): "insert",
    (True, False): "delete",
    (True, True): "update",
}
