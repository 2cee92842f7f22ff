"""Parses a row filter with sqlglot, and accepts only text that PostgreSQL's grammar parses in the same way.

In: text. Out: sqlglot's tree, in which operators bind as in PostgreSQL's gram.y. Other functions of the module read
parts of this tree. Raises RefusedError if PostgreSQL may parse the text differently, and InvalidSyntaxError if the
text is not a single expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import SqlglotError
from sqlglot.parsers.postgres import PostgresParser
from sqlglot.tokenizer_core import Token, TokenType

from pgsieve.decoding.row_filters.constants import RefusedError


class InvalidSyntaxError(Exception):
    """A text is not a single expression."""


_XML_FUNCTIONS: Final = frozenset(
    ("xmlconcat", "xmlelement", "xmlforest", "xmlparse", "xmlpi", "xmlroot", "xmlserialize", "xmlexists")
)


def _make_call(name: str, *arguments: exp.Expr | None) -> exp.Anonymous:
    call_arguments = [argument for argument in arguments if argument is not None]
    return exp.Anonymous(this=name, expressions=call_arguments)


#: The mark of a NULL that is written as UNKNOWN.
_UNKNOWN_MARK: Final = "is_unknown"


class _FilterDialect(Postgres):
    """sqlglot's PostgreSQL dialect, changed so that each function keeps the name that the text has."""

    class Tokenizer(Postgres.Tokenizer):
        """Reads ALTER, DROP and some other words as names, because PostgreSQL allows them as unquoted column names."""

        KEYWORDS: ClassVar[dict[str, TokenType]] = {
            word: token
            for word, token in Postgres.Tokenizer.KEYWORDS.items()
            if word not in {"ALTER", "DROP", "INSERT", "REVOKE", "ROLLBACK"}
        }

    class Parser(PostgresParser):
        """Keeps the name of each function from the text."""

        FUNCTIONS: ClassVar[dict[str, Callable[..., exp.Expr]]] = {}
        FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            "CAST": PostgresParser.FUNCTION_PARSERS["CAST"],
            "EXTRACT": lambda self: self.extract(),
            "OVERLAY": lambda self: self.overlay(),
            "POSITION": lambda self: self.position(),
            "SUBSTRING": lambda self: self.substring(),
            "TRIM": lambda self: self.trim(),
        }
        NO_PAREN_FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            word: PostgresParser.NO_PAREN_FUNCTION_PARSERS[word] for word in ("ANY", "CASE")
        }

        def _parse_null(self) -> exp.Expr | None:
            """Read NULL or UNKNOWN after IS. sqlglot reads both as NULL; `is_unknown` tells them apart."""
            null: exp.Expr | None = super()._parse_null()
            if isinstance(null, exp.Null):
                null.meta[_UNKNOWN_MARK] = self._prev.token_type == TokenType.UNKNOWN
            return null

        # Functions with a special syntax (func_expr_common_subexpr in gram.y).

        def extract(self) -> exp.Expr:
            """Read EXTRACT(field FROM source)."""
            field = self._parse_string() or self._parse_var(any_token=True)
            if field is None or not self._match(TokenType.FROM):
                raise InvalidSyntaxError
            return _make_call("extract", exp.Literal.string(field.name.lower()), self._parse_disjunction())

        def overlay(self) -> exp.Expr:
            """Read OVERLAY(text PLACING other FROM start FOR count)."""
            arguments = self._parse_csv(self._parse_disjunction)
            words = (word for word in ("PLACING", "FROM", "FOR") if self._match_text_seq(word))
            return _make_call("overlay", *arguments, *(self._parse_disjunction() for _ in words))

        def position(self) -> exp.Expr:
            """Read POSITION(sought IN text)."""
            sought_text = self._parse_bitwise()
            if not self._match(TokenType.IN):
                raise InvalidSyntaxError
            return _make_call("position", self._parse_bitwise(), sought_text)

        def substring(self) -> exp.Expr:
            """Read SUBSTRING(text FROM start FOR count)."""
            arguments = self._parse_csv(self._parse_disjunction)
            start = self._parse_disjunction() if self._match(TokenType.FROM) else None
            count = self._parse_disjunction() if self._match(TokenType.FOR) else None
            if count is not None and start is None:
                start = exp.Literal.number(1)
            return _make_call("substring", *arguments, start, count)

        def trim(self) -> exp.Expr:
            """Read TRIM(BOTH characters FROM text)."""
            side = self._prev.text.upper() if self._match_texts(("BOTH", "LEADING", "TRAILING")) else "BOTH"
            first_argument = None if self._match(TokenType.FROM) else self._parse_disjunction()
            if first_argument is None or self._match(TokenType.FROM):
                arguments = [*self._parse_csv(self._parse_disjunction), first_argument]
            else:
                arguments = [first_argument]
            return _make_call({"LEADING": "ltrim", "TRAILING": "rtrim"}.get(side, "btrim"), *arguments)


