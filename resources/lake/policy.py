"""Chooses the runner of functions on rows, and the committer of their results; no other module does.

In: the access to the lake, a number of bytes, and the features that a table requires of readers and writers.
Out: a runner (`pgsieve.resources.lake.executors`) and a committer (`pgsieve.resources.lake.committers`). Raises
LakeError.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.committers import Committer, FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.executors import INLINE, Executors

#: The default size up to which batches are written without Spark, in a lake that delta-rs reaches.
SMALL_BYTES_DEFAULT = 8 * 1024 * 1024
#: The default size up to which a replica's files are rewritten without deleted rows; in larger replicas the
#: rows are marked.
REWRITTEN_BYTES_DEFAULT = 64 * 1024 * 1024
#: From this many changes of a table on, an apply decides by parts of the keys.
PARTED_CHANGES_DEFAULT = 2_000_000
#: The prefix of the columns that a MERGE of delta-rs adds to a table's.
_RESERVED_PREFIX = "__delta_rs_"

#: The beginnings of the Spark types of keys for which Arrow is unsuitable: of numbers, because 0.0 and -0.0 are
#: not equal there, and of arrays, which only Spark supports as keys.
_INEXACT_TYPES = ("float", "double", "array<")

_LOGGER = logging.getLogger(__name__)


def has_exact_equality(types: Iterable[str]) -> bool:
    """Whether values of these Spark types are equal in Arrow exactly if they are equal in PostgreSQL."""
    return not any(each.startswith(_INEXACT_TYPES) for each in types)


@dataclass(frozen=True)
class LakeSettings:
    """The user's settings of a lake; `small_bytes`, `rewritten_bytes`, `vectors` and `parted_changes` as in `Policy`.

    `threads` is the number of this process' threads for large work; None means that Spark runs it. `cores` is
    the number of Spark's cores; None if its master does not show it.
    """

    small_bytes: int = SMALL_BYTES_DEFAULT
    rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT
    vectors: bool = True
    threads: int | None = None
    cores: int | None = None
    parted_changes: int = PARTED_CHANGES_DEFAULT


DEFAULT_SETTINGS = LakeSettings()


@dataclass(frozen=True)
class Policy:
    """Chooses by bytes, and by the limits of delta-rs and Arrow.

    `local` is the access by delta-rs, or None. `executors` run large work. Up to `small_bytes` may pass
    through this process. In replicas up to `rewritten_bytes` (-1: in none) files are rewritten without their
    deleted rows. `vectors` says whether the user wants deletion vectors in large tables. From `parted_changes`
    of a table on, the runner decides by parts of the keys.
    """

    access: LakeAccess
    local: LocalRecords | None
    executors: Executors
    small_bytes: int = SMALL_BYTES_DEFAULT
    rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT
    vectors: bool = True
    parted_changes: int = PARTED_CHANGES_DEFAULT

    def is_small(self, size: int | None) -> bool:
        """Whether this many bytes (None: many) may pass through this process."""
        return self.local is not None and size is not None and size <= self.small_bytes

    def runner(self, size: int | None) -> Executors:
        """The runner for this many bytes (None: many): the calling thread for few, the executors for many."""
        return INLINE if self.is_small(size) else self.executors

    def prepare_runner(self, size: int) -> None:
        """Begin to start the runner for this many bytes, before they have arrived."""
        if self.local is not None:
            self.runner(size).prepare()

    def parts_in_parallel(self, size: int) -> int:
        """How many parts of this many bytes run at a time."""
        return self.runner(size).number

    def local_writer(self, path: str) -> LocalRecords | None:
        """The access by delta-rs, if it can write a table; None if only Spark can.

        Only Spark writes tables with mapped column names, and tables that require features that delta-rs
        lacks.
        """
        if self.local is None:
            return None
        with self.access.translate_errors(path):
            return self.local if self.local.is_unmapped(path) and self.local.can_write(path) else None

    def committer(
        self,
        path: str,
        columns: Sequence[str],
        size: int | None,
        schema: Callable[[], pa.Schema] | None = None,
        *,
        overwrite: bool = False,
        key: Iterable[str] = (),
    ) -> Committer:
        """The committer of rows to a table; the parameters are those of `committer_with_reason`."""
        committer, reason = self.committer_with_reason(
            path, columns, size, schema, overwrite=overwrite, key=key
        )
        _LOGGER.debug('Delta table "%s": %s (%s)', path, type(committer).__name__, reason)
        return committer

    def committer_with_reason(
        self,
        path: str,
        columns: Sequence[str],
        size: int | None,
        schema: Callable[[], pa.Schema] | None = None,
        *,
        overwrite: bool = False,
        key: Iterable[str] = (),
    ) -> tuple[Committer, str]:
        """The committer of about `size` bytes (None: many) of rows with these columns to a table, and the reason.

        It is a `FileCommitter` only if `schema` returns the schema of the files. With `overwrite` the rows
        replace the table's. `key` are the Spark types of the columns that identify rows.
        """
        local = self.local_writer(path)
        if local is None:
            return SparkCommitter(self.access), "delta-rs does not write it, or its names are mapped"
        with self.access.translate_errors(path):
            if not self.is_small(size):
                reason = "many rows" if size is None else f"{size} bytes"
            elif not has_exact_equality(key):
                reason = "a key that Arrow does not compare as PostgreSQL does"
            elif any(name.startswith(_RESERVED_PREFIX) for name in columns):
                reason = "a column name that a MERGE of delta-rs reserves"
            elif overwrite and local.permutes(path, columns):
                reason = "columns in another order"
            elif overwrite and local.is_partitioned_by_others(path, columns):
                reason = "partitions by a column that is dropped"
            else:
                return InProcessCommitter(local, self.access), f"{size} bytes"
        files = None if schema is None else self.by_files(path, schema(), overwrite=overwrite)
        return (SparkCommitter(self.access) if files is None else files), reason

    def in_process(
        self,
        path: str,
        columns: Sequence[str],
        size: int | None,
        *,
        overwrite: bool = False,
        key: Iterable[str] = (),
    ) -> InProcessCommitter | None:
        """The committer of rows that pass through this process; None if they are too many, or the table needs another one.

        The parameters are those of `committer_with_reason`.
        """
        committer = self.committer(path, columns, size, overwrite=overwrite, key=key)
        return committer if isinstance(committer, InProcessCommitter) else None

    def by_files(self, path: str, schema: pa.Schema, *, overwrite: bool = False) -> FileCommitter | None:
        """The committer of few or many rows as files with this schema; None if only Spark commits them."""
        local = self.local_writer(path)
        if local is None:
            return None
        with self.access.translate_errors(path):
            can_add_files = local.can_add_files(path, schema, overwrite=overwrite)
        return FileCommitter(local, self.access, self.vectors) if can_add_files else None

    def reader(self, path: str, size: int | None = None) -> LocalRecords | None:
        """The access by delta-rs, if it can read the table, and this process may read `size` bytes; otherwise None.

        Without `size` only the table's features count.
        """
        if self.local is None or not (size is None or self.is_small(size)):
            return None
        with self.access.translate_errors(path):
            return self.local if self.local.is_readable(path) else None
