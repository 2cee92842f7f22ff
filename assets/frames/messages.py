"""Slot consumption: one peek of the slot -> rows of the change log."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.pandas.types import from_arrow_schema

from assets.frames.schema import CHANGE_LOG
from decoding.tuples import HeaderScanner
from resources.postgres import without_values
from resources.slot import read_messages

_CHANGES, _DESCRIPTIONS = ("I", "U", "D"), ("R", "T")
_KINDS = pa.array([chr(byte) for byte in range(256)], pa.string())


def drained_messages(spark: SparkSession, conninfo: str, query: str, slice_end: int) -> DataFrame:
    """The change log's rows of a slice, read from the slot by one executor."""

    def drain(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            if batch.num_rows:
                with without_values():
                    arrays = (messages.column("data") for messages in read_messages(conninfo, query))
                    yield from change_log_rows(arrays, slice_end)

    return spark.range(0, 1, 1, 1).mapInArrow(drain, from_arrow_schema(CHANGE_LOG))


def change_log_rows(messages: Iterable[pa.Array], slice_end: int) -> Iterator[pa.RecordBatch]:
    """Messages of transactions in commit order (binary) with their order key, in the change log's columns.

    The headers (type, relation, transaction) are read from the bytes in numpy, message bodies stay as
    they are. A message's number in the slice orders the slice like the order key does, in one integer.
    """
    scanner, count = HeaderScanner(), 0
    for data in messages:
        headers = scanner.scan(data)
        columns = [
            pa.array(np.full(len(data), slice_end, np.int64)),
            pa.array(headers.commit_lsn),
            pa.array(headers.ordinal),
            pa.array(np.arange(count, count + len(data))),
            pa.array(headers.commit_time).cast(pa.timestamp("us", "UTC")),
            pa.array(headers.xid),
            _KINDS.take(pa.array(headers.kind)),
            pa.array(headers.relation_id),
            data,
        ]
        count += len(data)
        yield pa.RecordBatch.from_arrays(columns, schema=CHANGE_LOG)


def slice_summary() -> list[Column]:
    """Aggregates over a slice's messages: what its transformation has to know before it reads rows."""
    at = F.struct("commit_lsn", "ordinal", "data")
    return [
        F.coalesce(F.sum(F.length("data")), F.lit(0)).alias("bytes"),
        F.collect_set(F.when(F.col("kind").isin(*_CHANGES), F.col("relation_id"))).alias("relations"),
        F.collect_list(F.when(F.col("kind").isin(*_DESCRIPTIONS), at)).alias("messages"),
    ]


class SliceSummary:
    """The same as `slice_summary`, of batches that pass through this process."""

    def __init__(self) -> None:
        self._bytes = 0
        self._relations: set[int] = set()
        self._messages: list[dict[str, Any]] = []
        #: What stopped the batches: whoever writes them would only say that they ended.
        self.failure: Exception | None = None

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass the batches on and take note of them."""
        try:
            yield from self._noted(batches)
        except Exception as error:
            self.failure = error
            raise

    def _noted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            kind, relation = batch.column("kind"), batch.column("relation_id")
            self._bytes += batch.column("data").nbytes
            changes = pc.is_in(kind, pa.array(_CHANGES))
            self._relations.update(pc.unique(relation.filter(changes)).to_pylist())
            described = batch.filter(pc.is_in(kind, pa.array(_DESCRIPTIONS)))
            self._messages += described.select(["commit_lsn", "ordinal", "data"]).to_pylist()
            yield batch

    def get(self) -> Mapping[str, Any]:
        """What has passed."""
        return {"bytes": self._bytes, "relations": sorted(self._relations), "messages": self._messages}
