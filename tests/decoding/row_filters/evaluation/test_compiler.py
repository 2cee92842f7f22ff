"""Which parts of an expression are evaluated for a row, and in which order."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from pgsieve.decoding.row_filters.evaluation.compiler import compile_tree
from pgsieve.decoding.row_filters.nodes import (
    INT4,
    NUMERIC,
    TEXT,
    UUID,
    Arithmetic,
    Array,
    Case,
    Cast,
    Coalesce,
    ColumnValue,
    Comparison,
    Constant,
    EachElement,
    Element,
    Extreme,
    FunctionCall,
    Logical,
    Node,
    NotDistinct,
    NullIf,
)
from pgsieve.decoding.row_filters.strings import FilterValueError

A, B = ColumnValue("a", type_oid=INT4), ColumnValue("b", type_oid=INT4)
ONE = Constant(1, type_oid=INT4)
#: Fails if b is 0, and is NULL if b is NULL.
QUOTIENT = Arithmetic("/", ONE, B, type_oid=INT4)
IS_ONE = Comparison("=", QUOTIENT, ONE)
A_IS_ONE = Comparison("=", A, ONE)


def value(node: Node, a: int | None, b: int | None) -> Any:
    program = compile_tree(node)
    return program.evaluate([*({"a": a, "b": b}[name] for name in program.columns), *program.scratch_values])


@pytest.mark.parametrize(
    ("node", "a"),
    [
        (Logical("AND", (A_IS_ONE, IS_ONE)), 2),
        (Logical("OR", (A_IS_ONE, IS_ONE)), 1),
        (Coalesce((A, QUOTIENT), type_oid=INT4), 1),
        (Case((A_IS_ONE,), (A,), QUOTIENT, type_oid=INT4), 1),
    ],
)
def test_unevaluated_parts_do_not_fail(node: Node, a: int) -> None:
    value(node, a, 0)
    with pytest.raises(FilterValueError, match="division by zero"):
        value(node, None, 0)


@pytest.mark.parametrize(
    "node",
    [
        Arithmetic("+", A, QUOTIENT, type_oid=INT4),
        Comparison("=", A, QUOTIENT),
        NotDistinct(A, QUOTIENT),
        NullIf(A, QUOTIENT, type_oid=INT4),
        Extreme("LEAST", (A, QUOTIENT), type_oid=INT4),
        FunctionCall("int4gcd", (A, QUOTIENT), type_oid=INT4),
    ],
)
def test_all_operands_are_evaluated_although_one_is_null(node: Node) -> None:
    with pytest.raises(FilterValueError, match="division by zero"):
        value(node, None, 0)


def test_greatest_and_least_keep_the_scale_of_the_first_equal_numeric() -> None:
    several = tuple(Constant(Decimal(text), type_oid=NUMERIC) for text in ("1.5", "1.50"))
    assert str(value(Extreme("GREATEST", several, type_oid=NUMERIC), 0, 0)) == "1.5"
    assert str(value(Extreme("LEAST", several[::-1], type_oid=NUMERIC), 0, 0)) == "1.50"


def test_a_conversion_without_a_counterpart_is_refused() -> None:
    with pytest.raises(TypeError, match=f"converts type {TEXT} to {UUID}"):
        compile_tree(Cast(ColumnValue("t", type_oid=TEXT), type_oid=UUID))


def test_repeated_expressions_are_computed_once() -> None:
    node: Node = A
    for _ in range(16):  # without sharing, it would be computed once per leaf
        node = Arithmetic("-", node, Arithmetic("/", node, ONE, type_oid=INT4), type_oid=INT4)
    assert value(node, 5, 0) == 0


def test_results_for_an_element_are_not_kept_for_the_next() -> None:
    element = Element(type_oid=INT4)
    later = Arithmetic("+", element, ONE, type_oid=INT4)
    test = Logical("AND", (Comparison(">", later, ONE), Comparison("<", later, Constant(3, type_oid=INT4))))
    array = Array((Constant(9, type_oid=INT4), A), type_oid=1007)
    each = EachElement(False, ONE, array, element, test)
    assert [value(Logical("OR", (each, each)), a, 0) for a in (1, 2, None)] == [True, False, None]
    other = replace(each, array=Array((A, A), type_oid=1007))  # it shares the element and the test
    assert [value(Logical("AND", (each, other)), a, 0) for a in (1, 2, None)] == [True, False, None]
