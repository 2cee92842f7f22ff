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
from contextlib import suppress
from itertools import repeat
from typing import Any

import pyarrow as pa

from pgsieve.decoding.row_filters.evaluation.columns import NotColumnarError, Values, columnar
from pgsieve.decoding.row_filters.evaluation.compiler import Program, compiled
from pgsieve.decoding.row_filters.evaluation.values import python_values
from pgsieve.decoding.row_filters.nodes import Logical, Node


def condition(*trees: Node) -> Callable[[pa.RecordBatch], pa.BooleanArray]:
    """Return row filters' trees as a function of batches, which several threads may call at once.

    Of several filters a row has to pass one. They are tried in order, and no further than needed (pgoutput_row_filter_init()
    in src/backend/replication/pgoutput/pgoutput.c joins them with OR).
    """
    tree = trees[0] if len(trees) == 1 else Logical("OR", trees)
    with suppress(NotColumnarError):
        compute = columnar(tree)
        return lambda batch: _every_row(compute(batch), batch)
    program = compiled(tree)

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        return pa.array(map(program.evaluate, _rows(program, batch)), pa.bool_())

    return verdicts_on


def verdicts(node: Node, batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the verdict of a row filter's tree on each row of a batch."""
    return condition(node)(batch)


def _every_row(values: Values, batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the verdict of each row of a batch."""
    return pa.repeat(values, batch.num_rows) if isinstance(values, pa.Scalar) else values


def _rows(program: Program, batch: pa.RecordBatch) -> Iterator[list[Any]]:
    """Return the values that the program reads, row by row, and room for those that it keeps."""
    columns = [python_values(batch.column(name), type_oid) for name, type_oid in program.columns.items()]
    rows = zip(*columns, strict=True) if columns else repeat((), batch.num_rows)
    return ([*row, *program.room] for row in rows)
