"""PostgreSQL's restrictions on the expression of a publication's WHERE (section 29.4.2).

In: an analysed expression as a node tree, and its mutable or user-defined functions and operators. Out: the
reason why it is refused, and the columns it reads. The rules are those of
check_simple_rowfilter_expr_walker() in src/backend/commands/publicationcmds.c; raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pgsieve.decoding.publications.catalog import Table
from pgsieve.decoding.publications.node_tree import TreeNode, Value

#: FirstNormalObjectId of src/include/access/transam.h: objects from here on were made by users.
FIRST_USER_OID: Final = 16384

_OPERATORS: Final = frozenset({"OPEXPR", "DISTINCTEXPR", "NULLIFEXPR", "SCALARARRAYOPEXPR"})
_ALLOWED: Final = _OPERATORS | {
    "VAR", "CONST", "FUNCEXPR", "BOOLEXPR", "RELABELTYPE", "COLLATEEXPR", "CASEEXPR", "CASETESTEXPR", "ARRAYEXPR",
    "ROWEXPR", "ROWCOMPAREEXPR", "COALESCEEXPR", "MINMAXEXPR", "XMLEXPR", "NULLTEST", "BOOLEANTEST",
}  # fmt: skip

#: The fields with the result type of a node (exprType); nodes without such a field return built-in types.
_TYPES: Final = (
    "vartype", "consttype", "funcresulttype", "opresulttype", "resulttype", "casetype", "typeId", "array_typeid",
    "row_typeid", "coalescetype", "minmaxtype",
)  # fmt: skip
#: exprCollation and exprInputCollation.
_COLLATIONS: Final = (
    "varcollid", "constcollid", "funccollid", "opcollid", "resultcollid", "casecollid", "collation", "array_collid",
    "coalescecollid", "minmaxcollid", "collOid", "inputcollid",
)  # fmt: skip

_ONLY: Final = (
    "Only columns, constants, built-in operators, built-in data types, built-in collations, and immutable built-in"
    " functions are allowed."
)


@dataclass(frozen=True, slots=True)
class Expression:
    """An analysed expression.

    `generation` has the expressions of virtual generated columns, by attribute number.
    """

    tree: TreeNode
    generation: Mapping[int, TreeNode] = field(default_factory=lambda: MappingProxyType({}))

    def nodes(self) -> Iterator[TreeNode]:
        """Yield each node before its children.

        A virtual column is followed by its expression (since version 18).
        """
        waiting = [self.tree]
        while waiting:
            node = waiting.pop()
            if node.label != "CASEWHEN":
                yield node
            below = list(node.children)
            if node.label == "VAR" and (expression := self.generation.get(node.number("varattno"))):
                below = [expression]
            waiting += reversed(below)

    def columns(self) -> frozenset[int]:
        """The attribute numbers that the expression reads.

        A virtual column counts as the columns of its expression.
        """
        read = {node.number("varattno") for node in self.nodes() if node.label == "VAR"}
        return frozenset(read - self.generation.keys())

    def functions(self) -> frozenset[int]:
        """The oids of the functions called by name, or by a cast."""
        return frozenset(node.number("funcid") for node in self.nodes()) - {0}

    def operators(self) -> frozenset[int]:
        """The oids of the operators."""
        return frozenset(oid for node in self.nodes() for oid in _operators(node)) - {0}


def column_names(expression: Expression, table: Table) -> frozenset[str]:
    """The columns of the table that the expression reads."""
    read = expression.columns()
    return frozenset(a.name for a in table.attributes if a.number in read)


def _operators(node: TreeNode) -> tuple[int, ...]:
    if node.label == "ROWCOMPAREEXPR":
        return _oids(node.fields["opnos"])
    return (node.number("opno"),) if node.label in _OPERATORS else ()


def _oids(value: Value) -> tuple[int, ...]:
    """A list of oids is written `(o 96 97)`."""
    items = value[1:] if isinstance(value, tuple) else ()
    return tuple(int(oid) for oid in items if isinstance(oid, str))


def refusal(expression: Expression, functions: frozenset[int], operators: frozenset[int]) -> str | None:
    """PostgreSQL's reason to refuse the expression, None if it may be a row filter.

    `functions` and `operators` are the expression's functions and operators that are user-defined or not
    immutable.
    """
    return next((why for node in expression.nodes() if (why := _refusal(node, functions, operators))), None)


def _refusal(node: TreeNode, functions: frozenset[int], operators: frozenset[int]) -> str | None:
    used = _operators(node)
    if node.label not in _ALLOWED:
        return _ONLY
    if node.label == "VAR" and node.number("varattno") < 0:
        return "System columns are not allowed."
    if any(oid >= FIRST_USER_OID for oid in used):
        return "User-defined operators are not allowed."
    if any(node.number(name) >= FIRST_USER_OID for name in _TYPES):
        return "User-defined types are not allowed."
    if node.number("funcid") in functions or not operators.isdisjoint(used):
        return "User-defined or built-in mutable functions are not allowed."
    if any(node.number(name) >= FIRST_USER_OID for name in _COLLATIONS):
        return "User-defined collations are not allowed."
    return None
