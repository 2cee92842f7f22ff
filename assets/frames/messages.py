"""Slot consumption: one peek of the slot -> rows of the change log, read by one executor."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.schema import CHANGE_LOG, NO_MESSAGES
from decoding.tuples import HeaderScanner
from resources.slot import read_messages

_KINDS = pa.array([chr(byte) for byte in range(256)], pa.string())


def drained_messages(spark: SparkSession, conninfo: str, query: str, slice_end: int) -> DataFrame:
    """The slot's messages up to `slice_end` with their order key, in the change log's columns.

    The headers (type, relation, transaction) are read from the bytes in numpy, message bodies stay as
    they are.
    """

    def drain(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            if batch.num_rows:
                yield from _with_headers(read_messages(conninfo, query), slice_end)

    return spark.range(0, 1, 1, 1).mapInArrow(drain, CHANGE_LOG)


def slice_summary() -> list[Column]:
    """Aggregates over a slice's messages: what its transformation has to know before it reads rows."""
    at = F.struct("commit_lsn", "ordinal", "data")
    return [
        F.collect_set(F.when(F.col("kind").isin("I", "U", "D"), F.col("relation_id"))).alias("relations"),
        F.collect_list(F.when(F.col("kind").isin("R", "T"), at)).alias("messages"),
    ]


def _with_headers(batches: Iterable[pa.RecordBatch], slice_end: int) -> Iterator[pa.RecordBatch]:
    scanner = HeaderScanner()
    for batch in batches:
        data = batch.column("data")
        headers = scanner.scan(data)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(np.full(len(data), slice_end, np.int64)),
                pa.array(headers.commit_lsn),
                pa.array(headers.ordinal),
                pa.array(headers.commit_time).cast(pa.timestamp("us", "UTC")),
                batch.column("xid"),
                _KINDS.take(pa.array(headers.kind)),
                pa.array(headers.relation_id),
                data,
            ],
            names=NO_MESSAGES.schema.names,
        )
