"""Compiles a row filter's tree into a Python function of a row.

In: a tree. Out: a `Program`, whose function takes a row's values and returns the filter's value. The function
raises an error where PostgreSQL does, and skips the parts that PostgreSQL skips: it evaluates all operands
from the left, except those that AND, OR, CASE and COALESCE do not reach (section 4.2.14; ExecInterpExpr() in
src/backend/executor/execExprInterp.c).
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
from pgsieve.decoding.row_filters.evaluation.values import constant_value, midnight, python_values, rank
from pgsieve.decoding.row_filters.nodes import Node
from pgsieve.decoding.row_filters.numeric import DECIMAL_FUNCTIONS
from pgsieve.decoding.values.builtin_types import ELEMENTS

Row: TypeAlias = list[Any]
Evaluate: TypeAlias = Callable[[Row], Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled tree.

    `evaluate` takes a row: a list of the values of `columns` in their order, then the items of `room`, where
    it keeps intermediate values.
    """

    columns: dict[str, int]
    room: tuple[object, ...]
    evaluate: Evaluate

    def values(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """Evaluate the rows of a batch, one after the other."""
        columns = [python_values(batch.column(name), type_oid) for name, type_oid in self.columns.items()]
        rows = zip(*columns, strict=True) if columns else repeat((), batch.num_rows)
        return (self.evaluate([*row, *self.room]) for row in rows)


def compiled(tree: Node) -> Program:
    """Compile a tree; raises RecursionError for a tree that is nested too deeply."""
    compiler = _Compiler(_Parts(tree))
    evaluate = compiler.compile(tree)
    return Program(compiler.columns, (_MISSING,) * compiler.kept, evaluate)


_LEAVES: Final = (nodes.ColumnValue, nodes.Constant, nodes.Element)
_MISSING: Final = object()


class _Parts:
    """The columns that a tree reads, and its repeated parts, such as the value of a BETWEEN."""

    def __init__(self, tree: Node) -> None:
        self.columns: dict[str, int] = {}
        self.shared: set[int] = set()
        #: Whether each node depends on an element of an array, by identity.
        self._of_element: dict[int, bool] = {}
        self._visit(tree)

    def _visit(self, node: Node) -> bool:
        if id(node) in self._of_element:
            if not isinstance(node, _LEAVES) and not self._of_element[id(node)]:
                self.shared.add(id(node))
            return self._of_element[id(node)]
        if isinstance(node, nodes.ColumnValue):
            self.columns[node.name] = node.type_oid
        of_element = [self._visit(child) for child in nodes.children(node)]
        self._of_element[id(node)] = isinstance(node, nodes.Element) or (
            any(of_element) and not isinstance(node, nodes.EachElement)
        )
        return self._of_element[id(node)]


_COMPARISONS: Final[MappingProxyType[str, Callable[[Any, Any], bool]]] = MappingProxyType(
    {"=": eq, "<>": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
)
_FUNCTIONS: Final = MappingProxyType(
    {**numbers.FUNCTIONS, **strings.FUNCTIONS, **datetimes.FUNCTIONS, **arrays.FUNCTIONS}
)
_CONVERSIONS: Final = MappingProxyType(
    {**numbers.CONVERSIONS, **strings.CONVERSIONS, **datetimes.CONVERSIONS}
)


class _Compiler:
    """Compiles nodes into functions of a row."""

    def __init__(self, parts: _Parts) -> None:
        self.columns = parts.columns
        self.kept = 0
        self._shared = parts.shared
        self._places = {name: place for place, name in enumerate(parts.columns)}
        #: Functions by the node's identity: equal constants may have different scales (1.5 and 1.50).
        self._compiled: dict[int, Evaluate] = {}
        self._elements: dict[int, int] = {}

    def compile(self, node: Node) -> Evaluate:
        """Return the function of a node."""
        if id(node) not in self._compiled:
            function = self._function_of(node)
            self._compiled[id(node)] = _once(function, self._room()) if id(node) in self._shared else function
        return self._compiled[id(node)]

    def _function_of(self, node: Node) -> Evaluate:
        match node:
            case nodes.ColumnValue(name=name):
                return itemgetter(self._places[name])
            case nodes.Element():
                return itemgetter(self._elements[id(node)])
            case nodes.Constant(value=value):
                return _constant(constant_value(value))
            case nodes.Array(elements=elements):
                return _listed(self._each(elements))
            case nodes.Cast():
                return self._cast(node)
            case nodes.Collate(operand=operand):
                return self.compile(operand)
            case nodes.Comparison(operator=operator, left=left, right=right):
                return _strict(_COMPARISONS[operator], self._ranked(left, right))
            case nodes.NotDistinct(left=left, right=right):
                return _not_distinct(*self._ranked(left, right))
            case nodes.Logical():
                return self._logical(node)
            case nodes.Not(operand=operand):
                return _strict(not_, [self.compile(operand)])
            case nodes.IsNull(operand=operand):
                return _is_null(self.compile(operand))
            case nodes.IsTruth(operand=operand, truth=truth):
                return _is_truth(self.compile(operand), truth)
            case nodes.Like(operand=operand, pattern=pattern):
                return _strict(strings.like(pattern), [self.compile(operand)])
            case nodes.Regex(operand=operand, pattern=pattern):
                return _strict(strings.regex(pattern), [self.compile(operand)])
            case nodes.Arithmetic(operator=operator, left=left, right=right):
                return _strict(numbers.arithmetic(operator, node.type_oid), self._each((left, right)))
            case nodes.FunctionCall():
                return self._call(node)
            case nodes.CaseChange(operand=operand, mapping=mapping):
                return _strict(partial(mapping.changed, node.function), [self.compile(operand)])
            case nodes.EachElement():
                return self._each_element(node)
            case nodes.Coalesce(operands=operands):
                return _coalesce(self._each(operands))
            case nodes.Extreme(operands=operands):
                choose = max if node.function == "GREATEST" else min
                return _extreme(choose, self._each(operands), rank(node.type_oid))
            case nodes.NullIf(left=left, right=right):
                return _null_if(self._each((left, right)), _rank_functions(left, right))
            case nodes.Case(conditions=conditions, results=results, default=default):
                branches = list(zip(self._each(conditions), self._each(results), strict=True))
                return _case(branches, self.compile(default))
            case _:
                raise TypeError(f"nothing evaluates {type(node).__name__}")

    def _each(self, operands: Sequence[Node]) -> list[Evaluate]:
        return [self.compile(operand) for operand in operands]

    # Comparisons.

    def _ranked(self, left: Node, right: Node) -> list[Evaluate]:
        """Both sides as the values by which they are compared."""
        sides = zip((left, right), _rank_functions(left, right), strict=True)
        return [_applied(function, self.compile(side)) for side, function in sides]

    def _logical(self, node: nodes.Logical) -> Evaluate:
        decided = node.connective == "OR"
        return self._membership(node, decided) or _connected(self._each(node.operands), decided)

    def _membership(self, node: nodes.Logical, decided: bool) -> Evaluate | None:
        """For `x = a OR x = b …`, or its negation, the lookup of x in a set of constants.

        None for other expressions.
        """
        operator = "=" if decided else "<>"
        match node.operands[0]:
            case nodes.Comparison(left=subject):
                constants = [o.right for o in node.operands if _compares(o, operator, subject)]
            case _:
                return None
        if len(constants) < len(node.operands):
            return None
        function = rank(subject.type_oid)
        values = [_applied(function, self.compile(constant))([]) for constant in constants]
        return _member(_applied(function, self.compile(subject)), values, decided)

    def _each_element(self, node: nodes.EachElement) -> Evaluate:
        subject, array = self._each((node.subject, node.array))
        if id(node.element) not in self._elements:
            self._elements[id(node.element)] = self._room()
        place, test = self._elements[id(node.element)], self.compile(node.test)
        decided = not node.every

        def evaluate(row: Row) -> bool | None:
            subject(row)  # It may fail, even if there is no element to compare it with.
            items = array(row)
            if items is None:
                return None
            result: bool | None = not decided
            for row[place] in items:
                verdict: bool | None = test(row)
                if verdict is decided:
                    return decided
                result = None if verdict is None else result
            return result

        return evaluate

    def _room(self) -> int:
        self.kept += 1
        return len(self.columns) + self.kept - 1

    # Conversions and functions.

    def _cast(self, node: nodes.Cast) -> Evaluate:
        operand, source, target = self.compile(node.operand), node.operand.type_oid, node.type_oid
        if node.modifier:
            return _applied(_modified(target, node.modifier), operand)
        if {source, target} <= set(nodes.STRINGS):
            return _applied(strings.conversion(source, target), operand)
        if source == target or (source in ELEMENTS and target in ELEMENTS):
            return operand  # Conversions of arrays leave the elements as they are.
        if (source, target) not in _CONVERSIONS:
            raise TypeError(f"nothing converts type {source} to {target}")
        return _applied(_CONVERSIONS[source, target], operand)

    def _call(self, node: nodes.FunctionCall) -> Evaluate:
        with_constant = datetimes.function_of(node)
        if with_constant is not None:
            function, operands = with_constant
            return _strict(function, self._each(operands))
        operands = node.operands
        if node.name in arrays.COMPARING:
            ranked = [_applied(_element_ranks(o.type_oid), self.compile(o)) for o in operands]
            return _strict(arrays.COMPARING[node.name], ranked)
        if node.name == "array_position":
            array, sought = self._each(operands)
            items = _applied(_element_ranks(operands[0].type_oid), array)
            return _array_position(items, _applied(rank(operands[1].type_oid), sought))
        if node.name not in _FUNCTIONS:
            raise TypeError(f"nothing evaluates the function {node.name}")
        return _strict(_FUNCTIONS[node.name], self._each(operands))


# --- functions of a row ------------------------------------------------------------------


def _identity(value: Any) -> Any:
    return value


def _once(function: Evaluate, place: int) -> Evaluate:
    """Return a function that is evaluated once per row and keeps its value in the row."""

    def evaluate(row: Row) -> Any:
        value = row[place]
        if value is _MISSING:
            value = row[place] = function(row)
        return value

    return evaluate


def _constant(value: Any) -> Evaluate:
    return lambda _row: value


def _applied(function: Callable[[Any], Any] | None, operand: Evaluate) -> Evaluate:
    """A strict function of one operand; a `function` of None returns the operand."""
    return operand if function is None else _strict(function, [operand])


def _strict(function: Callable[..., Any], operands: Sequence[Evaluate]) -> Evaluate:
    """A strict function: it evaluates all operands, and returns NULL if one is NULL."""
    if len(operands) == 1:
        (only,) = operands

        def unary(row: Row) -> Any:
            value = only(row)
            return None if value is None else function(value)

        return unary
    if len(operands) == 2:
        left, right = operands

        def binary(row: Row) -> Any:
            first, second = left(row), right(row)
            return None if first is None or second is None else function(first, second)

        return binary

    def evaluate(row: Row) -> Any:
        values = [operand(row) for operand in operands]
        return None if any(value is None for value in values) else function(*values)

    return evaluate


def _not_distinct(left: Evaluate, right: Evaluate) -> Evaluate:
    def evaluate(row: Row) -> bool:
        first, second = left(row), right(row)
        return first is second if first is None or second is None else bool(first == second)

    return evaluate


def _connected(operands: Sequence[Evaluate], decided: bool) -> Evaluate:
    """AND or OR: operands after the first decisive one are not evaluated."""

    def evaluate(row: Row) -> bool | None:
        result: bool | None = not decided
        for operand in operands:
            verdict: bool | None = operand(row)
            if verdict is decided:
                return decided
            result = None if verdict is None else result
        return result

    return evaluate


def _member(subject: Evaluate, values: Sequence[Any], decided: bool) -> Evaluate:
    members = frozenset(values) - {None}
    otherwise = None if None in values else not decided

    def evaluate(row: Row) -> bool | None:
        value = subject(row)
        if value is None:
            return None
        return decided if value in members else otherwise

    return evaluate


def _is_null(operand: Evaluate) -> Evaluate:
    return lambda row: operand(row) is None


def _is_truth(operand: Evaluate, truth: bool) -> Evaluate:
    return lambda row: operand(row) is truth


def _listed(elements: Sequence[Evaluate]) -> Evaluate:
    return lambda row: [element(row) for element in elements]


def _coalesce(operands: Sequence[Evaluate]) -> Evaluate:
    def evaluate(row: Row) -> Any:
        return next((value for operand in operands if (value := operand(row)) is not None), None)

    return evaluate


def _extreme(
    choose: Callable[..., Any], operands: Sequence[Evaluate], key: Callable[[Any], Any] | None
) -> Evaluate:
    """GREATEST or LEAST. Of equal values it returns the first, with its display scale."""

    def evaluate(row: Row) -> Any:
        values = [operand(row) for operand in operands]
        return choose((value for value in values if value is not None), key=key, default=None)

    return evaluate


def _null_if(operands: Sequence[Evaluate], functions: Sequence[Callable[[Any], Any] | None]) -> Evaluate:
    of_left, of_right = (_identity if function is None else function for function in functions)
    left, right = operands

    def evaluate(row: Row) -> Any:
        value, other = left(row), right(row)
        if value is None or other is None:
            return value
        return None if of_left(value) == of_right(other) else value

    return evaluate


def _case(branches: Sequence[tuple[Evaluate, Evaluate]], default: Evaluate) -> Evaluate:
    def evaluate(row: Row) -> Any:
        for condition, result in branches:
            if condition(row):
                return result(row)
        return default(row)

    return evaluate


def _array_position(items: Evaluate, sought: Evaluate) -> Evaluate:
    """array_position, the only function that takes NULL as an operand."""

    def evaluate(row: Row) -> int | None:
        array, value = items(row), sought(row)
        return None if array is None else arrays.position(array, value)

    return evaluate


# ------------------------------------------------------------------------------------------


def _modified(type_oid: int, modifier: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return the cast to `numeric(p,s)`, `varchar(n)` or `character(n)` of a value of the type."""
    if type_oid != nodes.NUMERIC:
        return strings.modified(type_oid, *modifier)
    precision, scale = (*modifier, 0)[:2]
    return lambda value: DECIMAL_FUNCTIONS["numeric"](value, precision, scale)


def _rank_functions(
    left: Node, right: Node
) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """The functions that make both sides comparable; a date and a timestamp compare as timestamps."""
    if left.type_oid == right.type_oid:
        return rank(left.type_oid), rank(right.type_oid)
    first, second = (midnight if side.type_oid == nodes.DATE else None for side in (left, right))
    return first, second


def _element_ranks(array_oid: int) -> Callable[[list[Any]], list[Any]]:
    function = rank(ELEMENTS[array_oid])

    def ranks(items: list[Any]) -> list[Any]:
        return items if function is None else [None if item is None else function(item) for item in items]

    return ranks


def _compares(node: Node, operator: str, subject: Node) -> TypeGuard[nodes.Comparison]:
    """Whether an expression compares a subject with a constant of the subject's type."""
    return (
        isinstance(node, nodes.Comparison)
        and node.operator == operator
        and isinstance(node.right, nodes.Constant)
        and node.right.type_oid == subject.type_oid
        and node.left == subject
    )
