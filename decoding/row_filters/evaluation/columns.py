"""Compiles a row filter's tree into Arrow computations on whole columns; this works for most filters.

In: a tree. Out: a function of a batch, with the same verdicts as `compiler`. Raises NotColumnarError if Arrow
cannot compute a part of the tree, or if a part can fail for a row. PostgreSQL skips some parts for some rows
(PostgreSQL documentation, Expression Evaluation Rules); as no part can fail, this makes no difference here.
A pattern match computes its text row by row if necessary, and the match on the whole column.
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
from pgsieve.decoding.row_filters.evaluation.values import constant_value
from pgsieve.decoding.row_filters.nodes import Digits, Node
from pgsieve.decoding.values.datetimes import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
)

#: The result of an expression for a batch: an array of its rows, or a scalar for all of them.
Values: TypeAlias = pa.Array | pa.Scalar
Columnar: TypeAlias = Callable[[pa.RecordBatch], Values]


class NotColumnarError(Exception):
    """Arrow cannot compute a part of a tree on whole columns."""


def compile_columnar(tree: Node) -> Columnar:
    """Compile a predicate; raises NotColumnarError, and RecursionError if it nests too deeply."""
    return _compile(tree)


#: Arrow's type for the values of a PostgreSQL type. Arrow orders text by bytes (see `values.rank_function`).
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
#: The numbers that mean infinities in Arrow columns.
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


def _compile(node: Node) -> Columnar:
    match node:
        case nodes.ColumnValue():
            return _column(node)
        case nodes.Constant():
            return _constant(node)
        case nodes.Cast():
            return _cast(node)
        case nodes.Collate(operand=operand):
            return _compile(operand)
        case nodes.Arithmetic():
            return _arithmetic(node)
        case nodes.Comparison(operator=operator, left=left, right=right):
            return _compose(_COMPARISONS[operator], *_sides(left, right))
        case nodes.NotDistinct(left=left, right=right):
            return _compose(_not_distinct, *_sides(left, right))
        case nodes.Logical():
            return _logical(node)
        case nodes.Not(operand=operand):
            return _compose(pc.invert, _compile(operand))
        case nodes.IsNull(operand=nodes.ColumnValue(name=name)):
            return lambda batch: batch.column(name).is_null()
        case nodes.IsNull(operand=operand):
            return _compose(pc.is_null, _compile(operand))
        case nodes.Like(operand=operand, pattern=pattern):
            return _compose(_like(pattern), _text(operand))
        case nodes.Regex(operand=operand, pattern=pattern):
            return _compose(lambda text: pc.match_substring_regex(text, pattern), _text(operand))
        case nodes.IsTruth(operand=operand, truth=truth):
            return _compose(lambda value: pc.fill_null(pc.equal(value, truth), False), _compile(operand))
        case _:
            raise NotColumnarError


def _like(pattern: str) -> Callable[[Values], Values]:
    """Return the match of a pattern.

    A pattern with a backslash becomes a regular expression, because Arrow takes the backslash literally in
    patterns of the form `%a` or `a%`.
    """
    if "\\" not in pattern:
        return lambda text: pc.match_like(text, pattern)
    expression = like_expression(pattern)
    return lambda text: pc.match_substring_regex(text, expression)


def _compose(function: Callable[..., Values], *operands: Columnar) -> Columnar:
    return lambda batch: function(*(operand(batch) for operand in operands))


# --- values --------------------------------------------------------------------------------


def _arrow_type(node: Node) -> pa.DataType:
    """The Arrow type in which an expression's values are computed."""
    if node.type_oid == nodes.NUMERIC and node.digits is not None:
        return pa.decimal128(node.digits.precision, node.digits.scale)
    if node.type_oid not in _ARROW_TYPES:
        raise NotColumnarError
    return _ARROW_TYPES[node.type_oid]


def _column(node: nodes.ColumnValue) -> Columnar:
    name, kind = node.name, _arrow_type(node)
    if node.type_oid == nodes.BPCHAR:  # Comparisons ignore the padding.
        return lambda batch: pc.utf8_rtrim(batch.column(name), characters=" ")
    return lambda batch: batch.column(name).cast(kind)


def _constant(node: nodes.Constant) -> Columnar:
    scalar = _scalar(node)
    return lambda _batch: scalar


def _scalar(node: nodes.Constant) -> pa.Scalar:
    value = constant_value(node.value)
    kind = _arrow_type(node) if node.type_oid != nodes.NUMERIC else _decimal_type(value)
    if node.type_oid == nodes.BPCHAR and value is not None:
        value = value.rstrip(" ")
    return pa.scalar(_INFINITIES.get(node.type_oid, {}).get(value, value), kind)


