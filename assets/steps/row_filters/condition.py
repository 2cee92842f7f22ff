"""Row filters as Spark expressions.

In: a `RowFilter` and a way to name a column of the row. Out: a boolean Column that is true, false or NULL where
PostgreSQL's expression is; it fails where PostgreSQL's fails (overflow, division by zero), which needs
spark.sql.ansi.enabled, Spark's default. Only functions that Spark Connect has, and no text of the user becomes
SQL. Raises nothing: what Spark cannot do exactly, `pgsieve.decoding.row_filters.analysis` has refused.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import add, and_, eq, ge, gt, le, lt, mod, mul, ne, or_, sub
from typing import Final, TypeGuard

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, StringType

from pgsieve.assets.steps.row_filters import datetimes, numbers
from pgsieve.assets.steps.row_filters.expressions import bound, chosen
from pgsieve.assets.steps.row_filters.functions import FUNCTIONS, in_python, initcap
from pgsieve.assets.steps.row_filters.numbers import numeric_function, numeric_order
from pgsieve.assets.steps.row_filters.python import PythonFunction, value_of
from pgsieve.assets.steps.row_filters.values import (
    constant,
    decimal_type,
    element_to_compare,
    spark_type,
    value_type,
)
from pgsieve.decoding.row_filters import nodes
from pgsieve.decoding.row_filters.nodes import Digits, Node, RowFilter
from pgsieve.decoding.values.builtin_types import ELEMENTS

_COMPARISONS: Final[dict[str, Callable[[Column, Column], Column]]] = {
    "=": eq, "<>": ne, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip
_ARITHMETIC: Final[dict[str, Callable[[Column, Column], Column]]] = {
    "+": add, "-": sub, "*": mul, "%": mod, "/": partial(F.call_function, "div"),
}  # fmt: skip
_NUMERIC: Final = {
    "+": "numeric_add", "-": "numeric_sub", "*": "numeric_mul", "/": "numeric_div", "%": "numeric_mod",
}  # fmt: skip

# Spark's IN has -0.0 differ from 0.0, and wants one decimal type for all.
_UNLISTED: Final = frozenset((*nodes.FLOATS, nodes.NUMERIC, nodes.DATE, nodes.TIMESTAMP))


def condition(
    row_filter: RowFilter, column: Callable[[str], Column], evaluated: Column | None = None
) -> Column:
    """Return the filter over the columns that `column` gives for their names.

    `evaluated` says for which rows the result counts; for others nothing fails.
    """
    return _Compiler(column, None if evaluated is None else lambda: evaluated).compile(row_filter.tree)


@dataclass(frozen=True)
class _Compiled:
    """What was compiled so far, by identity: constants that are equal may be printed differently (1.5 and 1.50)."""

    columns: ChainMap[int, tuple[Node, Column]] = field(default_factory=ChainMap)
    #: Nodes to be computed as text.
    texts: dict[int, tuple[Node, Node]] = field(default_factory=dict)
    #: What Python computed, with what another function in Python takes of it.
    in_python: dict[int, tuple[Column, Column]] = field(default_factory=dict)

    def within(self) -> "_Compiled":
        """Return the same for a narrower condition: what is evaluated under the wider one, is so there."""
        return replace(self, columns=self.columns.new_child())


class _Compiler:
    """Nodes to Columns.

    `evaluated` is the condition under which PostgreSQL would come to evaluate a node: Spark computes what a Python
    function takes for all rows, also for a branch of a CASE that is not taken. `known` are nodes that have a Column
    already.
    """

    def __init__(
        self,
        column: Callable[[str], Column],
        evaluated: Callable[[], Column] | None = None,
        known: Mapping[Node, Column] | None = None,
        compiled: _Compiled | None = None,
    ) -> None:
        self._column = column
        self._evaluated = evaluated
        self._known = known or {}
        self._compiled = compiled or _Compiled()

    def where(self, further: Callable[[], Column]) -> "_Compiler":
        """Return the compiler of what is evaluated only where `further` holds, too."""
        outer = self._evaluated

        @cache
        def evaluated() -> Column:
            holds = F.coalesce(further(), F.lit(False))
            return holds if outer is None else F.when(outer(), holds).otherwise(F.lit(False))

        return _Compiler(self._column, evaluated, self._known, self._compiled.within())

    def compile(self, node: Node) -> Column:
        """Return the Column of a node, of the Spark type of the node's PostgreSQL type."""
        if node in self._known:
            return self._known[node]
        columns = self._compiled.columns
        if id(node) not in columns:
            columns[id(node)] = node, self._column_of(node)
        return columns[id(node)][1]

    def _column_of(self, node: Node) -> Column:
        match node:
            case nodes.ColumnValue(name=name):
                return self._stored(self._column(name), node)
            case nodes.Constant():
                return constant(node.value, node)
            case nodes.Array(elements=elements):
                element_type = value_type(ELEMENTS[node.type_oid], node.digits)
                items = self._alike(elements, node.digits)
                return F.array(*items).cast(ArrayType(element_type))
            case nodes.Cast(operand=operand):
                return self._cast(operand, node)
            case nodes.Collate(operand=operand):
                return self.compile(operand)
            case nodes.Comparison(operator=operator, left=left, right=right):
                return self._strict(_COMPARISONS[operator](*self._comparable(left, right)), (left, right))
            case nodes.NotDistinct(left=left, right=right):
                first, second = self._comparable(left, right)
                return first.eqNullSafe(second)
            case nodes.Logical(connective=connective, operands=operands):
                return self._logical(connective, operands)
            case nodes.Not(operand=operand):
                return ~self.compile(operand)
            case nodes.IsNull(operand=operand):
                return self.compile(operand).isNull()
            case nodes.IsTruth(operand=operand, truth=truth):
                return self.compile(operand).eqNullSafe(F.lit(truth))
            case nodes.Like(operand=operand, pattern=pattern):
                return F.like(self.compile(operand), F.lit(pattern))
            case nodes.Regex(operand=operand, pattern=pattern):
                return F.rlike(self.compile(operand), F.lit(pattern))
            case nodes.EachElement():
                return self._each_element(node)
            case nodes.Arithmetic(left=left, right=right):
                return self._strict(self._arithmetic(node), (left, right))
            case nodes.FunctionCall(operands=operands):
                return self._strict(self._call(node), operands)
            case nodes.CaseChange():
                return self._change_case(node)
            case nodes.Coalesce(operands=operands):
                return self._coalesce(operands, node)
            case nodes.Extreme(function=function, operands=operands):
                return self._extreme(function, operands, node)
            case nodes.NullIf(left=left, right=right):
                first, second = self._comparable(left, right)
                value = self.in_digits(left, node.digits)
                return F.when(first.eqNullSafe(second), F.lit(None)).otherwise(value)
            case nodes.Case():
                return self._case(node)
            case _:
                raise TypeError(f"no Spark expression for {type(node).__name__}")

    def _stored(self, value: Column, node: Node) -> Column:
        """Return a column's value; an interval's text becomes what intervals are compared by."""
        if node.type_oid != nodes.INTERVAL:
            return value
        return datetimes.interval_from_text(value)

    # Evaluation order.

    def _logical(self, connective: str, operands: Sequence[Node]) -> Column:
        membership = self._listed(connective, operands)
        if membership is not None:
            return membership
        decided = F.lit(connective == "OR")
        columns: list[Column] = []
        for operand in operands:
            before = tuple(columns)
            undecided = partial(_none_is, before, decided)
            columns.append((self.where(undecided) if before else self).compile(operand))
        joined = _joined(and_ if connective == "AND" else or_, columns)
        if not any(nodes.can_fail(operand) for operand in operands[1:]):
            return joined
        # Spark may compute a common part of later operands first; the branches of a CASE are left alone.
        return chosen([(column.eqNullSafe(decided), decided) for column in columns[:-1]], joined)

    def _strict(self, result: Column, operands: Sequence[Node]) -> Column:
        """Compute later operands too when one before is NULL, as PostgreSQL does: they may have to fail."""
        for operand in operands[:0:-1]:
            if nodes.can_fail(operand):
                result = F.when(self.compile(operand).isNull(), F.lit(None)).otherwise(result)
        return result

    def _case(self, node: nodes.Case) -> Column:
        branches: list[tuple[Column, Column]] = []
        before: tuple[Column, ...] = ()
        for test, result in zip(node.conditions, node.results, strict=True):
            reached = self.where(partial(_none_is, before, F.lit(True))) if before else self
            tested = reached.compile(test)
            branches.append((tested, reached.where(partial(_same, tested)).in_digits(result, node.digits)))
            before = (*before, tested)
        if not branches:  # its constants have chosen the default
            return self.in_digits(node.default, node.digits)
        last = self.where(partial(_none_is, before, F.lit(True))).in_digits(node.default, node.digits)
        return chosen(branches, last)

    def _coalesce(self, operands: Sequence[Node], node: Node) -> Column:
        columns: list[Column] = []
        for operand in operands:
            missing = partial(_all_null, tuple(columns))
            columns.append((self.where(missing) if columns else self).in_digits(operand, node.digits))
        return F.coalesce(*columns)

    # Numbers.

    def _arithmetic(self, node: nodes.Arithmetic) -> Column:
        result_type = spark_type(node)
        if isinstance(result_type, StringType):
            function = numeric_function(_NUMERIC[node.operator])
            return self._python(function, node, [(o, self._numeric_text(o)) for o in (node.left, node.right)])
        left, right = self.compile(node.left), self.compile(node.right)
        if node.type_oid in nodes.FLOATS:
            return numbers.float_arithmetic(node.operator, result_type, left, right)
        result = _ARITHMETIC[node.operator](left, right).cast(result_type)
        return numbers.in_order(result) if node.type_oid in nodes.INTEGERS else result

    def _numeric_text(self, node: Node) -> Column:
        """Return a numeric as PostgreSQL prints it: with the display scale that a quotient depends on."""
        match node:
            case nodes.ColumnValue() | nodes.Element():
                return self.compile(node).cast(StringType())
            case nodes.Cast(operand=operand) if operand.type_oid in nodes.INTEGERS and not node.modifier:
                return self.compile(node).cast(StringType())
            case nodes.FunctionCall(name=name) if name.startswith("extract_"):
                return self.compile(node).cast(StringType())
            case _ if node.digits is None:
                return self.compile(node)
            case _:
                _, as_text = self._compiled.texts.setdefault(id(node), (node, replace(node, digits=None)))
                return self.compile(as_text)

    def in_digits(self, node: Node, digits: Digits | None) -> Column:
        """Return a value in the Spark type that its numerics have there; other types are as they are."""
        if ELEMENTS.get(node.type_oid) == nodes.NUMERIC:
            return self.compile(node).cast(value_type(node.type_oid, digits))
        if node.type_oid != nodes.NUMERIC:
            return self.compile(node)
        return self._numeric_text(node) if digits is None else self.compile(node).cast(decimal_type(digits))

    def _alike(self, operands: Iterable[Node], digits: Digits | None) -> list[Column]:
        return [self.in_digits(operand, digits) for operand in operands]

    def _python(
        self,
        function: PythonFunction,
        node: Node,
        operands: Sequence[tuple[Node, Column]],
        constants: Sequence[Column] = (),
    ) -> Column:
        """Return a Python function of operands; nothing fails for rows that PostgreSQL does not evaluate it for."""
        in_python = self._compiled.in_python
        arguments: list[Column] = []
        for operand, value in operands:
            if id(value) in in_python:
                arguments.append(in_python[id(value)][1])
            elif self._evaluated is not None and nodes.can_fail(operand):
                # What Spark computes for Python, it computes for every row.
                arguments.append(F.when(self._evaluated(), value))
            else:
                arguments.append(value)
        if nodes.can_fail(node):
            handed = function.outcomes(*arguments, *constants)
            result = value_of(handed)
        else:
            result = handed = function.values(*arguments, *constants)
        in_python[id(result)] = result, handed
        return result

    # Conversions.

    def _cast(self, operand: Node, node: nodes.Cast) -> Column:
        source, target = operand.type_oid, node.type_oid
        if node.modifier:
            return self._modified(operand, node)
        if source in nodes.STRINGS:
            return self._trimmed(operand) if source == nodes.BPCHAR != target else self.compile(operand)
        if source == nodes.NUMERIC:
            return self._cast_numeric(operand, node)
        value = self.compile(operand)
        if target == nodes.NUMERIC and source in nodes.FLOATS:
            name = "float4_numeric" if source == nodes.FLOAT4 else "float8_numeric"
            return self._python(numeric_function(name), node, [(operand, value)])
        if source in nodes.FLOATS and target in nodes.INTEGERS:
            return numbers.integer_from_float(value, target)
        if (source, target) == (nodes.FLOAT8, nodes.FLOAT4):
            return numbers.real_from_double(value)
        if (source, target) == (nodes.DATE, nodes.TIMESTAMP):
            return datetimes.timestamp_from_date(value)
        if (source, target) == (nodes.TIMESTAMP, nodes.DATE):
            return datetimes.date_from_timestamp(value)
        converted = value.cast(value_type(target, nodes.INTEGER_DIGITS.get(source)))
        return converted if node.digits is not None or target != nodes.NUMERIC else converted.cast("string")

    def _cast_numeric(self, operand: Node, node: nodes.Cast) -> Column:
        digits, target = operand.digits, node.type_oid
        if target in nodes.INTEGERS:
            name = {nodes.INT2: "numeric_int2", nodes.INT4: "numeric_int4"}.get(target, "numeric_int8")
            if digits is None or digits.integral >= Digits.MAXIMUM:
                return self._python(numeric_function(name), node, [(operand, self._numeric_text(operand))])
            whole = self.compile(operand)
            return (F.round(whole, 0) if digits.scale else whole).cast(value_type(target, None))
        float_type = value_type(target, None)
        if digits is None:
            return numbers.float_from_text(self._numeric_text(operand), float_type)
        value = self.compile(operand)
        return (value if target == nodes.FLOAT8 else value.cast(StringType())).cast(float_type)

    def _modified(self, operand: Node, node: nodes.Cast) -> Column:
        """Return `operand::numeric(p,s)`, which rounds and may fail, or a string cut or padded to its length."""
        if node.type_oid != nodes.NUMERIC:
            (length,) = node.modifier
            cut = F.substring(self.compile(operand), 1, length)
            return cut if node.type_oid == nodes.VARCHAR else F.rpad(cut, length, " ")
        precision, scale = (*node.modifier, 0)[:2]
        own = operand.digits
        if node.digits is not None and own is not None and own.scale <= scale:
            return self.compile(operand).cast(decimal_type(node.digits))
        limits = F.lit(precision), F.lit(scale)
        text = self._python(
            numeric_function("numeric"), node, [(operand, self._numeric_text(operand))], limits
        )
        return text.cast(decimal_type(node.digits))

    # Comparisons.

    def _listed(self, connective: str, operands: Sequence[Node]) -> Column | None:
        """Return `x = a OR x = b …` as Spark's IN, and the negation of it; None for what is neither."""
        operator = "=" if connective == "OR" else "<>"
        match operands[0]:
            case nodes.Comparison(left=subject) if subject.type_oid not in {*_UNLISTED, *ELEMENTS}:
                values = [operand.right for operand in operands if _compares(operand, operator, subject)]
            case _:
                return None
        if len(values) < len(operands) or not all(isinstance(value, nodes.Constant) for value in values):
            return None
        membership = self._trimmed(subject).isin([self._trimmed(value) for value in values])
        return membership if connective == "OR" else ~membership

    def _trimmed(self, node: Node) -> Column:
        """Return a value to compare: the padding of character(n) has no meaning (section 8.3)."""
        value = self.compile(node)
        return F.rtrim(value) if node.type_oid == nodes.BPCHAR else value

    def _comparable(self, left: Node, right: Node) -> tuple[Column, Column]:
        if left.type_oid in ELEMENTS:
            return self.elements_to_compare(left), self.elements_to_compare(right)
        if left.type_oid != right.type_oid:
            first, second = (datetimes.moment(self.compile(side), side.type_oid) for side in (left, right))
            return first, second
        if left.type_oid != nodes.NUMERIC:
            return self._trimmed(left), self._trimmed(right)
        common = nodes.common_digits(iter((left.digits, right.digits)))
        if common is None:
            return numeric_order(self._numeric_text(left)), numeric_order(self._numeric_text(right))
        return self.compile(left).cast(decimal_type(common)), self.compile(right).cast(decimal_type(common))

    def elements_to_compare(self, array: Node) -> Column:
        """Return an array whose elements compare as PostgreSQL's do: NULL is equal to itself and the greatest."""
        element_oid = ELEMENTS[array.type_oid]

        def compared(element: Column) -> Column:
            value = element_to_compare(element, element_oid)
            return F.struct(element.isNull().alias("missing"), value.alias("value"))

        return F.transform(self.compile(array), compared)

    def _extreme(self, function: str, operands: Sequence[Node], node: Node) -> Column:
        several = self._alike(operands, node.digits)
        if len(several) == 1:
            return several[0]
        if isinstance(spark_type(node), StringType) and node.type_oid == nodes.NUMERIC:
            several_texts = list(zip(operands, several, strict=True))
            return self._python(numbers.numeric_extreme(function), node, several_texts)
        return (F.greatest if function == "GREATEST" else F.least)(*several)

    # Functions and arrays.

    def _change_case(self, node: nodes.CaseChange) -> Column:
        value, mapping = self.compile(node.operand), node.mapping
        if node.function == "initcap":
            return self._python(initcap(mapping), node, [(node.operand, value)])
        # Spark's translate maps character by character, as the server does; its lower and upper know contexts.
        is_lower = node.function == "lower"
        changed = F.translate(value, *(mapping.lower if is_lower else mapping.upper))
        if not (_is_column(node.operand) and mapping.is_plain_in_ascii()):
            return changed
        # In ASCII they know none, and are much faster. Of a value that is computed there would be three copies.
        in_ascii = F.length(value) == F.octet_length(value)
        return F.when(in_ascii, (F.lower if is_lower else F.upper)(value)).otherwise(changed)

    def _call(self, node: nodes.FunctionCall) -> Column:
        name, operands = node.name, node.operands
        python = in_python(name)
        if python is not None:
            return self._python(python, node, [(operand, self.compile(operand)) for operand in operands])
        if name.startswith("numeric_") and node.digits is None:
            values = [
                (o, self._numeric_text(o) if o.type_oid == nodes.NUMERIC else self.compile(o))
                for o in operands
            ]
            return self._python(numeric_function(name), node, values)
        if name.startswith("array"):
            return self._call_on_array(name, operands)
        made = datetimes.function_of(node, spark_type(node))
        if made is not None:
            return made(*(self.compile(o) for o in operands if not datetimes.is_parameter(o)))
        return FUNCTIONS[name](*(self.compile(operand) for operand in operands))

    def _call_on_array(self, name: str, operands: Sequence[Node]) -> Column:
        if len(operands) == 1:
            return FUNCTIONS[name](self.compile(operands[0]))
        array, other = operands
        element_oid = ELEMENTS[array.type_oid]

        def to_compare(element: Column) -> Column:
            return element_to_compare(element, element_oid)

        searched = F.transform(self.compile(array), to_compare)
        if other.type_oid in ELEMENTS:
            return FUNCTIONS[name](searched, F.transform(self.compile(other), to_compare))
        return FUNCTIONS[name](searched, to_compare(self.in_digits(other, None)))

    def _subject(self, node: Node) -> Column:
        is_text = node.type_oid == nodes.NUMERIC and node.digits is None
        return self._numeric_text(node) if is_text else self.compile(node)

    def _each_element(self, node: nodes.EachElement) -> Column:
        # The subject is computed outside: Spark runs no Python for an element. A numeric may be asked for as text.
        subjects = dict.fromkeys((node.subject, replace(node.subject, digits=None)))
        quantify = F.forall if node.every else F.exists

        def build(array: Column, *values: Column) -> Column:
            values_of: dict[Node, Column] = dict(zip(subjects, values, strict=True))

            def test(element: Column) -> Column:
                return _Compiler(self._column, self._evaluated, {**values_of, node.element: element}).compile(
                    node.test
                )

            return quantify(array, test)

        values = [self._subject(subject) for subject in subjects]
        return self._strict(bound(build, self.compile(node.array), *values), (node.subject, node.array))


def _is_column(node: Node) -> bool:
    """Whether it is a column, perhaps as another type of strings or under another collation."""
    while isinstance(node, nodes.Cast | nodes.Collate):
        node = node.operand
    return isinstance(node, nodes.ColumnValue)


def _compares(node: Node, operator: str, subject: Node) -> TypeGuard[nodes.Comparison]:
    return isinstance(node, nodes.Comparison) and node.operator == operator and node.left == subject


def _joined(connect: Callable[[Column, Column], Column], columns: Sequence[Column]) -> Column:
    """Join in halves: a filter of a thousand parts stays a shallow tree."""
    if len(columns) == 1:
        return columns[0]
    half = len(columns) // 2
    return connect(_joined(connect, columns[:half]), _joined(connect, columns[half:]))


def _none_is(columns: Sequence[Column], decided: Column) -> Column:
    return _joined(and_, [~column.eqNullSafe(decided) for column in columns])


def _all_null(columns: Sequence[Column]) -> Column:
    return _joined(and_, [column.isNull() for column in columns])


def _same(column: Column) -> Column:
    return column
