"""Compiles a row filter's tree into a Python function of a row.

In: a tree. Out: a `Program`. Its function takes the values of a row, and returns the filter's value for this row.

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
    constant_value,
    midnight,
    python_values,
    rank_function,
)
from pgsieve.decoding.row_filters.nodes import Node
from pgsieve.decoding.row_filters.numeric import DECIMAL_FUNCTIONS
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS

Row: TypeAlias = list[Any]
Evaluate: TypeAlias = Callable[[Row], Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled tree.

    `columns` maps each column that the tree reads to the oid of its type. `evaluate` takes a list: the values of
    these columns, then the items of `scratch`. It overwrites the latter with intermediate values.
    """

    columns: dict[str, int]
    scratch: tuple[object, ...]
    evaluate: Evaluate

    def values(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """Return an iterator over the tree's value for each row of a batch; each value is computed when it is read."""
        columns = [python_values(batch.column(name), type_oid) for name, type_oid in self.columns.items()]
        rows = zip(*columns, strict=True) if columns else repeat((), batch.num_rows)
        return (self.evaluate([*row, *self.scratch]) for row in rows)


def compile_tree(tree: Node) -> Program:
    """Compile a tree; raises RecursionError if it is nested too deeply."""
    compiler = _Compiler(_TreeParts(tree))
    evaluate = compiler.compile(tree)
    return Program(compiler.columns, (_MISSING,) * compiler.scratch_size, evaluate)


_LEAVES: Final = (nodes.ColumnValue, nodes.Constant, nodes.Element)
_MISSING: Final = object()


class _TreeParts:
    """What the compiler needs to know of a tree.

    - `columns` maps each column that the tree reads to the oid of its type.
    - `shared` has the ids of the nodes that occur several times in the tree, such as the value of a BETWEEN. The
      compiler evaluates these once per row. A node that depends on an element of an array is not listed, because
      its value changes within a row.
    """

    def __init__(self, tree: Node) -> None:
        self.columns: dict[str, int] = {}
        self.shared: set[int] = set()
        #: Maps the id of a node to whether the node depends on an element of an array.
        self._depends_on_element: dict[int, bool] = {}
        self._visit(tree)

    def _visit(self, node: Node) -> bool:
        if id(node) in self._depends_on_element:
            if not isinstance(node, _LEAVES) and not self._depends_on_element[id(node)]:
                self.shared.add(id(node))
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
    {**numbers.FUNCTIONS, **strings.FUNCTIONS, **datetimes.FUNCTIONS, **arrays.FUNCTIONS}
)
_CONVERSIONS: Final = MappingProxyType(
    {**numbers.CONVERSIONS, **strings.CONVERSIONS, **datetimes.CONVERSIONS}
)