def _decimal_type(value: Decimal | None) -> pa.DataType:
    """The smallest decimal type that holds a value; raises NotColumnarError if there is none."""
    if value is None:
        return pa.decimal128(1, 0)
    if not value.is_finite():
        raise NotColumnarError
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    least = Digits.before_and_after_point(max(len(digits) + exponent, 0), max(-exponent, 0))
    if least is None:
        raise NotColumnarError
    return pa.decimal128(least.precision, least.scale)


def _cast(node: nodes.Cast) -> Columnar:
    """Compile a conversion that cannot fail and has PostgreSQL's result in Arrow."""
    operand, source, target = _compile(node.operand), node.operand.type_oid, node.type_oid
    if node.modifier:
        raise NotColumnarError
    if {source, target} <= {nodes.TEXT, nodes.VARCHAR}:
        return operand
    if {source, target} <= set(nodes.INTEGERS) and not nodes.node_can_fail(node):
        return _compose(lambda value: pc.cast(value, _ARROW_TYPES[target]), operand)
    raise NotColumnarError


def _arithmetic(node: nodes.Arithmetic) -> Columnar:
    """Compile the remainder of a division by a positive constant, which cannot fail."""
    if (
        node.operator != "%"
        or node.type_oid not in nodes.INTEGERS
        or not isinstance(node.left, nodes.ColumnValue | nodes.Cast)
        or not isinstance(node.right, nodes.Constant)
        or not isinstance(divisor := node.right.value, int)
        or divisor <= 0
    ):
        raise NotColumnarError

    def remainder(values: Values) -> Values:
        # The remainder has the sign of the dividend, as in PostgreSQL.
        numbers = np.asarray(values.fill_null(0))
        return pa.array(np.fmod(numbers, numbers.dtype.type(divisor)), mask=np.asarray(values.is_null()))

    return _compose(remainder, _compile(node.left))


def _text(node: Node) -> Columnar:
    """Compile the string of a pattern match, with the padding of character(n)."""
    match node:
        case nodes.ColumnValue(name=name):
            return lambda batch: batch.column(name)
        case nodes.Collate(operand=operand):
            return _text(operand)
        case _ if nodes.tree_can_fail(node):
            raise NotColumnarError
        case _:
            program = compile_tree(node)
            return lambda batch: pa.array(program.values(batch), pa.string())


# --- predicates ----------------------------------------------------------------------------


def _sides(left: Node, right: Node) -> tuple[Columnar, Columnar]:
    """Compile both sides of a comparison in one Arrow type; for numeric, a decimal type that fits both."""
    if left.type_oid != right.type_oid:
        raise NotColumnarError
    if left.type_oid != nodes.NUMERIC:
        return _compile(left), _compile(right)
    kinds = [
        _decimal_type(constant_value(s.value)) if isinstance(s, nodes.Constant) else _arrow_type(s)
        for s in (left, right)
    ]
    scale = max(kind.scale for kind in kinds)
    common = Digits.before_and_after_point(max(kind.precision - kind.scale for kind in kinds), scale)
    if common is None:
        raise NotColumnarError
    wide = pa.decimal128(common.precision, common.scale)
    first, second = (_compose(lambda value: pc.cast(value, wide), _compile(side)) for side in (left, right))
    return first, second


def _not_distinct(left: Values, right: Values) -> Values:
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(pc.fill_null(pc.equal(left, right), False), both_null)


def _logical(node: nodes.Logical) -> Columnar:
    if not node.operands:
        return _constant(nodes.Constant(node.connective == "AND", type_oid=nodes.BOOL))
    operands = _membership(node) or [_compile(operand) for operand in node.operands]
    connect = pc.and_kleene if node.connective == "AND" else pc.or_kleene
    return lambda batch: reduce(connect, (operand(batch) for operand in operands))


def _membership(node: nodes.Logical) -> list[Columnar] | None:
    """Compile `x = a OR x = b …`, or its negation, as a lookup of x in a set; None for other expressions."""
    operator = "=" if node.connective == "OR" else "<>"
    first = node.operands[0]
    if not isinstance(first, nodes.Comparison) or first.left.type_oid == nodes.NUMERIC:
        return None
    subject, constants = first.left, list[nodes.Constant]()
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
    scalars = [scalar for scalar in map(_scalar, constants) if scalar.is_valid]
    members = pa.array(scalars, _arrow_type(subject))
    has_null = len(scalars) < len(constants)

    def membership(value: Values) -> Values:
        is_in = pc.is_in(value, members)
        # NULL if the value is NULL, or if NULL is among the constants and the value equals none of the
        # others.
        is_known = pc.and_(pc.is_valid(value), is_in) if has_null else pc.is_valid(value)
        return pc.if_else(
            is_known, is_in if operator == "=" else pc.invert(is_in), pa.scalar(None, pa.bool_())
        )

    return [_compose(membership, _compile(subject))]
