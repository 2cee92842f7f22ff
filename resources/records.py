"""What pgsieve asks of Delta tables besides the rows that Spark reads and writes.

Small tables about pgsieve's own work, and the positions of all tables (Delta's `txn` action). In a lake on a
local path this is delta-rs (`local_records`), in milliseconds and without a JVM; for any other URI it is Spark
(`spark_records`), which can reach whatever the data is written to. Both leave the same tables.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

APPLICATION = "pgsieve"


def quoted(name: str) -> str:
    """An identifier or path quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def commit_metadata(position: int | None, more: Mapping[str, Any] | None = None) -> str:
    """The user metadata of a commit of pgsieve's."""
    return json.dumps({APPLICATION: {"lsn": position, **(more or {})}})


class Records(Protocol):
    """Reads and appends small tables, and tells what stands in the log of any."""

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

    def is_restored(self, path: str, since: int) -> bool:
        """Whether somebody has gone back in a table that had this version: by RESTORE, or an older folder put back.

        Delta keeps the transaction identifiers of what RESTORE undoes: the position alone does not tell.
        """

    def size(self, path: str) -> int:
        """The bytes of a table's files."""

    def count(self, path: str) -> int:
        """How many rows a table has."""

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends of the change log's slices beyond an LSN, in order."""

    def has_deletion_vectors(self, path: str) -> bool:
        """Whether writers of the table may mark rows in deletion vectors."""