class _Compiler:
    """Compiles nodes into functions of a row."""

    def __init__(self, parts: _TreeParts) -> None:
        self.columns = parts.columns
        self.scratch_size = 0
        self._shared = parts.shared
        self._places = {name: place for place, name in enumerate(parts.columns)}
        #: The functions by the id of the node. The key is not the node itself, because 1.5 and 1.50 are equal nodes
        #: with different display scales.
        self._compiled: dict[int, Evaluate] = {}
        self._elements: dict[int, int] = {}

    def compile(self, node: Node) -> Evaluate:
        """Return the function of a node."""
        if id(node) not in self._compiled:
            function = self._function_of(node)
            self._compiled[id(node)] = (
                _evaluate_once(function, self._new_scratch_place()) if id(node) in self._shared else function
            )
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
                return _array(self._compile_all(elements))
            case nodes.Cast():
                return self._cast(node)
            case nodes.Collate(operand=operand):
                return self.compile(operand)
            case nodes.Comparison(operator=operator, left=left, right=right):
                return _strict(_COMPARISONS[operator], self._comparison_sides(left, right))
            case nodes.NotDistinct(left=left, right=right):
                return _not_distinct(*self._comparison_sides(left, right))
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
                return _strict(numbers.arithmetic(operator, node.type_oid), self._compile_all((left, right)))
            case nodes.FunctionCall():
                return self._call(node)
            case nodes.CaseChange(operand=operand, mapping=mapping):
                return _strict(partial(mapping.change, node.function), [self.compile(operand)])
            case nodes.EachElement():
                return self._each_element(node)
            case nodes.Coalesce(operands=operands):
                return _coalesce(self._compile_all(operands))
            case nodes.Extreme(operands=operands):
                choose = max if node.function == "GREATEST" else min
                return _extreme(choose, self._compile_all(operands), rank_function(node.type_oid))
            case nodes.NullIf(left=left, right=right):
                return _null_if(self._compile_all((left, right)), _rank_functions(left, right))
            case nodes.Case(conditions=conditions, results=results, default=default):
                branches = list(zip(self._compile_all(conditions), self._compile_all(results), strict=True))
                return _case(branches, self.compile(default))
            case _:
                raise TypeError(f"no rule evaluates {type(node).__name__}")

    def _compile_all(self, operands: Sequence[Node]) -> list[Evaluate]:
        return [self.compile(operand) for operand in operands]

    # Comparisons.

    def _comparison_sides(self, left: Node, right: Node) -> list[Evaluate]:
        """Compile both sides of a comparison to functions that return the ranks to compare."""
        sides = zip((left, right), _rank_functions(left, right), strict=True)
        return [_apply_strict(function, self.compile(side)) for side, function in sides]

    def _logical(self, node: nodes.Logical) -> Evaluate:
        decisive = node.connective == "OR"
        return self._membership(node, decisive) or _connective(self._compile_all(node.operands), decisive)

    def _membership(self, node: nodes.Logical, decisive: bool) -> Evaluate | None:
        """Compile `x = a OR x = b …`, or its negation, as a lookup of x in a set; return None for other expressions."""
        operator = "=" if decisive else "<>"
        match node.operands[0]:
            case nodes.Comparison(left=subject):
                constants = [o.right for o in node.operands if _compares_with_constant(o, operator, subject)]
            case _:
                return None
        if len(constants) < len(node.operands):
            return None
        function = rank_function(subject.type_oid)
        values = [_apply_strict(function, self.compile(constant))([]) for constant in constants]
        return _member(_apply_strict(function, self.compile(subject)), values, decisive)

    def _each_element(self, node: nodes.EachElement) -> Evaluate:
        subject, array = self._compile_all((node.subject, node.array))
        if id(node.element) not in self._elements:
            self._elements[id(node.element)] = self._new_scratch_place()
        place, test = self._elements[id(node.element)], self.compile(node.test)
        decisive = not node.every

        def evaluate(row: Row) -> bool | None:
            subject(
                row
            )  # PostgreSQL evaluates the left side even if the array is empty, so it can raise an error.
            items = array(row)
            if items is None:
                return None
            result: bool | None = not decisive
            for row[place] in items:
                verdict: bool | None = test(row)
                if verdict is decisive:
                    return decisive
                result = None if verdict is None else result
            return result

        return evaluate

    def _new_scratch_place(self) -> int:
        self.scratch_size += 1
        return len(self.columns) + self.scratch_size - 1

    # Conversions and functions.

    def _cast(self, node: nodes.Cast) -> Evaluate:
        operand, source, target = self.compile(node.operand), node.operand.type_oid, node.type_oid
        if node.modifier:
            return _apply_strict(_modifier_cast(target, node.modifier), operand)
        if {source, target} <= set(nodes.STRINGS):
            return _apply_strict(strings.conversion(source, target), operand)
        if source == target or (source in ELEMENT_OIDS and target in ELEMENT_OIDS):
            return operand  # Conversions of arrays do not change the elements.
        if (source, target) not in _CONVERSIONS:
            raise TypeError(f"no rule converts type {source} to {target}")
        return _apply_strict(_CONVERSIONS[source, target], operand)

    def _call(self, node: nodes.FunctionCall) -> Evaluate:
        function_and_operands = datetimes.bind_constant(node)
        if function_and_operands is not None:
            function, operands = function_and_operands
            return _strict(function, self._compile_all(operands))
        operands = node.operands
        if node.name in arrays.RANK_OPERATORS:
            rank_operands = [_apply_strict(_element_ranks(o.type_oid), self.compile(o)) for o in operands]
            return _strict(arrays.RANK_OPERATORS[node.name], rank_operands)
        if node.name == "array_position":
            array, sought = self._compile_all(operands)
            items = _apply_strict(_element_ranks(operands[0].type_oid), array)
            return _array_position(items, _apply_strict(rank_function(operands[1].type_oid), sought))
        if node.name not in _FUNCTIONS:
            raise TypeError(f"no rule evaluates the function {node.name}")
        return _strict(_FUNCTIONS[node.name], self._compile_all(operands))


# --- functions of a row ------------------------------------------------------------------


def _identity(value: Any) -> Any:
    return value


def _evaluate_once(function: Evaluate, place: int) -> Evaluate:
    """Return a function that evaluates `function` only once per row, and stores the value at `place` of the row."""

    def evaluate(row: Row) -> Any:
        value = row[place]
        if value is _MISSING:
            value = row[place] = function(row)
        return value

    return evaluate


def _constant(value: Any) -> Evaluate:
    return lambda _row: value


