"""What is recorded of names in the catalog, and which entries of a catalog are replaced. A dictionary is the catalog. No JVM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pgsieve.assets.steps.operations import registration
from pgsieve.assets.steps.operations.registration import CatalogNameError, Registration, unregister
from pgsieve.assets.steps.records.registered_names import RegisteredNames
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.catalog_names import CatalogName
from pgsieve.resources.lake.delta.tables import share_tables
from pgsieve.resources.lake.lake import Lake
from tests.fixtures.shop import Shop

NAME = ("sales", "stock")


class Catalog:
    """A catalog of names and locations. It fails as often as `failures` says."""

    def __init__(self) -> None:
        self.location_by_name: dict[CatalogName, str] = {}
        self.failures = 0

    def read_location(self, name: CatalogName) -> str | None:
        return self.location_by_name.get(name)

    def register(self, name: CatalogName, path: str) -> None:
        if self.failures:
            self.failures -= 1
            raise KeyboardInterrupt
        assert name not in self.location_by_name
        self.location_by_name[name] = path

    def unregister(self, name: CatalogName) -> None:
        del self.location_by_name[name]


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    made = Catalog()
    monkeypatch.setattr(registration, "SparkCatalog", lambda _: made)
    monkeypatch.setattr(Lake, "spark", None)
    return made


def register(shop: Shop) -> tuple[str, ...]:
    project = build_project(load_config(shop.path))
    return Registration(project.subscriptions["two"], project.lake.open(), "sales.{table}").register()


def test_a_name_that_a_killed_process_has_recorded_is_registered_by_the_next_one(
    shop: Shop, catalog: Catalog
) -> None:
    shop.copy()
    catalog.failures = 1
    with pytest.raises(KeyboardInterrupt):
        register(shop)
    assert register(shop) == ("`sales`.`stock`",)
    replica = shop.lake.paths.replica("two", "public", "stock")
    assert catalog.location_by_name == {NAME: replica}
    assert register(shop) == ()
    # The process is killed after the catalog has the name.
    RegisteredNames(shop.lake, "two").note([(NAME, replica)], is_registered=None)
    assert register(shop) == ("`sales`.`stock`",)
    assert unregister(RegisteredNames(shop.lake, "two")) == ("`sales`.`stock`",)
    assert catalog.location_by_name == {}
    catalog.location_by_name[NAME] = replica
    with pytest.raises(CatalogNameError, match="pgsieve did not register it"):
        register(shop)
    assert unregister(RegisteredNames(shop.lake, "two")) == ()


def test_a_name_follows_a_lake_that_is_moved_and_not_one_that_is_copied(
    shop: Shop, catalog: Catalog, tmp_path: Path
) -> None:
    shop.copy()
    register(shop)
    lake, copied = Path(shop.lake.uri), tmp_path / "a copy"
    former_location = catalog.location_by_name[NAME]
    shutil.copytree(lake, copied)
    shop.configure(lake=str(copied))
    with pytest.raises(CatalogNameError, match="`stock` already"):
        register(shop)
    assert catalog.location_by_name == {NAME: former_location}
    shutil.rmtree(lake)
    share_tables.cache_clear()  # simulates another process, which has no table open
    assert register(shop) == ("`sales`.`stock`",)
    assert catalog.location_by_name == {NAME: f"{copied}/two/public/stock"}
