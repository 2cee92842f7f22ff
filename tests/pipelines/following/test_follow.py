"""A followed stream: how many runs and events Dagster records, however many slices there are."""

from __future__ import annotations

import os
import signal
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable

from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.following.follow import follow
from tests.fixtures.shop import Quiet, Shop

SLICES = 4


@pytest.mark.drawn
@pytest.mark.spark
def test_one_run_of_dagster_records_all_slices_and_their_files_are_maintained(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgsieve.pipelines.following.follower.MAINTAIN_SLICES", SLICES - 1)
    shop.configure(retention={"change_log": "off"})
    shop.run()
    config, slices = load_config(shop.path), []
    stock, log = dg.AssetKey(["two", "public", "stock"]), dg.AssetKey(["shop", "change_log"])
    with open_instance(config) as dagster:
        before = {key: _materializations(dagster, key) for key in (stock, log)}

    def tell(summary: RunSummary) -> None:
        assert not summary.failures
        slices.append(summary)
        if len(slices) == SLICES:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            shop.database.execute("insert into stock values (%s, 0)", [10 + len(slices)])

    shop.database.execute("insert into stock values (10, 0)")
    assert follow(config, config.select([]), Quiet(), tell) == ()
    assert shop.ids("two", "stock") == [1, 2, 3, 4, *range(10, 10 + SLICES)]
    with open_instance(config) as dagster:
        new = {key: _materializations(dagster, key)[len(former) :] for key, former in before.items()}
    assert [metadata["inserted"] for metadata in new[stock]] == [SLICES]
    assert [metadata["slices"] for metadata in new[log]] == [SLICES]
    assert [metadata["dagster/row_count"] for metadata in new[stock]] == [4 + SLICES]
    kept = DeltaTable(shop.lake.paths.change_log("shop")).to_pyarrow_table()["slice"]
    assert len(kept.unique()) == 1, "maintenance kept rows that had been applied"


def _materializations(dagster: dg.DagsterInstance, key: dg.AssetKey) -> list[dict[str, Any]]:
    """The metadata of an asset's materializations, oldest first."""
    records = dagster.fetch_materializations(key, limit=100, ascending=True).records
    return [
        {name: value.value for name, value in record.asset_materialization.metadata.items()}
        for record in records
        if record.asset_materialization
    ]