def _apply_strict(function: Callable[[Any], Any] | None, operand: Evaluate) -> Evaluate:
    """Return a strict function of one operand; if `function` is None, return the operand itself."""
    return operand if function is None else _strict(function, [operand])


def _strict(function: Callable[..., Any], operands: Sequence[Evaluate]) -> Evaluate:
    """Return a strict function: it evaluates all operands, and returns NULL if one of them is NULL."""
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


def _connective(operands: Sequence[Evaluate], decisive: bool) -> Evaluate:
    """Return AND or OR of the operands.

    `decisive` is the value of an operand that decides the result: false for AND, true for OR. The operands after such
    an operand are not evaluated.
    """

    def evaluate(row: Row) -> bool | None:
        result: bool | None = not decisive
        for operand in operands:
            verdict: bool | None = operand(row)
            if verdict is decisive:
                return decisive
            result = None if verdict is None else result
        return result

    return evaluate


def _member(subject: Evaluate, values: Sequence[Any], decisive: bool) -> Evaluate:
    members = frozenset(values) - {None}
    otherwise = None if None in values else not decisive

    def evaluate(row: Row) -> bool | None:
        value = subject(row)
        if value is None:
            return None
        return decisive if value in members else otherwise

    return evaluate


def _is_null(operand: Evaluate) -> Evaluate:
    return lambda row: operand(row) is None


def _is_truth(operand: Evaluate, truth: bool) -> Evaluate:
    return lambda row: operand(row) is truth


def _array(elements: Sequence[Evaluate]) -> Evaluate:
    return lambda row: [element(row) for element in elements]


def _coalesce(operands: Sequence[Evaluate]) -> Evaluate:
    def evaluate(row: Row) -> Any:
        return next((value for operand in operands if (value := operand(row)) is not None), None)

    return evaluate


def _extreme(
    choose: Callable[..., Any], operands: Sequence[Evaluate], key: Callable[[Any], Any] | None
) -> Evaluate:
    """Return GREATEST or LEAST of the operands; of equal values it is the first, with its display scale."""

    def evaluate(row: Row) -> Any:
        values = [operand(row) for operand in operands]
        return choose((value for value in values if value is not None), key=key, default=None)

    return evaluate


def _null_if(operands: Sequence[Evaluate], functions: Sequence[Callable[[Any], Any] | None]) -> Evaluate:
    left_rank, right_rank = (_identity if function is None else function for function in functions)
    left, right = operands

    def evaluate(row: Row) -> Any:
        value, other = left(row), right(row)
        if value is None or other is None:
            return value
        return None if left_rank(value) == right_rank(other) else value

    return evaluate


def _case(branches: Sequence[tuple[Evaluate, Evaluate]], default: Evaluate) -> Evaluate:
    def evaluate(row: Row) -> Any:
        for condition, result in branches:
            if condition(row):
                return result(row)
        return default(row)

    return evaluate


def _array_position(items: Evaluate, sought: Evaluate) -> Evaluate:
    """Return array_position. It is the only function that is not strict: it can search for NULL."""

    def evaluate(row: Row) -> int | None:
        array, value = items(row), sought(row)
        return None if array is None else arrays.position(array, value)

    return evaluate


# ------------------------------------------------------------------------------------------


def _modifier_cast(type_oid: int, modifier: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return the cast of a value of this type to `numeric(p,s)`, `varchar(n)` or `character(n)`."""
    if type_oid != nodes.NUMERIC:
        return strings.modifier_cast(type_oid, *modifier)
    precision, scale = (*modifier, 0)[:2]
    return lambda value: DECIMAL_FUNCTIONS["numeric"](value, precision, scale)


def _rank_functions(
    left: Node, right: Node
) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """Return the functions from both sides to their ranks; a date and a timestamp are compared as timestamps."""
    if left.type_oid == right.type_oid:
        return rank_function(left.type_oid), rank_function(right.type_oid)
    first, second = (midnight if side.type_oid == nodes.DATE else None for side in (left, right))
    return first, second


def _element_ranks(array_oid: int) -> Callable[[list[Any]], list[Any]]:
    function = rank_function(ELEMENT_OIDS[array_oid])

    def ranks(items: list[Any]) -> list[Any]:
        return items if function is None else [None if item is None else function(item) for item in items]

    return ranks


def _compares_with_constant(node: Node, operator: str, subject: Node) -> TypeGuard[nodes.Comparison]:
    """Whether an expression compares the subject with a constant of the subject's type."""
    return (
        isinstance(node, nodes.Comparison)
        and node.operator == operator
        and isinstance(node.right, nodes.Constant)
        and node.right.type_oid == subject.type_oid
        and node.left == subject
    )
