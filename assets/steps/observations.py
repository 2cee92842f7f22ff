"""Counts and notes that Spark collects while a query runs, so that nothing is computed a second time only to be counted.

A part is the rows of one task. A function of Arrow batches can add a note to its part: a text, for example the counts of
the rows as JSON. So the counts come from the same function, whether Spark or this process runs it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.resources.lake.row_sources import RowSource

#: The column with notes. A row with a note has no other value. It is not a row of the table.
NOTE = "note"


def get_metrics(
    observation: Observation, metrics: Sequence[Column], rows: Callable[[], DataFrame]
) -> Mapping[str, Any]:
    """Maps the name of each metric to its value, as Spark has observed it.

    If Spark does not report them, the metrics are computed from `rows`, which have to be the same rows.
    """
    return _read_reported(observation) or aggregate_metrics(rows(), metrics)


def _read_reported(observation: Observation) -> Mapping[str, Any]:
    """Maps the name of each metric to its value. Empty if Spark does not report them.

    Spark observes nothing if Delta leaves a write out, because the table has already reached the LSN of the write. Then
    `Observation.get` would wait without end. A Spark Connect server waits only a tenth of a second for the observations
    of a query (Observation.getRowOrEmpty in Spark's sql/api). If a busy server gets them later, it does not report them.
    """
    java_observation = getattr(observation, "_jo", None)  # Spark Connect has none
    if java_observation is not None and not java_observation.getRowOrEmpty().isDefined():
        return {}
    metrics: Mapping[str, Any] = observation.get
    return metrics


def aggregate_metrics(rows: DataFrame, metrics: Sequence[Column]) -> Mapping[str, Any]:
    """Maps the name of each metric of some rows to its value, computed by a query of its own."""
    row = rows.agg(*metrics).first()
    assert row is not None
    return row.asDict()


def schema_with_note(schema: pa.Schema) -> pa.Schema:
    """The columns of rows that may have a note."""
    return schema.append(pa.field(NOTE, pa.string()))


def with_note(
    rows: Iterable[pa.RecordBatch], schema: pa.Schema, make_note: Callable[[], str]
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part, and then a row with the note of the part. `make_note` is called after the last row."""
    note_schema = schema_with_note(schema)
    for batch in rows:
        columns = [*batch.columns, pa.nulls(batch.num_rows, pa.string())]
        yield pa.RecordBatch.from_arrays(columns, schema=note_schema)
    yield pa.RecordBatch.from_pylist([{NOTE: make_note()}], note_schema)


@dataclass(frozen=True)
class NotedRows:
    """Rows that Spark makes, and the notes of their parts (see `with_note`)."""

    frame: DataFrame

    def write(self, write_rows: Callable[[DataFrame], None]) -> list[str] | None:
        """Let the function `write_rows` write the rows. Returns the notes, or None if Spark does not report them."""
        # Spark makes another kind of Observation for a session of Spark Connect, so the session has to exist by now.
        observation = Observation()
        # The notes are observed as text, because Spark 4.0 would return an array as a Java object.
        notes = F.to_json(F.collect_list(NOTE)).alias(NOTE)
        write_rows(self.frame.observe(observation, notes).where(F.col(NOTE).isNull()).drop(NOTE))
        text = _read_reported(observation).get(NOTE)
        return None if text is None else [str(note) for note in json.loads(text)]

    def notes(self) -> list[str]:
        """Make the rows, and return only the notes."""
        noted_rows = self.frame.where(F.col(NOTE).isNotNull()).select(NOTE).toArrow()
        return [str(note) for note in noted_rows[NOTE].to_pylist()]


def collect_notes(
    rows: RowSource[pa.RecordBatch], make_note: Callable[[Iterable[pa.RecordBatch]], str]
) -> list[str]:
    """The notes that a function writes about the parts of some rows."""

    def note_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from with_note((), pa.schema([]), lambda: make_note(batches))

    notes = rows.compute(note_rows, schema_with_note(pa.schema([])))[NOTE]
    return [str(note) for note in notes.to_pylist()]
