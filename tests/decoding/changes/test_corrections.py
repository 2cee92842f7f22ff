"""The changes that correct a replica turn its rows into the publisher's rows."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.changes.corrections import Corrections

_SCHEMA = changes_schema(
    [("a", pa.int32()), ("b", pa.string()), ("_deleted", pa.bool_()), ("_lsn", pa.int64())]
)
_CORRECTIONS = Corrections(
    ["a", "b"], (("_deleted", "deleted"), ("_lsn", "commit_lsn")), _SCHEMA, 7, datetime.now(UTC)
)
_ROWS = st.dictionaries(
    st.tuples(st.none() | st.integers(0, 3), st.none() | st.text(max_size=2)), st.integers(-3, 3), max_size=6
)


@given(_ROWS, st.integers(0, 10))
def test_corrections_delete_what_is_too_much_and_insert_what_is_missing(
    counts: dict[tuple[int | None, str | None], int], first_number: int
) -> None:
    rows = pa.record_batch(
        {
            "c0": pa.array([a for a, _ in counts], pa.int32()),
            "c1": pa.array([b for _, b in counts], pa.string()),
            "count": pa.array(list(counts.values()), pa.int64()),
        }
    )
    changes = _CORRECTIONS.to_changes(rows, first_number).to_pylist()
    change_by_place = {(change["slice"], change["number"]): change for change in changes}
    assert len(change_by_place) == len(changes)
    assert all(change["number"] >= first_number for change in changes)
    operations = [change_by_place[place]["operation"] for place in sorted(change_by_place)]
    assert operations == sorted(operations), "the DELETEs come first"
    difference = Counter[tuple[int | None, str | None]]()
    for change in changes:
        side, other, sign = ("new", "old", 1) if change["operation"] == "insert" else ("old", "new", -1)
        row = change[side]
        assert change[other] is None
        assert (row["_deleted"], row["_lsn"]) == (sign < 0, None)
        difference[row["a"], row["b"]] += sign
    assert difference == Counter({row: count for row, count in counts.items() if count})
