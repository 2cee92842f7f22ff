"""The layout of each table, and the Delta properties that result from it."""

from __future__ import annotations

from pgsieve.resources.lake.delta.layout import (
    FILE_BYTES,
    SubscriptionLayout,
    TableLayout,
    file_bytes,
    recorded_properties,
)


def test_former_properties_are_known_from_the_record() -> None:
    tables = {("public", "a"): TableLayout(properties={"delta.checkpointInterval": "7"})}
    layout = SubscriptionLayout(every=TableLayout(file_bytes=70000), tables=tables)
    assert recorded_properties(layout.delta_json()) == {"delta.checkpointInterval", "delta.targetFileSize"}
    assert recorded_properties(None) == set()
    assert layout.of(("public", "a")).delta() == {
        "delta.checkpointInterval": "7",
        "delta.targetFileSize": "70000",
    }
    assert layout.of(("public", "b")).delta() == {"delta.targetFileSize": "70000"}


def test_a_layout_that_only_clusters_sets_no_properties() -> None:
    assert SubscriptionLayout(every=TableLayout(("a",))).delta_json() is None


def test_file_sizes_set_by_others_count_if_they_are_numbers() -> None:
    assert file_bytes({"delta.targetFileSize": "70000"}) == 70000
    assert file_bytes({"delta.targetFileSize": "128mb"}) == file_bytes({}) == FILE_BYTES
