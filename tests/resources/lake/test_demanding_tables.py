"""A table that demands more of its writers than delta-rs can do is left to Spark, and affects no other table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from pgsieve.resources.lake.committers import FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.errors import ERRORS_OF_NO_TABLE, LakeError, OvertakenError
from pgsieve.resources.lake.delta.records import Commit, quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance
from pgsieve.resources.lake.policy import LakeSettings
from tests.fixtures.pgsieve_replica import engine

pytestmark = pytest.mark.spark

_SCHEMA = pa.schema({"id": pa.int64(), "v": pa.string()})

#: By demand, Spark's statements with which a user makes a table demand it.
DEMANDS = {
    "nothing": (),
    "deletion vectors": ("set tblproperties ('delta.enableDeletionVectors' = 'true')",),
    "a feed": ("set tblproperties ('delta.enableChangeDataFeed' = 'true')",),
    "a feed, in capitals": ("set tblproperties ('delta.enableChangeDataFeed' = 'TRUE')",),
    "deletion vectors, in capitals": ("set tblproperties ('delta.enableDeletionVectors' = 'True')",),
    "a constraint": ("add constraint c check (id > 0)",),
    "checkpoints of version 2": ("set tblproperties ('delta.checkpointPolicy' = 'v2')",),
    "writers of version 4": (
        "set tblproperties ('delta.minReaderVersion' = '1', 'delta.minWriterVersion' = '4')",
    ),
    "writers of version 6": (
        "set tblproperties ('delta.minReaderVersion' = '2', 'delta.minWriterVersion' = '6')",
    ),
    "row tracking": ("set tblproperties ('delta.enableRowTracking' = 'true')",),
    "times in commits": ("set tblproperties ('delta.enableInCommitTimestamps' = 'true')",),
    "wider types": ("set tblproperties ('delta.enableTypeWidening' = 'true')",),
    "defaults": (
        "set tblproperties ('delta.feature.allowColumnDefaults' = 'supported')",
        "alter column v set default 'd'",
    ),
    "domains": ("set tblproperties ('delta.feature.domainMetadata' = 'supported')",),
    "liquid clustering": ("cluster by (id)",),
    "a look before a vacuum": ("set tblproperties ('delta.feature.vacuumProtocolCheck' = 'supported')",),
    "protected checkpoints": ("set tblproperties ('delta.feature.checkpointProtection' = 'supported')",),
    "times without a zone": ("set tblproperties ('delta.feature.timestampNtz' = 'supported')",),
    "variants": ("set tblproperties ('delta.feature.variantType' = 'supported')",),
}
#: Demands that delta-rs does not see, or that only Spark's writes need.
LEFT = {"a feed, in capitals", "deletion vectors, in capitals"}
#: The others take minutes.
ESSENTIAL = {"a feed, in capitals", "row tracking", "wider types"}


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": list(ids), "v": [f"row {each}" for each in ids]}, _SCHEMA)


def demanding(folder: Path, demand: str) -> str:
    path = str(folder / "t")
    for number in range(3):
        write_deltalake(path, rows(number + 1), mode="append")
    for change in DEMANDS[demand]:
        engine().session.sql(f"alter table delta.{quote_name(path)} {change}")
    return path


def is_refused(path: str) -> bool:
    """Whether delta-rs refuses to write to a table."""
    try:
        write_deltalake(path, rows(100), mode="append")
    except DeltaError as error:
        return "Unsupported table features" in str(error)
    return False


@pytest.mark.drawn
@pytest.mark.parametrize(
    "demand", [d if d in ESSENTIAL else pytest.param(d, marks=pytest.mark.long) for d in DEMANDS]
)
def test_delta_rs_does_what_it_can_and_spark_the_rest(tmp_path: Path, demand: str) -> None:
    """It takes long because Spark starts, and makes the table."""
    path = demanding(tmp_path, demand)
    lake = Lake(str(tmp_path), lambda: engine().session, LakeSettings(thread_count=2))
    assert lake.delta_rs is not None
    policy, files = lake.policy, FileCommitter(lake.delta_rs, lake.access)
    is_reached_by_delta_rs = isinstance(policy.choose_committer(path, _SCHEMA.names, 100), InProcessCommitter)
    many = policy.choose_committer(path, _SCHEMA.names, None, lambda: _SCHEMA)
    assert isinstance(many, SparkCommitter) >= (not is_reached_by_delta_rs)
    assert files.can_mark_rows(path, _SCHEMA.names) <= is_reached_by_delta_rs
    assert files.can_rewrite_files(path, _SCHEMA.names) <= is_reached_by_delta_rs
    compacted = make_table_maintenance(lake, path).compact()
    assert compacted == 2
    lake.set_properties(path, {"delta.checkpointInterval": "20"})
    lake.set_comments(path, "it's \\ 'here'", {"v": "a `column`'s"})
    lake.write(engine().session.createDataFrame(rows(10)), path, Commit(7), byte_count=100)
    lake.set_comments(path, "it's \\ 'here'", {"v": "a `column`'s"})
    table = DeltaTable(path)
    assert table.metadata().description == "it's \\ 'here'"
    assert table.metadata().configuration["delta.checkpointInterval"] == "20"
    assert (table.schema().fields[1].metadata or {})["comment"] == "a `column`'s"
    assert lake.records.position(path) == 7
    assert lake.count_rows(path) == 4
    if not lake.policy.is_read_by_spark(path):
        assert (
            sum(
                batch.num_rows
                for batch in lake.delta_rs.read_version_batches(path, lake.delta_rs.version(path))
            )
            == 4
        )
    assert is_reached_by_delta_rs == (demand not in LEFT and not is_refused(path))


@pytest.mark.drawn
def test_a_refusal_of_delta_rs_is_no_conflict_and_an_error_of_its_table(tmp_path: Path) -> None:
    path = demanding(tmp_path, "row tracking")
    engine().session.sql(
        f"alter table delta.{quote_name(path)} set tblproperties ('delta.appendOnly' = 'true')"
    )
    lake = Lake(str(tmp_path), lambda: engine().session, LakeSettings(thread_count=2))
    assert lake.delta_rs is not None
    for overwrite in (False, True):
        with pytest.raises(LakeError) as raised, lake.access.translate_errors(path):
            lake.delta_rs.write(path, rows(5), Commit(7, overwrite=overwrite))
        assert not isinstance(raised.value, ERRORS_OF_NO_TABLE)
    write_deltalake(other := str(tmp_path / "o"), rows(1), configuration={"delta.appendOnly": "true"})
    with pytest.raises(LakeError, match="append-only") as raised, lake.access.translate_errors(other):
        lake.delta_rs.write(other, rows(5), Commit(7, overwrite=True))
    assert not isinstance(raised.value, ERRORS_OF_NO_TABLE)
    with pytest.raises(OvertakenError):
        lake.delta_rs.write(other, rows(5), Commit(8, expected_version=7))


@pytest.mark.drawn
@pytest.mark.parametrize("demand", ["nothing", "row tracking", "only Spark reaches it"])
def test_a_users_demands_that_refuse_rows_are_removed_and_the_position_stays(
    tmp_path: Path, demand: str
) -> None:
    path = demanding(tmp_path, demand if demand in DEMANDS else "nothing")
    reached = demand in DEMANDS
    address, place = (str(tmp_path), path) if reached else (tmp_path.as_uri(), Path(path).as_uri())
    lake = Lake(address, lambda: engine().session, LakeSettings(thread_count=2))
    assert (lake.delta_rs is not None) is reached
    assert not lake.has_row_checks(place, [])
    lake.write(engine().session.createDataFrame(rows(4)), place, Commit(7), byte_count=100)
    for change in ("add constraint `A c` check (id < 9)", "set tblproperties ('delta.appendOnly' = 'TRUE')"):
        engine().session.sql(f"alter table delta.{quote_name(path)} {change}")
    assert lake.has_row_checks(place, [])
    lake.remove_row_checks(place, [])
    assert not lake.has_row_checks(place, [])
    assert lake.records.position(place) == 7
    lake.write(engine().session.createDataFrame(rows(10)), place, Commit(8, overwrite=True), byte_count=100)
    assert lake.count_rows(place) == 1


@pytest.mark.drawn
@pytest.mark.parametrize("reached", [False, True], ids=["only Spark reaches it", "delta-rs reaches it"])
def test_a_feed_and_mapped_names_allow_any_columns(tmp_path: Path, *, reached: bool) -> None:
    """Delta refuses rows in a commit that maps names, or drops a mapped column, of a table with a feed."""
    lake = Lake(str(tmp_path) if reached else tmp_path.as_uri(), lambda: engine().session)
    path, spark, committer = f"{lake.uri}/t", engine().session, SparkCommitter(lake.access)

    def write(position: int, version: int | None = None, **columns: int | str) -> int:
        commit = Commit(
            position,
            overwrite=True,
            expected_version=version,
            properties={"delta.enableChangeDataFeed": "TRUE"},
        )
        frame = spark.createDataFrame([tuple(columns.values())], list(columns))
        committer.write(frame, path, commit, exists=lambda: lake.records.exists(path))
        assert [row.asDict() for row in lake.read_table(path).collect()] == [columns]
        assert lake.records.position(path) == position
        properties = spark.sql(f"describe detail delta.{quote_name(path)}").collect()[0]["properties"]
        assert properties["delta.enableChangeDataFeed"].lower() == "true"
        return lake.records.version(path)

    def read_feed(version: int) -> list[str]:
        feed = spark.read.options(readChangeFeed="true", startingVersion=version).format("delta").load(path)
        return [row["_change_type"] for row in feed.collect()]

    version = write(1, id=1, **{"Line No": 2, "x": 3})
    assert read_feed(0) == ["insert"], "the feed begins with the table"
    version = write(2, version, id=1, **{"Line No": 2, "x": 4})
    assert sorted(read_feed(version)) == ["delete", "insert"]
    version = write(3, version, id=1, **{"Line No": 2})
    version = write(4, version, id=1, **{"Line No": "of another type"})
    if reached:
        for columns in ({"Line No": "later", "x": 1}, {"Line": "later"}):
            with pytest.raises(OvertakenError):
                write(5, version - 1, id=1, **columns)
    write(5, lake.records.version(path), id=1, Line="no mapped name")
