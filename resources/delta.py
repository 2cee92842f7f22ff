"""The lake: paths of Delta tables, and writes whose position stands in the same commit as the data.

In: the lake's URI and a Spark session. Out: DataFrames, and commits that carry a position as Delta's `txn`
(application id and version) and as user metadata. A write repeated with the same version changes nothing
(Delta protocol, transaction identifiers). Raises `LakeError` where the lake cannot be read or written.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
from deltalake.exceptions import DeltaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from decoding.errors import PgsieveError
from resources.local_records import COLUMN_MAPPING, LocalRecords, writable
from resources.parquet_files import WRITTEN_DDL, write_files
from resources.records import APPLICATION, Records, commit_metadata, quoted
from resources.spark import SparkEngine
from resources.spark_records import SparkRecords

_TXN_APP = "spark.databricks.delta.write.txnAppId"
_TXN_VERSION = "spark.databricks.delta.write.txnVersion"
_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_VECTORS = "spark.databricks.delta.merge.deletionVectors.persistent"
_WANT_VECTORS = "spark.databricks.delta.properties.defaults.enableDeletionVectors"

#: Spark configuration of pgsieve's own: batches of a local lake up to this size are written without Spark.
SMALL_BYTES = "spark.pgsieve.smallBytes"
SMALL_BYTES_DEFAULT = 8 * 1024 * 1024


class LakeError(PgsieveError):
    """The lake cannot be read or written."""


def escape(identifier: str) -> str:
    """An identifier as a folder name, reversibly: all but [a-z0-9_] becomes ~XX (UTF-8, hexadecimal).

    Upper case is escaped too, for file systems that fold it, and a leading underscore, which Spark hides.
    """
    escaped = re.sub(
        r"[^a-z0-9_]", lambda found: "".join(f"~{byte:02X}" for byte in found.group().encode()), identifier
    )
    return "~5F" + escaped[1:] if escaped.startswith("_") else escaped


def unescape(folder: str) -> str:
    """The identifier that `escape` made a folder name of."""
    raw = re.sub(rb"~([0-9A-F]{2})", lambda found: bytes([int(found.group(1), 16)]), folder.encode())
    return raw.decode()


class Lake:
    """The Delta tables of one lake."""

    def __init__(
        self, uri: str, session: Callable[[], SparkSession], small_bytes: int = SMALL_BYTES_DEFAULT
    ) -> None:
        self.uri = uri.rstrip("/")
        self._session = session
        #: Writes of small batches without Spark; None for a lake at a URI.
        self.local: LocalRecords | None = None if "://" in self.uri else LocalRecords()
        self.records: Records = self.local or SparkRecords(session)
        self._small_bytes = small_bytes

    def writes_small(self, size: int) -> LocalRecords | None:
        """What writes a batch of so many bytes without Spark; None where Spark has to."""
        return self.local if size <= self._small_bytes else None

    @property
    def spark(self) -> SparkSession:
        """The session, made at first use: a run with nothing to do in a local lake needs none."""
        return self._session()

    # paths

    def change_log(self, slot_owner: str) -> str:
        """The raw messages of a source's slot (of a subscription's, where it has one of its own)."""
        return f"{self.uri}/_pgsieve/{escape(slot_owner)}/change_log"

    def slices(self, slot_owner: str) -> str:
        """What each slice of the change log holds besides row changes; made again where it is missing."""
        return f"{self.uri}/_pgsieve/{escape(slot_owner)}/slices"

    def prepared(self, slot_owner: str) -> str:
        """The prepared transactions that waited for their second phase when the change log was last written."""
        return f"{self.uri}/_pgsieve/{escape(slot_owner)}/prepared"

    def replica(self, subscription: str, schema: str, table: str) -> str:
        """The replica of a table: the published columns, current rows only."""
        return f"{self.uri}/{subscription}/{escape(schema)}/{escape(table)}"

    def changes(self, subscription: str, schema: str, table: str) -> str:
        """The transformed changes of a table."""
        return f"{self.uri}/{subscription}/_changes/{escape(schema)}/{escape(table)}"

    def transformed(self, subscription: str) -> str:
        """One row a slice and table: what the slice changed, and that it has been transformed."""
        return f"{self.uri}/{subscription}/_transformed"

    def table_states(self, subscription: str) -> str:
        """The table sync states, the newest row of a table counts."""
        return f"{self.uri}/{subscription}/_table_states"

    def cuts(self, subscription: str) -> str:
        """The LSNs at which all replica tables agree, with their Delta versions."""
        return f"{self.uri}/{subscription}/_cuts"

    # reading

    def current(self, path: str) -> DataFrame:
        """The table at a path that is known to exist."""
        return self.spark.read.format("delta").load(path)

    def slices_of(self, path: str, ends: Collection[int]) -> DataFrame:
        """The rows of some slices: in a local lake by their files, without reading Delta's log in Spark."""
        found = self.local.slice_files(path, ends) if self.local else None
        if found is None:
            return self.current(path).where(F.col("slice").isin(sorted(ends)))
        schema, files = found
        reader = self.spark.read.schema(StructType.fromJson(json.loads(schema)))
        return reader.parquet(*files) if files else reader.parquet(path).limit(0)

    # writing

    def check_writable(self) -> None:
        """Raise LakeError now rather than after the copy; only a local lake can be tried cheaply."""
        if "://" in self.uri:
            return
        try:
            folder = Path(self.uri)
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".pgsieve-write-probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise LakeError(
                f'lake "{self.uri}" cannot be written: {error.strerror}',
                hint="choose another `lake` in pgsieve.yaml, or give this user the right to write there",
            ) from error

    def write(
        self,
        frame: DataFrame,
        path: str,
        *,
        position: int,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        """Append to (or overwrite) a table in one commit that holds `position`; done once per position.

        `properties` are those of a new table. `size` is about how many bytes the rows have, where that is
        known: few are written without Spark, unless names have to be mapped.
        """
        properties = properties or {}
        local = None if COLUMN_MAPPING in properties else self.local
        if local and size is not None and self.writes_small(size):
            with self.refusing(path):
                rows = writable(frame.toArrow())
                local.write(
                    path, rows, position, overwrite=overwrite, metadata=metadata, properties=properties
                )
            return
        schema = writable(self.spark.createDataFrame([], frame.schema).toArrow()).schema
        if local and local.has_schema(path, schema):
            written = frame.mapInArrow(lambda batches: write_files(path, schema, batches), WRITTEN_DDL)
            self.commit_files(
                written, path, schema, position, overwrite=overwrite, metadata=metadata, properties=properties
            )
            return
        writer = (
            frame.write.format("delta")
            .mode("overwrite" if overwrite else "append")
            .option("txnAppId", APPLICATION)
            .option("txnVersion", str(position))
            .option("userMetadata", commit_metadata(position, metadata))
            .options(**properties, **(options or {}))
        )
        writer = (
            writer.option("overwriteSchema", "true") if overwrite else writer.option("mergeSchema", "true")
        )
        with self.refusing(path):
            writer.save(path)

    def commit_files(
        self,
        written: DataFrame,
        path: str,
        schema: pa.Schema,
        position: int,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """Have the executors write files (`resources.parquet_files`), and commit them; returns their rows."""
        assert self.local is not None
        with self.refusing(path):
            files: list[dict[str, Any]] = written.toArrow().to_pylist()
            self.local.commit(
                path,
                schema,
                files,
                position,
                overwrite=overwrite,
                metadata=metadata,
                properties=properties,
            )
        return files

    @contextmanager
    def committing(self, position: int, *, vectors: bool) -> Iterator[None]:
        """Within the block every SQL write of this session is done once per table and position.

        `vectors` lets MERGE mark rows in deletion vectors, in tables that have them.
        """
        conf = self.spark.conf
        conf.set(_TXN_APP, APPLICATION)
        conf.set(_TXN_VERSION, str(position))
        conf.set(_METADATA, commit_metadata(position))
        conf.set(_VECTORS, str(vectors).lower())
        try:
            yield
        finally:
            for key in (_TXN_APP, _TXN_VERSION, _METADATA, _VECTORS):
                conf.unset(key)

    def enable_deletion_vectors(self, path: str) -> None:
        """Let a table that was small so far mark rows in deletion vectors, unless the user turned them off."""
        wanted = self.spark.conf.get(_WANT_VECTORS, "true") == "true"
        if wanted and not self.records.has_deletion_vectors(path):
            with self.refusing(path):
                self.spark.sql(
                    f"alter table delta.{quoted(path)} set tblproperties ('delta.enableDeletionVectors' = 'true')"
                )

    @contextmanager
    def refusing(self, path: str) -> Iterator[None]:
        """Name the table when it cannot be read or written."""
        try:
            yield
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise LakeError(
                f'Delta table "{path}": {first_line(error)}',
                hint="`pgsieve run` goes on from the last commit",
            ) from error
        except PySparkException as error:
            raise_ours(error)
            raise LakeError(
                f'Delta table "{path}": {first_line(error)}',
                hint="see the Spark log above; `pgsieve run` goes on from the last commit",
            ) from error


def first_line(error: BaseException) -> str:
    """The first line of an engine's message: the rest is its stack."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def raise_ours(error: BaseException) -> None:
    """Raise the pgsieve error that an executor raised, when a Spark error carries one."""
    for line in reversed(str(error).splitlines()):
        found = re.match(r"(?:decoding|resources|assets)[\w.]*\.(\w+): (.*)", line.strip())
        if found:
            raise ExecutorError(found.group(2), kind=found.group(1)) from error


class ExecutorError(PgsieveError):
    """An error of pgsieve's that was raised on a Spark executor; `kind` is its class."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class LakeResource(dg.ConfigurableResource["LakeResource"]):
    """The lake as a Dagster resource: its URI, and the Spark engine that reads and writes it."""

    uri: str
    engine: SparkEngine

    def open(self) -> Lake:
        """The lake; its session is made when it is first needed."""
        small = int(self.engine.spark_config.get(SMALL_BYTES, SMALL_BYTES_DEFAULT))
        return Lake(self.uri, lambda: self.engine.session, small)
