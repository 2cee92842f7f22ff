"""Parses the text of a publication's WHERE clause into a typed tree.

In: an expression as `pg_get_expr(prqual, prrelid)` prints it or as a user types it, and the relation's
columns. Out: a `RowFilter` with its tree (`pgsieve.decoding.row_filters.nodes`). Raises:

- UnsupportedFilterError if pgsieve cannot evaluate the filter exactly as PostgreSQL does
- RowFilterSyntaxError if PostgreSQL rejects the filter, too
- UndefinedColumnError if the relation lacks a column of the filter

PostgreSQL documentation: Row Filters, Operator Precedence, Subquery Expressions, Row and Array Comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NoReturn

from sqlglot import exp

from pgsieve.decoding.errors import RowFilterSyntaxError, UndefinedColumnError, UnsupportedFilterError
from pgsieve.decoding.row_filters import functions, grammar, operators, patterns, simplification, type_rules
from pgsieve.decoding.row_filters import regex as filter_regex
from pgsieve.decoding.row_filters.collations import is_collatable, strip_collation
from pgsieve.decoding.row_filters.constants import (
    InvalidConstantError,
    RefusedError,
    number_constant,
    parse_digits,
)
from pgsieve.decoding.row_filters.encodings import UTF8, require_characters, require_same_result
from pgsieve.decoding.row_filters.letter_case import CaseMappingFinder, find_ascii_mapping
from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    INTERVAL,
    STRINGS,
    TEXT,
    UNKNOWN,
    Array,
    Case,
    Collate,
    ColumnValue,
    Constant,
    IsNull,
    IsTruth,
    Node,
    Not,
    RowFilter,
    column_names,
    is_null,
    tree_can_fail,
)
from pgsieve.decoding.server_versions import NEWEST_SERVER
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS
from pgsieve.decoding.values.quoting import quote_identifier
from pgsieve.decoding.wording import shorten

PUBLISHER_HINT: Final = "use row_filter: publisher"


@dataclass(frozen=True, slots=True)
class FilterColumn:
    """A column of the filtered relation.

    `collation` is the name of a collation of pg_catalog, or '' if the type has no collation. For a collation of
    another schema it is `schema.name`, and pgsieve assumes that the collation is nondeterministic. A caller may pass
    'C' instead of 'default' if the database has the encoding UTF8, and its default collation orders strings by bytes.
    """

    name: str
    type_oid: int
    type_modifier: int
    collation: str


def parse_row_filter(
    expression: str,
    columns: Mapping[str, FilterColumn],
    relation: str,
    case_mappings: CaseMappingFinder = find_ascii_mapping,
    encoding: str = UTF8,
    major_version: int = NEWEST_SERVER // 10000,
) -> RowFilter:
    """Return the filter as a server of this version, with this encoding and case mappings, evaluates it.

    `relation` is the quoted name of the table, with its schema.
    """
    return _Analysis(expression, columns, relation, case_mappings, encoding, major_version).analyse()


_SYSTEM_COLUMNS = frozenset(("tableoid", "ctid", "xmin", "xmax", "cmin", "cmax"))
_Row = tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class _Analysis:
    """Resolves the names and types of one filter: turns sqlglot's tree into nodes."""

    _expression: str
    _columns: Mapping[str, FilterColumn]
    _relation: str
    _case_mappings: CaseMappingFinder
    _encoding: str
    _major_version: int

    def analyse(self) -> RowFilter:
        """Return the parsed filter. Its columns are all columns in the text, even if the simplified tree has fewer."""
        try:
            tree = self._analyse_condition(grammar.parse(self._expression))
            require_same_result(tree, self._encoding)
            return RowFilter(
                self._expression, simplification.simplify(tree, self._major_version), column_names(tree)
            )
        except RefusedError as error:
            raise self._make_unsupported_error(self._expression, str(error)) from None
        except RecursionError:
            raise self._make_unsupported_error(self._expression, "it is nested too deeply") from None
        except grammar.InvalidSyntaxError:
            raise RowFilterSyntaxError(
                f"row filter of {self._relation} is not an SQL expression: {shorten(self._expression)}",
                sqlstate="42601",
            ) from None

    # Errors. Their messages may quote the filter, which is a definition, but no values of rows.

    def _make_unsupported_error(self, part: str, reason: str) -> UnsupportedFilterError:
        return UnsupportedFilterError(
            f"row filter of {self._relation} cannot be evaluated outside PostgreSQL: {shorten(part)}: {reason}",
            hint=PUBLISHER_HINT,
        )

    def _refuse(self, part: exp.Expr, reason: str) -> NoReturn:
        raise self._make_unsupported_error(part.sql(dialect="postgres"), reason)

    def _apply_rule(self, part: exp.Expr, analyse: Callable[[], Node]) -> Node:
        """Return the node that `analyse` makes for a part of the filter; an error names this part."""
        try:
            return analyse()
        except RefusedError as error:
            self._refuse(part, str(error))
        except InvalidConstantError as error:
            raise RowFilterSyntaxError(
                f"row filter of {self._relation} is not valid: {shorten(part.sql(dialect='postgres'))}: {error}",
                sqlstate=error.sqlstate,
            ) from None

    # The parts of a tree.

    def _unwrap_left_operand(self, parent: exp.Expr) -> exp.Expr:
        return grammar.unwrap_operand(parent, parent.this)

    def _unwrap_right_operand(self, parent: exp.Expr) -> exp.Expr:
        return grammar.unwrap_operand(parent, parent.expression, is_right=True)

    def _analyse_condition(self, part: exp.Expr) -> Node:
        node = self._analyse_part(part)
        if node.type_oid == UNKNOWN:
            node = self._apply_rule(part, partial(type_rules.coerce, node, BOOL))
        if node.type_oid != BOOL:
            raise RowFilterSyntaxError(
                f"row filter of {self._relation}: {part.sql(dialect='postgres')} must be type boolean, "
                f"not type {type_rules.type_name(node.type_oid)}",
                sqlstate="42804",
            )
        return node

    def _analyse_part(self, part: exp.Expr) -> Node:
        part = grammar.strip_parentheses(part)
        handler = _HANDLERS.get(type(part))
        unhandled_arguments = {
            name for name, value in part.args.items() if value
        } - operators.supported_arguments(type(part))
        if handler is None or unhandled_arguments:
            self._refuse(part, "it has no exact counterpart in pgsieve")
        return self._apply_rule(part, partial(handler, self, part))

    def _analyse_parts(self, parts: Sequence[exp.Expr]) -> list[Node]:
        return [self._analyse_part(part) for part in parts]

    def _analyse_row_fields(self, part: exp.Expr) -> _Row | None:
        """Return the fields of ROW(a, b) or (a, b); None if the part is not a row constructor."""
        part = grammar.strip_parentheses(part)
        is_row = isinstance(part, exp.Tuple) or (
            isinstance(part, exp.Anonymous) and grammar.function_name(part) == "row"
        )
        return tuple(self._analyse_parts(part.expressions)) if is_row else None

    # Leaves.

    def analyse_column(self, part: exp.Column) -> Node:
        identifier, table = part.this, part.args.get("table")
        if not isinstance(identifier, exp.Identifier):
            self._refuse(part, "it is not a column")
        name = grammar.folded_name(identifier)
        qualifier = ".".join(
            quote_identifier(grammar.folded_name(item))
            for item in (part.args.get("db"), table)
            if item is not None
        )
        if name in _SYSTEM_COLUMNS:
            self._refuse(part, "system columns are not allowed in a row filter")
        is_wrong_relation = qualifier and not f".{self._relation}".endswith(f".{qualifier}")
        if name not in self._columns or is_wrong_relation:
            raise UndefinedColumnError(
                f"row filter of {self._relation}: column {part.sql(dialect='postgres')} does not exist",
                sqlstate="42703",
            )
        column = self._columns[name]
        digits = type_rules.column_digits(column.type_oid, column.type_modifier)
        return ColumnValue(name, column.collation, type_oid=column.type_oid, digits=digits)

    def analyse_literal(self, part: exp.Literal) -> Node:
        if part.is_string:
            return Constant(part.this, type_oid=UNKNOWN)
        return number_constant(part.this)

    def analyse_boolean(self, part: exp.Boolean) -> Node:
        return Constant(bool(part.this), type_oid=BOOL)

    def analyse_null(self, _part: exp.Null) -> Node:
        return Constant(None, type_oid=UNKNOWN)

    def resolve_type(self, part: exp.DataType) -> tuple[int, tuple[int, ...]]:
        """Return the oid and the modifier of a cast's type."""
        if part.this == exp.DType.ARRAY and part.expressions:
            element_oid, modifier = self.resolve_type(part.expressions[0])
            if modifier:
                self._refuse(part, "a type modifier on an array is not supported")
            return type_rules.find_array_type(element_oid), ()
        type_oid = operators.TYPE_OIDS.get(part.this)
        parameters = [str(parameter.this) for parameter in part.expressions]
        if type_oid is None or part.args.get("nested") or not all(p.isdecimal() for p in parameters):
            self._refuse(part, "the type has no exact counterpart in pgsieve")
        modifier = tuple(parse_digits(parameter) for parameter in parameters)
        if part.this == exp.DType.CHAR and not modifier:
            modifier = (1,)  # character means character(1); bpchar has no length limit
        return type_oid, modifier

    def analyse_cast(self, part: exp.Cast) -> Node:
        type_oid, modifier = self.resolve_type(part.to)
        if isinstance(part.this, exp.Array) and not part.this.expressions and type_oid in ELEMENT_OIDS:
            return type_rules.make_array((), ELEMENT_OIDS[type_oid])
        if modifier and type_oid in STRINGS:
            require_characters(self._encoding)
        # Precedence needs no check here: nothing binds tighter than ::, and CAST(… AS …) encloses its operand.
        return type_rules.make_cast(self._analyse_part(part.this), type_oid, modifier)

    def analyse_collate(self, part: exp.Collate) -> Node:
        operand = self._analyse_part(self._unwrap_left_operand(part))
        # A quoted constant has no type yet. As without COLLATE, `coerce` gives it the type that its place needs.
        if operand.type_oid != UNKNOWN and not is_collatable(operand.type_oid):
            self._refuse(part, "its type does not support collations")
        identifier = part.expression
        qualifier = (
            grammar.folded_name(identifier.args["table"]) if identifier.args.get("table") else "pg_catalog"
        )
        name = grammar.folded_name(identifier.this if isinstance(identifier, exp.Column) else identifier)
        full_name = name if qualifier == "pg_catalog" else f"{qualifier}.{name}"
        return Collate(operand, full_name, type_oid=operand.type_oid)

    # Operators.

    def analyse_logical(self, connective: Literal["AND", "OR"], part: exp.Expr) -> Node:
        operands = [
            self._analyse_condition(self._unwrap_left_operand(part)),
            self._analyse_condition(self._unwrap_right_operand(part)),
        ]
        return functions.make_logical(connective, operands)

    def analyse_negation(self, part: exp.Not) -> Node:
        return Not(self._analyse_condition(self._unwrap_left_operand(part)))

    def analyse_is(self, part: exp.Is) -> Node:
        operand, test = self._unwrap_left_operand(part), part.expression
        if isinstance(test, exp.Boolean):
            result: Node = IsTruth(self._analyse_condition(operand), bool(test.this))
        elif isinstance(test, exp.Null) and grammar.is_unknown(test):
            result = IsNull(self._analyse_condition(operand))
        elif isinstance(test, exp.Null):
            return self._analyse_null_test(operand, is_negated=bool(part.args.get("negate")))
        else:
            self._refuse(part, "it has no exact counterpart in pgsieve")
        return Not(result) if part.args.get("negate") else result

    def _analyse_null_test(self, operand: exp.Expr, *, is_negated: bool) -> Node:
        # A row IS NULL if all its fields are NULL, and IS NOT NULL if none is (PostgreSQL documentation,
        # Comparison Functions and Operators).
        row = self._analyse_row_fields(operand)
        fields = (self._analyse_part(operand),) if row is None else row
        tests = [IsNull(type_rules.resolve_unknown_as_text(field)) for field in fields]
        return functions.make_logical("AND", [Not(test) if is_negated else test for test in tests])

    def analyse_comparison(self, part: exp.Expr) -> Node:
        operator = operators.COMPARISONS[type(part)]
        quantified_operand = grammar.find_quantified_operand(part.expression)
        if quantified_operand is not None:
            return self._compare_each_element(
                self._unwrap_left_operand(part),
                *quantified_operand,
                partial(type_rules.make_comparison, operator),
            )
        left, right = self._unwrap_left_operand(part), self._unwrap_right_operand(part)
        rows = self._analyse_row_pair(part, left, right)
        if rows is None:
            return type_rules.make_comparison(operator, self._analyse_part(left), self._analyse_part(right))
        return functions.compare_rows(operator, *rows, self._major_version)

    def _analyse_row_pair(self, part: exp.Expr, left: exp.Expr, right: exp.Expr) -> tuple[_Row, _Row] | None:
        """Return the fields of both sides, or None if neither side is a row."""
        rows = self._analyse_row_fields(left), self._analyse_row_fields(right)
        if rows[0] is None and rows[1] is None:
            return None
        if rows[0] is None or rows[1] is None or len(rows[0]) != len(rows[1]) or not rows[0]:
            self._refuse(part, "a row can only be compared with a row of the same number of fields")
        return rows[0], rows[1]

    def analyse_distinct(self, part: exp.Expr) -> Node:
        left, right = self._unwrap_left_operand(part), self._unwrap_right_operand(part)
        rows = self._analyse_row_pair(part, left, right) or (
            (self._analyse_part(left),),
            (self._analyse_part(right),),
        )
        equality = functions.make_logical(
            "AND", [type_rules.make_not_distinct(*pair) for pair in zip(*rows, strict=True)]
        )
        return equality if isinstance(part, exp.NullSafeEQ) else Not(equality)

    def analyse_between(self, part: exp.Between) -> Node:
        compare = type_rules.make_comparison
        value = self._analyse_part(self._unwrap_left_operand(part))
        lower_bound, upper_bound = (
            self._analyse_part(grammar.unwrap_operand(part, part.args[end], is_right=True))
            for end in ("low", "high")
        )
        range_test = functions.make_logical(
            "AND", [compare(">=", value, lower_bound), compare("<=", value, upper_bound)]
        )
        if not part.args.get("symmetric"):
            return range_test
        swapped_range_test = functions.make_logical(
            "AND", [compare(">=", value, upper_bound), compare("<=", value, lower_bound)]
        )
        return functions.make_logical("OR", [range_test, swapped_range_test])

    def analyse_in(self, part: exp.In) -> Node:
        left, items = self._unwrap_left_operand(part), part.expressions
        if not items:
            self._refuse(part, "only a list of values is supported, no subquery")
        row = self._analyse_row_fields(left)
        if row is not None:
            pairs = (self._analyse_row_pair(item, left, item) for item in items)
            equalities = [
                functions.compare_rows("=", *pair, self._major_version) for pair in pairs if pair is not None
            ]
            return functions.make_logical("OR", equalities)
        value, nodes = self._analyse_part(left), self._analyse_parts(items)
        constants = [node for node in nodes if not column_names(node)]
        if len(constants) > 1:
            if all(map(is_null, constants)):
                self._refuse(part, "the list has several NULLs: write one")
            # PostgreSQL puts the constants into one array (transformAExprIn). It converts them and the left side to a
            # common type. It searches this array before it computes the other values.
            common_oid = type_rules.find_common_type([value, *constants])
            if common_oid not in ELEMENT_OIDS:  # there is no array of arrays
                nodes_with_columns = [node for node in nodes if column_names(node)]
                nodes = [*(type_rules.coerce(node, common_oid) for node in constants), *nodes_with_columns]
        return functions.make_logical("OR", [type_rules.make_comparison("=", value, node) for node in nodes])

    def _compare_each_element(
        self, left: exp.Expr, is_all: bool, array: exp.Expr, compare: Callable[[Node, Node], Node]
    ) -> Node:
        """Return `left operator ANY (array)`, or ALL if `is_all`."""
        value = self._analyse_part(left)
        elements = self._analyse_elements(array, value.type_oid)
        if isinstance(elements, Array) and tree_can_fail(value):
            self._refuse(
                array,
                "PostgreSQL computes the left side even for an array without values, and that can fail",
            )
        if isinstance(elements, Node):
            return functions.make_each_element(value, elements, is_all=is_all, compare=compare)
        if any(tree_can_fail(element) and column_names(element) for element in elements):
            self._refuse(array, "PostgreSQL computes all elements first, and one can fail")
        results = [compare(value, element) for element in elements]
        return functions.make_logical("AND" if is_all else "OR", results)

    def _analyse_elements(self, array: exp.Expr, left_oid: int) -> Sequence[Node] | Node:
        """Return the elements of ARRAY[…] or of a constant array, in their common type.

        Any other array is returned as one node.

        ARRAY[…] of only NULLs is one node, too, because PostgreSQL's planner does not divide a comparison with it into
        comparisons with its elements.
        """
        array = grammar.strip_parentheses(array)
        if isinstance(array, exp.Array):
            # If all elements are quoted constants, they stay without a type here. The comparison later gives them the
            # type of the left side.
            converted_elements, type_oid, _ = type_rules.convert_to_common_type(
                self._analyse_parts(array.expressions)
            )
            if type_oid in ELEMENT_OIDS:
                self._refuse(array, "an array of several dimensions has no counterpart in pgsieve")
            return (
                type_rules.make_array(converted_elements, type_oid)
                if all(map(is_null, converted_elements))
                else converted_elements
            )
        node = self._analyse_part(array)
        if node.type_oid == UNKNOWN:
            node = type_rules.coerce(
                node, type_rules.find_array_type(type_rules.resolve_unknown_type(left_oid))
            )
        if node.type_oid not in ELEMENT_OIDS:
            self._refuse(array, "ANY and ALL need an array")
        return node.elements if isinstance(node, Array) and not all(map(is_null, node.elements)) else node

    def analyse_array(self, part: exp.Array) -> Node:
        return functions.make_array_constructor(self._analyse_parts(part.expressions))

    def analyse_arithmetic(self, part: exp.Expr) -> Node:
        left, right = (
            self._analyse_part(self._unwrap_left_operand(part)),
            self._analyse_part(self._unwrap_right_operand(part)),
        )
        return functions.make_operation(operators.ARITHMETIC[type(part)], left, right)

    def analyse_operator(self, part: exp.Expr) -> Node:
        operands = self._analyse_parts((self._unwrap_left_operand(part), self._unwrap_right_operand(part)))
        return functions.make_function_node(operators.OPERATORS[type(part)], operands)

    def analyse_prefix_operator(self, part: exp.Expr) -> Node:
        return functions.make_builtin_call(
            operators.PREFIX_OPERATORS[type(part)], [self._analyse_part(self._unwrap_left_operand(part))]
        )

    def analyse_minus(self, part: exp.Neg) -> Node:
        operand = self._unwrap_left_operand(part)
        if isinstance(operand, exp.Literal) and not operand.is_string:
            # The sign is part of the number, as in PostgreSQL's grammar. Otherwise a filter could not contain the
            # least integer.
            return number_constant(f"-{operand.this}")
        return functions.make_builtin_call("-", [self._analyse_part(operand)])

    # Patterns.

    def analyse_like(self, part: exp.Expr, escape: str = "\\") -> Node:
        right, case_mappings = part.expression, self._case_mappings if isinstance(part, exp.ILike) else None
        if grammar.find_quantified_operand(right) is None:
            right = self._unwrap_right_operand(part)
        if grammar.is_call(right, "like_escape", 2):
            right, escape = right.expressions[0], self._analyse_text_constant(right.expressions[1])
        return self._analyse_pattern_match(
            part, right, partial(patterns.make_like, escape=escape, case_mappings=case_mappings)
        )

    def analyse_escape(self, part: exp.Escape) -> Node:
        escape = self._analyse_text_constant(part.expression)
        if isinstance(part.this, exp.SimilarTo):
            return self.analyse_similar(part.this, escape)
        if not isinstance(part.this, exp.Like | exp.ILike):
            self._refuse(part, "ESCAPE belongs to LIKE or SIMILAR TO")
        return self.analyse_like(part.this, escape)

    def analyse_regex(self, part: exp.Expr) -> Node:
        case_mappings = self._case_mappings if isinstance(part, exp.RegexpILike) else None
        right = part.expression
        if grammar.find_quantified_operand(right) is None:
            right = self._unwrap_right_operand(part)
        if grammar.is_call(right, "similar_to_escape", 1, 2):
            pattern, *escapes = (self._analyse_text_constant(argument) for argument in right.expressions)
            converted_pattern = filter_regex.similar_to_escape(pattern, escapes[0] if escapes else "\\")
            return patterns.make_regex(
                self._analyse_part(self._unwrap_left_operand(part)),
                Constant(converted_pattern, type_oid=TEXT),
            )
        return self._analyse_pattern_match(
            part, right, partial(patterns.make_regex, case_mappings=case_mappings)
        )

    def analyse_similar(self, part: exp.SimilarTo, escape: str = "\\") -> Node:
        pattern = filter_regex.similar_to_escape(
            self._analyse_text_constant(self._unwrap_right_operand(part)), escape
        )
        return patterns.make_regex(
            self._analyse_part(self._unwrap_left_operand(part)), Constant(pattern, type_oid=TEXT)
        )

    def _analyse_pattern_match(
        self, part: exp.Expr, pattern: exp.Expr, compare: Callable[[Node, Node], Node]
    ) -> Node:
        is_negated, quantified_operand = (
            bool(part.args.get("negate")),
            grammar.find_quantified_operand(pattern),
        )
        if quantified_operand is None:
            comparison_node = compare(
                self._analyse_part(self._unwrap_left_operand(part)), self._analyse_part(pattern)
            )
            return Not(comparison_node) if is_negated else comparison_node
        # `x !~~ ANY (array)` is not the negation of `x ~~ ANY (array)`, so each comparison is negated by itself.
        compare_element = (lambda left, right: Not(compare(left, right))) if is_negated else compare
        return self._compare_each_element(
            self._unwrap_left_operand(part), *quantified_operand, compare_element
        )

    def _analyse_text_constant(self, part: exp.Expr) -> str:
        node = strip_collation(self._analyse_part(part))
        if not isinstance(node, Constant) or not isinstance(node.value, str):
            self._refuse(part, "only a constant is supported here")
        return node.value

    # Functions, CASE and INTERVAL.

    def analyse_case(self, part: exp.Case) -> Node:
        subject = None if part.this is None else self._analyse_part(part.this)
        if subject is not None and subject.type_oid == UNKNOWN:
            # A quoted subject becomes text, whatever types it is compared with (transformCaseExpr).
            subject = type_rules.coerce(subject, TEXT)
        conditions, results = [], []
        for branch in part.args["ifs"]:
            if subject is None:
                conditions.append(self._analyse_condition(branch.this))
            else:
                conditions.append(type_rules.make_comparison("=", subject, self._analyse_part(branch.this)))
            results.append(self._analyse_part(branch.args["true"]))
        default = part.args.get("default")
        default_node = Constant(None, type_oid=UNKNOWN) if default is None else self._analyse_part(default)
        # PostgreSQL looks at the type of the default before the types of the results. If they are different string
        # types, the first type is the common type.
        (default_node, *result_nodes), type_oid, digits = type_rules.convert_to_common_type(
            [default_node, *results]
        )
        return Case(tuple(conditions), tuple(result_nodes), default_node, type_oid=type_oid, digits=digits)

    def analyse_function(self, part: exp.Anonymous) -> Node:
        return functions.make_function_node(
            grammar.function_name(part), self._analyse_parts(part.expressions), self._case_mappings
        )

    def analyse_interval(self, part: exp.Interval) -> Node:
        return type_rules.coerce(Constant(grammar.interval_text(part), type_oid=UNKNOWN), INTERVAL)


