"""A lake whose file system Spark does not know is refused as a whole, with advice. No table is set aside."""

from __future__ import annotations

import pytest

from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.resources.lake.delta.errors import LakeUnavailableError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage
from tests.fixtures.pgsieve_replica import engine


@pytest.mark.spark
@pytest.mark.parametrize("address", ["abfss://lake@account.dfs.core.windows.net/x", "gs://bucket/x"])
def test_a_file_system_that_spark_lacks_sets_no_table_aside(address: str) -> None:
    session = engine().session
    lake = Lake(address, lambda: session, storage=Storage.from_address(address, {}))
    path = f"{address}/sales/public/orders"
    for read in (lambda: lake.read_table(path).count(), lambda: session.read.parquet(path).count()):
        with pytest.raises(LakeUnavailableError) as refused, lake.access.translate_errors(path):
            read()
        assert refused.value.message == f'lake "{address}": Spark has no file system for this address'
        assert "spark.jars.packages" in (refused.value.hint or "")
        with pytest.raises(Exception) as raised:
            read()
        with pytest.raises(LakeUnavailableError):
            describe_error(lake, raised.value)
