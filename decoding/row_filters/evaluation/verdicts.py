"""A row filter's verdict on each row of an Arrow batch, as PostgreSQL gives it.

In: a tree of `pgsieve.decoding.row_filters.nodes`, and batches whose columns have the Arrow types of
`pgsieve.decoding.values.types` without overrides. Out: true, false or NULL for each row; NULL counts as no
match (section 29.4). Raises RecursionError, before any row is read, for a tree that is nested too deeply.
Raises FilterValueError or NumericError, with PostgreSQL's message and SQLSTATE and without a value, for the
first row for which PostgreSQL would raise an error.

`columns` computes the largest parts that cannot fail, `compiler` computes the rest row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeAlias

import pyarrow as pa

from pgsieve.decoding.row_filters.evaluation.columns import Columnar, NotColumnarError, columnar
from pgsieve.decoding.row_filters.evaluation.compiler import compiled
from pgsieve.decoding.row_filters.nodes import BOOL, ColumnValue, Constant, Logical, Node

#: The verdicts on the rows of a batch.
Verdicts: TypeAlias = Callable[[pa.RecordBatch], pa.BooleanArray]


def condition(*trees: Node) -> Verdicts:
    """Compile trees into one function of batches, which several threads may call at once.

    A row has to pass one of the filters; without any filter no row passes. As in an OR, filters after the
    first match are not evaluated (pgoutput_row_filter_init() in src/backend/replication/pgoutput/pgoutput.c
    joins them with OR).
    """
    parts = _Parts()
    tree = parts.divided(trees[0] if len(trees) == 1 else Logical("OR", trees))
    if isinstance(tree, ColumnValue) and tree.name in parts.computed:
        return _every_row(parts.computed[tree.name])
    program, computed = compiled(tree), parts.computed

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        columns = {
            name: _every_row(computed[name])(batch) if name in computed else batch.column(name)
            for name in program.columns
        }
        rows = pa.record_batch(columns) if columns else batch
        return pa.array(program.values(rows), pa.bool_())

    return verdicts_on


def verdicts(node: Node, batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the verdict of a row filter's tree on each row of a batch."""
    return condition(node)(batch)


def _every_row(compute: Columnar) -> Verdicts:
    """The verdicts as an array with one item per row, even if one scalar holds for all."""

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        values = compute(batch)
        return pa.repeat(values, batch.num_rows) if isinstance(values, pa.Scalar) else values

    return verdicts_on


class _Parts:
    """The largest predicates of a tree that can be computed by columns."""

    def __init__(self) -> None:
        #: Computed predicates by the name of the column that replaces them; no column of a table has such a
        #: name.
        self.computed: dict[str, Columnar] = {}
        #: Divided nodes by the node's identity, so that a repeated part is evaluated once.
        self._divided: dict[int, Node] = {}

    def divided(self, node: Node) -> Node:
        """The tree with a column in place of each predicate that is computed by columns."""
        if id(node) not in self._divided:
            self._divided[id(node)] = self._column(node) or self._with_children_divided(node)
        return self._divided[id(node)]

    def _column(self, node: Node) -> ColumnValue | None:
        if node.type_oid != BOOL or isinstance(node, ColumnValue | Constant):
            return None
        with suppress(NotColumnarError):
            compute = columnar(node)
            name = f"\0{len(self.computed)}"
            self.computed[name] = compute
            return ColumnValue(name, type_oid=BOOL)
        return None

    def _with_children_divided(self, node: Node) -> Node:
        changed: dict[str, Any] = {}
        for field in fields(node):
            value = getattr(node, field.name)
            if isinstance(value, Node):
                after: Any = self.divided(value)
                same = after is value
            elif isinstance(value, tuple) and value and isinstance(value[0], Node):
                after = tuple(map(self.divided, value))
                same = all(one is other for one, other in zip(after, value, strict=True))
            else:
                continue
            if not same:
                changed[field.name] = after
        return replace(node, **changed) if changed else node
