"""Dates whose bounds delta-rs cannot tell are written, merged and compacted without bounds. No JVM."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import maintenance

#: 262142-12-31, PostgreSQL's last date, infinity and -infinity as days since 1970-01-01.
_LAST, _LAST_OF_POSTGRESQL, _INFINITY, _MINUS_INFINITY = 95_026_236, 2_145_042_905, 2**31 - 1, -(2**31)


def no_session() -> NoReturn:
    raise AssertionError("no session is needed here")


def dates(*days: int | None) -> pa.Array:
    return pa.array(days, pa.int32()).cast(pa.date32())


def days(path: str) -> dict[int, int | None]:
    """The dates of a table by `id`."""
    rows = pa.table(QueryBuilder().register("t", DeltaTable(path)).execute("select * from t").read_all())
    return dict(zip(rows["id"].to_pylist(), rows["day"].cast(pa.int32()).to_pylist(), strict=True))


@pytest.mark.parametrize("day", [_LAST + 1, _LAST_OF_POSTGRESQL, _INFINITY])
def test_distant_dates_are_written_merged_and_compacted(tmp_path: Path, day: int) -> None:
    local, path = LocalRecords(), str(tmp_path / "t")
    local.write(path, pa.table({"id": [1, 2, 3], "day": dates(day, _MINUS_INFINITY, None)}), 10)
    # The rows of the file that is written again have the distant date, those that are merged have not.
    source = pa.table({"action": ["upsert", "delete"], "k0": [4, 3], "v0": [4, 3], "v1": dates(7, None)})
    merge = Merge({"id": "k0"}, {"id": "v0", "day": "v1"}, {})
    assert local.merge(path, source, merge, 20, 0) == {"inserted": 1, "updated": 0, "deleted": 1}
    local.write(path, pa.table({"id": [5], "day": dates(5)}), 30)
    assert maintenance(Lake(str(tmp_path), no_session), path).compact() == 1
    assert days(path) == {1: day, 2: _MINUS_INFINITY, 4: 7, 5: 5}
    assert local.position(path) == 30


def test_dates_within_lists_and_structs_are_looked_at(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    distant = dates(_INFINITY, None, 1)
    kinds = {
        "list": pa.ListArray.from_arrays([0, 2, 3], distant),
        "struct": pa.StructArray.from_arrays([distant.slice(0, 2)], ["day"]),
        "nothing": pa.array([None, None], pa.list_(pa.date32())),
    }
    for name, values in kinds.items():
        LocalRecords().write(str(tmp_path / name), pa.table({"id": [1, 2], name: values}), 10)
        assert DeltaTable(str(tmp_path / name)).to_pyarrow_table(columns=["id"]).num_rows == 2
    assert "panicked" not in capfd.readouterr().err


def test_other_columns_have_bounds_beside_distant_dates(tmp_path: Path) -> None:
    # By those of `slice` this process knows what a file of a change history has; without them Spark would have to read it.
    new = pa.StructArray.from_arrays([dates(_INFINITY, 1), pa.array([1, 2])], ["day", "id"])
    path, local = str(tmp_path / "t"), LocalRecords()
    local.write(path, pa.table({"slice": [10, 10], "commit_lsn": [5, 6], "ordinal": [0, 0], "new": new}), 10)
    rows = local.change_log(path).rows([10], every=True)
    assert rows is not None
    assert rows.num_rows == 2


def test_other_dates_have_bounds(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    LocalRecords().write(path, pa.table({"id": [1, 2], "day": dates(1, 2)}), 10)
    bounds = pa.table(DeltaTable(path).get_add_actions(flatten=True))
    assert bounds["max.day"].cast(pa.int32()).to_pylist() == [2]
