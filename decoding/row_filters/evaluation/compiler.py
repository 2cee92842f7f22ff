"""Compiles a row filter's tree into a Python function of a row.

In: a tree. Out: a `Program`. Its function takes the values of a row, and returns the filter's value for this row.
Comparisons compare the ranks of values. The rank of a value is a Python object that orders as the value does in
PostgreSQL (`values.rank_function`).

The function raises an error for the same rows as PostgreSQL does. It evaluates operands from the left. In AND, OR,
CASE and COALESCE it leaves out the operands that PostgreSQL does not evaluate (PostgreSQL documentation, Expression
Evaluation Rules; ExecInterpExpr() in src/backend/executor/execExprInterp.c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import eq, ge, gt, itemgetter, le, lt, ne, not_
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeGuard

import pyarrow as pa

from pgsieve.decoding.row_filters import nodes
from pgsieve.decoding.row_filters.evaluation import arrays, datetimes, numbers, strings
from pgsieve.decoding.row_filters.evaluation.values import (
    date_to_micros,
    rank_function,
    to_python_value,
    to_python_values,
)
from pgsieve.decoding.row_filters.nodes import Node
from pgsieve.decoding.row_filters.numeric import DECIMAL_FUNCTIONS
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS

Row: TypeAlias = list[Any]
RowFunction: TypeAlias = Callable[[Row], Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled tree.

    `columns` maps each column that the tree reads to the oid of its type. `evaluate` takes a list: the values of
    these columns, then the items of `scratch_values`. It overwrites these items with intermediate values.
    """

    columns: dict[str, int]
    scratch_values: tuple[object, ...]
    evaluate: RowFunction

    def compute_values(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """Return an iterator over the tree's value for each row of a batch; each value is computed when it is read."""
        columns = [to_python_values(batch.column(name), type_oid) for name, type_oid in self.columns.items()]
        rows = zip(*columns, strict=True) if columns else repeat((), batch.num_rows)
        return (self.evaluate([*row, *self.scratch_values]) for row in rows)


def compile_tree(tree: Node) -> Program:
    """Compile a tree; raises RecursionError if it is nested too deeply."""
    compiler = _Compiler(_TreeFacts(tree))
    evaluate = compiler.compile(tree)
    return Program(compiler.columns, (_NOT_COMPUTED,) * compiler.scratch_size, evaluate)


_LEAVES: Final = (nodes.ColumnValue, nodes.Constant, nodes.Element)
_NOT_COMPUTED: Final = object()


class _TreeFacts:
    """What the compiler needs to know of a tree.

    - `columns` maps each column that the tree reads to the oid of its type.
    - `shared_ids` has the ids of the nodes that occur several times in the tree, such as the value of a BETWEEN. They
      are evaluated only once per row. Leaves are not listed, because their values are at hand. A node that depends on
      an element of an array is not listed either, because its value changes within a row.
    """

    def __init__(self, tree: Node) -> None:
        self.columns: dict[str, int] = {}
        self.shared_ids: set[int] = set()
        #: Maps the id of a node to whether the node depends on an element of an array.
        self._depends_on_element: dict[int, bool] = {}
        self._visit(tree)

    def _visit(self, node: Node) -> bool:
        if id(node) in self._depends_on_element:
            if not isinstance(node, _LEAVES) and not self._depends_on_element[id(node)]:
                self.shared_ids.add(id(node))
            return self._depends_on_element[id(node)]
        if isinstance(node, nodes.ColumnValue):
            self.columns[node.name] = node.type_oid
        depends_on_element = [self._visit(child) for child in nodes.children(node)]
        self._depends_on_element[id(node)] = isinstance(node, nodes.Element) or (
            any(depends_on_element) and not isinstance(node, nodes.EachElement)
        )
        return self._depends_on_element[id(node)]


_COMPARISONS: Final[MappingProxyType[str, Callable[[Any, Any], bool]]] = MappingProxyType(
    {"=": eq, "<>": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
)
_FUNCTIONS: Final = MappingProxyType(
    {
        **numbers.NUMBER_FUNCTIONS,
        **strings.STRING_FUNCTIONS_BY_SOURCE,
        **datetimes.DATETIME_FUNCTIONS,
        **arrays.ARRAY_FUNCTIONS,
    }
)
_CONVERSIONS: Final = MappingProxyType(
    {**numbers.NUMBER_CONVERSIONS, **strings.STRING_CONVERSIONS, **datetimes.DATETIME_CONVERSIONS}
)


class _Compiler:
    """Compiles nodes into functions of a row."""

    def __init__(self, facts: _TreeFacts) -> None:
        self.columns = facts.columns
        self.scratch_size = 0
        self._shared_ids = facts.shared_ids
        self._index_by_column = {name: index for index, name in enumerate(facts.columns)}
        #: The functions by the id of the node. The key is not the node itself, because 1.5 and 1.50 are equal nodes
        #: with different display scales.
        self._function_by_node_id: dict[int, RowFunction] = {}
        self._index_by_element_id: dict[int, int] = {}

    def compile(self, node: Node) -> RowFunction:
        """Return the function of a node."""
        if id(node) not in self._function_by_node_id:
            function = self._compile_node(node)
            self._function_by_node_id[id(node)] = (
                _evaluate_once(function, self._add_scratch_index())
                if id(node) in self._shared_ids
                else function
            )
        return self._function_by_node_id[id(node)]

    def _compile_node(self, node: Node) -> RowFunction:
        match node:
            case nodes.ColumnValue(name=name):
                return itemgetter(self._index_by_column[name])
            case nodes.Element():
                return itemgetter(self._index_by_element_id[id(node)])
            case nodes.Constant(value=value):
                return _make_constant_function(to_python_value(value))
            case nodes.Array(elements=elements):
                return _make_array_function(self._compile_all(elements))
            case nodes.Cast():
                return self._compile_cast(node)
            case nodes.Collate(operand=operand):
                return self.compile(operand)
            case nodes.Comparison(operator=operator, left=left, right=right):
                return _make_strict_function(_COMPARISONS[operator], self._compile_sides(left, right))
            case nodes.NotDistinct(left=left, right=right):
                return _make_not_distinct_function(*self._compile_sides(left, right))
            case nodes.Logical():
                return self._compile_logical(node)
            case nodes.Not(operand=operand):
                return _make_strict_function(not_, [self.compile(operand)])
            case nodes.IsNull(operand=operand):
                return _make_null_test_function(self.compile(operand))
            case nodes.IsTruth(operand=operand, truth=truth):
                return _make_truth_test_function(self.compile(operand), truth)
            case nodes.Like(operand=operand, pattern=pattern):
                return _make_strict_function(strings.like_matcher(pattern), [self.compile(operand)])
            case nodes.Regex(operand=operand, pattern=pattern):
                return _make_strict_function(strings.regex_matcher(pattern), [self.compile(operand)])
            case nodes.Arithmetic(operator=operator, left=left, right=right):
                return _make_strict_function(
                    numbers.arithmetic_function(operator, node.type_oid), self._compile_all((left, right))
                )
            case nodes.FunctionCall():
                return self._compile_call(node)
            case nodes.CaseChange(operand=operand, mapping=mapping):
                return _make_strict_function(partial(mapping.change, node.function), [self.compile(operand)])
            case nodes.EachElement():
                return self._compile_each_element(node)
            case nodes.Coalesce(operands=operands):
                return _make_coalesce_function(self._compile_all(operands))
            case nodes.Extreme(operands=operands):
                choose = max if node.function == "GREATEST" else min
                return _make_extreme_function(
                    choose, self._compile_all(operands), rank_function(node.type_oid)
                )
            case nodes.NullIf(left=left, right=right):
                return _make_null_if_function(
                    self._compile_all((left, right)), _find_rank_functions(left, right)
                )
            case nodes.Case(conditions=conditions, results=results, default=default):
                branches = list(zip(self._compile_all(conditions), self._compile_all(results), strict=True))
                return _make_case_function(branches, self.compile(default))
            case _:
                raise TypeError(f"no rule evaluates {type(node).__name__}")

    def _compile_all(self, operands: Sequence[Node]) -> list[RowFunction]:
        return [self.compile(operand) for operand in operands]

    # Comparisons.

    def _compile_sides(self, left: Node, right: Node) -> list[RowFunction]:
        """Compile both sides of a comparison to functions that return the ranks to compare."""
        sides = zip((left, right), _find_rank_functions(left, right), strict=True)
        return [_compose_strictly(function, self.compile(side)) for side, function in sides]

    def _compile_logical(self, node: nodes.Logical) -> RowFunction:
        # The value of an operand that decides the result, whatever the other operands are.
        deciding_value = node.connective == "OR"
        return self._compile_membership(node, deciding_value) or _make_connective_function(
            self._compile_all(node.operands), deciding_value
        )

    def _compile_membership(self, node: nodes.Logical, deciding_value: bool) -> RowFunction | None:
        """Compile `x = a OR x = b …`, or its negation, as a lookup of x in a set; return None for other expressions."""
        operator = "=" if deciding_value else "<>"
        match node.operands[0]:
            case nodes.Comparison(left=subject):
                constants = [o.right for o in node.operands if _compares_with_constant(o, operator, subject)]
            case _:
                return None
        if len(constants) < len(node.operands):
            return None
        find_rank = rank_function(subject.type_oid)
        ranks = [_compose_strictly(find_rank, self.compile(constant))([]) for constant in constants]
        return _make_membership_function(
            _compose_strictly(find_rank, self.compile(subject)), ranks, deciding_value
        )

    def _compile_each_element(self, node: nodes.EachElement) -> RowFunction:
        subject, array = self._compile_all((node.subject, node.array))
        if id(node.element) not in self._index_by_element_id:
            self._index_by_element_id[id(node.element)] = self._add_scratch_index()
        index, test = self._index_by_element_id[id(node.element)], self.compile(node.test)
        deciding_value = not node.is_all

        def evaluate(row: Row) -> bool | None:
            subject(row)  # For its errors: PostgreSQL evaluates the left side even if the array is empty.
            items = array(row)
            if items is None:
                return None
            result: bool | None = not deciding_value
            for row[index] in items:
                verdict: bool | None = test(row)
                if verdict is deciding_value:
                    return deciding_value
                result = None if verdict is None else result
            return result

        return evaluate

    def _add_scratch_index(self) -> int:
        self.scratch_size += 1
        return len(self.columns) + self.scratch_size - 1

    # Conversions and functions.

    def _compile_cast(self, node: nodes.Cast) -> RowFunction:
        operand, source_oid, target_oid = self.compile(node.operand), node.operand.type_oid, node.type_oid
        if node.modifier:
            return _compose_strictly(_make_modifier_cast_function(target_oid, node.modifier), operand)
        if {source_oid, target_oid} <= set(nodes.STRINGS):
            return _compose_strictly(strings.conversion_function(source_oid, target_oid), operand)
        if source_oid == target_oid or (source_oid in ELEMENT_OIDS and target_oid in ELEMENT_OIDS):
            return operand  # Conversions of arrays do not change the elements.
        if (source_oid, target_oid) not in _CONVERSIONS:
            raise TypeError(f"no rule converts type {source_oid} to {target_oid}")
        return _compose_strictly(_CONVERSIONS[source_oid, target_oid], operand)

    def _compile_call(self, node: nodes.FunctionCall) -> RowFunction:
        function_and_operands = datetimes.bind_constant(node)
        if function_and_operands is not None:
            function, operands = function_and_operands
            return _make_strict_function(function, self._compile_all(operands))
        operands = node.operands
        if node.name in arrays.RANK_OPERATORS:
            rank_operands = [
                _compose_strictly(_make_element_rank_function(o.type_oid), self.compile(o)) for o in operands
            ]
            return _make_strict_function(arrays.RANK_OPERATORS[node.name], rank_operands)
        if node.name == "array_position":
            array, sought_item = self._compile_all(operands)
            items = _compose_strictly(_make_element_rank_function(operands[0].type_oid), array)
            return _make_array_position_function(
                items, _compose_strictly(rank_function(operands[1].type_oid), sought_item)
            )
        if node.name not in _FUNCTIONS:
            raise TypeError(f"no rule evaluates the function {node.name}")
        return _make_strict_function(_FUNCTIONS[node.name], self._compile_all(operands))


# --- functions of a row ------------------------------------------------------------------


def _identity(value: Any) -> Any:
    return value


def _evaluate_once(function: RowFunction, index: int) -> RowFunction:
    """Return a function that evaluates `function` only once per row, and stores the value at `index` of the row."""

    def evaluate(row: Row) -> Any:
        value = row[index]
        if value is _NOT_COMPUTED:
            value = row[index] = function(row)
        return value

    return evaluate


def _make_constant_function(value: Any) -> RowFunction:
    return lambda _row: value


def _compose_strictly(function: Callable[[Any], Any] | None, operand: RowFunction) -> RowFunction:
    """Return a strict function of one operand; if `function` is None, return the operand itself."""
    return operand if function is None else _make_strict_function(function, [operand])


def _make_strict_function(function: Callable[..., Any], operands: Sequence[RowFunction]) -> RowFunction:
    """Return a strict function: it evaluates all operands, and returns NULL if one of them is NULL."""
    if len(operands) == 1:
        (only_operand,) = operands

        def evaluate_one(row: Row) -> Any:
            value = only_operand(row)
            return None if value is None else function(value)

        return evaluate_one
    if len(operands) == 2:
        left, right = operands

        def evaluate_two(row: Row) -> Any:
            first, second = left(row), right(row)
            return None if first is None or second is None else function(first, second)

        return evaluate_two

    def evaluate(row: Row) -> Any:
        values = [operand(row) for operand in operands]
        return None if any(value is None for value in values) else function(*values)

    return evaluate


def _make_not_distinct_function(left: RowFunction, right: RowFunction) -> RowFunction:
    def evaluate(row: Row) -> bool:
        first, second = left(row), right(row)
        return first is second if first is None or second is None else bool(first == second)

    return evaluate


def _make_connective_function(operands: Sequence[RowFunction], deciding_value: bool) -> RowFunction:
    """Return AND or OR of the operands.

    `deciding_value` is the value of an operand that decides the result: false for AND, true for OR. The operands after such
    an operand are not evaluated.
    """

    def evaluate(row: Row) -> bool | None:
        result: bool | None = not deciding_value
        for operand in operands:
            verdict: bool | None = operand(row)
            if verdict is deciding_value:
                return deciding_value
            result = None if verdict is None else result
        return result

    return evaluate


def _make_membership_function(
    subject: RowFunction, ranks: Sequence[Any], deciding_value: bool
) -> RowFunction:
    members = frozenset(ranks) - {None}
    other_result = None if None in ranks else not deciding_value

    def evaluate(row: Row) -> bool | None:
        value = subject(row)
        if value is None:
            return None
        return deciding_value if value in members else other_result

    return evaluate


def _make_null_test_function(operand: RowFunction) -> RowFunction:
    return lambda row: operand(row) is None


def _make_truth_test_function(operand: RowFunction, truth: bool) -> RowFunction:
    return lambda row: operand(row) is truth


def _make_array_function(elements: Sequence[RowFunction]) -> RowFunction:
    return lambda row: [element(row) for element in elements]


def _make_coalesce_function(operands: Sequence[RowFunction]) -> RowFunction:
    def evaluate(row: Row) -> Any:
        return next((value for operand in operands if (value := operand(row)) is not None), None)

    return evaluate


def _make_extreme_function(
    choose: Callable[..., Any], operands: Sequence[RowFunction], key: Callable[[Any], Any] | None
) -> RowFunction:
    """Return GREATEST or LEAST: of equal operands the first one, because their display scales may differ."""

    def evaluate(row: Row) -> Any:
        values = [operand(row) for operand in operands]
        return choose((value for value in values if value is not None), key=key, default=None)

    return evaluate


def _make_null_if_function(
    operands: Sequence[RowFunction], functions: Sequence[Callable[[Any], Any] | None]
) -> RowFunction:
    left_rank, right_rank = (_identity if function is None else function for function in functions)
    left, right = operands

    def evaluate(row: Row) -> Any:
        value, other = left(row), right(row)
        if value is None or other is None:
            return value
        return None if left_rank(value) == right_rank(other) else value

    return evaluate


def _make_case_function(
    branches: Sequence[tuple[RowFunction, RowFunction]], default: RowFunction
) -> RowFunction:
    def evaluate(row: Row) -> Any:
        for condition, result in branches:
            if condition(row):
                return result(row)
        return default(row)

    return evaluate


def _make_array_position_function(items: RowFunction, sought_item: RowFunction) -> RowFunction:
    """Return array_position. It is the only function that is not strict: it can search for NULL."""

    def evaluate(row: Row) -> int | None:
        array, value = items(row), sought_item(row)
        return None if array is None else arrays.find_position(array, value)

    return evaluate


# ------------------------------------------------------------------------------------------


def _make_modifier_cast_function(type_oid: int, modifier: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return the cast of a value of this type to `numeric(p,s)`, `varchar(n)` or `character(n)`."""
    if type_oid != nodes.NUMERIC:
        return strings.modifier_cast_function(type_oid, *modifier)
    precision, scale = (*modifier, 0)[:2]
    return lambda value: DECIMAL_FUNCTIONS["numeric"](value, precision, scale)


def _find_rank_functions(
    left: Node, right: Node
) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """Return the functions from both sides to their ranks; a date and a timestamp are compared as timestamps."""
    if left.type_oid == right.type_oid:
        return rank_function(left.type_oid), rank_function(right.type_oid)
    first, second = (date_to_micros if side.type_oid == nodes.DATE else None for side in (left, right))
    return first, second


def _make_element_rank_function(array_oid: int) -> Callable[[list[Any]], list[Any]]:
    find_rank = rank_function(ELEMENT_OIDS[array_oid])

    def rank_items(items: list[Any]) -> list[Any]:
        return items if find_rank is None else [None if item is None else find_rank(item) for item in items]

    return rank_items


def _compares_with_constant(node: Node, operator: str, subject: Node) -> TypeGuard[nodes.Comparison]:
    """Whether an expression compares the subject with a constant of the subject's type."""
    return (
        isinstance(node, nodes.Comparison)
        and node.operator == operator
        and isinstance(node.right, nodes.Constant)
        and node.right.type_oid == subject.type_oid
        and node.left == subject
    )
