"""The layout of each table, and the Delta properties that result from it."""

from __future__ import annotations

from pgsieve.resources.lake.delta.layout import (
    DEFAULT_FILE_BYTES,
    SubscriptionLayout,
    TableLayout,
    find_target_file_bytes,
    parse_recorded_properties,
)


def test_former_properties_are_known_from_the_record() -> None:
    tables = {("public", "a"): TableLayout(properties={"delta.checkpointInterval": "7"})}
    layout = SubscriptionLayout(default_layout=TableLayout(file_bytes=70000), layout_by_table=tables)
    assert parse_recorded_properties(layout.format_properties()) == {
        "delta.checkpointInterval",
        "delta.targetFileSize",
    }
    assert parse_recorded_properties(None) == set()
    assert layout.find_table_layout(("public", "a")).make_delta_properties() == {
        "delta.checkpointInterval": "7",
        "delta.targetFileSize": "70000",
    }
    assert layout.find_table_layout(("public", "b")).make_delta_properties() == {
        "delta.targetFileSize": "70000"
    }


def test_a_layout_that_only_clusters_sets_no_properties() -> None:
    assert SubscriptionLayout(default_layout=TableLayout(("a",))).format_properties() is None


def test_file_sizes_set_by_others_count_if_they_are_numbers() -> None:
    assert find_target_file_bytes({"delta.targetFileSize": "70000"}) == 70000
    assert (
        find_target_file_bytes({"delta.targetFileSize": "128mb"})
        == find_target_file_bytes({})
        == DEFAULT_FILE_BYTES
    )
