"""A row filter simplified before any row is read: constants decide, and the parts that they exclude cannot fail."""

from __future__ import annotations

import pytest

from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    INT4,
    Arithmetic,
    Array,
    Case,
    Coalesce,
    ColumnValue,
    Comparison,
    Constant,
    FunctionCall,
    IsNull,
    Logical,
    Node,
    Not,
    NullIf,
)
from pgsieve.decoding.row_filters.simplification import simplify

A = ColumnValue("a", type_oid=INT4)
ONE, NULL = Constant(1, type_oid=INT4), Constant(None, type_oid=INT4)
TRUE, FALSE, UNKNOWN = (Constant(value, type_oid=BOOL) for value in (True, False, None))
#: Fail if a is 0.
QUOTIENT = Arithmetic("/", ONE, A, type_oid=INT4)
DIVIDES = Comparison("=", QUOTIENT, ONE)
#: 1 / 1 = 1, whose value only PostgreSQL computes.
COMPUTED = Comparison("=", Arithmetic("/", ONE, ONE, type_oid=INT4), ONE)

#: A constant of several parts, and the planner's simplification of it: COALESCE ends at its first operand.
CONSTANT_ARRAY = Array((ONE,), type_oid=1007)
A_OR_CONSTANT = Coalesce((CONSTANT_ARRAY, Array((A,), type_oid=1007)), type_oid=1007)


@pytest.mark.parametrize(
    ("filtered", "left"),
    [
        pytest.param(Logical("AND", (DIVIDES, FALSE)), FALSE, id="false decides AND"),
        pytest.param(Logical("OR", (DIVIDES, TRUE)), TRUE, id="true decides OR"),
        pytest.param(Logical("AND", (DIVIDES, TRUE)), DIVIDES, id="true is left out of AND"),
        pytest.param(
            Logical("AND", (DIVIDES, UNKNOWN)), Logical("AND", (DIVIDES, UNKNOWN)), id="NULL decides nothing"
        ),
        pytest.param(
            Comparison("=", NULL, Arithmetic("/", ONE, A, type_oid=INT4)), UNKNOWN, id="NULL = is NULL"
        ),
        pytest.param(Not(Logical("AND", (DIVIDES, FALSE))), TRUE, id="constants are computed upwards"),
        pytest.param(Logical("OR", (DIVIDES, IsNull(ONE))), DIVIDES, id="IS NULL of a constant is known"),
        pytest.param(
            Case((TRUE, DIVIDES), (FALSE, TRUE), TRUE, type_oid=BOOL), FALSE, id="CASE ends at the first true"
        ),
        pytest.param(
            Coalesce((NULL, ONE, Arithmetic("/", ONE, A, type_oid=INT4)), type_oid=INT4),
            ONE,
            id="COALESCE ends at the first constant",
        ),
        pytest.param(
            Comparison("=", NullIf(NULL, A, type_oid=INT4), Arithmetic("/", ONE, A, type_oid=INT4)),
            UNKNOWN,
            id="NULLIF of NULL is NULL",
        ),
        pytest.param(
            NullIf(DIVIDES, UNKNOWN, type_oid=BOOL), DIVIDES, id="nothing is equal to NULL for NULLIF"
        ),
    ],
)
def test_parts_that_constants_exclude_are_never_evaluated(filtered: Node, left: Node) -> None:
    assert simplify(filtered) == left


def test_a_filter_that_cannot_fail_is_unchanged() -> None:
    filtered = Logical("AND", (Comparison("=", A, ONE), FALSE))
    assert simplify(filtered) is filtered


def test_an_error_must_not_depend_on_a_constant_that_only_postgresql_computes() -> None:
    with pytest.raises(RefusedError, match="write the value of the constant expression"):
        simplify(Logical("AND", (DIVIDES, COMPUTED)))
    with pytest.raises(RefusedError, match="write the value of the constant expression"):
        simplify(Logical("OR", (DIVIDES, Comparison("=", CONSTANT_ARRAY, A_OR_CONSTANT))))
    with pytest.raises(RefusedError, match="write the value of the constant expression"):
        simplify(Comparison("=", FunctionCall("numeric_scale", (ONE,), type_oid=INT4), QUOTIENT))
    with pytest.raises(RefusedError, match="write the value of the constant expression"):
        simplify(NullIf(FunctionCall("numeric_scale", (ONE,), type_oid=INT4), QUOTIENT, type_oid=INT4))
    kept = Logical("AND", (COMPUTED, Comparison("=", A, ONE)))
    assert simplify(kept) == kept


@pytest.mark.parametrize(
    ("operand", "decided"),
    [
        pytest.param(Array((QUOTIENT,), type_oid=1007), True, id="ARRAY is not NULL"),
        pytest.param(IsNull(QUOTIENT), True, id="IS NULL is not NULL"),
        pytest.param(Coalesce((QUOTIENT, ONE), type_oid=INT4), True, id="COALESCE with a constant"),
        pytest.param(QUOTIENT, False, id="a function may be NULL"),
        pytest.param(Logical("AND", (DIVIDES, IsNull(A))), False, id="AND is not looked into"),
    ],
)
def test_from_19_on_a_null_test_of_a_never_null_expression_is_decided(operand: Node, decided: bool) -> None:
    tested = IsNull(operand)
    assert simplify(tested, 18) == tested
    assert simplify(tested, 19) == (FALSE if decided else tested)


def test_from_19_on_a_null_test_must_not_depend_on_a_constant_that_only_postgresql_computes() -> None:
    scale = FunctionCall("numeric_scale", (ONE,), type_oid=INT4)
    tested = IsNull(Coalesce((QUOTIENT, scale), type_oid=INT4))
    assert simplify(tested, 18) == tested
    with pytest.raises(RefusedError, match="write the value of the constant expression"):
        simplify(tested, 19)
