"""The component in a project's folder of definitions: scaffolded, translated, and loaded only from its state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.instance_for_test import instance_for_test
from dagster.components.testing.utils import DefsFolderSandbox, create_defs_folder_sandbox

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.component import PgsieveComponent
from pgsieve.pipelines.config.model import load_config
from tests.fixtures.shop import Shop

TYPE = "pgsieve.PgsieveComponent"


@pytest.fixture
def sandbox() -> Iterator[DefsFolderSandbox]:
    with instance_for_test(), create_defs_folder_sandbox() as made:
        yield made


@contextmanager
def _loaded(
    sandbox: DefsFolderSandbox, configuration: str, **attributes: Any
) -> Iterator[tuple[PgsieveComponent, dg.Definitions]]:
    path = sandbox.defs_folder_path / "replicas"
    if not path.exists():
        sandbox.scaffold_component(component_cls=PgsieveComponent, defs_path="replicas")
    contents = {"type": TYPE, "attributes": {"config": "pgsieve.yaml", **attributes}}
    (path / "defs.yaml").write_text(yaml.safe_dump(contents))
    (path / "pgsieve.yaml").write_text(configuration)
    with sandbox.load_component_and_build_defs(defs_path=path) as (component, defs):
        assert isinstance(component, PgsieveComponent)
        yield component, defs


def _descriptions(defs: dg.Definitions) -> dict[str, str]:
    graph = defs.resolve_asset_graph()
    keys = [k for k in graph.materializable_asset_keys if "public" in k.path]
    return {k.to_user_string(): graph.get(k).description or "" for k in keys}


def test_a_scaffolded_component_loads(sandbox: DefsFolderSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_PASSWORD", raising=False)
    path = sandbox.scaffold_component(component_cls=PgsieveComponent, defs_path="replicas")
    assert yaml.safe_load((path / "defs.yaml").read_text())["attributes"] == {"config": "pgsieve.yaml"}
    # The replicated data is not part of the package.
    assert Path(load_config(path / "pgsieve.yaml").lake) == sandbox.project_root / "lake"
    with sandbox.load_component_and_build_defs(defs_path=path) as (_, defs):
        dg.Definitions.validate_loadable(defs)
        assert set(defs.resources or {}) == {"pgsieve_lake", "pgsieve_spark"}
        assert dg.AssetKey(["sales", "cut"]) in defs.resolve_asset_graph().get_all_asset_keys()


def test_a_second_component_gets_other_names(sandbox: DefsFolderSandbox) -> None:
    sandbox.scaffold_component(component_cls=PgsieveComponent, defs_path="replicas")
    path = sandbox.scaffold_component(component_cls=PgsieveComponent, defs_path="crm-app")
    attributes = yaml.safe_load((path / "defs.yaml").read_text())["attributes"]
    assert attributes == {"config": "pgsieve.yaml", "prefix": "crm_app"}
    configuration = (path / "pgsieve.yaml").read_text()
    (path / "pgsieve.yaml").write_text(configuration.replace("shop", "app").replace("sales", "copy"))
    with sandbox.build_all_defs() as defs:
        dg.Definitions.validate_loadable(defs)
        assert set(defs.resources or {}) == {
            *("pgsieve_lake", "pgsieve_spark", "crm_app_lake", "crm_app_spark"),
        }


def test_a_translation_changes_keys_groups_tags_and_their_dependents(sandbox: DefsFolderSandbox) -> None:
    configuration = (
        "lake: ./lake\nsources: {shop: {conninfo: dbname=shop}}\n"
        "subscriptions: {sales: {source: shop, publications: [p]}}\n"
    )
    translation = {
        "key_prefix": ["raw"],
        "group_name": "{{ data.source }}_{{ data.kind }}",
        "tags": {"slot": "{{ data.slot }}"},
        "owners": ["team:data"],
        "kinds": ["postgres"],
        "automation_condition": "{{ automation_condition.on_cron('@daily') }}",
    }
    with _loaded(sandbox, configuration, prefix="crm", translation=translation) as (_, defs):
        graph = defs.resolve_asset_graph()
        changes = graph.get(dg.AssetKey(["raw", "sales", "table_changes"]))
        assert {k.to_user_string() for k in changes.parent_keys} == {"raw/shop/change_log"}
        assert changes.group_name == "shop_table_changes"
        assert changes.tags["slot"] == "pgsieve_shop"
        assert changes.owners == ["team:data"]
        assert changes.automation_condition is not None
        assert {job.name for job in defs.jobs or []} >= {"crm_shop_increments"}


def test_the_state_alone_names_the_published_tables(
    shop: Shop, sandbox: DefsFolderSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_IS_DEV_CLI", raising=False)
    with _loaded(sandbox, yaml.safe_dump(shop.written)) as (component, defs):
        assert _descriptions(defs) == {}, "there are descriptions without a state or a lake"
        asyncio.run(component.refresh_state(sandbox.project_root))
    shop.database.execute("alter publication p drop table notes")
    gone = {**shop.written, "sources": {"shop": {**shop.written["sources"]["shop"], "conninfo": "port=1"}}}
    with _loaded(sandbox, yaml.safe_dump(gone)) as (component, defs):
        before = _descriptions(defs)
        assert set(before) == {"one/public/orders", "one/public/notes", "two/public/stock"}
        assert before["one/public/orders"].endswith("Row filter: (id > 1)")
        assert before["one/public/notes"].endswith("Row filter: none")
        with pytest.raises(PgsieveError, match="no connection"):
            asyncio.run(component.refresh_state(sandbox.project_root))
        monkeypatch.setenv("DAGSTER_IS_DEV_CLI", "1")
        asyncio.run(component.refresh_state(sandbox.project_root))
    monkeypatch.delenv("DAGSTER_IS_DEV_CLI")
    with _loaded(sandbox, yaml.safe_dump(gone)) as (_, defs):
        assert _descriptions(defs) == before, "a source that does not answer lost its part"
    with _loaded(sandbox, yaml.safe_dump(shop.written)) as (component, _):
        asyncio.run(component.refresh_state(sandbox.project_root))
    with _loaded(sandbox, yaml.safe_dump(shop.written)) as (_, defs):
        assert set(_descriptions(defs)) == {"one/public/orders", "two/public/stock"}
