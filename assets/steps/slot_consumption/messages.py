"""Makes rows of the change log (a Delta table) from the messages of a slot."""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from pgsieve.assets.steps.observations import NotedRows, schema_with_note, with_note
from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA
from pgsieve.assets.steps.records.slices import SliceSummary
from pgsieve.assets.steps.slot_consumption.backlog import skip_earlier_transactions
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.resources.lake.runners import to_spark_schema
from pgsieve.resources.postgres.errors import remove_values
from pgsieve.resources.postgres.peeks import read_messages
from pgsieve.resources.postgres.sessions import Conninfo

#: Maps the first byte of a message to its kind, which is a letter.
_KIND_LETTERS = pa.array([chr(byte) for byte in range(256)], pa.string())


def read_slice_by_executor(
    spark: SparkSession, conninfo: Conninfo, query: str, begin: int, slice_end: int
) -> NotedRows:
    """Let one executor read a slice from the slot. Returns the rows for the change log, with a note.

    The note is the slice's summary, as a text that Spark returns beside the rows.

    The slice has the transactions whose commit LSN is at or after `begin` and before `slice_end`.
    """

    def make_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                summary = SliceSummary()

                def make_note(summary: SliceSummary = summary) -> str:
                    summary.refuse_undescribed_relations()
                    return summary.to_json()

                with remove_values():
                    arrays = (messages.column("data") for messages in read_messages(conninfo, query))
                    relations = RelationDescriptions()
                    transactions = skip_earlier_transactions(begin, arrays, relations)
                    relations.begin_slice()
                    described_messages = map(
                        relations.insert_missing_descriptions, transactions.take_before(None)
                    )
                    rows = make_change_log_rows(chain.from_iterable(described_messages), slice_end)
                    yield from with_note(summary.collect(rows), CHANGE_LOG_SCHEMA, make_note)

    note_schema = to_spark_schema(schema_with_note(CHANGE_LOG_SCHEMA))
    return NotedRows(spark.range(0, 1, 1, 1).mapInArrow(make_rows, note_schema))


def make_change_log_rows(messages: Iterable[pa.Array], slice_end: int) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the change log for messages.

    `messages` are binary arrays with transactions in commit order. The headers of messages (type, relation,
    transaction) are read from the bytes by numpy, and the messages themselves stay as they are. The column `number`
    counts the messages of a slice, in the order of their order keys (commit LSN, ordinal).
    """
    scanner, count = HeaderScanner(), 0
    for message_array in messages:
        headers = scanner.scan(message_array)
        columns = [
            pa.array(np.full(len(message_array), slice_end, np.int64)),
            pa.array(headers.commit_lsn),
            pa.array(headers.ordinal),
            pa.array(np.arange(count, count + len(message_array))),
            pa.array(headers.commit_time).cast(pa.timestamp("us", "UTC")),
            pa.array(headers.xid),
            _KIND_LETTERS.take(pa.array(headers.kind)),
            pa.array(headers.relation_id),
            message_array,
        ]
        count += len(message_array)
        yield pa.RecordBatch.from_arrays(columns, schema=CHANGE_LOG_SCHEMA)
