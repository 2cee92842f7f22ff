"""Delta tables wherever Spark can reach them: `Records` by Spark, for lakes at a URI."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.pandas.types import from_arrow_schema

from resources.records import APPLICATION, commit_metadata, quoted

_MISSING = {
    "PATH_NOT_FOUND",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_TABLE_ONLY_OPERATION",
}


class SparkRecords:
    """Delta tables wherever Spark can reach them."""

    def __init__(self, session: Callable[[], SparkSession]) -> None:
        self._session = session

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""
        with _none_where_missing():
            self._session().read.format("delta").load(path).schema  # noqa: B018 - Connect resolves only here
            return True
        return False

    def rows(self, path: str) -> list[dict[str, Any]]:
        """All rows of a small table; none where there is no table."""
        rows: list[dict[str, Any]] = []
        with _none_where_missing():
            rows += self._session().read.format("delta").load(path).toArrow().to_pylist()
        return rows

    def append(self, path: str, rows: pa.Table, position: int | None = None) -> None:
        """Append rows in one commit; with a position, once per position."""
        # Connect cannot tell the columns of a table without rows.
        frame = self._session().createDataFrame(rows, from_arrow_schema(rows.schema))
        writer = frame.coalesce(1).write.format("delta").mode("append")
        writer = writer.option("userMetadata", commit_metadata(position))
        if position is not None:
            writer = writer.option("txnAppId", APPLICATION).option("txnVersion", str(position))
        writer.save(path)

    def position(self, path: str) -> int | None:
        """The position of the newest commit of pgsieve's, from the table's history.

        The Delta API of Spark does not show transaction ids; the same position stands in the user metadata.
        """
        # The newest commit is pgsieve's, unless someone else has touched the table since.
        for limit in (" limit 1", ""):
            with _none_where_missing():
                history = self._session().sql(f"describe history delta.{quoted(path)}{limit}")
                for row in history.orderBy(F.desc("version")).select("userMetadata").toLocalIterator():
                    found = _lsn(row["userMetadata"])
                    if found is not None:
                        return found
        return None

    def version(self, path: str) -> int:
        """The newest version of a table."""
        row = self._session().sql(f"describe history delta.{quoted(path)} limit 1").first()
        assert row is not None
        return int(row["version"])

    def is_restored(self, path: str, since: int) -> bool:
        """Whether somebody has gone back in a table that had this version."""
        history = self._session().sql(f"describe history delta.{quoted(path)}")
        later = history.where(F.col("version") >= since).select("version", "operation").collect()
        return not later or any(row["operation"] == "RESTORE" for row in later if row["version"] > since)

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        row = self._session().sql(f"describe detail delta.{quoted(path)}").first()
        assert row is not None
        return int(row["sizeInBytes"])

    def count(self, path: str) -> int:
        """How many rows a table has."""
        return self._session().read.format("delta").load(path).count()

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The slices, from the rows; files without newer ones are passed over by their statistics."""
        ends: list[int] = []
        with _none_where_missing():
            newer = self._session().read.format("delta").load(path).where(F.col("slice") > after)
            ends += sorted(int(row[0]) for row in newer.select("slice").distinct().collect())
        return ends

    def has_deletion_vectors(self, path: str) -> bool:
        """Whether writers of the table may mark rows in deletion vectors."""
        row = self._session().sql(f"describe detail delta.{quoted(path)}").first()
        assert row is not None
        return bool(row["properties"].get("delta.enableDeletionVectors") == "true")


def _lsn(metadata: str | None) -> int | None:
    try:
        read = json.loads(metadata or "null")
    except ValueError:
        return None
    if not isinstance(read, dict) or not isinstance(read.get(APPLICATION), dict):
        return None
    lsn = read[APPLICATION].get("lsn")
    return lsn if isinstance(lsn, int) else None


@contextmanager
def _none_where_missing() -> Iterator[None]:
    """End the block early where there is no Delta table at the path."""
    try:
        yield
    except AnalysisException as error:
        if error.getCondition() not in _MISSING:
            raise
