"""The one policy of a lake: it chooses the runner of functions on rows, and the committer of their results.

In: the lake's place, a number of bytes, and the features that a table requires of readers and writers. Out: a
runner (`pgsieve.resources.lake.executors`) and a committer (`pgsieve.resources.lake.committers`). No other
module makes this choice. Raises LakeError.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.committers import ByFiles, BySpark, Committer, InProcess
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.executors import INLINE, Executors

#: Default size up to which batches of a lake that delta-rs reaches are written without Spark.
SMALL_BYTES_DEFAULT = 8 * 1024 * 1024
#: In replicas up to this size, files are rewritten without their deleted rows; in larger replicas the rows
#: are marked.
REWRITTEN_BYTES_DEFAULT = 64 * 1024 * 1024
#: The prefix of the columns that a MERGE of delta-rs adds to those of a table.
_OF_DELTA_RS = "__delta_rs_"

#: Types with values that are equal in PostgreSQL and Spark but not in Arrow (0.0 and -0.0), and types that
#: only Spark supports as keys.
_INEXACT = ("float", "double", "array<")

_LOGGER = logging.getLogger(__name__)


def is_exact(types: Iterable[str]) -> bool:
    """Whether Arrow and PostgreSQL agree on which values of these Spark types are equal."""
    return not any(each.startswith(_INEXACT) for each in types)


@dataclass(frozen=True)
class LakeSettings:
    """The user's settings for work on a lake; `small_bytes`, `rewritten_bytes` and `vectors` as in `Policy`.

    `threads` is the number of this process' threads for large work; None means that Spark runs it. `cores` is
    the number of Spark's cores, if its master names it.
    """

    small_bytes: int = SMALL_BYTES_DEFAULT
    rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT
    vectors: bool = True
    threads: int | None = None
    cores: int | None = None


DEFAULT_SETTINGS = LakeSettings()


@dataclass(frozen=True)
class Policy:
    """Chooses by bytes, and by the limits of delta-rs and Arrow.

    `local` is delta-rs; None if it cannot reach and write the lake. `executors` run large work. Up to
    `small_bytes` may pass through this process. In replicas up to `rewritten_bytes` (-1: in none) files are
    rewritten without their deleted rows. `vectors` says whether the user wants deletion vectors in large
    tables.
    """

    access: LakeAccess
    local: LocalRecords | None
    executors: Executors
    small_bytes: int = SMALL_BYTES_DEFAULT
    rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT
    vectors: bool = True

    def is_small(self, size: int | None) -> bool:
        """Whether this many bytes are few enough to pass through this process; None means many."""
        return self.local is not None and size is not None and size <= self.small_bytes

    def runner(self, size: int | None) -> Executors:
        """The runner for this many bytes (None: many): this thread for few bytes, the executors for many."""
        return INLINE if self.is_small(size) else self.executors

    def expect(self, size: int) -> None:
        """Begin to start the runner for this many bytes, before all of them have arrived."""
        if self.local is not None:
            self.runner(size).prepare()

    def parts_in_parallel(self, size: int) -> int:
        """How many parts of this many bytes run at a time."""
        return self.runner(size).number

    def reached(self, path: str) -> LocalRecords | None:
        """delta-rs, if it can write a table; None if only Spark can.

        Only Spark writes tables whose column names are or were mapped, and tables with features that delta-rs
        lacks.
        """
        if self.local is None:
            return None
        with self.access.refusing(path):
            return self.local if self.local.is_unmapped(path) and self.local.is_written(path) else None

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
        """The committer of about `size` bytes (None: many) of rows with these columns into a table.

        See `explained`.
        """
        committer, reason = self.explained(path, columns, size, schema, overwrite=overwrite, key=key)
        _LOGGER.debug('Delta table "%s": %s (%s)', path, type(committer).__name__, reason)
        return committer

    def explained(
        self,
        path: str,
        columns: Sequence[str],
        size: int | None,
        schema: Callable[[], pa.Schema] | None = None,
        *,
        overwrite: bool = False,
        key: Iterable[str] = (),
    ) -> tuple[Committer, str]:
        """The committer of about `size` bytes (None: many) of rows with these columns into a table, and the reason.

        `ByFiles` is chosen only with the `schema` of files. With `overwrite` the rows replace the table's.
        `key` has the types of the columns that identify rows.
        """
        local = self.reached(path)
        if local is None:
            return BySpark(self.access), "delta-rs does not write it, or its names are mapped"
        with self.access.refusing(path):
            if not self.is_small(size):
                reason = "many rows" if size is None else f"{size} bytes"
            elif not is_exact(key):
                reason = "a key that Arrow does not compare as PostgreSQL does"
            elif any(name.startswith(_OF_DELTA_RS) for name in columns):
                reason = "a column name that a MERGE of delta-rs reserves"
            elif overwrite and local.permutes(path, columns):
                reason = "columns in another order"
            elif overwrite and local.is_partitioned_by_others(path, columns):
                reason = "partitions by a column that is dropped"
            else:
                return InProcess(local, self.access), f"{size} bytes"
            if schema is not None and local.takes_files(path, schema(), overwrite=overwrite):
                return ByFiles(local, self.access, self.vectors), reason
        return BySpark(self.access), reason

    def file_committer(self, path: str, schema: pa.Schema) -> ByFiles | BySpark:
        """The committer of few or many rows to a table: this process as files of this schema, or otherwise Spark."""
        local = self.reached(path)
        if local is not None:
            with self.access.refusing(path):
                if local.takes_files(path, schema):
                    return ByFiles(local, self.access, self.vectors)
        return BySpark(self.access)

    def reader(self, path: str, size: int | None = None) -> LocalRecords | None:
        """delta-rs, if this many bytes of a table may be read in this process; otherwise None.

        Without `size` only the table's features count.
        """
        if self.local is None or not (size is None or self.is_small(size)):
            return None
        with self.access.refusing(path):
            return self.local if self.local.is_readable(path) else None
