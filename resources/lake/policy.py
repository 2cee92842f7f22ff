"""Chooses where pgsieve computes rows, and how it commits them to a Delta table.

A runner calls functions that compute rows; it is the calling thread, a pool of threads, or Spark. It divides large
work into parts, which run in parallel. A committer writes the rows to a table in one commit. All choices of runners
and committers are made in this module, so that the steps of pgsieve do not depend on them.

In: - the access to the lake (the folder or bucket with the Delta tables)
    - the number of bytes of the work
    - the path of a table, whose Delta log lists the features that the table requires of readers and writers
Out: - a runner (`pgsieve.resources.lake.runners`)
     - a committer (`pgsieve.resources.lake.committers`)

Raises LakeError if the lake cannot be read.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.byte_limits import REWRITTEN_BYTES_DEFAULT, SMALL_BYTES_DEFAULT
from pgsieve.resources.lake.committers import (
    Committer,
    FileCommitter,
    InProcessCommitter,
    LargeCommitter,
    SmallCommitter,
    SparkCommitter,
)
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.spark import SparkRecords
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD, ThreadRunner
from pgsieve.resources.lake.runners import Runner

#: A MERGE into a table of at least this many bytes marks rows in deletion vectors. For a smaller table, rewriting files
#: is faster.
_MARKED_BYTES = 64 * 1024 * 1024
#: For a MERGE in this process, the limit on the replica's bytes is this many times the limit on the changes' bytes. A byte
#: of the replica takes less memory in a MERGE than a byte of the changes.
_MERGED_FACTOR = 4
#: The default of `Policy.min_parted_changes`, a number of changes of one table.
PARTED_CHANGES_DEFAULT = 2_000_000
#: The prefix of the columns that delta-rs adds to a table's own columns during a MERGE. A user's column with this
#: prefix could have the name of an added column.
_RESERVED_PREFIX = "__delta_rs_"

#: The beginnings of the names of the Spark types that Arrow cannot compare as keys. Arrow does not treat 0.0 and
#: -0.0 as equal, but PostgreSQL does. Only Spark supports arrays as keys.
_INEXACT_TYPES = ("float", "double", "array<")

#: Why changes are merged, if no committer adds files to a table.
CANNOT_ADD_FILES = "pgsieve cannot add files to the table"

_LOGGER = logging.getLogger(__name__)


def has_exact_equality(types: Iterable[str]) -> bool:
    """True if, for all of these Spark types, Arrow calls two values equal exactly if PostgreSQL does."""
    return not any(spark_type.startswith(_INEXACT_TYPES) for spark_type in types)


def estimate_merge_bytes(change_bytes: int, replica_bytes: int) -> int:
    """The bytes of changes that would take as much memory as a MERGE of changes into a replica of these sizes."""
    return max(change_bytes, replica_bytes // _MERGED_FACTOR)


def marks_rows_in_merge(replica_bytes: int) -> bool:
    """True if a MERGE into a replica of this size marks rows in deletion vectors, and does not rewrite their files."""
    return replica_bytes >= _MARKED_BYTES


@dataclass(frozen=True)
class LakeSettings:
    """The user's settings for the work on a lake.

    - `thread_count`: the number of threads of this process that run large work; None if Spark runs large work
    - `core_count`: the number of Spark's cores; None if the address of Spark's master does not show this number
    - the other fields have the same meaning as the fields of `Policy` with the same names
    """

    small_bytes: int = SMALL_BYTES_DEFAULT
    rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT
    wants_vectors: bool = True
    thread_count: int | None = None
    core_count: int | None = None
    min_parted_changes: int = PARTED_CHANGES_DEFAULT


DEFAULT_SETTINGS = LakeSettings()


@dataclass(frozen=True)
class Policy:
    """Chooses runners and committers by the number of bytes, and by what delta-rs and Arrow can do.

    - `access`: the address of the lake, and the translation of the errors of its libraries to LakeError
    - `delta_rs`: the access to the lake by delta-rs; None if delta-rs cannot reach the lake
    - `spark_records`: the access to the lake by Spark
    - `runner`: the runner of large work
    - `small_bytes`: up to this many bytes are small work, which the calling thread does in its own memory
    - `rewritten_bytes`: in replicas up to this many bytes, pgsieve deletes rows by rewriting the files that contain
      them. In larger replicas it does this only if the files are small in proportion to the changes. Otherwise it
      marks the rows in deletion vectors. With -1 it rewrites files only if the table's rows cannot be marked.
    - `wants_vectors`: whether the user wants deletion vectors in large tables
    - `min_parted_changes`: if a table has at least this many changes, the runner computes the rows that result from
      the changes. This work is divided by keys, or by the digests of rows without a key. With fewer changes the driver
      (pgsieve's own process) computes these rows.
    """

    access: LakeAccess
    delta_rs: DeltaRsRecords | None
    spark_records: SparkRecords
    runner: Runner
    small_bytes: int = SMALL_BYTES_DEFAULT
    rewritten_bytes: int = REWRITTEN_BYTES_DEFAULT
    wants_vectors: bool = True
    min_parted_changes: int = PARTED_CHANGES_DEFAULT

    def is_small(self, byte_count: int | None) -> bool:
        """True if `byte_count` bytes are small work, which may pass through this process. None stands for many bytes.

        No work is small in a lake that delta-rs cannot reach.
        """
        return self.delta_rs is not None and byte_count is not None and byte_count <= self.small_bytes

    @property
    def uses_threads(self) -> bool:
        """True if threads of this process do the work that Spark does by default."""
        return isinstance(self.runner, ThreadRunner)

    def choose_runner(self, byte_count: int | None) -> Runner:
        """The runner for `byte_count` bytes: the calling thread for small work, otherwise `runner`.

        None stands for many bytes.
        """
        return CALLING_THREAD if self.is_small(byte_count) else self.runner

    def prepare_runner(self, byte_count: int) -> None:
        """Begin to start the runner for `byte_count` bytes, while the caller still reads these bytes."""
        if self.delta_rs is not None:
            self.choose_runner(byte_count).prepare()

    def count_parallel_parts(self, byte_count: int) -> int:
        """The number of parts that run at the same time if the whole work has `byte_count` bytes."""
        return self.choose_runner(byte_count).parallelism

    def choose_small_committer(self, path: str) -> SmallCommitter:
        """The committer that writes few rows to the table at `path`: delta-rs if it can, otherwise Spark.

        Only Spark writes tables that require a feature that delta-rs lacks, and tables with column mapping: a column
        has another name in the files than in the table. With `translates_names`, `choose_large_committer` accepts the latter.
        """
        if self.delta_rs is None:
            return SparkCommitter(self.access)
        with self.access.translate_errors(path):
            can_write = self.delta_rs.is_unmapped(path) and self.delta_rs.can_write(path)
        return InProcessCommitter(self.delta_rs, self.access) if can_write else SparkCommitter(self.access)

    def is_written_by_spark(self, path: str) -> bool:
        """True if only Spark writes a table (see `choose_small_committer`)."""
        return isinstance(self.choose_small_committer(path), SparkCommitter)

    def choose_committer(
        self,
        path: str,
        columns: Sequence[str],
        byte_count: int | None,
        make_schema: Callable[[], pa.Schema] | None = None,
        *,
        overwrite: bool = False,
        key_types: Iterable[str] = (),
    ) -> Committer:
        """The committer that writes rows to a table. It has the parameters of `choose_committer_with_reason`."""
        committer, reason = self.choose_committer_with_reason(
            path, columns, byte_count, make_schema, overwrite=overwrite, key_types=key_types
        )
        _LOGGER.debug('Delta table "%s": %s (%s)', path, type(committer).__name__, reason)
        return committer

    def choose_committer_with_reason(
        self,
        path: str,
        columns: Sequence[str],
        byte_count: int | None,
        make_schema: Callable[[], pa.Schema] | None = None,
        *,
        overwrite: bool = False,
        key_types: Iterable[str] = (),
    ) -> tuple[Committer, str]:
        """The committer that writes rows to a table, and the reason for this choice.

        - `path`: the table
        - `columns`: the names of the columns of the rows
        - `byte_count`: about how many bytes the rows have; None if they are many
        - `make_schema`: returns the schema of the files that a runner would write. Without it, a `FileCommitter` is not
          chosen, and Spark writes the rows that are not small work.
        - `overwrite`: whether the rows replace all rows of the table
        - `key_types`: the Spark types of the columns that identify rows; empty if no rows are looked up
        """
        committer = self.choose_small_committer(path)
        if isinstance(committer, SparkCommitter):
            return committer, "only Spark writes this table"
        delta_rs = committer.delta_rs
        with self.access.translate_errors(path):
            if not self.is_small(byte_count):
                reason = "many rows" if byte_count is None else f"{byte_count} bytes"
            elif not has_exact_equality(key_types):
                reason = "a key that Arrow does not compare as PostgreSQL does"
            elif any(name.startswith(_RESERVED_PREFIX) for name in columns):
                reason = "a column name that a MERGE of delta-rs reserves"
            elif overwrite and delta_rs.has_permuted_columns(path, columns):
                reason = "columns in another order"
            elif overwrite and delta_rs.is_partitioned_by_other_columns(path, columns):
                reason = "partitions by a column that is dropped"
            else:
                return committer, f"{byte_count} bytes"
        if make_schema is None:
            return SparkCommitter(self.access), reason
        return self.choose_large_committer(
            path, make_schema(), overwrite=overwrite, can_replace_columns=overwrite
        ), reason

    def choose_apply_committer(
        self,
        path: str,
        schema: pa.Schema,
        byte_count: int | None,
        *,
        overwrite: bool = False,
        key_types: Iterable[str] = (),
    ) -> tuple[Committer, str]:
        """The committer that applies changes to a table, and the reason.

        It is a `FileCommitter` for any number of changes if this process can write the table's files, and otherwise that of
        `choose_merge_committer`. `schema` has the columns of the rows. The other parameters are those of
        `choose_committer_with_reason`.
        """
        large_committer = self.choose_large_committer(
            path, schema, overwrite=overwrite, translates_names=True
        )
        if isinstance(large_committer, FileCommitter):
            return large_committer, "its files are written anew, and this process commits them"
        committer, reason = self.choose_merge_committer(
            path, schema.names, byte_count, overwrite=overwrite, key_types=key_types
        )
        if isinstance(committer, SparkCommitter):
            return committer, f"Delta in Spark merges rows: {reason}"
        return committer, f"rows are merged, because {CANNOT_ADD_FILES}"

    def choose_merge_committer(
        self,
        path: str,
        columns: Sequence[str],
        byte_count: int | None,
        *,
        overwrite: bool = False,
        key_types: Iterable[str] = (),
    ) -> tuple[SmallCommitter, str]:
        """The committer that merges changes into a table, and the reason.

        The parameters are those of `choose_committer_with_reason`. `byte_count` is the size of the MERGE
        (`estimate_merge_bytes`).
        """
        committer, reason = self.choose_committer_with_reason(
            path, columns, byte_count, overwrite=overwrite, key_types=key_types
        )
        return (
            committer if isinstance(committer, InProcessCommitter) else SparkCommitter(self.access)
        ), reason

    def choose_large_committer(
        self,
        path: str,
        schema: pa.Schema,
        *,
        overwrite: bool = False,
        can_replace_columns: bool = False,
        translates_names: bool = False,
    ) -> LargeCommitter:
        """The committer that writes any number of rows to a table.

        It adds files with this schema, which a runner writes before the commit. If that is impossible, Spark commits.

        `can_replace_columns`: an overwrite may give the table other columns.
        `translates_names`: the caller uses `FileCommitter.make_table_store`, which translates the names of columns.
        Otherwise tables with column mapping are left to Spark.
        """
        if (delta_rs := self.delta_rs) is None:
            return SparkCommitter(self.access)
        with self.access.translate_errors(path):
            can_add_files = (
                (translates_names or delta_rs.is_unmapped(path))
                and delta_rs.can_write(path)
                and (
                    delta_rs.can_replace_rows(path, schema)
                    if overwrite and can_replace_columns
                    else delta_rs.can_add_files(path, schema, overwrite=overwrite)
                )
            )
        if not can_add_files:
            return SparkCommitter(self.access)
        return FileCommitter(delta_rs, self.access, self.wants_vectors)

    def choose_reader(self, path: str) -> DeltaRsRecords | SparkRecords:
        """The access to the lake by which the rows of a table are read.

        It is that of delta-rs if the table is readable (`DeltaRsRecords.is_readable`). A table with partitions is not,
        for example; Spark reads it.
        """
        if self.delta_rs is None:
            return self.spark_records
        with self.access.translate_errors(path):
            return self.delta_rs if self.delta_rs.is_readable(path) else self.spark_records

    def is_read_by_spark(self, path: str) -> bool:
        """True if only Spark can read the rows of a table (see `choose_reader`)."""
        return isinstance(self.choose_reader(path), SparkRecords)
