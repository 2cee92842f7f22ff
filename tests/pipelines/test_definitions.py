"""The definitions in a project with others: names do not clash, and no source is asked while they load."""

from __future__ import annotations

import socket
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import pgsieve
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.translator import AssetKind, PgsieveAsset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines import definitions
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from tests.fixtures.shop import Shop

#: An address that neither answers nor refuses: a connection would wait until its timeout.
SILENT = """
lake: ./lake
sources: {shop: {conninfo: "host=203.0.113.1 dbname=shop connect_timeout=60"}}
subscriptions: {sales: {source: shop, publications: [p]}}
"""


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    path = tmp_path / "pgsieve.yaml"
    path.write_text(SILENT)
    return path


def test_the_web_interface_prints_no_warning_of_dagsters_own_parameters(
    silent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSIEVE_CONFIG", str(silent))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", dg.BetaWarning)
        loaded = definitions.defs()
        assert isinstance(loaded, dg.Definitions)
        assert loaded.get_repository_def().sensor_defs
    assert [str(warning.message) for warning in caught if warning.category is dg.BetaWarning] == []


def _keys(defs: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}


def _names(defs: dg.Definitions) -> set[str]:
    return {each.name for some in (defs.jobs, defs.schedules, defs.sensors) for each in some or []}


@dg.asset
def mine(lake: dg.ResourceParam[str]) -> None: ...


def test_definitions_merge_into_a_project_with_an_executor_and_a_lake(silent: Path, tmp_path: Path) -> None:
    own = dg.Definitions(
        assets=[mine],
        jobs=[
            dg.define_asset_job("shop_increments", [mine]),
            dg.define_asset_job("shop_maintenance", [mine]),
        ],
        resources={"lake": "mine"},
        executor=dg.multiprocess_executor,
    )
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "pgsieve.yaml").write_text(
        SILENT.replace("shop:", "app:").replace("sales", "copy").replace("source: shop", "source: app")
    )
    second = pgsieve.build_definitions(tmp_path / "second" / "pgsieve.yaml", prefix="second")
    merged = dg.Definitions.merge(own, pgsieve.build_definitions(silent), second)
    dg.Definitions.validate_loadable(merged)
    assert merged.executor is dg.multiprocess_executor
    assert set(merged.resources or {}) == {
        "lake",
        *("pgsieve_lake", "pgsieve_spark", "second_lake", "second_spark"),
    }
    assert {"mine", "shop/change_log", "sales/cut", "app/change_log", "copy/cut"} <= _keys(merged)
    theirs = _names(merged) - {"shop_increments", "shop_maintenance"}
    assert all(name.startswith(("pgsieve_", "second_")) for name in theirs)
    with pytest.raises(PgsieveError, match="cannot begin a name"):
        pgsieve.build_definitions(silent, prefix="my-own")


def test_definitions_alone_keep_their_names(silent: Path) -> None:
    defs = build_ui_definitions(load_config(silent))
    assert defs.executor is dg.in_process_executor
    assert _names(defs) == {
        "shop_increments",
        "shop_increments_schedule",
        "shop_maintenance",
        "shop_maintenance_schedule",
        "shop_slot_alarm",
        "shop_slot_lag",
        "sales_new_tables",
        "sales_copies",
        "published_tables",
    }
    assert all(each.description for each in (*defs.jobs, *defs.schedules, *defs.sensors))


def test_no_source_is_asked_while_definitions_load(silent: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1 port={server.getsockname()[1]}"
        silent.write_text(SILENT.replace("203.0.113.1", address).replace("=60", "=2"))
        dg.Definitions.validate_loadable(pgsieve.build_definitions(silent))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_one_key_switches_schedules_sensors_and_freshness_policies_on(silent: Path) -> None:
    def running() -> tuple[set[str], bool]:
        defs = build_ui_definitions(load_config(silent))
        on = {s.name for s in defs.schedules or [] if s.default_status is dg.DefaultScheduleStatus.RUNNING}
        on |= {s.name for s in defs.sensors or [] if s.default_status is dg.DefaultSensorStatus.RUNNING}
        cut = defs.resolve_asset_graph().get(dg.AssetKey(["sales", "cut"]))
        return on, cut.freshness_policy is not None

    assert running() == ({"published_tables"}, False), "this sensor starts no run"
    silent.write_text(f"{SILENT}dagster: {{automation: true}}\n")
    names = {"shop_increments_schedule", "shop_maintenance_schedule", "sales_new_tables", "shop_slot_lag"}
    assert running() == ({*names, "published_tables"}, True)


@pytest.mark.drawn
def test_tables_are_known_from_the_stored_state_and_then_from_the_lake(shop: Shop) -> None:
    def described() -> dict[str, str]:
        """The row filter that each replica shows."""
        specs = pgsieve.build_definitions(shop.path).resolve_asset_graph()
        keys = [k for k in specs.get_all_asset_keys() if "public" in k.path and "tables" not in k.path]
        return {k.path[-1]: (specs.get(k).description or "").partition("Row filter: ")[2] for k in keys}

    assert described() == {}
    config = load_config(shop.path)
    assert shop.cli("refresh-defs-state") == (0, "")
    everything = {"orders": "(id > 1)", "notes": "none", "stock": "none"}
    assert described() == everything
    shop.copy()
    (config.state_folder / "published.json").unlink()
    assert described() == everything, "the catalog in the lake is not used"
    shop.database.execute("create table later (id int primary key); alter publication q add table later")
    assert described() == everything, "a source is asked"
    shop.copy()
    assert described() == {**everything, "later": "none"}, "the newer record of a run is not used"


def test_an_unknown_row_filter_is_not_shown_as_none(shop: Shop) -> None:
    own: dict[str, Any] = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    shop.configure(subscriptions={"three": own})
    shop.copy()
    stock = TableStates(shop.lake, "three").read_newest()["public", "stock"]
    assert stock.definition is not None
    unknown = replace(stock, definition=replace(stock.definition, published=None))
    key = dg.AssetKey(["three", "public", "stock"])
    for state, row_filter in ((stock, "none"), (unknown, "not known before the source has been read")):
        TableStates(shop.lake, "three").append([state])
        node = pgsieve.build_definitions(shop.path).resolve_asset_graph().get(key)
        assert (node.description or "").endswith(f"Row filter: {row_filter}")


def test_a_translator_changes_keys_and_their_dependents(silent: Path) -> None:
    class Mine(pgsieve.PgsieveTranslator):
        def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
            spec = super().get_asset_spec(data)
            if data.kind is AssetKind.CHANGE_LOG:
                spec = spec.replace_attributes(deps=[dg.AssetKey("upstream")])
            return spec.replace_attributes(key=spec.key.with_prefix("raw"), owners=["team:data"])

    defs = pgsieve.build_definitions(silent, translator=Mine())
    graph = defs.resolve_asset_graph()
    assert all(k.path[0] == "raw" for k in graph.materializable_asset_keys)
    changes = graph.get(dg.AssetKey(["raw", "sales", "table_changes"]))
    assert {k.to_user_string() for k in changes.parent_keys} == {"raw/shop/change_log"}
    assert changes.owners == ["team:data"]
    log = graph.get(dg.AssetKey(["raw", "shop", "change_log"]))
    assert {k.to_user_string() for k in log.parent_keys} == {"upstream", "raw/sales/initial_sync"}

    class Same(pgsieve.PgsieveTranslator):
        def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
            return super().get_asset_spec(data).replace_attributes(key=dg.AssetKey("same"))

    with pytest.raises(PgsieveError, match="one key, same"):
        pgsieve.build_definitions(silent, translator=Same())
