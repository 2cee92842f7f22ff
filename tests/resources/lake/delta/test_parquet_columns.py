"""Files with encoded columns of other files have the same rows and statistics as files that are written as usual."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.transaction import AddAction

from pgsieve.resources.lake.delta import parquet_columns, parquet_files
from pgsieve.resources.lake.delta.parquet_columns import ExtendedRows, write_extended_files
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.thrift import format_struct, parse_struct
from pgsieve.resources.lake.stores.store import Store

_COLUMNS = pa.schema(
    {
        "k": pa.int64(),
        "note": pa.string(),
        "status": pa.string(),
        "amount": pa.decimal128(12, 2),
        "point": pa.struct({"x": pa.float64(), "y": pa.list_(pa.int32())}),
        "tags": pa.list_(pa.string()),
    }
)
_NEW_COLUMNS = pa.schema([_COLUMNS.field("k"), ("since", pa.int64()), ("is_current", pa.bool_())])
_SCHEMA = pa.schema([*_COLUMNS, *list(_NEW_COLUMNS)[1:]])


def _make_rows(first: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "k": number,
                "note": None if number % 7 == 0 else f"note {number} 'ä'",
                "status": ["new", "paid"][number % 2],
                "amount": Decimal(number) / 4,
                "point": {"x": number / 3, "y": [number] * (number % 3)},
                "tags": None if number % 5 == 0 else [f"tag {number % 4}"],
                "since": number // 10 - 5,
                "is_current": number % 3 > 0,
            }
            for number in range(first, first + count)
        ],
        _SCHEMA,
    )


def _write(folder: Path, batches: Sequence[pa.RecordBatch]) -> list[str]:
    """Write the columns that the source files have; each batch is a row group of its file."""
    rows = [batch.select(_COLUMNS.names) for batch in batches]
    return [
        str(folder / file)
        for batch in rows
        for written in write_files(str(folder), _COLUMNS, [batch])
        for file in written["path"].to_pylist()
    ]


@pytest.mark.parametrize("tail_bytes", [16, 1 << 16], ids=["long footers", "short footers"])
def test_copied_columns_have_the_rows_and_statistics_of_written_ones(
    tail_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_columns, "_TAIL_BYTES", tail_bytes)
    monkeypatch.setattr(parquet_files, "ROW_GROUP_ROWS", 40)
    (tmp_path / "source").mkdir()
    (tmp_path / "table").mkdir()
    batches = [_make_rows(0, 100), _make_rows(100, 30), _make_rows(130, 1)]
    files = _write(tmp_path / "source", batches)
    assert pq.read_metadata(files[0]).num_row_groups == 3
    rows = pa.Table.from_batches(batches)
    # The batches of the other columns need not end where the files and row groups do.
    columns = rows.select(_NEW_COLUMNS.names).to_batches(max_chunksize=17)
    encodings = {"k": "DELTA_BINARY_PACKED", "since": "DELTA_BINARY_PACKED"}
    sources = [ExtendedRows(files[:2], columns[:-1]), ExtendedRows(files[2:], columns[-1:])]
    (described,) = write_extended_files(
        str(tmp_path / "table"), _SCHEMA, sources, Store(), encodings=encodings
    )
    (file,) = described.to_pylist()
    path = tmp_path / "table" / file["path"]
    assert file["size"] == path.stat().st_size
    assert pq.read_table(path).equals(rows)
    assert pq.read_schema(path).equals(_SCHEMA)
    (expected,) = write_files(str(tmp_path / "usual"), _SCHEMA, batches, encodings=encodings)
    assert json.loads(file["stats"]) == json.loads(expected["stats"][0].as_py())
    groups = [pq.read_metadata(path).row_group(number) for number in range(5)]
    assert [group.num_rows for group in groups] == [40, 40, 20, 30, 1]
    assert "DELTA_BINARY_PACKED" in groups[0].column(0).encodings


def test_other_readers_read_copied_columns(tmp_path: Path) -> None:
    batch = _make_rows(0, 300)
    write_deltalake(tmp_path, pa.table(batch.slice(0, 0)))
    files = _write(tmp_path, [batch])
    columns = [batch.select(_NEW_COLUMNS.names)]
    (described,) = write_extended_files(str(tmp_path), _SCHEMA, [ExtendedRows(files, columns)], Store())
    (file,) = described.to_pylist()
    table = DeltaTable(tmp_path)
    action = AddAction(file["path"], file["size"], {}, 0, True, file["stats"])
    table.create_write_transaction([action], "append", table.schema(), [])
    batches_read = QueryBuilder().register("t", DeltaTable(tmp_path)).execute("select * from t where k < 250")
    rows = pa.RecordBatchReader.from_stream(batches_read).read_all().cast(_SCHEMA)
    assert rows.equals(pa.Table.from_batches([batch.slice(0, 250)]))


def test_a_full_file_gets_no_further_row_group(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    batches = [_make_rows(0, 100), _make_rows(100, 100)]
    files = _write(tmp_path / "source", batches)
    sources = [ExtendedRows(files, [batch.select(_NEW_COLUMNS.names) for batch in batches])]
    described = list(write_extended_files(str(tmp_path / "table"), _SCHEMA, sources, Store(), 10))
    written = [tmp_path / "table" / file["path"][0].as_py() for file in described]
    assert [pq.read_table(path).to_batches() for path in written] == [[batch] for batch in batches]


def test_missing_rows_of_the_other_columns_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    batch = _make_rows(0, 10)
    files = _write(tmp_path / "source", [batch])
    sources = [ExtendedRows(files, [batch.select(_NEW_COLUMNS.names).slice(3)])]
    with pytest.raises(ValueError, match="3 more rows"):
        list(write_extended_files(str(tmp_path / "table"), _SCHEMA, sources, Store()))


def test_structs_of_thrift_keep_all_fields() -> None:
    struct = {
        1: (5, -1),
        2: (6, 2**40),
        3: (8, b"text"),
        4: (1, True),
        5: (1, False),
        20: (4, -300),
        200: (9, (5, list(range(-10, 10)))),
        201: (9, (1, [1, 2])),
        202: (9, (12, [{1: (8, b"")}, {}])),
        203: (7, b"\0" * 8),
        204: (3, b"\7"),
    }
    octets = format_struct(struct)
    parsed = parse_struct(octets + b"more")
    assert {number: value for number, (_, value) in parsed.items()} == {
        number: value for number, (_, value) in struct.items()
    }
    assert format_struct(parsed) == octets
    with pytest.raises(ValueError, match="the type 11"):
        parse_struct(b"\x1b\x00")
