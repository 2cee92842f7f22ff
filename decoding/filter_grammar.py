"""The text of a row filter to sqlglot's tree, taken only where it reads as PostgreSQL's grammar does.

In: text. Out: a tree of sqlglot whose operands bind as in gram.y (section 4.1.6), and readers of its names,
patterns and array constants. Raises RefusedError for what PostgreSQL may read in another way, and
InvalidSyntaxError for what is no single expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import SqlglotError
from sqlglot.parsers.postgres import PostgresParser
from sqlglot.tokenizer_core import Token, TokenType

from decoding.filter_constants import InvalidConstantError, RefusedError


class InvalidSyntaxError(Exception):
    """Text that is not one expression."""


class _FilterDialect(Postgres):
    """sqlglot's PostgreSQL without its rewriting of functions into those of other dialects."""

    class Tokenizer(Postgres.Tokenizer):
        """Reads statements' first words as names: PostgreSQL lets columns have them without quotes."""

        KEYWORDS: ClassVar[dict[str, TokenType]] = {
            word: token
            for word, token in Postgres.Tokenizer.KEYWORDS.items()
            if word not in {"ALTER", "DROP", "INSERT", "REVOKE", "ROLLBACK"}
        }

    class Parser(PostgresParser):
        """Leaves every function under the name it is called by."""

        FUNCTIONS: ClassVar[dict[str, Callable[..., exp.Expr]]] = {}
        FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            "CAST": PostgresParser.FUNCTION_PARSERS["CAST"]
        }
        NO_PAREN_FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            word: PostgresParser.NO_PAREN_FUNCTION_PARSERS[word] for word in ("ANY", "CASE")
        }


_OPERATOR_CHARACTERS = frozenset("+-*/<>=~!@#%^&|`?")
_OPERATORS = frozenset(("+", "-", "*", "/", "%", "<", ">", "=", "<=", ">=", "<>", "!=", "~~", "!~~"))

# Precedence (section 4.1.6): of the operator, and the least its left and right operand must have. sqlglot binds
# some operators differently, so a tree is taken only where its operands bind as in PostgreSQL's grammar. LIKE is
# also spelled ~~, which binds closer: its operands must bind closer than both spellings.
_PRECEDENCE: Final[dict[type[exp.Expr], tuple[int, int, int]]] = {
    exp.Or: (1, 1, 2),
    exp.And: (2, 2, 3),
    exp.Not: (3, 3, 3),
    exp.Is: (4, 5, 5),
    exp.NullSafeEQ: (4, 5, 5),
    exp.NullSafeNEQ: (4, 5, 5),
    **dict.fromkeys((exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE), (5, 6, 6)),
    **dict.fromkeys((exp.Between, exp.In), (6, 7, 7)),
    exp.Escape: (6, 6, 8),
    exp.Like: (6, 8, 8),
    **dict.fromkeys((exp.Add, exp.Sub), (8, 8, 9)),
    **dict.fromkeys((exp.Mul, exp.Div, exp.Mod), (9, 9, 10)),
    exp.Collate: (12, 12, 13),
    exp.Neg: (13, 13, 13),
}
_PRIMARY = (15, 0, 0)

_ASCII_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def parse(expression: str) -> exp.Expr:
    """Return the tree of a single expression."""
    dialect = _FilterDialect()
    try:
        tokens = dialect.tokenize(expression)
    except SqlglotError as error:
        raise InvalidSyntaxError from error
    for operator in _operators(tokens):
        if operator not in _OPERATORS:
            raise RefusedError(f"operator {operator} has no exact counterpart in Spark")
    try:
        parsed = dialect.parser().parse(tokens, expression)
    except (SqlglotError, ValueError) as error:
        raise InvalidSyntaxError from error
    if len(parsed) != 1 or not isinstance(parsed[0], exp.Expr):
        raise InvalidSyntaxError
    return parsed[0]


def _is_operator(token: Token) -> bool:
    quoted = token.token_type in (TokenType.STRING, TokenType.IDENTIFIER)
    return not quoted and bool(token.text) and set(token.text) <= _OPERATOR_CHARACTERS


def _operators(tokens: Sequence[Token]) -> Iterator[str]:
    """Return the operators among the tokens; !~~ is two of sqlglot's."""
    previous: Token | None = None
    for token in filter(_is_operator, tokens):
        if previous is not None:
            if token.text == "~~" and previous.end + 1 == token.start:
                yield "!~~"
                previous = None
                continue
            yield previous.text
        previous = token if token.text == "!" else None
        if previous is None:
            yield token.text
    if previous is not None:
        yield previous.text


def without_parentheses(part: exp.Expr) -> exp.Expr:
    """Return what stands inside of any parentheses."""
    while isinstance(part, exp.Paren):
        part = part.this
    return part


def operand(parent: exp.Expr, part: exp.Expr, *, right: bool = False) -> exp.Expr:
    """Return an operand without its parentheses; if it has none it must bind as in PostgreSQL's grammar."""
    binds = _PRECEDENCE.get(type(part), _PRIMARY)[0]
    if binds < _PRECEDENCE.get(type(parent), _PRIMARY)[2 if right else 1]:
        raise RefusedError("its precedence is not clear, put parentheses around the operands")
    return without_parentheses(part)


def folded_name(identifier: exp.Identifier | exp.Expr) -> str:
    """Return the name an identifier means: unquoted ASCII letters are folded (section 4.1.1)."""
    name = str(identifier.this)
    return name if identifier.args.get("quoted") else name.translate(_ASCII_LOWER)


def function_name(part: exp.Anonymous) -> str:
    """Return the name of a function, which no quotes can make another."""
    return str(part.this).lower()


def quantified(part: exp.Expr) -> tuple[bool, exp.Expr] | None:
    """Return (every, array) for ANY (array) and ALL (array)."""
    if isinstance(part, exp.Any | exp.All):
        return isinstance(part, exp.All), part.this
    if (
        isinstance(part, exp.Anonymous)
        and function_name(part) in ("all", "some")
        and len(part.expressions) == 1
    ):
        return function_name(part) == "all", part.expressions[0]
    return None


def array_texts(text: str) -> list[str | None] | None:
    """Return the elements of an array constant without quotes, escapes, dimensions; None when it has those."""
    found = re.fullmatch(r"\s*\{([^{}\"\\]*)\}\s*", text)
    if found is None:
        return None
    items = [item.strip() for item in found[1].split(",")] if found[1].strip() else []
    return None if "" in items else [None if item.upper() == "NULL" else item for item in items]


def canonical_pattern(pattern: str, escape: str) -> str:
    """Rewrite a LIKE pattern to one where a backslash escapes what needs it and nothing else (section 9.7.1)."""
    if len(escape) > 1:
        raise InvalidConstantError("invalid escape string", "22025")
    return "".join(_pattern_parts(pattern, escape))


def _pattern_parts(pattern: str, escape: str) -> Iterator[str]:
    characters = iter(pattern)
    for character in characters:
        literal = character == escape
        meant = next(characters, None) if literal else character
        if meant is None:
            raise RefusedError("a pattern that ends with the escape character fails on some rows only")
        yield f"\\{meant}" if meant == "\\" or (literal and meant in "%_") else meant
