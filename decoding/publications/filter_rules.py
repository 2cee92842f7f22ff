"""PostgreSQL's restrictions on the expression of a publication's WHERE.

In: an expression that the server has analysed, as a node tree; and the oids of functions and operators that are
user-defined or not immutable.

Out: the reason why PostgreSQL refuses the expression, and the columns that the expression reads. Raises nothing.

PostgreSQL documentation, Row Filters: Expression Restrictions; check_simple_rowfilter_expr_walker() in
src/backend/commands/publicationcmds.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pgsieve.decoding.publications.catalog import Table
from pgsieve.decoding.publications.node_tree import TreeNode, Value

#: FirstNormalObjectId of src/include/access/transam.h: the lowest oid of users' objects.
FIRST_USER_OID: Final = 16384

#: The labels of the nodes that apply an operator. A label is the name of the node's struct in PostgreSQL.
_OPERATOR_LABELS: Final = frozenset({"OPEXPR", "DISTINCTEXPR", "NULLIFEXPR", "SCALARARRAYOPEXPR"})
_ALLOWED_LABELS: Final = _OPERATOR_LABELS | {
    "VAR", "CONST", "FUNCEXPR", "BOOLEXPR", "RELABELTYPE", "COLLATEEXPR", "CASEEXPR", "CASETESTEXPR", "ARRAYEXPR",
    "ROWEXPR", "ROWCOMPAREEXPR", "COALESCEEXPR", "MINMAXEXPR", "XMLEXPR", "NULLTEST", "BOOLEANTEST",
}  # fmt: skip

#: The fields with a node's result type (exprType()); nodes without such a field have built-in types.
_TYPE_FIELDS: Final = (
    "vartype", "consttype", "funcresulttype", "opresulttype", "resulttype", "casetype", "typeId", "array_typeid",
    "row_typeid", "coalescetype", "minmaxtype",
)  # fmt: skip
#: The fields with the collation of a node's result or of its arguments (exprCollation(), exprInputCollation()).
_COLLATION_FIELDS: Final = (
    "varcollid", "constcollid", "funccollid", "opcollid", "resultcollid", "casecollid", "collation", "array_collid",
    "coalescecollid", "minmaxcollid", "collOid", "inputcollid",
)  # fmt: skip

_LABEL_REFUSAL_REASON: Final = (
    "Only columns, constants, built-in operators, built-in data types, built-in collations, and immutable built-in"
    " functions are allowed."
)


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression that the server has analysed.

    `generation_expressions` has the expressions of the table's virtual generated columns, by attribute number.
    """

    tree: TreeNode
    generation_expressions: Mapping[int, TreeNode] = field(default_factory=lambda: MappingProxyType({}))

    def iterate_nodes(self) -> Iterator[TreeNode]:
        """Yield each node before its children. A WHEN in a CASE is not yielded, only its children.

        A reference to a virtual generated column counts as the parent of the column's expression.
        """
        pending_nodes = [self.tree]
        while pending_nodes:
            node = pending_nodes.pop()
            if node.label != "CASEWHEN":
                yield node
            children = list(node.children)
            if node.label == "VAR" and (
                expression := self.generation_expressions.get(node.find_number("varattno"))
            ):
                children = [expression]
            pending_nodes += reversed(children)

    def find_column_numbers(self) -> frozenset[int]:
        """The numbers of the columns that the expression reads.

        A virtual generated column is not in the result, but the columns that its own expression reads are.
        """
        attribute_numbers = {
            node.find_number("varattno") for node in self.iterate_nodes() if node.label == "VAR"
        }
        return frozenset(attribute_numbers - self.generation_expressions.keys())

    def find_function_oids(self) -> frozenset[int]:
        """The oids of the functions that the expression calls by name or by a cast."""
        return frozenset(node.find_number("funcid") for node in self.iterate_nodes()) - {0}

    def find_operator_oids(self) -> frozenset[int]:
        """The oids of the operators in the expression."""
        return frozenset(oid for node in self.iterate_nodes() for oid in _find_operator_oids(node)) - {0}


def find_expression_columns(expression: Expression, table: Table) -> frozenset[str]:
    """The columns of the table that the expression reads."""
    attribute_numbers = expression.find_column_numbers()
    return frozenset(a.name for a in table.attributes if a.number in attribute_numbers)


def _find_operator_oids(node: TreeNode) -> tuple[int, ...]:
    if node.label == "ROWCOMPAREEXPR":
        return _parse_oids(node.fields["opnos"])
    return (node.find_number("opno"),) if node.label in _OPERATOR_LABELS else ()


def _parse_oids(value: Value) -> tuple[int, ...]:
    """Parse a list of oids, such as `(o 96 97)`."""
    items = value[1:] if isinstance(value, tuple) else ()
    return tuple(int(oid) for oid in items if isinstance(oid, str))


def find_refusal_reason(
    expression: Expression, refused_functions: frozenset[int], refused_operators: frozenset[int]
) -> str | None:
    """The reason why PostgreSQL refuses the expression as a row filter, or None if PostgreSQL accepts it.

    `refused_functions` and `refused_operators` are the oids of the functions and operators that are user-defined or not immutable.
    """
    return next(
        (
            reason
            for node in expression.iterate_nodes()
            if (reason := _find_node_refusal_reason(node, refused_functions, refused_operators))
        ),
        None,
    )


def _find_node_refusal_reason(
    node: TreeNode, refused_functions: frozenset[int], refused_operators: frozenset[int]
) -> str | None:
    used_operators = _find_operator_oids(node)
    if node.label not in _ALLOWED_LABELS:
        return _LABEL_REFUSAL_REASON
    if node.label == "VAR" and node.find_number("varattno") < 0:
        return "System columns are not allowed."
    if any(oid >= FIRST_USER_OID for oid in used_operators):
        return "User-defined operators are not allowed."
    if any(node.find_number(name) >= FIRST_USER_OID for name in _TYPE_FIELDS):
        return "User-defined types are not allowed."
    if node.find_number("funcid") in refused_functions or not refused_operators.isdisjoint(used_operators):
        return "User-defined or built-in mutable functions are not allowed."
    if any(node.find_number(name) >= FIRST_USER_OID for name in _COLLATION_FIELDS):
        return "User-defined collations are not allowed."
    return None
