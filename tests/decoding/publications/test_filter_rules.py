"""Which expressions may be a row filter, and the parser of the server's expression trees.

PostgreSQL documentation, Row Filters: Expression Restrictions.
"""

from __future__ import annotations

import pytest

from pgsieve.decoding.publications.filter_rules import FIRST_USER_OID, Expression, find_refusal_reason
from pgsieve.decoding.publications.node_tree import TreeNode, parse_expression, parse_node_tree

#: `a > 5`, as in pg_publication_rel.prqual, shortened.
COMPARED = (
    "{OPEXPR :opno 521 :opfuncid 147 :opresulttype 16 :opcollid 0 :inputcollid 0 :args ("
    "{VAR :varno 1 :varattno 1 :vartype 23 :varcollid 0}"
    " {CONST :consttype 23 :constvalue 4 [ 5 0 0 0 0 0 0 0 ]})}"
)


def test_a_node_has_a_label_fields_and_child_nodes() -> None:
    tree = parse_expression(COMPARED)
    assert (tree.label, tree.find_number("opno"), tree.find_number("no such field")) == ("OPEXPR", 521, 0)
    assert [node.label for node in tree.children] == ["VAR", "CONST"]


def test_delimiters_inside_of_a_value_are_escaped() -> None:
    tree = parse_expression(r"{COLUMNREF :name a\ \{b\}\)}")
    assert tree.fields["name"] == r"a\ \{b\}\)"


def test_labels_of_older_versions_are_those_of_newer_ones() -> None:
    assert parse_expression("{CASE :casetype 23}").label == "CASEEXPR"


@pytest.mark.parametrize("text", ["", "{VAR", "{VAR} {VAR}", "{}", "{{VAR}}", "{VAR}}"])
def test_a_text_that_is_not_a_tree_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="node"):
        parse_node_tree(text)
    with pytest.raises(ValueError, match="node"):
        parse_expression(text)


def test_a_deep_tree_needs_no_deep_stack() -> None:
    depth = 100_000
    tree = parse_node_tree("(" * depth + ")" * depth)
    for _ in range(depth - 1):
        assert isinstance(tree, tuple)
        (tree,) = tree
    assert tree == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (COMPARED, None),
        ("{SUBLINK :subLinkType 4}", "Only columns, constants, built-in operators"),
        ("{VAR :varattno -1 :vartype 27}", "System columns"),
        (f"{{OPEXPR :opno {FIRST_USER_OID} :args ()}}", "User-defined operators"),
        (f"{{VAR :varattno 1 :vartype {FIRST_USER_OID}}}", "User-defined types"),
        (f"{{VAR :varattno 1 :vartype 25 :varcollid {FIRST_USER_OID}}}", "User-defined collations"),
        ("{FUNCEXPR :funcid 1299 :funcresulttype 1184 :args ()}", "mutable functions"),  # now()
        ("{OPEXPR :opno 1300 :args ()}", "mutable functions"),
        (
            f"{{BOOLEXPR :boolop not :args ({{VAR :varattno 1 :vartype {FIRST_USER_OID}}})}}",
            "User-defined types",
        ),
    ],
)
def test_row_filters_with_forbidden_nodes_are_refused(text: str, reason: str | None) -> None:
    message = find_refusal_reason(Expression(parse_expression(text)), frozenset({1299}), frozenset({1300}))
    assert (message is None) if reason is None else (reason in (message or ""))


def test_a_virtual_column_counts_as_its_expression() -> None:
    """In version 18, generated column 2 is `now() + column 3`. Neither its name nor its number hides the function."""
    virtual: dict[int, TreeNode] = {
        2: parse_expression(
            "{OPEXPR :opno 1327 :args ({FUNCEXPR :funcid 1299} {VAR :varattno 3 :vartype 1186})}"
        )
    }
    expression = Expression(parse_expression("{NULLTEST :arg {VAR :varattno 2 :vartype 1184}}"), virtual)
    assert (
        expression.find_column_numbers(),
        expression.find_function_oids(),
        expression.find_operator_oids(),
    ) == ({3}, {1299}, {1327})
    assert find_refusal_reason(expression, frozenset({1299}), frozenset()) is not None
