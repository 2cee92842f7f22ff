"""Dates whose bounds delta-rs cannot express are written, merged and compacted without bounds. Long values get short bounds. No JVM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance
from tests.fixtures.lakes import find_slices, no_session

#: 262142-12-31, PostgreSQL's last date, infinity and -infinity, as days since 1970-01-01.
_LAST, _LAST_OF_POSTGRESQL, _INFINITY, _MINUS_INFINITY = 95_026_236, 2_145_042_905, 2**31 - 1, -(2**31)


def dates(*days: int | None) -> pa.Array:
    return pa.array(days, pa.int32()).cast(pa.date32())


def days(path: str) -> dict[int, int | None]:
    """The dates of a table, by `id`."""
    rows = pa.table(QueryBuilder().register("t", DeltaTable(path)).execute("select * from t").read_all())
    return dict(zip(rows["id"].to_pylist(), rows["day"].cast(pa.int32()).to_pylist(), strict=True))


@pytest.mark.parametrize("day", [_LAST + 1, _LAST_OF_POSTGRESQL, _INFINITY])
def test_distant_dates_are_written_merged_and_compacted(tmp_path: Path, day: int) -> None:
    local, path = DeltaRsRecords(), str(tmp_path / "t")
    local.write(path, pa.table({"id": [1, 2, 3], "day": dates(day, _MINUS_INFINITY, None)}), Commit(10))
    # Rows of the rewritten file have the distant date, merged rows do not.
    source = pa.table({"action": ["upsert", "delete"], "k0": [4, 3], "v0": [4, 3], "v1": dates(7, None)})
    merge = Merge({"id": "k0"}, {"id": "v0", "day": "v1"})
    local.merge(path, source, merge, Commit(20, expected_version=0))
    local.write(path, pa.table({"id": [5], "day": dates(5)}), Commit(30))
    assert make_table_maintenance(Lake(str(tmp_path), no_session), path).compact() == 1
    assert days(path) == {1: day, 2: _MINUS_INFINITY, 4: 7, 5: 5}
    assert local.position(path) == 30


def test_dates_within_lists_and_structs_have_no_bounds_either(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    distant = dates(_INFINITY, None, 1)
    kinds = {
        "list": pa.ListArray.from_arrays([0, 2, 3], distant),
        "struct": pa.StructArray.from_arrays([distant.slice(0, 2)], ["day"]),
        "nothing": pa.array([None, None], pa.list_(pa.date32())),
    }
    for name, values in kinds.items():
        DeltaRsRecords().write(str(tmp_path / name), pa.table({"id": [1, 2], name: values}), Commit(10))
        assert DeltaTable(str(tmp_path / name)).to_pyarrow_table(columns=["id"]).num_rows == 2
    assert "panicked" not in capfd.readouterr().err


def test_other_columns_of_files_with_distant_dates_have_bounds(tmp_path: Path) -> None:
    # From the bounds of `slice` this process knows what is in a file of a change history. Without them Spark would have to read it.
    new = pa.StructArray.from_arrays([dates(_INFINITY, 1), pa.array([1, 2])], ["day", "id"])
    path, local = str(tmp_path / "t"), DeltaRsRecords()
    local.write(
        path, pa.table({"slice": [10, 10], "commit_lsn": [5, 6], "ordinal": [0, 0], "new": new}), Commit(10)
    )
    assert find_slices(local, path, [10]).read_rows().num_rows == 2


def test_other_dates_have_bounds(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    DeltaRsRecords().write(path, pa.table({"id": [1, 2], "day": dates(1, 2)}), Commit(10))
    bounds = pa.table(DeltaTable(path).get_add_actions(flatten=True))
    assert bounds["max.day"].cast(pa.int32()).to_pylist() == [2]


#: One row has megabytes, because Spark's reader of Delta's log limits the length of a text. The others are short.
_LONG = "x" * 3_000_000
#: The largest size of a log entry of few columns, and of a footer.
_SHORT = 20_000


def _long_rows(*ids: int) -> pa.Table:
    text = pa.array([_LONG] * len(ids))
    octets = text.cast(pa.binary())
    new = pa.StructArray.from_arrays([text, octets], ["text", "octets"])
    lists = pa.ListArray.from_arrays(range(len(ids) + 1), text)
    return pa.table({"id": list(ids), "text": text, "octets": octets, "new": new, "lists": lists})


def _written(local: DeltaRsRecords, path: str) -> None:
    local.write(path, _long_rows(1, 2), Commit(10))
    local.append(path, _long_rows(3), 20)


def _read_as_it_comes(local: DeltaRsRecords, path: str) -> None:
    local.write(path, _long_rows(1).to_reader(), Commit(10))


def _versioned(local: DeltaRsRecords, path: str) -> None:
    local.append_versioned(path, _long_rows(1))


def _merged(local: DeltaRsRecords, path: str) -> None:
    rows = _long_rows(1, 2, 3).select(["id", "text", "octets"])
    local.write(path, rows, Commit(10))
    changes = {"action": ["update", "upsert"], "k0": [1, 4], "v0": [1, 4]}
    source = pa.table(changes | {f"v{n}": rows[name].slice(0, 2) for n, name in ((1, "text"), (2, "octets"))})
    merge = Merge({"id": "k0"}, {"id": "v0", "text": "v1", "octets": "v2"})
    local.merge(path, source, merge, Commit(20, expected_version=0))


def _deleted(local: DeltaRsRecords, path: str) -> None:
    _written(local, path)
    assert make_table_maintenance(Lake(str(Path(path).parent), no_session), path).delete("id = 2") == 1


def _by_threads(local: DeltaRsRecords, path: str) -> None:
    rows = _long_rows(1, 2)
    files = [row for file in write_files(path, rows.schema, rows.to_batches()) for row in file.to_pylist()]
    local.commit(path, rows.schema, files, Commit(10))


def _compacted(local: DeltaRsRecords, path: str) -> None:
    _written(local, path)
    assert make_table_maintenance(Lake(str(Path(path).parent), no_session), path).compact() == 1


def _clustered(local: DeltaRsRecords, path: str) -> None:
    _written(local, path)
    make_table_maintenance(Lake(str(Path(path).parent), no_session), path).compact(["id"])


@pytest.mark.parametrize(
    "write",
    [_written, _read_as_it_comes, _versioned, _merged, _deleted, _by_threads, _compacted, _clustered],
)
def test_neither_log_nor_footer_has_a_long_value(
    write: Callable[[DeltaRsRecords, str], None], tmp_path: Path
) -> None:
    path = tmp_path / "t"
    write(DeltaRsRecords(), str(path))
    assert max(len(line) for log in path.glob("_delta_log/*.json") for line in log.open()) < _SHORT
    assert DeltaTable(str(path)).count() > 0
    assert max(pq.read_metadata(file).serialized_size for file in path.glob("*.parquet")) < _SHORT
