"""`layout` of a subscription: its allowed values, and their meaning."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from pgsieve.decoding.changes.metadata_columns import TYPE_OID_BY_KIND
from pgsieve.pipelines.config.file import ConfigError
from pgsieve.pipelines.config.layout import LayoutConfig
from pgsieve.pipelines.config.model import parse_config
from pgsieve.pipelines.config.values import MetadataKind
from pgsieve.resources.lake.delta.layout import SubscriptionLayout, TableLayout


def read(layout: object) -> LayoutConfig:
    written = {
        "lake": "./lake",
        "sources": {"shop": {"conninfo": "dbname=shop"}},
        "subscriptions": {"sales": {"source": "shop", "publications": ["p"], "layout": layout}},
    }
    return parse_config(yaml.safe_dump(written), Path("/etc/pgsieve.yaml"), {}).subscriptions["sales"].layout


def test_a_table_overrides_the_default() -> None:
    layout = read(
        {
            "cluster_by": ["Region", '"Day"'],
            "properties": {"delta.enableChangeDataFeed": True, "delta.checkpointInterval": 20},
            "target_file_size": "256 MB",
            "tables": {
                "public.Orders": {"properties": {"delta.enableChangeDataFeed": "false"}, "cluster_by": []},
                '"Sales".lines': {"target_file_size": "64kB"},
            },
        }
    ).to_subscription_layout()
    every = {"delta.enableChangeDataFeed": "true", "delta.checkpointInterval": "20"}
    assert layout.find_table_layout(("public", "other")) == TableLayout(
        ("region", "Day"), every, 256 * 1024**2
    )
    own = {**every, "delta.enableChangeDataFeed": "false"}
    assert layout.find_table_layout(("public", "orders")) == TableLayout((), own, 256 * 1024**2)
    assert layout.find_table_layout(("Sales", "lines")) == TableLayout(("region", "Day"), every, 65536)


def test_a_table_has_its_own_metadata_columns_in_place_of_the_others() -> None:
    layout = read(
        {"columns": {"operation": "op", "applied_at": "at"}, "tables": {"public.t": {"columns": {}}}}
    )
    assert layout.to_subscription_layout().find_table_layout(("public", "u")).columns == {
        "applied_at": "at",
        "operation": "op",
    }
    assert layout.to_subscription_layout().find_table_layout(("public", "t")).columns == {}
    assert set(get_args(MetadataKind)) == TYPE_OID_BY_KIND.keys()


def test_the_default_layout_is_empty() -> None:
    assert LayoutConfig().to_subscription_layout() == SubscriptionLayout()
    assert SubscriptionLayout().format_properties() is None


@pytest.mark.parametrize("folders", ["{table}", "{schema}_{table}", "bronze/{schema}.{table}/v-1"])
def test_templates_of_folders_are_accepted(folders: str) -> None:
    assert read({"folders": folders}).folders == folders


REFUSED = {
    "two columns of a name": ({"columns": {"operation": "_o", "ordinal": "_O"}}, "names a column twice"),
    "no plain name": ({"columns": {"operation": "a-b"}}, "cannot be the name of a column"),
    "no metadata": ({"columns": {"moved": "d"}}, "should be one of commit_lsn, "),
    "columns of rows that go": (
        {"columns": {"deleted": "d"}},
        "has columns of deleted rows (deleted), but keeps no deleted rows",
    ),
    "no kind of delete": ({"deletes": "maybe"}, "soft"),
    "no table": ({"folders": "{schema}"}, "is not a template for folders"),
    "another field": ({"folders": "{subscription}/{table}"}, "is not a template for folders"),
    "a format": ({"folders": "{table:>9}"}, "is not a template for folders"),
    "an open brace": ({"folders": "{table"}, "is not a template for folders"),
    "hidden": ({"folders": "_{table}"}, "cannot be the name of a folder"),
    "above": ({"folders": "../{table}"}, "cannot be the name of a folder"),
    "absolute": ({"folders": "/{table}"}, "cannot be the name of a folder"),
    "a capital": ({"folders": "T{table}"}, "cannot be the name of a folder"),
    "a positionless size": ({"target_file_size": "256"}, "is not a size for files"),
    "a small size": ({"target_file_size": "63 kB"}, "is not a size for files"),
    "a column twice": ({"cluster_by": ["a", "A"]}, "names a column twice"),
    "a table twice": ({"tables": {"public.a": {}, "PUBLIC.a": {}}}, "names a table twice"),
    "no qualified table": ({"tables": {"a": {}}}, "has 1 name where 2 are needed"),
    "append only": ({"properties": {"delta.appendOnly": "true"}}, "which a layout cannot set"),
    "positions that expire": (
        {"properties": {"delta.setTransactionRetentionDuration": "interval 1 day"}},
        "the positions of replicas are transaction identifiers",
    ),
    "a value that is none": (
        {"tables": {"public.a": {"properties": {"delta.checkpointInterval": 0}}}},
        "it is a number of commits, 1 at least",
    ),
    "an unknown key": ({"tables": {"public.a": {"folders": "{table}"}}}, "unknown key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_layouts_have_a_reason(case: str) -> None:
    layout, words = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        read(layout)
    assert words in str(caught.value), str(caught.value)
    assert "subscriptions.sales.layout" in str(caught.value)
