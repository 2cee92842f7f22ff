"""Evaluates row filters on Arrow batches as PostgreSQL does.

In: a tree of `pgsieve.decoding.row_filters.nodes`, and batches of rows. The columns of a batch have the Arrow types of
`pgsieve.decoding.values.types`, even if the user chose other types for the replica.

Out: the filter's value for each row, here called the verdict: true, false or NULL. Only a row with the verdict true
matches.

Raises RecursionError if a tree is nested too deeply; this happens before a row is read. Raises FilterValueError or
NumericError if PostgreSQL would raise an error for a row. The error has PostgreSQL's message and SQLSTATE, and no value
of the row.

If a predicate cannot raise an error, and Arrow can compute it, the module `columns` computes it on whole columns.
`compiler` evaluates the rest of the tree row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeAlias

import pyarrow as pa

from pgsieve.decoding.row_filters.evaluation.columns import ColumnFunction, NotColumnarError, compile_columnar
from pgsieve.decoding.row_filters.evaluation.compiler import compile_tree
from pgsieve.decoding.row_filters.nodes import BOOL, ColumnValue, Constant, Logical, Node

#: The verdicts on the rows of a batch.
VerdictFunction: TypeAlias = Callable[[pa.RecordBatch], pa.BooleanArray]


def compile_filters(*trees: Node) -> VerdictFunction:
    """Compile filters into one function of batches. Several threads may call this function at the same time.

    The filters are joined with OR, as in pgoutput_row_filter_init() in
    src/backend/replication/pgoutput/pgoutput.c. If no filter is given, no row matches.
    """
    parts = _ColumnarParts()
    tree = parts.replace_predicates(trees[0] if len(trees) == 1 else Logical("OR", trees))
    if isinstance(tree, ColumnValue) and tree.name in parts.predicate_by_column:
        return _broadcast(parts.predicate_by_column[tree.name])
    program, computed_columns = compile_tree(tree), parts.predicate_by_column

    def compute_batch_verdicts(batch: pa.RecordBatch) -> pa.BooleanArray:
        columns = {
            name: _broadcast(computed_columns[name])(batch)
            if name in computed_columns
            else batch.column(name)
            for name in program.columns
        }
        rows = pa.record_batch(columns) if columns else batch
        return pa.array(program.compute_values(rows), pa.bool_())

    return compute_batch_verdicts


def compute_verdicts(node: Node, batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the verdicts of one filter on the rows of a batch."""
    return compile_filters(node)(batch)


def _broadcast(compute: ColumnFunction) -> VerdictFunction:
    """Return a function whose result has a value for each row, even if `compute` returns one value for all rows."""

    def compute_batch_verdicts(batch: pa.RecordBatch) -> pa.BooleanArray:
        values = compute(batch)
        return pa.repeat(values, batch.num_rows) if isinstance(values, pa.Scalar) else values

    return compute_batch_verdicts


class _ColumnarParts:
    """The largest predicates of a tree that Arrow can compute on whole columns."""

    def __init__(self) -> None:
        #: Maps the name of a made-up column to the predicate that it replaces. No table can have a column of
        #: such a name.
        self.predicate_by_column: dict[str, ColumnFunction] = {}
        #: The results of `replace_predicates` by the id of the node. So a part that occurs several times in the tree
        #: stays one object, and `compiler` evaluates it once per row.
        self._tree_by_node_id: dict[int, Node] = {}

    def replace_predicates(self, node: Node) -> Node:
        """Return the tree with a made-up column instead of each predicate that Arrow can compute."""
        if id(node) not in self._tree_by_node_id:
            self._tree_by_node_id[id(node)] = self._add_computed_column(node) or self._replace_in_children(
                node
            )
        return self._tree_by_node_id[id(node)]

    def _add_computed_column(self, node: Node) -> ColumnValue | None:
        if node.type_oid != BOOL or isinstance(node, ColumnValue | Constant):
            return None
        with suppress(NotColumnarError):
            compute = compile_columnar(node)
            name = f"\0{len(self.predicate_by_column)}"
            self.predicate_by_column[name] = compute
            return ColumnValue(name, type_oid=BOOL)
        return None

    def _replace_in_children(self, node: Node) -> Node:
        replacements: dict[str, Any] = {}
        for field in fields(node):
            value = getattr(node, field.name)
            if isinstance(value, Node):
                replacement: Any = self.replace_predicates(value)
                is_same = replacement is value
            elif isinstance(value, tuple) and value and isinstance(value[0], Node):
                replacement = tuple(map(self.replace_predicates, value))
                is_same = all(new_item is item for new_item, item in zip(replacement, value, strict=True))
            else:
                continue
            if not is_same:
                replacements[field.name] = replacement
        return replace(node, **replacements) if replacements else node
