"""The table `slices` of a stream. It has a summary of each slice of the change log (the table of the slot's messages).

A slot stream is a slot with the subscriptions that read it, and a slice is the changes from one position of the slot to
another. Because of the summary, a step learns what a slice contains without reading all of its messages.

The step `slot_consumption` writes the summary after the slice. If a row is missing, the summary is made again from the
messages of the slice.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION
from pgsieve.decoding.errors import ProtocolError
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.lake import Lake

#: A row has the summary of a slice: the bytes of its messages; the oids of the relations with changes, and the bytes of
#: the changes of each; and its Relation and Truncate messages. A Relation message is needed to decode the changes of its
#: relation. `relation_bytes` has the order of `relations`. It is NULL in rows that earlier versions of pgsieve wrote.
SLICE_SCHEMA = pa.schema(
    {
        "slice": pa.int64(),
        "bytes": pa.int64(),
        "relations": pa.list_(pa.int64()),
        "relation_bytes": pa.list_(pa.int64()),
        "messages": pa.list_(
            pa.struct({"commit_lsn": pa.int64(), "ordinal": pa.int64(), "data": pa.binary()})
        ),
    }
)

#: The kinds of messages: INSERT, UPDATE and DELETE are changes of rows. Relation and Truncate messages are kept in the
#: summary.
_ROW_CHANGE_KINDS, _KEPT_KINDS = ("I", "U", "D"), ("R", "T")


class SliceSummary:
    """Summarises the messages of a slice, batch by batch, while they pass to the writer of the change log.

    `expect_bytes` is told how many bytes of messages a table with changes has on average, so that it can prepare for
    the next step. The largest table has at least about as many.
    """

    def __init__(self, expect_bytes: Callable[[int], None] | None = None) -> None:
        self._expect_bytes = expect_bytes
        self._bytes = 0
        self._bytes_by_relation = Counter[int]()
        #: The identifiers (xid) of the transactions in the batches.
        self.xids: set[int] = set()
        self._kept_messages: list[dict[str, Any]] = []
        #: The error that the source of the batches has raised. The writer of the change log would hide it.
        self.failure: Exception | None = None

    def collect(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches, and add them to the summary."""
        try:
            yield from self._summarize(batches)
        except Exception as error:
            self.failure = error
            raise

    def _summarize(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            kind, relation = batch.column("kind"), batch.column("relation_id")
            self._bytes += batch.column("data").nbytes
            is_row_change = pc.is_in(kind, pa.array(_ROW_CHANGE_KINDS))
            changes = pa.table([relation, pc.binary_length(batch.column("data"))], ["relation", "bytes"])
            sums = changes.filter(is_row_change).group_by("relation").aggregate([("bytes", "sum")])
            relations, byte_counts = (sums.column(name).to_pylist() for name in ("relation", "bytes_sum"))
            self._bytes_by_relation.update(dict(zip(relations, byte_counts, strict=True)))
            if self._expect_bytes is not None:
                self._expect_bytes(self._bytes // max(len(self._bytes_by_relation), 1))
            self.xids.update(pc.unique(batch.column("xid").filter(pc.equal(kind, "B"))).to_pylist())
            kept_messages = batch.filter(pc.is_in(kind, pa.array(_KEPT_KINDS)))
            self._kept_messages += kept_messages.select(["commit_lsn", "ordinal", "data"]).to_pylist()
            yield batch

    def refuse_undescribed_relations(self) -> None:
        """Raise ProtocolError if a relation has changes, but no Relation message in the slice.

        Without that message, the changes of the relation cannot be decoded.
        """
        described_relations = {
            int.from_bytes(message["data"][1:5])
            for message in self._kept_messages
            if message["data"][:1] == b"R"
        }
        for relation_id in sorted(self._bytes_by_relation.keys() - described_relations):
            raise ProtocolError(
                f"no Relation message has described relation {relation_id} before its change",
                hint="report it with the server's version: nothing is confirmed, so nothing is lost",
                sqlstate=PROTOCOL_VIOLATION,
            )

    def to_row(self) -> Mapping[str, Any]:
        """The summary, as the contents of a row of `slices`."""
        relations = sorted(self._bytes_by_relation)
        return {
            "bytes": self._bytes,
            "relations": relations,
            "relation_bytes": [self._bytes_by_relation[relation] for relation in relations],
            "messages": self._kept_messages,
        }

    def to_json(self) -> str:
        """The summary as JSON."""
        messages = [{**message, "data": message["data"].hex()} for message in self._kept_messages]
        return json.dumps({**self.to_row(), "messages": messages})


def join_summaries(texts: Iterable[str]) -> Mapping[str, Any]:
    """Join the summaries of the parts of a slice. `texts` are the results of `SliceSummary.to_json`."""
    parts = [json.loads(text) for text in texts]
    bytes_by_relation = Counter[int]()
    for part in parts:
        bytes_by_relation.update(dict(zip(part["relations"], part["relation_bytes"], strict=True)))
    relations = sorted(bytes_by_relation)
    return {
        "bytes": sum(part["bytes"] for part in parts),
        "relations": relations,
        "relation_bytes": [bytes_by_relation[relation] for relation in relations],
        "messages": [
            {**message, "data": bytes.fromhex(message["data"])}
            for part in parts
            for message in part["messages"]
        ],
    }


@dataclass(frozen=True)
class Slices:
    """The table `slices` of one stream."""

    lake: Lake
    slot_stream: SlotStream

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.slices(self.slot_stream.name)

    def read_row(self, slice_end: int) -> Mapping[str, Any] | None:
        """The summary of the slice that ends at an LSN. None if a run died before it wrote the summary."""
        rows = self.lake.records.rows(self.path, f"slice = {slice_end:d}")
        return rows[0] if rows else None

    def append(self, slice_end: int, summary: Mapping[str, Any]) -> Mapping[str, Any]:
        """Record the summary of a slice; returns the row."""
        row = {
            "slice": slice_end,
            "bytes": summary["bytes"],
            "relations": list(summary["relations"]),
            "relation_bytes": list(summary["relation_bytes"]),
            "messages": [
                {
                    "commit_lsn": message["commit_lsn"],
                    "ordinal": message["ordinal"],
                    "data": bytes(message["data"]),
                }
                for message in summary["messages"]
            ],
        }
        self.lake.records.append(self.path, pa.Table.from_pylist([row], SLICE_SCHEMA), slice_end)
        reach(Failpoint.SLICE_SUMMARIZED)
        return row