_OPERATOR_CHARACTERS = frozenset("+-*/<>=~!@#%^&|`?")
_OPERATORS = frozenset(
    [
        "+",
        "-",
        "*",
        "/",
        "%",
        "^",
        "<",
        ">",
        "=",
        "<=",
        ">=",
        "<>",
        "!=",
        "||",
        "&",
        "|",
        "#",
        "|/",
        "~~",
        "!~~",
        "~~*",
        "!~~*",
        "~",
        "!~",
        "~*",
        "!~*",
        "^@",
        "@>",
        "<@",
        "&&",
    ]
)

# Three numbers for each operator: its precedence (PostgreSQL documentation, Operator Precedence), the least
# precedence that its left operand may have, and the least precedence that its right operand may have. sqlglot binds
# some operators differently, so `unwrap_operand` checks these numbers. sqlglot does not distinguish ~~ from LIKE, although
# ~~ binds tighter in PostgreSQL. So an operand of either must bind tighter than both.
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
    **dict.fromkeys((exp.Like, exp.ILike, exp.SimilarTo), (6, 8, 8)),
    # gram.y has one precedence for all operators that it does not name.
    **dict.fromkeys(
        (
            *(exp.DPipe, exp.RegexpLike, exp.RegexpILike, exp.StartsWith, exp.BitwiseAnd, exp.BitwiseOr),
            *(exp.BitwiseXor, exp.ArrayContainsAll, exp.ArrayContainedBy, exp.ArrayOverlaps),
        ),
        (7, 7, 8),
    ),
    **dict.fromkeys((exp.BitwiseNot, exp.Sqrt), (7, 7, 7)),
    **dict.fromkeys((exp.Add, exp.Sub), (8, 8, 9)),
    **dict.fromkeys((exp.Mul, exp.Div, exp.Mod), (9, 9, 10)),
    exp.Pow: (10, 10, 11),
    exp.AtTimeZone: (11, 11, 12),
    exp.Collate: (12, 12, 13),
    exp.Neg: (13, 13, 13),
}
#: The same numbers for an expression that is not an operator.
_PRIMARY_PRECEDENCE = (15, 0, 0)

_ASCII_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def parse(expression: str) -> exp.Expr:
    """Return sqlglot's tree of a single expression."""
    dialect = _FilterDialect()
    try:
        tokens = dialect.tokenize(expression)
    except SqlglotError as error:
        raise InvalidSyntaxError from error
    for token in tokens:
        if token.text.lower() in _XML_FUNCTIONS and token.token_type not in (
            TokenType.STRING,
            TokenType.IDENTIFIER,
        ):
            raise RefusedError("type xml has no counterpart in pgsieve")
    for operator in _join_operators(tokens):
        if operator not in _OPERATORS:
            raise RefusedError(f"operator {operator} has no exact counterpart in pgsieve")
    try:
        trees = dialect.parser().parse(tokens, expression)
    except (SqlglotError, ValueError) as error:
        raise InvalidSyntaxError from error
    if len(trees) != 1 or not isinstance(trees[0], exp.Expr):
        raise InvalidSyntaxError
    return trees[0]


