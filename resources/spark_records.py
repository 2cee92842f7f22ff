"""Delta tables wherever Spark can reach them: `Records` by Spark, for lakes at a URI."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.pandas.types import from_arrow_schema

from resources.records import APPLICATION, commit_metadata, quoted


class SparkRecords:
    """Delta tables wherever Spark can reach them."""

    def __init__(self, session: Callable[[], SparkSession]) -> None:
        self._session = session

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""
        try:
            self._session().read.format("delta").load(path).schema  # noqa: B018 - Connect resolves only here
        except AnalysisException as error:
            if is_missing(error):
                return False
            raise
        return True

    def rows(self, path: str) -> list[dict[str, Any]]:
        """All rows of a small table; none where there is no table."""
        if not self.exists(path):
            return []
        rows: list[dict[str, Any]] = self._session().read.format("delta").load(path).toArrow().to_pylist()
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
        if not self.exists(path):
            return None
        history = self._session().sql(f"describe history delta.{quoted(path)}")
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
        if not self.exists(path):
            return []
        frame = self._session().read.format("delta").load(path)
        return sorted(
            int(row[0]) for row in frame.where(F.col("slice") > after).select("slice").distinct().collect()
        )

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


def is_missing(error: AnalysisException) -> bool:
    """Whether a Spark error says that there is no Delta table at a path."""
    condition = error.getCondition() or ""
    return condition in {
        "PATH_NOT_FOUND",
        "DELTA_TABLE_NOT_FOUND",
        "DELTA_MISSING_DELTA_TABLE",
        "DELTA_PATH_DOES_NOT_EXIST",
    }
