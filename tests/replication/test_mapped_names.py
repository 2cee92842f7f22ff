"""A replica whose columns have other names in its files: pgsieve still writes the files itself, and each engine reads its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaProtocolError

from pgsieve.assets.steps.apply import batch
from pgsieve.resources.lake.delta.records import quote_name
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.schema_changes import alter, replicas

pytestmark = [
    pytest.mark.spark,
    pytest.mark.drawn,
    pytest.mark.parametrize("scenario", ["driver drawn marking", "spark large"], indirect=True),
]
_TABLES = ("keyed", "keyless")


def _check_what_readers_do(path: str, expected: pa.Table) -> None:
    """Check what docs/reading.md says about mapped names."""
    rows = pa.table(QueryBuilder().register("t", DeltaTable(path)).execute("select * from t"))
    assert sorted(map(str, rows.to_pylist())) == sorted(map(str, expected.to_pylist()))
    with pytest.raises(DeltaProtocolError, match=r"columnMapping|column mapping"):
        pl.read_delta(path)


def _check_feed_of_last_commit(replica: PgsieveReplica, path: str) -> None:
    """Check that the change data feed, as Spark reads it, has what the last commit changed."""
    version, names = DeltaTable(path).version(), [field.name for field in DeltaTable(path).schema().fields]

    def count_rows(kinds: Sequence[str] = (), **options: object) -> Counter[str]:
        rows = replica.spark.read.options(**options).format("delta").load(path).toArrow().to_pylist()
        return Counter(
            repr([row[name] for name in names]) for row in rows if not kinds or row["_change_type"] in kinds
        )

    feed = {"readChangeFeed": "true", "startingVersion": version}
    removed = count_rows(("delete", "update_preimage"), **feed)
    added = count_rows(("insert", "update_postimage"), **feed)
    assert removed
    assert count_rows(versionAsOf=version - 1) - removed + added == count_rows()


def _replicas(scenario: Scenario) -> Iterator[tuple[PgsieveReplica, str]]:
    """Each of pgsieve's replicas of each table, with its path."""
    for replica in replicas(scenario):
        for table in _TABLES:
            yield replica, replica.lake.paths.replica("sub", "public", table)


def test_a_replica_whose_names_are_mapped_is_written_as_files(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long because Spark maps the names."""
    scenario.tables("""
        CREATE TABLE keyed (a int, b int, line text, n float8[], PRIMARY KEY (a, b));
        ALTER TABLE keyed ALTER line SET STORAGE EXTERNAL;
        CREATE TABLE keyless (a int, b text)
    """)
    scenario.publisher("""
        ALTER TABLE keyless REPLICA IDENTITY FULL;
        INSERT INTO keyed SELECT i, 1, repeat('large ', 500) || i, ARRAY[i, NULL] FROM generate_series(1, 40) i;
        INSERT INTO keyless SELECT i % 5, 'x' FROM generate_series(1, 20) i;
        CREATE PUBLICATION pub FOR TABLE keyed WHERE (a <> 7), keyless
    """)
    scenario.subscribe("pub")
    for replica, path in _replicas(scenario):
        replica.spark.sql(
            f"alter table delta.{quote_name(path)} set tblproperties"
            " ('delta.columnMapping.mode' = 'name', 'delta.enableChangeDataFeed' = 'true')"
        )
    with monkeypatch.context() as without_spark:
        without_spark.setattr(batch, "_merge_by_spark", None)
        scenario.publisher("""
            UPDATE keyed SET n = '{0}' WHERE a < 20; UPDATE keyed SET a = 100 WHERE a = 30; DELETE FROM keyed WHERE a = 31;
            INSERT INTO keyed VALUES (50, 1, 'new', NULL), (7, 2, 'filtered', NULL);
            UPDATE keyless SET b = 'y' WHERE a = 2; DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless)
        """)
        scenario.check(*_TABLES)
    # Spark gives the new column a name in files that is no name of the table.
    alter(scenario, "ALTER TABLE keyed ADD COLUMN c text")
    scenario.check(*_TABLES)
    with monkeypatch.context() as without_spark:
        without_spark.setattr(batch, "_merge_by_spark", None)
        scenario.publisher("""
            UPDATE keyed SET c = 'c ' || a WHERE a % 2 = 0; INSERT INTO keyed VALUES (60, 1, 'new', NULL, 'c');
            UPDATE keyed SET b = 5 WHERE a = 12; TRUNCATE keyless; INSERT INTO keyless VALUES (1, 'after')
        """)
        scenario.check(*_TABLES)
    for replica, path in _replicas(scenario):
        by_spark = replica.spark.read.format("delta").load(path).toArrow()
        assert sorted(map(str, by_spark.to_pylist())) == sorted(
            map(str, replica.stored(path).select(by_spark.column_names).to_pylist())
        )
        names = [
            (field.metadata or {})["delta.columnMapping.physicalName"]
            for field in DeltaTable(path).schema().fields
        ]
        assert (by_spark.column_names != names) == path.endswith("keyed")
        _check_what_readers_do(path, by_spark)
        _check_feed_of_last_commit(replica, path)
