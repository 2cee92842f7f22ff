"""Messages of a slot -> rows of the change log."""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from pgsieve.assets.steps.observations import NotedRows, noted_schema, with_note
from pgsieve.assets.steps.records.change_log import CHANGE_LOG
from pgsieve.assets.steps.records.slices import SliceSummary
from pgsieve.assets.steps.slot_consumption.backlog import transactions_from
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.resources.lake.executors import spark_schema
from pgsieve.resources.postgres.errors import without_values
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.slot import read_messages

_KINDS = pa.array([chr(byte) for byte in range(256)], pa.string())


def drained_messages(
    spark: SparkSession, conninfo: Conninfo, query: str, begin: int, slice_end: int
) -> NotedRows:
    """The change log's rows of the slice [begin, slice_end), read from the slot by one executor; the note is its summary."""

    def drain(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            if batch.num_rows:
                summary = SliceSummary()

                def note(summary: SliceSummary = summary) -> str:
                    summary.refuse_undescribed()
                    return summary.text()

                with without_values():
                    arrays = (messages.column("data") for messages in read_messages(conninfo, query))
                    relations = RelationDescriptions()
                    transactions = transactions_from(begin, arrays, relations)
                    relations.begin_slice()
                    described = map(relations.insert_missing, transactions.before(None))
                    rows = change_log_rows(chain.from_iterable(described), slice_end)
                    yield from with_note(summary.of(rows), CHANGE_LOG, note)

    note_schema = spark_schema(noted_schema(CHANGE_LOG))
    return NotedRows(spark.range(0, 1, 1, 1).mapInArrow(drain, note_schema))


def change_log_rows(messages: Iterable[pa.Array], slice_end: int) -> Iterator[pa.RecordBatch]:
    """The change log's rows of messages, which are binary arrays of transactions in commit order.

    Headers (type, relation, transaction) are read from the bytes by numpy; the messages stay as they are. The column
    `number` orders a slice as the order key does, in one integer.
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
