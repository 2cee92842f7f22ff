"""PostgreSQL's verdict of a row filter on each row of an Arrow batch.

In: a tree of `pgsieve.decoding.row_filters.nodes`, and batches whose columns have the Arrow types that
`pgsieve.decoding.values.types` gives PostgreSQL's types without an override. Out: true, false or NULL for
each row, where NULL counts as no match (section 29.4). Raises RecursionError before any row is read, for a
tree that nests too deeply; FilterValueError or NumericError, with PostgreSQL's words and SQLSTATE and no
value, for the first row for which PostgreSQL would raise an error.

The largest parts that cannot fail are computed by columns (`columns`), the rest row by row (`compiler`).
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
    """Row filters' trees as one function of batches, which several threads may call at once.

    A row has to pass one of several filters; without any filter no row passes. They are tried in order, and
    no further than needed (pgoutput_row_filter_init() in src/backend/replication/pgoutput/pgoutput.c joins
    them with OR).
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
    """The verdict of each row of a batch, even where one verdict holds for all."""

    def verdicts_on(batch: pa.RecordBatch) -> pa.BooleanArray:
        values = compute(batch)
        return pa.repeat(values, batch.num_rows) if isinstance(values, pa.Scalar) else values

    return verdicts_on


class _Parts:
    """The parts of a tree that are computed by columns: its largest possible predicates."""

    def __init__(self) -> None:
        #: By the name of the column that a predicate becomes; no column of a table has such a name.
        self.computed: dict[str, Columnar] = {}
        #: By identity, as a repeated part of a tree is evaluated once.
        self._divided: dict[int, Node] = {}

    def divided(self, node: Node) -> Node:
        """A tree in which these predicates are columns."""
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
