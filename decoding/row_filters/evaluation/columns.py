"""Compiles a row filter's tree into Arrow computations on whole columns. This works for most filters.

In: a tree. Out: a function of a batch, with the same results as `compiler`. Raises NotColumnarError if Arrow
cannot compute a part of the tree, or if a part can raise an error for a row.

PostgreSQL does not evaluate all parts for all rows (PostgreSQL documentation, Expression Evaluation Rules). This
module evaluates all of them. The result is the same, because no part can raise an error.

The text that a pattern is matched against is computed row by row if it is not simply a column. The match itself is
always computed on the whole column.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import reduce
from math import inf
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.row_filters import nodes
from pgsieve.decoding.row_filters.evaluation.compiler import compile_tree
from pgsieve.decoding.row_filters.evaluation.strings import like_expression
from pgsieve.decoding.row_filters.evaluation.values import to_python_value
from pgsieve.decoding.row_filters.nodes import Digits, Node
from pgsieve.decoding.values.datetimes import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
)

#: The result of an expression for a batch: an array with a value per row, or one scalar for all rows.
Values: TypeAlias = pa.Array | pa.Scalar
ColumnFunction: TypeAlias = Callable[[pa.RecordBatch], Values]


class NotColumnarError(Exception):
    """Arrow cannot compute a part of a tree on whole columns."""


def compile_columnar(tree: Node) -> ColumnFunction:
    """Compile a predicate.

    Raises NotColumnarError if Arrow cannot compute it, and RecursionError if it is nested too deeply.
    """
    return _compile(tree)


#: Maps the oid of a type to the Arrow type of its values. Arrow orders text by bytes, and so do the collations under
#: which a filter may order text (`values.rank_function`).
_ARROW_TYPES: Final = MappingProxyType(
    {
        nodes.BOOL: pa.bool_(),
        nodes.INT2: pa.int16(),
        nodes.INT4: pa.int32(),
        nodes.INT8: pa.int64(),
        nodes.TEXT: pa.string(),
        nodes.VARCHAR: pa.string(),
        nodes.BPCHAR: pa.string(),
        nodes.UUID: pa.string(),
        nodes.TIME: pa.string(),
        nodes.BYTEA: pa.binary(),
        nodes.DATE: pa.int32(),
        nodes.TIMESTAMP: pa.int64(),
        nodes.TIMESTAMPTZ: pa.int64(),
    }
)
_DATE_INFINITIES: Final = MappingProxyType({inf: DATE_INFINITY, -inf: DATE_MINUS_INFINITY})
_TIMESTAMP_INFINITIES: Final = MappingProxyType({inf: TIMESTAMP_INFINITY, -inf: TIMESTAMP_MINUS_INFINITY})
#: The numbers that stand for infinite dates and timestamps in Arrow columns.
_INFINITIES: Final = MappingProxyType(
    {
        nodes.DATE: _DATE_INFINITIES,
        nodes.TIMESTAMP: _TIMESTAMP_INFINITIES,
        nodes.TIMESTAMPTZ: _TIMESTAMP_INFINITIES,
    }
)
_COMPARISONS: Final[MappingProxyType[str, Callable[[Values, Values], Values]]] = MappingProxyType(
    {
        "=": pc.equal,
        "<>": pc.not_equal,
        "<": pc.less,
        "<=": pc.less_equal,
        ">": pc.greater,
        ">=": pc.greater_equal,
    }
)


def _compile(node: Node) -> ColumnFunction:
    match node:
        case nodes.ColumnValue():
            return _compile_column(node)
        case nodes.Constant():
            return _compile_constant(node)
        case nodes.Cast():
            return _compile_cast(node)
        case nodes.Collate(operand=operand):
            return _compile(operand)
        case nodes.Arithmetic():
            return _compile_arithmetic(node)
        case nodes.Comparison(operator=operator, left=left, right=right):
            return _compose(_COMPARISONS[operator], *_compile_sides(left, right))
        case nodes.NotDistinct(left=left, right=right):
            return _compose(_compare_not_distinct, *_compile_sides(left, right))
        case nodes.Logical():
            return _compile_logical(node)
        case nodes.Not(operand=operand):
            return _compose(pc.invert, _compile(operand))
        case nodes.IsNull(operand=nodes.ColumnValue(name=name)):
            return lambda batch: batch.column(name).is_null()
        case nodes.IsNull(operand=operand):
            return _compose(pc.is_null, _compile(operand))
        case nodes.Like(operand=operand, pattern=pattern):
            return _compose(_make_like_matcher(pattern), _compile_text(operand))
        case nodes.Regex(operand=operand, pattern=pattern):
            return _compose(lambda text: pc.match_substring_regex(text, pattern), _compile_text(operand))
        case nodes.IsTruth(operand=operand, truth=truth):
            return _compose(lambda value: pc.fill_null(pc.equal(value, truth), False), _compile(operand))
        case _:
            raise NotColumnarError


def _make_like_matcher(pattern: str) -> Callable[[Values], Values]:
    """Return a function that matches a LIKE pattern.

    A pattern with a backslash becomes a regular expression. Arrow's own LIKE takes a backslash for an ordinary
    character in patterns such as `%a` and `a%`.
    """
    if "\\" not in pattern:
        return lambda text: pc.match_like(text, pattern)
    expression = like_expression(pattern)
    return lambda text: pc.match_substring_regex(text, expression)


def _compose(function: Callable[..., Values], *operands: ColumnFunction) -> ColumnFunction:
    return lambda batch: function(*(operand(batch) for operand in operands))


# --- values --------------------------------------------------------------------------------


def _find_arrow_type(node: Node) -> pa.DataType:
    """Return the Arrow type in which the values of an expression are computed."""
    if node.type_oid == nodes.NUMERIC and node.digits is not None:
        return pa.decimal128(node.digits.precision, node.digits.scale)
    if node.type_oid not in _ARROW_TYPES:
        raise NotColumnarError
    return _ARROW_TYPES[node.type_oid]


def _compile_column(node: nodes.ColumnValue) -> ColumnFunction:
    name, arrow_type = node.name, _find_arrow_type(node)
    if node.type_oid == nodes.BPCHAR:  # Comparisons ignore the padding.
        return lambda batch: pc.utf8_rtrim(batch.column(name), characters=" ")
    return lambda batch: batch.column(name).cast(arrow_type)


def _compile_constant(node: nodes.Constant) -> ColumnFunction:
    scalar = _make_scalar(node)
    return lambda _batch: scalar


def _make_scalar(node: nodes.Constant) -> pa.Scalar:
    value = to_python_value(node.value)
    arrow_type = _find_arrow_type(node) if node.type_oid != nodes.NUMERIC else _find_decimal_type(value)
    if node.type_oid == nodes.BPCHAR and value is not None:
        value = value.rstrip(" ")
    return pa.scalar(_INFINITIES.get(node.type_oid, {}).get(value, value), arrow_type)


def _find_decimal_type(value: Decimal | None) -> pa.DataType:
    """Return the smallest decimal type that can hold a value; raises NotColumnarError if none can."""
    if value is None:
        return pa.decimal128(1, 0)
    if not value.is_finite():
        raise NotColumnarError
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    value_digits = Digits.from_digit_counts(max(len(digits) + exponent, 0), max(-exponent, 0))
    if value_digits is None:
        raise NotColumnarError
    return pa.decimal128(value_digits.precision, value_digits.scale)


def _compile_cast(node: nodes.Cast) -> ColumnFunction:
    """Compile a conversion that cannot fail, and whose result is the same in Arrow as in PostgreSQL."""
    operand, source_oid, target_oid = _compile(node.operand), node.operand.type_oid, node.type_oid
    if node.modifier:
        raise NotColumnarError
    if {source_oid, target_oid} <= {nodes.TEXT, nodes.VARCHAR}:
        return operand
    if {source_oid, target_oid} <= set(nodes.INTEGERS) and not nodes.node_can_fail(node):
        return _compose(lambda value: pc.cast(value, _ARROW_TYPES[target_oid]), operand)
    raise NotColumnarError


def _compile_arithmetic(node: nodes.Arithmetic) -> ColumnFunction:
    """Compile the remainder of an integer divided by a positive constant. All other arithmetic raises NotColumnarError.

    Most other arithmetic can fail.
    """
    if (
        node.operator != "%"
        or node.type_oid not in nodes.INTEGERS
        or not isinstance(node.left, nodes.ColumnValue | nodes.Cast)
        or not isinstance(node.right, nodes.Constant)
        or not isinstance(divisor := node.right.value, int)
        or divisor <= 0
    ):
        raise NotColumnarError

    def compute_remainder(values: Values) -> Values:
        # The remainder has the sign of the dividend, as in PostgreSQL.
        numbers = np.asarray(values.fill_null(0))
        return pa.array(np.fmod(numbers, numbers.dtype.type(divisor)), mask=np.asarray(values.is_null()))

    return _compose(compute_remainder, _compile(node.left))


def _compile_text(node: Node) -> ColumnFunction:
    """Compile the string that a pattern is matched against; a value of character(n) keeps its padding."""
    match node:
        case nodes.ColumnValue(name=name):
            return lambda batch: batch.column(name)
        case nodes.Collate(operand=operand):
            return _compile_text(operand)
        case _ if nodes.tree_can_fail(node):
            raise NotColumnarError
        case _:
            program = compile_tree(node)
            return lambda batch: pa.array(program.compute_values(batch), pa.string())


# --- predicates ----------------------------------------------------------------------------


def _compile_sides(left: Node, right: Node) -> tuple[ColumnFunction, ColumnFunction]:
    """Compile both sides of a comparison to the same Arrow type; for numerics, to a decimal type that fits both."""
    if left.type_oid != right.type_oid:
        raise NotColumnarError
    if left.type_oid != nodes.NUMERIC:
        return _compile(left), _compile(right)
    decimal_types = [
        _find_decimal_type(to_python_value(s.value)) if isinstance(s, nodes.Constant) else _find_arrow_type(s)
        for s in (left, right)
    ]
    scale = max(decimal_type.scale for decimal_type in decimal_types)
    common_digits = Digits.from_digit_counts(
        max(decimal_type.precision - decimal_type.scale for decimal_type in decimal_types), scale
    )
    if common_digits is None:
        raise NotColumnarError
    decimal_type = pa.decimal128(common_digits.precision, common_digits.scale)
    left_function, right_function = (
        _compose(lambda value: pc.cast(value, decimal_type), _compile(side)) for side in (left, right)
    )
    return left_function, right_function


def _compare_not_distinct(left: Values, right: Values) -> Values:
    are_both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(pc.fill_null(pc.equal(left, right), False), are_both_null)


def _compile_logical(node: nodes.Logical) -> ColumnFunction:
    if not node.operands:
        return _compile_constant(nodes.Constant(node.connective == "AND", type_oid=nodes.BOOL))
    operands = _compile_membership(node) or [_compile(operand) for operand in node.operands]
    connect = pc.and_kleene if node.connective == "AND" else pc.or_kleene
    return lambda batch: reduce(connect, (operand(batch) for operand in operands))


def _compile_membership(node: nodes.Logical) -> list[ColumnFunction] | None:
    """Compile `x = a OR x = b …`, or its negation, as a lookup of x in a set; return None for other expressions."""
    operator = "=" if node.connective == "OR" else "<>"
    first_operand = node.operands[0]
    if not isinstance(first_operand, nodes.Comparison) or first_operand.left.type_oid == nodes.NUMERIC:
        return None
    subject, constants = first_operand.left, list[nodes.Constant]()
    for operand in node.operands:
        if (
            not isinstance(operand, nodes.Comparison)
            or operand.operator != operator
            or operand.left != subject
            or not isinstance(operand.right, nodes.Constant)
            or operand.right.type_oid != subject.type_oid
        ):
            return None
        constants.append(operand.right)
    scalars = [scalar for scalar in map(_make_scalar, constants) if scalar.is_valid]
    members = pa.array(scalars, _find_arrow_type(subject))
    has_null = len(scalars) < len(constants)

    def find_membership(value: Values) -> Values:
        is_in = pc.is_in(value, members)
        # The result is NULL if the value is NULL. It is also NULL if NULL is among the constants, and the value
        # equals none of the other constants.
        is_known = pc.and_(pc.is_valid(value), is_in) if has_null else pc.is_valid(value)
        return pc.if_else(
            is_known, is_in if operator == "=" else pc.invert(is_in), pa.scalar(None, pa.bool_())
        )

    return [_compose(find_membership, _compile(subject))]
