"""What a slot captures for several subscriptions, and which replicas a captured message affects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from pgsieve.decoding.publications.catalog import Catalog, Publication, PublicationTable, Table
from pgsieve.decoding.publications.routing import (
    find_leaf_captured_trees,
    find_routes,
    find_truncated_tables,
    list_capture_suffixes,
    plan_capture,
)

#: orders (1) ⊃ orders_a (2), orders_b (3); and a plain table, customers (4)
ORDERS = Table(1, "public", "orders", "p", "d", (), leaves=(2, 3))
ORDERS_A = Table(2, "public", "orders_a", "r", "d", (), ancestors=(1,))
ORDERS_B = Table(3, "public", "orders_b", "r", "d", (), ancestors=(1,))
CUSTOMERS = Table(4, "public", "customers", "r", "d", ())
CATALOG = Catalog({t.oid: t for t in (ORDERS, ORDERS_A, ORDERS_B, CUSTOMERS)}, {})

AS_ROOT = Publication("as_root", tables=(PublicationTable(1),), via_root=True)
AS_LEAVES = Publication("as_leaves", tables=(PublicationTable(1),))
INSERTS = Publication("inserts", frozenset({"insert"}), tables=(PublicationTable(4),))
TRUNCATES = Publication("truncates", frozenset({"truncate"}), tables=(PublicationTable(4),))


def captures(**subscriptions: Publication) -> dict[str, tuple[str, ...]]:
    """The tables of each capture publication, by the suffix of its name."""
    plan = plan_capture(CATALOG, {name: [publication] for name, publication in subscriptions.items()})
    return {capture.suffix: tuple(table.name for table in capture.tables) for capture in plan}


@pytest.mark.parametrize(
    ("subscriptions", "expected"),
    [
        pytest.param({"a": AS_ROOT}, {"_root": ("orders",)}, id="a tree that all want as its root"),
        pytest.param(
            {"a": AS_ROOT, "b": AS_LEAVES},
            {"": ("orders",)},
            id="a tree that one subscription wants as its leaves: the root without via_root",
        ),
        pytest.param(
            {"a": INSERTS}, {"_i": ("customers",)}, id="only the operations that a subscription wants"
        ),
        pytest.param(
            {"a": INSERTS, "b": TRUNCATES, "c": AS_ROOT},
            {"_it": ("customers",), "_root": ("orders",)},
            id="one publication per set of operations",
        ),
    ],
)
def test_a_capture_has_each_table_once_with_the_operations_of_all_subscriptions(
    subscriptions: dict[str, Publication], expected: dict[str, tuple[str, ...]]
) -> None:
    assert captures(**subscriptions) == expected
    assert set(expected) <= set(list_capture_suffixes())


def test_a_message_of_the_root_or_of_a_leaf_reaches_the_subscriptions_replica() -> None:
    as_root = {oid: sent.publish_as.name for oid, sent in find_routes(CATALOG, [AS_ROOT]).items()}
    assert as_root == {1: "orders", 2: "orders", 3: "orders"}
    as_leaves = {oid: sent.publish_as.name for oid, sent in find_routes(CATALOG, [AS_LEAVES]).items()}
    assert as_leaves == {2: "orders_a", 3: "orders_b"}


@pytest.mark.parametrize(
    ("truncated", "publication", "emptied"),
    [
        ({1}, AS_ROOT, ["orders"]),
        ({2}, AS_ROOT, []),  # a partition's TRUNCATE is not one of the root
        ({2, 3}, AS_ROOT, ["orders"]),
        ({2}, AS_LEAVES, ["orders_a"]),
        ({4}, INSERTS, []),
        ({4}, TRUNCATES, ["customers"]),
    ],
)
def test_a_truncate_empties_the_replicas_of_the_truncated_tables(
    truncated: set[int], publication: Publication, emptied: list[str]
) -> None:
    assert [t.name for t in find_truncated_tables(truncated, CATALOG, [publication])] == emptied


def test_if_only_leaves_are_captured_a_truncate_of_all_may_be_one_of_the_root() -> None:
    assert find_leaf_captured_trees(CATALOG, {"a": [AS_ROOT]}) == ()
    assert find_leaf_captured_trees(CATALOG, {"a": [AS_ROOT], "b": [AS_LEAVES]}) == (frozenset({2, 3}),)


def count_steps(function: Callable[[], object]) -> int:
    """How many lines of Python a call executes. Each iteration of a loop in one line counts, too."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal steps
        steps += 1
        return trace

    former_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(former_trace)
    return steps


@pytest.mark.parametrize(
    "find",
    [
        pytest.param(lambda catalog, listed: plan_capture(catalog, {"a": listed}), id="plan_capture"),
        pytest.param(find_routes, id="find_routes"),
        pytest.param(lambda catalog, listed: find_leaf_captured_trees(catalog, {"a": listed}), id="trees"),
    ],
)
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_the_work_grows_with_the_tables_and_not_with_their_square(
    find: Callable[[Catalog, list[Publication]], object], *, is_partitioned: bool
) -> None:
    """The tables are listed one by one, and so are the leaves of one root."""

    def work(count: int) -> int:
        leaves = tuple(range(2, count + 2))
        root = Table(1, "public", "root", "p", "d", (), leaves=leaves if is_partitioned else ())
        ancestors = (1,) if is_partitioned else ()
        tables = [
            root,
            *(Table(oid, "public", f"t{oid}", "r", "d", (), ancestors=ancestors) for oid in leaves),
        ]
        entries = tuple(PublicationTable(t.oid) for t in tables)
        publication = Publication("p", tables=entries, via_root=is_partitioned)
        return count_steps(lambda: find(Catalog({t.oid: t for t in tables}, {}), [publication]))

    assert work(400) < 3 * work(200)
