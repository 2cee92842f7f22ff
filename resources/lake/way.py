"""Who reads and writes a table's rows: this process, the executors as files, or Spark.

`LakeWays` decides it, and is the only place that does: nothing else combines where a lake is, how much there is, and what
delta-rs and Arrow cannot do.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto

import pyarrow as pa
from pyspark.sql.types import StructType

from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.requirements import COLUMN_MAPPING
from pgsieve.resources.lake.delta.tables import shared_tables
from pgsieve.resources.lake.stores.storage import Storage

#: Batches of a lake that delta-rs reaches are written without Spark up to this size, if nothing else is said.
SMALL_BYTES_DEFAULT = 8 * 1024 * 1024
#: Of replicas up to this size files are written once more without rows that go; in larger ones these are marked.
REWRITTEN_BYTES_DEFAULT = 64 * 1024 * 1024
#: How columns are named that delta-rs adds to those of a table.
_OF_DELTA_RS = "__delta_rs_"

#: Types of which Arrow tells values apart that PostgreSQL and Spark do not (0.0 and -0.0), or that are keys of Spark's only.
_INEXACT = ("float", "double", "array<")

_LOGGER = logging.getLogger(__name__)


class Way(Enum):
    """How rows come into a table."""

    #: They pass through this process, which writes them by delta-rs: few rows.
    IN_PROCESS = auto()
    #: The executors write Parquet files, which this process commits: many rows, and no Spark expression has to see them.
    FILES = auto()
    #: Spark writes them.
    SPARK = auto()


def is_exact(types: Iterable[str]) -> bool:
    """Whether values of these Spark types are equal in Arrow just where they are in PostgreSQL."""
    return not any(each.startswith(_INEXACT) for each in types)


def column_mapping(columns: Iterable[str]) -> dict[str, str]:
    """Delta properties of a new table: column mapping, only where Parquet forbids a name as it is."""
    if any(set(name) & set(" ,;{}()\n\t=") for name in columns):
        return {COLUMN_MAPPING: "name"}
    return {}


def names_at_every_depth(kind: StructType) -> list[str]:
    """The names of a struct's fields, and of the fields of those: Delta maps the names at every depth."""
    nested = (field.dataType for field in kind if isinstance(field.dataType, StructType))
    return [*kind.names, *(name for each in nested for name in names_at_every_depth(each))]


class LakeWays(LakeAccess):
    """A lake that knows who reads and writes its tables."""

    def __init__(
        self, storage: Storage, folders: Mapping[str, str] | None, small_bytes: int, *, vectors: bool
    ) -> None:
        super().__init__(storage, folders)
        #: delta-rs, where it reaches the lake and may write there.
        self._tables = shared_tables(self.store.options)
        self.local: LocalRecords | None = (
            LocalRecords(self.store, self._tables) if storage.by_delta_rs else None
        )
        self._small_bytes = small_bytes
        #: Whether the user has deletion vectors in large tables.
        self._vectors = vectors

    def is_small(self, size: int | None) -> bool:
        """Whether so many bytes may pass through this process; where they are not counted (None) they may not."""
        return self.local is not None and size is not None and size <= self._small_bytes

    def is_reached(self, path: str, columns: Iterable[str]) -> bool:
        """Whether delta-rs can write a table of these columns: names that are mapped, or were once, only Spark writes.

        So it does a table that asks of its writers what delta-rs does not do.
        """
        if self.local is None or column_mapping(columns):
            return False
        with self.refusing(path):
            return self.local.is_unmapped(path) and self.local.is_written(path)

    def way(
        self,
        path: str,
        columns: Sequence[str],
        size: int | None,
        schema: Callable[[], pa.Schema] | None = None,
        *,
        overwrite: bool = False,
        key: Iterable[str] = (),
    ) -> Way:
        """Who writes about `size` bytes (None: many) of rows with these columns into a table.

        Without the `schema` of files there is no way by files. `overwrite`: the rows replace the table's. `key` are the
        types of columns that rows are found by.
        """
        if self.local is None or not self.is_reached(path, columns):
            return _chosen(path, Way.SPARK, "delta-rs does not write it, or its names are mapped")
        with self.refusing(path):
            if not self.is_small(size):
                reason = "many rows" if size is None else f"{size} bytes"
            elif not is_exact(key):
                reason = "a key that Arrow does not compare as PostgreSQL does"
            elif any(name.startswith(_OF_DELTA_RS) for name in columns):
                reason = "a name that a MERGE of delta-rs' has for itself"
            elif overwrite and self.local.permutes(path, columns):
                reason = "columns in another order"
            elif overwrite and self.local.is_partitioned_by_others(path, columns):
                reason = "partitions by a column that goes"
            else:
                return _chosen(path, Way.IN_PROCESS, f"{size} bytes")
            if schema is not None and self.local.takes_files(path, schema(), overwrite=overwrite):
                return _chosen(path, Way.FILES, reason)
        return _chosen(path, Way.SPARK, reason)

    def takes_files(self, path: str, columns: Sequence[str], schema: pa.Schema) -> bool:
        """Whether this process may commit files of this schema, of rows with these columns, to a table; else Spark writes it."""
        if self.local is None or not self.is_reached(path, columns):
            return False
        with self.refusing(path):
            return self.local.takes_files(path, schema)

    def takes_rewriting(self, path: str, columns: Collection[str]) -> bool:
        """Whether this process may replace files of a table by others with some rows less; `columns` are those of its rows."""
        if self.local is None:
            return False
        with self.refusing(path):
            return row_removal.takes_rewriting(self.local, path, columns)

    def takes_marking(self, path: str, columns: Collection[str]) -> bool:
        """Whether this process may mark rows of a table in deletion vectors; `columns` are those of its rows."""
        if self.local is None or not self._vectors:
            return False
        with self.refusing(path):
            return row_removal.takes_marking(self.local, path, columns)

    def way_to_read(self, path: str, size: int | None = None) -> Way:
        """Who reads so many bytes of a table, or its rows as they come (None): this process where no column is mapped."""
        if self.local is None or not (size is None or self.is_small(size)):
            return Way.SPARK
        with self.refusing(path):
            return Way.IN_PROCESS if self.local.is_readable(path) else Way.SPARK


def _chosen(path: str, way: Way, reason: str) -> Way:
    _LOGGER.debug('Delta table "%s": %s (%s)', path, way.name, reason)
    return way
