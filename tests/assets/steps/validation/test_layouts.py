"""Impossible layouts are reported with their tables."""

from __future__ import annotations

import pytest

from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.validation.layouts import (
    ClusteringError,
    find_clustering_columns,
    find_shared_folders,
)
from pgsieve.resources.lake.delta.layout import SubscriptionLayout, TableLayout
from pgsieve.resources.postgres.source import Source

FEED = SlotStream("shop", Source("shop", ""), "shop", "shop", False, {"sales": ()})


def subscription(layout: SubscriptionLayout) -> Subscription:
    return Subscription("sales", FEED, layout=layout)


def test_tables_that_would_share_a_folder_are_all_refused() -> None:
    names = [("a_b", "c"), ("a", "b_c"), ("a", "d")]
    assert not find_shared_folders(subscription(SubscriptionLayout()), names)
    problems = find_shared_folders(subscription(SubscriptionLayout("{schema}_{table}")), names)
    assert set(problems) == {("a_b", "c"), ("a", "b_c")}
    assert problems["a", "b_c"].message == "tables a.b_c and a_b.c would have the same folder, a_b_c"


def test_tables_are_clustered_by_the_columns_that_they_have() -> None:
    own = {("s", "own"): TableLayout(("x",)), ("s", "not"): TableLayout(())}
    layout = subscription(SubscriptionLayout(default_layout=TableLayout(("a", "b")), layout_by_table=own))
    assert find_clustering_columns(layout, ("s", "t"), [("b", "int"), ("a", "string")]) == ("a", "b")
    assert find_clustering_columns(layout, ("s", "t"), [("a", "string")]) == ()
    assert find_clustering_columns(layout, ("s", "t"), [("a", "string"), ("b", "array<int>")]) == ()
    assert find_clustering_columns(layout, ("s", "not"), [("b", "int"), ("a", "string")]) == ()
    assert find_clustering_columns(layout, ("s", "own"), [("x", "date")]) == ("x",)
    with pytest.raises(ClusteringError, match=r'subscription "sales": table s.own cannot be clustered by x'):
        find_clustering_columns(layout, ("s", "own"), [("a", "string")])
