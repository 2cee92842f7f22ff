"""A reader that skips files and row groups by their bounds finds the same rows as a reader of every row.

This holds for every writer: delta-rs by an append, a MERGE or a DELETE, an executor, and the compaction.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit, quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance
from tests.fixtures.pgsieve_replica import engine

pytestmark = pytest.mark.spark

_NAN, _INFINITY = float("nan"), float("inf")
_DECIMALS = [
    "9007199254740993",
    "-9007199254740993",
    "12345678901234567.89",
    "99999999999999999.99",
    "0.01",
    "1.1",
]
_VALUES = {
    "large": pa.array(map(decimal.Decimal, _DECIMALS), pa.decimal128(20, 2)),
    "digits": pa.array([decimal.Decimal(f"0.{'1' * 37}{n}") for n in range(6)], pa.decimal128(38, 38)),
    "double": pa.array([1.5, _NAN, -0.0, 0.1, _INFINITY, 5e-324]),
    "real": pa.array([1.5, _NAN, 0.0, 0.1, -_INFINITY, 16777217.0], pa.float32()),
    "text": pa.array(["a" * 100, "a" * 31 + "é", "\U0010ffff" * 40, "z" * 64 + "b", "\ud7ff" * 50, ""]),
    "at": pa.array([1, 999, 1001, -1, 10**15 + 1, 253402300800000000], pa.timestamp("us", "UTC")),
    "local": pa.array([1, 999, 1001, -1, 10**15 + 1, -62135596800000001], pa.timestamp("us")),
    "day": pa.array([0, -1, 2932897, -719163, 95026236, -100000000], pa.int32()).cast(pa.date32()),
    "number": pa.array([2**63 - 1, -(2**63), 2**53 + 1, 0, 1, 2]),
}
_NAMES = list(_VALUES)


def _files(rows: pa.Table) -> list[pa.Table]:
    """Files of one value each, and of two."""
    return [*(rows.slice(i, 1) for i in range(rows.num_rows)), *(rows.slice(i, 2) for i in (0, 2, 4))]


def _rows() -> pa.Table:
    columns = pa.table(_VALUES)
    nested = columns.to_struct_array().combine_chunks()
    return columns.append_column("new", nested).append_column("id", pa.array(range(len(nested))))


def _append(path: str) -> None:
    for file in _files(_rows()):
        DeltaRsRecords().write(path, file, Commit())


def _by_executor(path: str) -> None:
    for file in _files(_rows()):
        written = [
            f for batch in write_files(path, file.schema, file.to_batches()) for f in batch.to_pylist()
        ]
        DeltaRsRecords().commit(path, file.schema, written, Commit())


def _merge(path: str) -> None:
    local, rows = DeltaRsRecords(), _rows().drop_columns(["new"])
    for i in range(0, rows.num_rows, 2):
        local.write(path, rows.slice(i, 2), Commit(i + 1))
        source = pa.table(
            {"action": ["upsert"], "k0": [i], "v0": [i]}
            | {f"v{n + 1}": rows[name].slice(i, 1) for n, name in enumerate(_NAMES)}
        )
        merge = Merge({"id": "k0"}, {"id": "v0"} | {name: f"v{n + 1}" for n, name in enumerate(_NAMES)})
        update = source.set_column(0, "action", [["update"]])
        local.merge(path, update, merge, Commit(i + 2, expected_version=local.version(path)))


def _delete(path: str) -> None:
    rows = _rows()
    for i in range(0, rows.num_rows, 2):
        more = rows.slice(i, 2)
        DeltaRsRecords().write(
            path,
            pa.concat_tables([more, more.slice(0, 1).drop_columns(["id"]).append_column("id", [[i + 100]])]),
            Commit(),
        )
    assert make_table_maintenance(_lake(path), path).delete("id >= 100") == 3


def _compact(path: str) -> None:
    _append(path)
    assert make_table_maintenance(_lake(path), path).compact() == 8


def _lake(path: str) -> Lake:
    return Lake(str(Path(path).parent), lambda: engine().session)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("write", "asked_of"),
    [
        (_append, ["large", "double"]),
        pytest.param(_by_executor, ["real"], marks=pytest.mark.long),
        (_delete, ["digits"]),
        *(
            pytest.param(write, _NAMES, marks=pytest.mark.long)
            for write in (_append, _by_executor, _merge, _delete, _compact)
        ),
    ],
)
def test_every_row_is_found(write: Callable[[str], None], asked_of: list[str], tmp_path: Path) -> None:
    """It takes long because Spark starts. It is asked for each value of each column."""
    path, spark = str(tmp_path / "t"), engine().session
    write(path)
    table = spark.read.format("delta").load(path)
    kinds = {field.name: field.dataType.simpleString() for field in table.schema}
    columns = asked_of + ([f"new.{name}" for name in asked_of] if "new" in kinds else [])
    spelled = {
        name: [row[0] for row in table.selectExpr(f"cast({name} as string)").distinct().collect()]
        for name in asked_of
    }
    counts = [
        f"(select count(*) from delta.{quote_name(path)} where {column} {operator} cast('{value}' as {kinds[name]}))"
        for column in columns
        for name in [column.removeprefix("new.")]
        for value in spelled[name]
        for operator in ("=", ">")
    ]

    def asked(skipping: bool) -> list[int]:
        settings = {
            "spark.databricks.delta.stats.skipping": str(skipping).lower(),
            "spark.sql.parquet.filterPushdown": str(skipping).lower(),
        }
        try:
            for name, value in settings.items():
                spark.conf.set(name, value)
            return [
                n
                for some in range(0, len(counts), 60)
                for n in spark.sql(f"select {', '.join(counts[some : some + 60])}").collect()[0]
            ]
        finally:
            for name in settings:
                spark.conf.unset(name)

    with_skipping, without_skipping = asked(skipping=True), asked(skipping=False)
    assert {
        q: (f, t) for q, f, t in zip(counts, with_skipping, without_skipping, strict=True) if f != t
    } == {}
    assert any(without_skipping)
