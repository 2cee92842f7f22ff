"""The layout of each table, and the Delta properties that result from it."""

from __future__ import annotations

from pgsieve.resources.lake.delta.layout import (
    DEFAULT_FILE_BYTES,
    SubscriptionLayout,
    TableLayout,
    parse_recorded_properties,
    target_file_bytes,
)


def test_former_properties_are_known_from_the_record() -> None:
    tables = {("public", "a"): TableLayout(properties={"delta.checkpointInterval": "7"})}
    layout = SubscriptionLayout(default_layout=TableLayout(file_bytes=70000), layout_by_table=tables)
    assert parse_recorded_properties(layout.properties_json()) == {
        "delta.checkpointInterval",
        "delta.targetFileSize",
    }
    assert parse_recorded_properties(None) == set()
    assert layout.table_layout(("public", "a")).delta_properties() == {
        "delta.checkpointInterval": "7",
        "delta.targetFileSize": "70000",
    }
    assert layout.table_layout(("public", "b")).delta_properties() == {"delta.targetFileSize": "70000"}


def test_a_layout_that_only_clusters_sets_no_properties() -> None:
    assert SubscriptionLayout(default_layout=TableLayout(("a",))).properties_json() is None


def test_file_sizes_set_by_others_count_if_they_are_numbers() -> None:
    assert target_file_bytes({"delta.targetFileSize": "70000"}) == 70000
    assert target_file_bytes({"delta.targetFileSize": "128mb"}) == target_file_bytes({}) == DEFAULT_FILE_BYTES