def _is_operator(token: Token) -> bool:
    is_quoted = token.token_type in (TokenType.STRING, TokenType.IDENTIFIER)
    return not is_quoted and bool(token.text) and set(token.text) <= _OPERATOR_CHARACTERS


def _join_operators(tokens: Sequence[Token]) -> Iterator[str]:
    """Yield the operators among the tokens; sqlglot divides an operator such as !~ into two tokens."""
    exclamation_mark: Token | None = None
    for token in filter(_is_operator, tokens):
        is_joined = (
            exclamation_mark is not None
            and exclamation_mark.end + 1 == token.start
            and token.text.startswith("~")
        )
        if exclamation_mark is not None and not is_joined:
            yield exclamation_mark.text
        if is_joined:
            yield f"!{token.text}"
        elif token.text != "!":
            yield token.text
        exclamation_mark = token if token.text == "!" else None
    if exclamation_mark is not None:
        yield exclamation_mark.text


def is_unknown(test: exp.Null) -> bool:
    """True if this is the UNKNOWN of IS UNKNOWN, and not NULL."""
    return bool(test.meta.get(_UNKNOWN_MARK))


def strip_parentheses(part: exp.Expr) -> exp.Expr:
    """Return the expression inside any number of parentheses."""
    while isinstance(part, exp.Paren):
        part = part.this
    return part


def unwrap_operand(parent: exp.Expr, part: exp.Expr, *, is_right: bool = False) -> exp.Expr:
    """Return an operand without its parentheses.

    Raises RefusedError if the operand has no parentheses, and PostgreSQL may bind it to another operator.
    """
    precedence = _PRECEDENCE.get(type(part), _PRIMARY_PRECEDENCE)[0]
    if precedence < _PRECEDENCE.get(type(parent), _PRIMARY_PRECEDENCE)[2 if is_right else 1]:
        raise RefusedError(
            "the precedence of its operators is not clear, put parentheses around the operands"
        )
    return strip_parentheses(part)


def folded_name(identifier: exp.Identifier | exp.Expr) -> str:
    """Return an identifier's name; ASCII letters are folded to lower case unless the identifier is quoted.

    PostgreSQL documentation, Identifiers and Key Words.
    """
    name = str(identifier.this)
    return name if identifier.args.get("quoted") else name.translate(_ASCII_LOWER)


def function_name(part: exp.Anonymous) -> str:
    """Return the name of a function, folded to lower case unless it is quoted."""
    return part.name if isinstance(part.this, exp.Identifier) and part.this.quoted else part.name.lower()


def is_call(part: exp.Expr, name: str, *argument_counts: int) -> bool:
    """Whether a part calls the function of this name, with as many arguments as one of `argument_counts`."""
    return (
        isinstance(part, exp.Anonymous)
        and function_name(part) == name
        and len(part.expressions) in argument_counts
    )


def interval_text(part: exp.Interval) -> str:
    """Return the text of an interval constant; sqlglot divides this text into a number and a unit."""
    return str(part.this.name) + (f" {part.unit.name.lower()}" if part.unit else "")


def find_quantified_operand(part: exp.Expr) -> tuple[bool, exp.Expr] | None:
    """Return whether an expression is ALL (array), and its array; None if it is neither ANY (array) nor ALL (array)."""
    if isinstance(part, exp.Any | exp.All):
        return isinstance(part, exp.All), part.this
    if (
        isinstance(part, exp.Anonymous)
        and function_name(part) in ("all", "some")
        and len(part.expressions) == 1
    ):
        return function_name(part) == "all", part.expressions[0]
    return None
