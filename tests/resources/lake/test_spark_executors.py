"""Parts that Spark runs: as many beside each other as its session has cores, also where no master tells."""

from __future__ import annotations

import pytest

from pgsieve.resources.lake.executors import SparkExecutors
from tests.fixtures.pgsieve_replica import engine


@pytest.mark.spark
def test_a_session_says_how_many_parts_it_runs_at_a_time() -> None:
    session = engine().session
    cores = session.sparkContext.defaultParallelism
    executors = SparkExecutors(lambda: session)
    assert (executors.number, executors.number, SparkExecutors(lambda: session, 7).number) == (
        cores,
        cores,
        7,
    )
