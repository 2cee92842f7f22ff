"""Changes with their keys are read from files of the change history, in order."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes, read_changes
from pgsieve.assets.steps.apply.ways import UnsuitedWayError
from pgsieve.decoding.changes.arrays import NONE
from pgsieve.decoding.changes.columns import ROW_OPERATIONS
from pgsieve.decoding.changes.extent import Extent
from pgsieve.resources.lake.stores.store import Store

_KEY = pa.schema({"k": pa.int64(), "t.t": pa.string()})
_SLICES = (100, 200)


def test_changes_are_read_from_files_in_their_order(tmp_path: Path) -> None:
    row = pa.struct([*_KEY, ("other", pa.string())])
    names = ("slice", "ordinal", "number", "commit_lsn", "operation", "unchanged", "new", "old")

    def file(name: str, rows: list[tuple[object, ...]]) -> str:
        lists = pa.list_(pa.string())
        kinds = [*[pa.int64()] * 4, pa.string(), lists, row, row]
        columns = [
            pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), kinds, strict=True)
        ]
        pq.write_table(pa.table(columns, names), tmp_path / name)
        return str(tmp_path / name)

    def key(number: int, text: str | None) -> dict[str, object]:
        return {"k": number, "t.t": text, "other": "x" * 1000}

    files = [
        file(
            "b",
            [
                (200, 0, 0, 150, "update", ["other"], key(1, "b"), key(9, "old")),
                (200, 1, 1, 150, "update", None, key(1, "b"), key(1, "b")),
                (300, 0, 0, 250, "insert", None, key(7, ""), None),
            ],
        ),
        file(
            "a",
            [
                (100, 9, 5, 90, "delete", None, None, key(1, "a")),
                (100, 1, 1, 20, "insert", None, key(2, "copied"), None),
                (100, 5, 4, 90, "insert", None, key(1, "a"), None),
                (100, 7, None, 90, "truncate", None, None, None),
            ],
        ),
    ]

    def read(most_bytes: int, *paths: str) -> KeyedChanges:
        stored = read_changes(Store(), paths, _KEY, ["other"])
        return make_keyed_changes(
            stored, _KEY, ["other"], Extent(_SLICES, since_lsn=50), max_bytes=most_bytes
        )

    keyed = read(2000, *files)
    keys, changes = [*map(tuple, map(dict.values, keyed.keys.to_pylist())), None], keyed.changes
    assert [keys[number] for number in changes.new_keys] == [(1, "a"), None, (1, "b"), (1, "b")]
    # An UPDATE whose old key equals the new one is no move.
    assert [keys[number] for number in changes.old_keys] == [None, (1, "a"), (9, "old"), None]
    assert [ROW_OPERATIONS[number] for number in changes.operations] == [
        "insert",
        "delete",
        "update",
        "update",
    ]
    assert changes.is_sent_by_column["other"].tolist() == [True, True, False, True]
    assert keyed.places.tolist() == [4, 5, 1 << 56, (1 << 56) + 1]
    assert keyed.commit_lsns.tolist() == [90, 90, 150, 150]
    assert keyed.truncate_indices == (1,)
    with pytest.raises(UnsuitedWayError, match="more than 50 bytes"):
        read(50, *files)
    nothing = read(0)
    assert (nothing.keys.num_rows, nothing.truncate_indices) == (0, ())


def test_keys_are_equal_if_postgresql_finds_them_equal() -> None:
    kinds = {"f": pa.float64(), "l": pa.list_(pa.float32()), "t": pa.string()}
    keys = pa.schema(kinds)
    rows = [(0.0, [1.5, None], "a"), (-0.0, [1.5, None], "a"), (0.0, [1.5], "a"), (float("nan"), [], None)]
    changes = pa.Table.from_pylist(
        [
            {
                **dict.fromkeys(("slice", "commit_lsn"), 100),
                **dict.fromkeys(("ordinal", "number"), number),
                "operation": "insert",
                "new": dict(zip(kinds, row, strict=True)),
            }
            for number, row in enumerate([*rows, *rows])
        ],
        pa.schema(
            {
                **dict.fromkeys(("slice", "commit_lsn", "ordinal", "number"), pa.int64()),
                "operation": pa.string(),
                "new": pa.struct(keys),
                "old": pa.struct(keys),
            }
        ),
    )
    keyed = make_keyed_changes([changes], keys, (), Extent([100]))
    assert keyed.changes.new_keys.tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    assert NONE not in keyed.changes.new_keys