_HANDLERS: Final[dict[type[exp.Expr], Callable[[_Analysis, Any], Node]]] = {
    exp.Column: _Analysis.analyse_column,
    exp.Literal: _Analysis.analyse_literal,
    exp.Boolean: _Analysis.analyse_boolean,
    exp.Null: _Analysis.analyse_null,
    exp.Cast: _Analysis.analyse_cast,
    exp.Collate: _Analysis.analyse_collate,
    exp.And: lambda analysis, part: analysis.analyse_logical("AND", part),
    exp.Or: lambda analysis, part: analysis.analyse_logical("OR", part),
    exp.Not: _Analysis.analyse_negation,
    exp.Is: _Analysis.analyse_is,
    exp.NullSafeEQ: _Analysis.analyse_distinct,
    exp.NullSafeNEQ: _Analysis.analyse_distinct,
    exp.Between: _Analysis.analyse_between,
    exp.In: _Analysis.analyse_in,
    exp.Like: _Analysis.analyse_like,
    exp.ILike: _Analysis.analyse_like,
    exp.Escape: _Analysis.analyse_escape,
    exp.RegexpLike: _Analysis.analyse_regex,
    exp.RegexpILike: _Analysis.analyse_regex,
    exp.SimilarTo: _Analysis.analyse_similar,
    exp.Array: _Analysis.analyse_array,
    exp.Interval: _Analysis.analyse_interval,
    exp.Neg: _Analysis.analyse_minus,
    exp.Case: _Analysis.analyse_case,
    exp.Anonymous: _Analysis.analyse_function,
    **dict.fromkeys(operators.COMPARISONS, _Analysis.analyse_comparison),
    **dict.fromkeys(operators.ARITHMETIC, _Analysis.analyse_arithmetic),
    **dict.fromkeys(operators.OPERATORS, _Analysis.analyse_operator),
    **dict.fromkeys(operators.PREFIX_OPERATORS, _Analysis.analyse_prefix_operator),
}
