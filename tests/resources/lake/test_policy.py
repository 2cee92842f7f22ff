"""Which writer writes rows; the log says why. No JVM."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest

from pgsieve.resources.lake.committers import Committer, FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from tests.fixtures.lakes import no_session

_SCHEMA = pa.schema({"a": pa.int64(), "b": pa.string()})


@pytest.mark.parametrize(
    ("asked", "committer", "reason"),
    [
        ({"byte_count": 100}, InProcessCommitter, "100 bytes"),
        ({"byte_count": 101}, SparkCommitter, "101 bytes"),
        ({"byte_count": 101, "make_schema": lambda: _SCHEMA}, FileCommitter, "101 bytes"),
        ({"byte_count": None}, SparkCommitter, "many rows"),
        ({"byte_count": 1, "key_types": ["double"]}, SparkCommitter, "a key"),
        ({"byte_count": 1, "overwrite": True}, SparkCommitter, "another order"),
    ],
)
def test_the_committer_of_rows_and_the_reason(
    asked: dict[str, object],
    committer: type[Committer],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lake = Lake(str(tmp_path), no_session, LakeSettings(100))
    path = str(tmp_path / "t")
    assert lake.delta_rs is not None
    lake.delta_rs.write(path, pa.table({"b": ["x"], "a": [1]}), Commit())
    with caplog.at_level(logging.DEBUG, "pgsieve"):
        assert type(lake.policy.choose_committer(path, ["a", "b"], **asked)) is committer  # type: ignore[arg-type]
    # caplog.text cannot be used: once pyspark's loggers exist, pytest gives them its handler, and they give it their JSON format.
    messages = "\n".join(caplog.messages)
    assert f'Delta table "{path}": {committer.__name__}' in messages
    assert reason in messages


def test_a_name_that_delta_in_spark_would_map_needs_no_spark(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path), no_session)
    assert isinstance(lake.policy.choose_committer(str(tmp_path / "t"), ["a b"], 1), InProcessCommitter)
