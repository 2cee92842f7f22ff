"""A file that exists but is unreadable: every reader reports that the table is damaged, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import DamagedTableError, find_illegible_file
from pgsieve.resources.lake.delta.tables import share_tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage
from tests.fixtures.lakes import find_slices, no_session
from tests.fixtures.s3_server import S3Server

ROWS = pa.table(
    {
        "slice": pa.array([10] * 40, pa.int64()),
        "commit_lsn": pa.array(range(40), pa.int64()),
        "ordinal": pa.array(range(40), pa.int64()),
        "data": [f"some text {n}" for n in range(40)],
    }
)

#: Kinds of damage to a file's bytes.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "of a few bytes": lambda content: content[:3],
    "cut off": lambda content: content[: len(content) // 2],
    "garbage": lambda _: b"\x00\xff\xfenonsense" * 40,
    "garbage that begins and ends as it should": lambda _: b"PAR1 nothing here PAR1" * 20,
    "zeros": lambda content: bytes(len(content)),
    "without a part of its footer": lambda content: content[:-60] + b"\xff" * 40 + content[-20:],
    "without a part of its pages": lambda content: (
        content[:4] + bytes(b ^ 0x5A for b in content[4 : len(content) // 4]) + content[len(content) // 4 :]
    ),
}

#: Ways to read a table's rows; the last one reads no page.
READERS: dict[str, Callable[[DeltaRsRecords, str], object]] = {
    "rows": lambda records, path: records.rows(path),
    "least": lambda records, path: records.find_column_bound("min", path, "commit_lsn", "ordinal > 3"),
    "newest": lambda records, path: records.newest_rows(path, "slice"),
    "table": lambda records, path: records.read_all_rows(path),
    "batches": lambda records, path: list(records.read_version_batches(path, 1)),
    "matches": lambda records, path: records.find_key_matches(
        path, ROWS.select(["ordinal"]), [np.ones(ROWS.num_rows, np.bool_)], None
    ),
    "rows_of": lambda records, path: records.find_rows(path, ROWS.select(["ordinal"]), ROWS.schema),
    "slices": lambda records, path: find_slices(records, path, [10]).read_rows(),
    "delete": lambda records, path: _opened(records, path).delete("ordinal = 3"),
    "compact": lambda records, path: _opened(records, path).optimize.compact(),
    "merge": lambda records, path: (
        _opened(records, path)
        .merge(ROWS, "s.ordinal = t.ordinal", source_alias="s", target_alias="t")
        .when_matched_update_all()
        .execute()
    ),
    "row_groups": lambda records, path: find_slices(records, path, [10]).row_groups,
}


def _opened(records: DeltaRsRecords, path: str) -> DeltaTable:
    return DeltaTable(path, storage_options=dict(records.store.options) or None)


@pytest.fixture(params=["folder", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    storage = Storage.from_address(str(tmp_path))
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        storage = Storage.from_address(request.getfixturevalue("s3_folder"), server.storage)
    return Lake(storage.address, no_session, storage=storage)


def _change(lake: Lake, folder: str, ending: str, change: Callable[[bytes], bytes]) -> list[str]:
    """Change the files of a folder whose names end with `ending`. Return their names."""
    files, inner = lake.store.find_file_system(folder)
    matching = [file for file in files.get_file_info(pafs.FileSelector(inner)) if file.path.endswith(ending)]
    for file in matching:
        with files.open_input_file(file.path) as stream:
            content = stream.read()
        objects = (
            lake.store.open_objects(folder) if folder.startswith("s3") and lake.store.open_objects else None
        )
        if objects is None:
            Path(file.path).write_bytes(change(content))
        else:
            objects.write(file.path, change(content))
    share_tables.cache_clear()
    return [file.base_name for file in matching]


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_reader_reports_an_unreadable_file(lake: Lake, damage: str) -> None:
    assert lake.delta_rs is not None
    path = f"{lake.uri}/t"
    for position in (1, 2):
        lake.delta_rs.append(path, ROWS, position)
    files = _change(lake, path, ".parquet", DAMAGES[damage])
    for reader, read in READERS.items():
        if reader == "row_groups" and damage == "without a part of its pages":
            continue
        with pytest.raises(DamagedTableError) as raised, lake.access.translate_errors(path):
            read(DeltaRsRecords(lake.store), path)
        message = raised.value.message
        assert message.startswith(f'Delta table "{path}": '), (reader, message)
        assert "it is not a complete Parquet file" in message or "is empty" in message, (reader, message)
        # An engine may name the file, but no text of the engine is shown.
        named = [file for file in files if file in message]
        assert len(named) == message.count(".parquet"), (reader, message)
        assert len(message) < 2 * len(path) + 200, (reader, message)
        assert "http" not in message, (reader, message)
        if (
            "is empty" not in message
        ):  # an empty file counts as missing: the step that needs it sets tables aside
            assert "`pgsieve resync`" in str(raised.value.hint), reader


@pytest.mark.parametrize("damage", [each for each in DAMAGES if each != "without a part of its pages"])
def test_an_unreadable_checkpoint_is_damage_of_the_log(lake: Lake, damage: str) -> None:
    assert lake.delta_rs is not None
    path = f"{lake.uri}/t"
    for position in (1, 2):
        lake.delta_rs.append(path, ROWS, position)
    _opened(lake.delta_rs, path).create_checkpoint()
    assert _change(lake, f"{path}/_delta_log", ".checkpoint.parquet", DAMAGES[damage])
    with pytest.raises(DamagedTableError, match="its log ") as raised, lake.access.translate_errors(path):
        DeltaRsRecords(lake.store).rows(path)
    assert "http" not in raised.value.message


def test_an_empty_file_is_reported_although_spark_reads_it_without_an_error(lake: Lake) -> None:
    assert lake.delta_rs is not None
    path = f"{lake.uri}/t"
    lake.delta_rs.append(path, ROWS, 1)
    (file,) = _change(lake, path, ".parquet", DAMAGES["empty"])
    with pytest.raises(DamagedTableError, match="is empty") as raised:
        DeltaRsRecords(lake.store).open_slices(path).find([10])
    assert file in raised.value.message


def test_a_file_that_was_not_read_is_not_reported() -> None:
    fetched = "External error: Parquet error: Parquet error: Failed to fetch metadata for file t/a.parquet: Object Store error: "
    for unread in (
        "Generic S3 error: Error performing GET http://h/t/a.parquet in 3 ms - HTTP error: error sending request",
        "Generic S3 error: Error performing GET http://h/t/a.parquet - Server returned non-2xx status code: 503 Slow Down",
        "Generic LocalFileSystem error: Unable to open file t/a.parquet: Permission denied (os error 13)",
    ):
        assert find_illegible_file(DeltaError(fetched + unread)) is None, unread
    beyond = "Generic S3 error: Error performing GET http://h/t/a.parquet - Server returned non-2xx status code: 416 Range Not Satisfiable"
    assert find_illegible_file(DeltaError(fetched + beyond)) == "a.parquet"


def test_an_error_in_a_condition_on_rows_is_not_damage() -> None:
    cast = "Parquet error: Arrow: Cast error: Cannot cast string 'x' to value of Int64 type"
    assert find_illegible_file(DeltaError(f"External error: {cast}")) is None
    assert (
        find_illegible_file(pa.ArrowInvalid("Integer value 4294967296 not in range: 0 to 2147483647")) is None
    )


@pytest.mark.parametrize(
    "cause",
    [
        "java.lang.RuntimeException: file:/l/t/a.parquet is not a Parquet file (length is too low: 0)",
        "java.lang.RuntimeException: corrupted file: the footer index is not within the file: -543518901",
        "java.io.IOException: can not read class org.apache.parquet.format.PageHeader: don't know what type: 15",
        "org.apache.parquet.io.ParquetDecodingException: could not decompress page",
    ],
)
def test_sparks_messages_about_unreadable_files_are_understood(cause: str) -> None:
    reading = "org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:/l/t/a.parquet."
    assert find_illegible_file(RuntimeError(f"{reading}  SQLSTATE: KD001\nCaused by: {cause}")) == "a.parquet"
