"""The verdict of a row filter on each row of an Arrow batch, as PostgreSQL comes to it.

In: a tree of `pgsieve.decoding.row_filters.nodes`, and batches whose columns are of the Arrow types that
`pgsieve.decoding.values.types` gives PostgreSQL's types without an override. Out: true, false or NULL for each row, in
which NULL counts as no match (section 29.4). Raises NotEvaluableError before any row is read, for a tree that has
a part with no counterpart here; FilterValueError or NumericError, with PostgreSQL's words and SQLSTATE and no value, for the
first row of which PostgreSQL would raise an error.

Every function of `pgsieve.decoding.row_filters.procedures` has its counterpart. What is refused, a tree that nests deeper than
Python recurses, has none in Spark either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from pgsieve.decoding.row_filters.evaluation.compiler import Program, compiled
from pgsieve.decoding.row_filters.evaluation.values import python_values
from pgsieve.decoding.row_filters.nodes import Node


def condition(node: Node) -> Callable[[pa.RecordBatch], pa.BooleanArray]:
    """Return a row filter's tree as a function of batches; it may be called by several threads at once."""
    program = compiled(node)

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        return pa.array(map(program.evaluate, _rows(program, batch)), pa.bool_())

    return verdicts_on


def verdicts(node: Node, batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the verdict of a row filter's tree on each row of a batch."""
    return condition(node)(batch)


def _rows(program: Program, batch: pa.RecordBatch) -> Iterator[list[Any]]:
    """Return the values that the program reads, row by row, and room for those that it keeps."""
    columns = [python_values(batch.column(name), type_oid) for name, type_oid in program.columns.items()]
    room = [None] * program.kept
    # The row's number makes rows of no columns as many as the batch has.
    return ([*row, *room] for row in zip(*columns, range(batch.num_rows), strict=True))
