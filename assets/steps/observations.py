"""Metrics and notes that Spark observes while a query runs, so that nothing is computed twice to be counted.

A note is a text that a function of Arrow batches makes about the rows of its part, such as their counts as JSON. So
one function counts, whoever runs it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

#: The column with notes. A row with a note has no other value, and is no row of a table.
NOTE = "note"


def observed_metrics(
    observation: Observation, metrics: Sequence[Column], rows: Callable[[], DataFrame]
) -> Mapping[str, Any]:
    """The observed metrics by name; if Spark reports none, they are computed from `rows`, which are the same rows.

    A Spark Connect server waits a tenth of a second for a query's observations. A busy server leaves them out
    (Observation.getRowOrEmpty in Spark's sql/api).
    """
    return observation.get or aggregate_metrics(rows(), metrics)


def aggregate_metrics(rows: DataFrame, metrics: Sequence[Column]) -> Mapping[str, Any]:
    """The metrics of rows, computed by a query of their own."""
    row = rows.agg(*metrics).first()
    assert row is not None
    return row.asDict()


def noted_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of rows with notes."""
    return schema.append(pa.field(NOTE, pa.string()))


def with_note(
    rows: Iterable[pa.RecordBatch], schema: pa.Schema, note: Callable[[], str]
) -> Iterator[pa.RecordBatch]:
    """The rows of a part, then a row with the part's note; `note` is called after the last row."""
    note_schema = noted_schema(schema)
    for batch in rows:
        columns = [*batch.columns, pa.nulls(batch.num_rows, pa.string())]
        yield pa.RecordBatch.from_arrays(columns, schema=note_schema)
    yield pa.RecordBatch.from_pylist([{NOTE: note()}], note_schema)


@dataclass(frozen=True)
class NotedRows:
    """Rows that Spark makes, and the notes of their parts (`with_note`)."""

    frame: DataFrame

    def write(self, write: Callable[[DataFrame], None]) -> list[str] | None:
        """Let `write` write the rows; returns the notes, None where Spark reports none."""
        # The session exists by now: its kind decides the kind of the observation.
        observation = Observation()
        # As text: Spark 4.0 observes an array as a Java object.
        notes = F.to_json(F.collect_list(NOTE)).alias(NOTE)
        write(self.frame.observe(observation, notes).where(F.col(NOTE).isNull()).drop(NOTE))
        text = observation.get.get(NOTE)
        return None if text is None else [str(note) for note in json.loads(text)]

    def notes(self) -> list[str]:
        """Make the rows, and keep only the notes."""
        noted = self.frame.where(F.col(NOTE).isNotNull()).select(NOTE).toArrow()
        return [str(note) for note in noted[NOTE].to_pylist()]


def notes_of(rows: DataFrame, note: Callable[[Iterable[pa.RecordBatch]], str]) -> list[str]:
    """The notes that a function makes about the parts of some rows."""

    def noted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from with_note((), pa.schema([]), lambda: note(batches))

    return NotedRows(rows.mapInArrow(noted, f"{NOTE} string")).notes()
