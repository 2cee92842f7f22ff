"""Evaluates row filters on Arrow batches as PostgreSQL does.

In: a tree of `pgsieve.decoding.row_filters.nodes`, and batches of rows. The columns of a batch have the Arrow types of
`pgsieve.decoding.values.types`, without a user's overrides.

Out: the filter's value for each row, here called the verdict: true, false or NULL. Only a row with the verdict true
matches.

Raises RecursionError if a tree is nested too deeply; this happens before a row is read. Raises FilterValueError or
NumericError if PostgreSQL would raise an error for a row. The error has PostgreSQL's message and SQLSTATE, and no value
of the row.

`columns` computes the largest predicates that cannot fail on whole columns. `compiler` evaluates the rest row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeAlias

import pyarrow as pa

from pgsieve.decoding.row_filters.evaluation.columns import Columnar, NotColumnarError, compile_columnar
from pgsieve.decoding.row_filters.evaluation.compiler import compile_tree
from pgsieve.decoding.row_filters.nodes import BOOL, ColumnValue, Constant, Logical, Node

#: The verdicts on the rows of a batch.
Verdicts: TypeAlias = Callable[[pa.RecordBatch], pa.BooleanArray]


def compile_filters(*trees: Node) -> Verdicts:
    """Compile filters into one function of batches. Several threads may call this function at the same time.

    The filters are joined with OR, as in pgoutput_row_filter_init() in
    src/backend/replication/pgoutput/pgoutput.c. If no filter is given, no row matches.
    """
    parts = _ColumnarParts()
    tree = parts.divide(trees[0] if len(trees) == 1 else Logical("OR", trees))
    if isinstance(tree, ColumnValue) and tree.name in parts.computed:
        return _broadcast(parts.computed[tree.name])
    program, computed_columns = compile_tree(tree), parts.computed

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        columns = {
            name: _broadcast(computed_columns[name])(batch)
            if name in computed_columns
            else batch.column(name)
            for name in program.columns
        }
        rows = pa.record_batch(columns) if columns else batch
        return pa.array(program.values(rows), pa.bool_())

    return verdicts_on


def verdicts(node: Node, batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the verdicts of one filter on the rows of a batch."""
    return compile_filters(node)(batch)


def _broadcast(compute: Columnar) -> Verdicts:
    """Return a function whose result has a value for each row, even if `compute` returns one value for all rows."""

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        values = compute(batch)
        return pa.repeat(values, batch.num_rows) if isinstance(values, pa.Scalar) else values

    return verdicts_on


class _ColumnarParts:
    """The largest predicates of a tree that Arrow can compute on whole columns."""

    def __init__(self) -> None:
        #: Maps the name of a made-up column to the predicate that it replaces. No table can have such a name.
        self.computed: dict[str, Columnar] = {}
        #: The results of `divide` by the id of the node. With these, a part that occurs again stays the same object.
        self._results: dict[int, Node] = {}

    def divide(self, node: Node) -> Node:
        """Return the tree with a made-up column instead of each predicate that Arrow can compute."""
        if id(node) not in self._results:
            self._results[id(node)] = self._computed_column(node) or self._divide_children(node)
        return self._results[id(node)]

    def _computed_column(self, node: Node) -> ColumnValue | None:
        if node.type_oid != BOOL or isinstance(node, ColumnValue | Constant):
            return None
        with suppress(NotColumnarError):
            compute = compile_columnar(node)
            name = f"\0{len(self.computed)}"
            self.computed[name] = compute
            return ColumnValue(name, type_oid=BOOL)
        return None

    def _divide_children(self, node: Node) -> Node:
        replacements: dict[str, Any] = {}
        for field in fields(node):
            value = getattr(node, field.name)
            if isinstance(value, Node):
                replacement: Any = self.divide(value)
                is_same = replacement is value
            elif isinstance(value, tuple) and value and isinstance(value[0], Node):
                replacement = tuple(map(self.divide, value))
                is_same = all(new_item is item for new_item, item in zip(replacement, value, strict=True))
            else:
                continue
            if not is_same:
                replacements[field.name] = replacement
        return replace(node, **replacements) if replacements else node
