"""Each materialisation says what its work has cost: the engine, the tasks, the bytes, the seconds."""

from __future__ import annotations

from typing import Any

import pytest

from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.config.model import load_config
from tests.fixtures.shop import Shop

pytestmark = pytest.mark.slow

_COSTS = {"engine", "tasks", "bytes", "seconds"}


def _read_newest(shop: Shop) -> dict[str, dict[str, Any]]:
    """The metadata of the newest materialisation of each asset."""
    with open_instance(load_config(shop.path)) as instance:
        events = {
            key.to_user_string(): instance.get_latest_materialization_event(key)
            for key in instance.all_asset_keys()
        }
    return {
        key: {name: value.value for name, value in event.asset_materialization.metadata.items()}
        for key, event in events.items()
        if event is not None and event.asset_materialization is not None
    }


def test_each_materialisation_says_what_it_cost(shop: Shop) -> None:
    """It takes long: three commands."""
    shop.run()
    shop.database.execute(
        "insert into orders values (5, 5); update stock set n = 0; insert into stock values (5, 5)"
    )
    shop.run()
    code, output = shop.cli("maintain")
    assert code == 0, output
    metadata_by_asset = _read_newest(shop)
    steps = {"shop/change_log", "one/table_changes", "one/maintenance", "shop/change_log_maintenance"}
    assert steps | {"one/public/orders", "one/initial_sync"} <= metadata_by_asset.keys()
    assert {key for key, metadata in metadata_by_asset.items() if not metadata.keys() >= _COSTS} == set()
    for key in ("shop/change_log", "one/table_changes", "one/maintenance"):
        metadata = metadata_by_asset[key]
        assert metadata["engine"] == "driver", key
        assert min(metadata["tasks"], metadata["bytes"]) > 0, key
