"""Wraps `Records`, the interface to pgsieve's small tables, so that its errors name the table.

The errors of both engines, delta-rs and Spark, become LakeErrors. A position is the LSN up to which a table has all
changes. A slice is the changes from one position of the slot to another.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa

from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.delta.records import Records, TableHead


class NamedRecords:
    """Passes each call on to `records`, and translates its errors by `translate_errors(path)`."""

    def __init__(
        self, records: Records, translate_errors: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._records, self._translate_errors = records, translate_errors

    def exists(self, path: str) -> bool:
        """True if a Delta table exists."""
        with self._translate_errors(path):
            return self._records.exists(path)

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table for which an SQL condition is true. Empty if there is no table."""
        with self._translate_errors(path):
            return self._records.rows(path, where)

    def newest_rows(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column. Empty if there is no table."""
        with self._translate_errors(path):
            return self._records.newest_rows(path, column)

    def append(
        self,
        path: str,
        rows: pa.Table,
        position: int | None = None,
        *,
        expected_version: int | None = None,
        expected_position: int | None = None,
    ) -> None:
        """Append rows in one commit. With a position, nothing is appended if the table already has this or a later position."""
        with self._translate_errors(path):
            self._records.append(
                path, rows, position, expected_version=expected_version, expected_position=expected_position
            )

    def append_versioned(self, path: str, rows: pa.Table, expected_version: int | None = None) -> None:
        """Append rows, with the Delta version of their commit in a column. If another writer was faster, append again.

        With `expected_version` a faster writer is an error, because the rows were planned from that version.
        """

        def attempt() -> None:
            with self._translate_errors(path):
                self._records.append_versioned(path, rows, expected_version)

        if expected_version is None:
            retry_after_conflict(attempt)()
        else:
            attempt()

    def position(self, path: str) -> int | None:
        """The position of pgsieve's newest commit to a table. None if there is no table, or no such commit."""
        with self._translate_errors(path):
            return self._records.position(path)

    def head(self, path: str) -> TableHead:
        """The newest version of a table and its position, both read at the same moment."""
        with self._translate_errors(path):
            return self._records.head(path)

    def stamp(self, path: str) -> tuple[str, int] | None:
        """A stamp that distinguishes the newest version of a table from all others.

        None if there is no table, or if finding the stamp would take as long as reading the table.
        """
        with self._translate_errors(path):
            return self._records.stamp(path)

    def version(self, path: str) -> int:
        """The newest version of a table."""
        with self._translate_errors(path):
            return self._records.version(path)

    def is_restored(self, path: str, since_version: int, entry_bytes: int | None = None) -> bool:
        """True if a table was put back to a version before `since_version`, by RESTORE or an older copy of its folder."""
        with self._translate_errors(path):
            return self._records.is_restored(path, since_version, entry_bytes)

    def is_repaired(self, path: str, since_version: int) -> bool:
        """True if a commit after `since_version` is a repair, which `check --repair` has made."""
        with self._translate_errors(path):
            return self._records.is_repaired(path, since_version)

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of the log entry of a version. None if a request to an object store would be needed."""
        with self._translate_errors(path):
            return self._records.entry_bytes(path, version)

    def version_of_position(self, path: str, position: int) -> int | None:
        """The version in which pgsieve wrote a position. None if it is not among the last commits."""
        with self._translate_errors(path):
            return self._records.version_of_position(path, position)

    def size_bytes(self, path: str) -> int:
        """The bytes of all files of a table."""
        with self._translate_errors(path):
            return self._records.size_bytes(path)

    def count_rows(self, path: str, version: int | None = None) -> int:
        """The number of rows of a table, without `version` of its newest version."""
        with self._translate_errors(path):
            return self._records.count_rows(path, version)

    def slices(self, path: str, after_lsn: int) -> Sequence[int]:
        """The LSNs after `after_lsn` at which slices of a change log (a slot's messages) end, in order."""
        with self._translate_errors(path):
            return self._records.slices(path, after_lsn)

    def has_deletion_vectors(self, path: str) -> bool | None:
        """True if a table's property allows writers to mark rows in deletion vectors. None if the property is not set."""
        with self._translate_errors(path):
            return self._records.has_deletion_vectors(path)
