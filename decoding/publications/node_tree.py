"""Parses expression trees that the server's catalogs store as texts of type pg_node_tree.

In: text of pg_rewrite.ev_action, pg_publication_rel.prqual or pg_attrdef.adbin. Out: nested `TreeNode`s.
Raises ValueError for other text. src/backend/nodes/outfuncs.c writes the format. A label is the name of a struct
in src/include/nodes, and a field is the name of one of its members.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

#: outToken() writes a backslash before each delimiter inside a value, even between quotes. So a quoted value is one token.
_TOKEN: Final = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)

#: Maps labels of versions 13 and 14 to the labels of later versions, which are the names of the structs.
_RENAMED_LABELS: Final = MappingProxyType({
    "ARRAY": "ARRAYEXPR", "CASE": "CASEEXPR", "COALESCE": "COALESCEEXPR", "COLLATE": "COLLATEEXPR",
    "MINMAX": "MINMAXEXPR", "ROW": "ROWEXPR", "ROWCOMPARE": "ROWCOMPAREEXPR", "WHEN": "CASEWHEN",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node: its label, and the value that follows the name of each field."""

    label: str
    fields: Mapping[str, Value]

    def find_number(self, field: str) -> int:
        """Return a field's value as a number, such as an oid; 0 if the node lacks the field."""
        value = self.fields.get(field, "0")
        return int(value) if isinstance(value, str) else 0

    @property
    def children(self) -> tuple[TreeNode, ...]:
        """The nodes directly below this node, as values of its fields or elements of lists in its fields."""
        return tuple(node for value in self.fields.values() for node in _iterate_nodes(value))


Value: TypeAlias = "str | TreeNode | tuple[Value, ...]"


def _iterate_nodes(value: Value) -> Iterator[TreeNode]:
    match value:
        case TreeNode():
            yield value
        case tuple():
            for item in value:
                yield from _iterate_nodes(item)


def parse_node_tree(text: str) -> Value:
    """Parse text of any depth into a node or a list of nodes; raises ValueError for other text."""
    top_values: list[Value] = []
    enclosing_lists: list[list[Value]] = []
    values = top_values
    for lexeme in _TOKEN.findall(text):
        if lexeme in ("{", "("):
            enclosing_lists.append(values)
            values = []
        elif lexeme in ("}", ")"):
            if not enclosing_lists:
                raise ValueError("not the text of a node tree")
            closed_value = _make_node(values) if lexeme == "}" else tuple(values)
            values = enclosing_lists.pop()
            values.append(closed_value)
        else:
            values.append(lexeme)
    if enclosing_lists or len(top_values) != 1:
        raise ValueError("not the text of a node tree")
    return top_values[0]


def parse_expression(text: str) -> TreeNode:
    """Parse text into a node; raises ValueError for other text, including a list."""
    tree = parse_node_tree(text)
    if not isinstance(tree, TreeNode):
        raise ValueError("not the text of an expression")  # noqa: TRY004 - the text is wrong, not a type
    return tree


def _make_node(values: list[Value]) -> TreeNode:
    """Return a node from its label and its `:field value` pairs.

    A value can begin with a colon, too. So whatever follows a field's name is read as its value.
    """
    if not values or not isinstance(values[0], str):
        raise ValueError("a node without a label")
    fields: dict[str, Value] = {}
    names_and_values = iter(values[1:])
    for name in names_and_values:
        if isinstance(name, str) and name.startswith(":"):
            fields[name[1:]] = next(names_and_values, "<>")
    return TreeNode(_RENAMED_LABELS.get(values[0], values[0]), MappingProxyType(fields))
