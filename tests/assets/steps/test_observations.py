"""What Spark observes while it writes rows into a lake that only Spark reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.observations import NotedRows, get_metrics, schema_with_note, with_note
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.lake.runners import to_spark_schema
from tests.fixtures.pgsieve_replica import engine

# Where nothing is observed, Spark itself would wait without end.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
_SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path.as_uri(), lambda: engine().session, LakeSettings(-1))


def _ids(lake: Lake, count: int) -> DataFrame:
    return lake.spark.range(0, count, 1, 1)


def test_notes_of_a_write_that_delta_leaves_out_are_not_reported(lake: Lake) -> None:
    def note_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from with_note(batches, _SCHEMA, lambda: "a note")

    note_schema = to_spark_schema(schema_with_note(_SCHEMA))
    rows = NotedRows(_ids(lake, 3).mapInArrow(note_rows, note_schema))
    path = f"{lake.paths.uri}/t"
    written = [rows.write(lambda frame: lake.write(frame, path, Commit(7))) for _ in range(2)]
    assert written == [["a note"], None]
    assert lake.read_table(path).count() == 3


def test_metrics_of_a_write_that_delta_leaves_out_are_those_of_the_table(lake: Lake) -> None:
    path, metrics = f"{lake.paths.uri}/t", [F.count(F.lit(1)).alias("rows")]
    observed = []
    for count in (3, 5):
        observation = Observation()
        lake.write(_ids(lake, count).observe(observation, *metrics), path, Commit(7))
        observed.append(get_metrics(observation, metrics, lambda: lake.read_table(path)))
    assert observed == [{"rows": 3}, {"rows": 3}]
