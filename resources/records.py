"""Small Delta tables that pgsieve keeps about its own work, and the positions of all Delta tables.

In: paths and Arrow tables. Out: rows, versions, positions (Delta's `txn` action). In a lake on a local path
this is delta-rs, in milliseconds and without a JVM; for any other URI it is Spark, which can reach whatever the
data is written to. Both leave the same tables.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

APPLICATION = "pgsieve"


def quoted(name: str) -> str:
    """An identifier or path quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def commit_metadata(position: int | None, more: Mapping[str, Any] | None = None) -> str:
    """The user metadata of a commit of pgsieve's."""
    return json.dumps({APPLICATION: {"lsn": position, **(more or {})}})


class Records(Protocol):
    """What pgsieve asks of Delta besides rows."""

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""

    def rows(self, path: str) -> list[dict[str, Any]]:
        """All rows of a small table; none where there is no table."""

    def append(self, path: str, rows: pa.Table, position: int | None = None) -> None:
        """Append rows in one commit; with a position, once per position."""

    def position(self, path: str) -> int | None:
        """The position of the newest commit of pgsieve's; None where there is no table or none of its commits."""

    def version(self, path: str) -> int:
        """The newest version of a table."""

    def size(self, path: str) -> int:
        """The bytes of a table's files."""

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends of the change log's slices beyond an LSN, in order."""


class LocalRecords:
    """Delta tables in a folder of this machine."""

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""
        return Path(path, "_delta_log").is_dir() and DeltaTable.is_deltatable(path)

    def rows(self, path: str) -> list[dict[str, Any]]:
        """All rows of a small table; none where there is no table."""
        if not self.exists(path):
            return []
        rows: list[dict[str, Any]] = DeltaTable(path).to_pyarrow_table().to_pylist()
        return rows

    def append(self, path: str, rows: pa.Table, position: int | None = None) -> None:
        """Append rows in one commit; with a position, once per position."""
        if position is not None and (self.position(path) or -1) >= position:
            return
        transactions = None if position is None else [Transaction(APPLICATION, position)]
        properties = CommitProperties(
            custom_metadata={"userMetadata": commit_metadata(position)}, app_transactions=transactions
        )
        write_deltalake(path, rows, mode="append", commit_properties=properties)

    def position(self, path: str) -> int | None:
        """The position of the newest commit of pgsieve's."""
        return DeltaTable(path).transaction_version(APPLICATION) if self.exists(path) else None

    def version(self, path: str) -> int:
        """The newest version of a table."""
        return DeltaTable(path).version()

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        return sum(pa.table(DeltaTable(path).get_add_actions())["size_bytes"].to_pylist())

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The slices, from the statistics of the files: a file holds one slice."""
        if (self.position(path) or 0) <= after:
            return []
        files = pa.table(DeltaTable(path).get_add_actions(flatten=True))
        if "max.slice" not in files.column_names:
            return []
        return sorted({s for s in files["max.slice"].to_pylist() if s is not None and s > after})


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
        writer = self._session().createDataFrame(rows).coalesce(1).write.format("delta").mode("append")
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

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The slices, from the rows; files without newer ones are passed over by their statistics."""
        if not self.exists(path):
            return []
        frame = self._session().read.format("delta").load(path)
        return sorted(
            int(row[0]) for row in frame.where(F.col("slice") > after).select("slice").distinct().collect()
        )


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
