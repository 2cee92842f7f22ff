"""Maps the classes of sqlglot's tree to PostgreSQL's operators and to the oids of PostgreSQL's types."""

from __future__ import annotations

from typing import Final, Literal

from sqlglot import exp

from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    INTERVAL,
    NUMERIC,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    UUID,
    VARCHAR,
    Operator,
)

COMPARISONS: Final[dict[type[exp.Expr], Operator]] = {
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
}  # fmt: skip
ARITHMETIC: Final[dict[type[exp.Expr], Literal["+", "-", "*", "/", "%"]]] = {
    exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%",
}  # fmt: skip
TYPE_OIDS: Final = {
    exp.DType.BOOLEAN: BOOL, exp.DType.VARBINARY: BYTEA, exp.DType.SMALLINT: INT2, exp.DType.INT: INT4,
    exp.DType.BIGINT: INT8, exp.DType.DECIMAL: NUMERIC, exp.DType.FLOAT: FLOAT4, exp.DType.DOUBLE: FLOAT8,
    exp.DType.TEXT: TEXT, exp.DType.VARCHAR: VARCHAR, exp.DType.BPCHAR: BPCHAR, exp.DType.CHAR: BPCHAR,
    exp.DType.DATE: DATE, exp.DType.TIMESTAMP: TIMESTAMP, exp.DType.TIMESTAMPTZ: TIMESTAMPTZ,
    exp.DType.UUID: UUID, exp.DType.TIME: TIME, exp.DType.INTERVAL: INTERVAL,
}  # fmt: skip
OPERATORS: Final[dict[type[exp.Expr], str]] = {
    exp.DPipe: "||", exp.StartsWith: "^@", exp.Pow: "^", exp.BitwiseAnd: "&", exp.BitwiseOr: "|",
    exp.BitwiseXor: "#", exp.ArrayContainsAll: "@>", exp.ArrayContainedBy: "<@", exp.ArrayOverlaps: "&&",
}  # fmt: skip
PREFIX_OPERATORS: Final[dict[type[exp.Expr], str]] = {exp.BitwiseNot: "~", exp.Sqrt: "|/"}
_BINARY_ARGUMENTS = frozenset(("this", "expression"))
_SUPPORTED_ARGUMENTS: Final[dict[type[exp.Expr], frozenset[str]]] = {
    exp.Column: frozenset(("this", "table", "db")),
    exp.Literal: frozenset(("this", "is_string")),
    exp.Cast: frozenset(("this", "to")),
    exp.Is: _BINARY_ARGUMENTS | {"negate"},
    **dict.fromkeys((exp.Like, exp.ILike), _BINARY_ARGUMENTS | {"negate"}),
    exp.DPipe: _BINARY_ARGUMENTS | {"safe"},
    exp.Array: frozenset(("expressions", "bracket_notation")),
    exp.Interval: frozenset(("this", "unit")),
    exp.Between: frozenset(("this", "low", "high", "symmetric")),
    exp.In: frozenset(("this", "expressions", "query")),
    exp.Div: _BINARY_ARGUMENTS | {"typed", "safe"},
    exp.Case: frozenset(("this", "ifs", "default")),
    exp.Anonymous: frozenset(("this", "expressions")),
}


def supported_arguments(expression_class: type[exp.Expr]) -> frozenset[str]:
    """Return those arguments of a class of sqlglot that the analysis of row filters reads.

    If a part of a filter has other arguments, the analysis refuses the filter.
    """
    return _SUPPORTED_ARGUMENTS.get(expression_class, _BINARY_ARGUMENTS)
