"""`Records` whose errors name the table: errors of both engines become LakeErrors."""

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
        """Whether a Delta table exists."""
        with self._translate_errors(path):
            return self._records.exists(path)

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table that fulfil an SQL condition; empty if there is no table."""
        with self._translate_errors(path):
            return self._records.rows(path, where)

    def newest(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column; empty if there is no table."""
        with self._translate_errors(path):
            return self._records.newest(path, column)

    def append(
        self,
        path: str,
        rows: pa.Table,
        position: int | None = None,
        *,
        base: int | None = None,
        after: int | None = None,
    ) -> None:
        """Append rows in one commit; with a position, once per position."""
        with self._translate_errors(path):
            self._records.append(path, rows, position, base=base, after=after)

    def append_versioned(self, path: str, rows: pa.Table, base: int | None = None) -> None:
        """Append rows with the Delta version of their commit; repeat that if another writer was faster.

        With a `base` nothing is repeated, as another writer's commit makes the base outdated.
        """

        def attempt() -> None:
            with self._translate_errors(path):
                self._records.append_versioned(path, rows, base)

        if base is None:
            retry_after_conflict(attempt)()
        else:
            attempt()

    def position(self, path: str) -> int | None:
        """The position of pgsieve's newest commit; None if there is no table or no such commit."""
        with self._translate_errors(path):
            return self._records.position(path)

    def head(self, path: str) -> TableHead:
        """The newest version of a table and its position, read together."""
        with self._translate_errors(path):
            return self._records.head(path)

    def stamp(self, path: str) -> tuple[str, int] | None:
        """A stamp that distinguishes the newest version of a table from others; None if it is expensive."""
        with self._translate_errors(path):
            return self._records.stamp(path)

    def version(self, path: str) -> int:
        """The newest version of a table."""
        with self._translate_errors(path):
            return self._records.version(path)

    def is_restored(self, path: str, since: int, entry_bytes: int | None = None) -> bool:
        """Whether a table was set back to before this version."""
        with self._translate_errors(path):
            return self._records.is_restored(path, since, entry_bytes)

    def is_repaired(self, path: str, since: int) -> bool:
        """Whether a commit after this version is a repair."""
        with self._translate_errors(path):
            return self._records.is_repaired(path, since)

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of a version's log entry; None if that would take a request."""
        with self._translate_errors(path):
            return self._records.entry_bytes(path, version)

    def version_of_position(self, path: str, position: int) -> int | None:
        """The version in which pgsieve wrote a position; None if it is not among the last commits."""
        with self._translate_errors(path):
            return self._records.version_of_position(path, position)

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        with self._translate_errors(path):
            return self._records.size(path)

    def count(self, path: str) -> int:
        """The number of a table's rows."""
        with self._translate_errors(path):
            return self._records.count(path)

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends (LSNs) of the change log's slices after an LSN, in order."""
        with self._translate_errors(path):
            return self._records.slices(path, after)

    def has_deletion_vectors(self, path: str) -> bool | None:
        """Whether writers of a table may mark rows in deletion vectors; None if the property is unset."""
        with self._translate_errors(path):
            return self._records.has_deletion_vectors(path)
