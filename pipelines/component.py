"""A Dagster Component: `dg scaffold defs pgsieve.PgsieveComponent replicas` adds a pgsieve.yaml to a project.

In: the component's defs.yaml. Out: the definitions of the configuration file that defs.yaml names, changed by
its translation. The published tables are the component's state: `dg utils refresh-defs-state` reads them from the
sources, and Dagster keeps them, so that building the definitions needs no source.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from dagster import get_dagster_logger
from dagster.components import (
    DefsStateConfig,
    DefsStateConfigArgs,
    ResolvedDefsStateConfig,
    Scaffolder,
    ScaffoldRequest,
    scaffold_component,
    scaffold_with,
)
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from dagster_pyspark import LazyPySparkResource, PySparkResource

from pgsieve.assets.translator import Naming, PgsieveAsset, PgsieveTranslator
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import assemble
from pgsieve.pipelines.project import build_project
from pgsieve.pipelines.published import Published, fetch_published, load_published

_EXAMPLE = """\
# All keys: pgsieve's documentation, "Configuration: pgsieve.yaml". ${{NAME}} is an environment variable.
lake: {lake} # the project's folder; or s3://bucket/path
sources:
  shop:
    conninfo: "host=localhost dbname=shop user=pgsieve"
    # password: ${{SHOP_PASSWORD}}
subscriptions:
  sales:
    source: shop
    publications: [sales]
"""

#: The line of a defs.yaml that names this component.
_COMPONENT_TYPE = re.compile(r"^type: *['\"]?pgsieve\.(\w+\.)*PgsieveComponent\b", re.MULTILINE)


class PgsieveScaffolder(Scaffolder[Any]):
    """Writes a defs.yaml, and beside it a pgsieve.yaml to be filled in.

    The lake is outside of the project's package. In a project with another such component, the new one gets a
    prefix of its own.
    """

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write both files."""
        folder = request.target_path
        prefix = (
            {"prefix": re.sub(r"[^A-Za-z0-9_]", "_", folder.name)} if _has_other_component(folder) else {}
        )
        scaffold_component(request, {"config": "pgsieve.yaml", **prefix})
        file = folder / "pgsieve.yaml"
        if not file.exists():
            root = folder if request.project_root is None else request.project_root
            lake = Path(os.path.relpath(root / "lake", folder)).as_posix()
            file.write_text(
                _EXAMPLE.format(lake=lake if lake.startswith(".") else f"./{lake}"), encoding="utf-8"
            )


def _has_other_component(folder: Path) -> bool:
    """Whether a folder beside this one already has such a component."""
    return any(
        file.parent != folder and _COMPONENT_TYPE.search(file.read_text(encoding="utf-8", errors="replace"))
        for file in folder.parent.rglob("defs.yaml")
    )


def _relative_path(context: dg.ResolutionContext, path: str) -> Path:
    """Resolve a path in defs.yaml, which is relative to its folder."""
    return Path(context.resolve_source_relative_path(path))


def _variables(data: PgsieveAsset) -> Mapping[str, Any]:
    """The variables that a translation in YAML may use."""
    return {"data": data}


@scaffold_with(PgsieveScaffolder)
@dataclass
class PgsieveComponent(dg.StateBackedComponent, dg.Resolvable):
    """Tables of PostgreSQL databases, replicated into Delta Lake with the row filters of their publications.

    `config` is the configuration file. The names of jobs, schedules, sensors, ops and of the resources
    `<prefix>_lake` and `<prefix>_spark` begin with `prefix`. `spark` is the project's own resource of
    dagster-pyspark (in YAML, a template variable). `translation` changes the assets; its `data` is a
    `PgsieveAsset`. Subclasses may override `get_asset_spec`.
    """

    config: Annotated[Path, dg.Resolver(_relative_path, model_field_type=str)] = Path("pgsieve.yaml")
    prefix: str = "pgsieve"
    spark: dg.Injected[PySparkResource | LazyPySparkResource] | None = None
    translation: (
        Annotated[TranslationFn[PgsieveAsset], TranslationFnResolver[PgsieveAsset](_variables)] | None
    ) = None
    defs_state: ResolvedDefsStateConfig = field(default_factory=DefsStateConfigArgs.local_filesystem)

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """The place of the state; each prefix has its own key."""
        return DefsStateConfig.from_args(self.defs_state, default_key=f"PgsieveComponent[{self.prefix}]")

    def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
        """The spec of an asset before `translation`; for additional `deps`, as pgsieve adds its own later."""
        return PgsieveTranslator().get_asset_spec(data)

    def write_state_to_path(self, state_path: Path) -> None:
        """Ask the sources for their published tables, and write the state.

        A source that does not answer keeps its part of the former state. Its error is raised, but only logged
        during development (`dg dev`), so that the definitions load.
        """
        config = load_config(self.config)
        former_state = (
            Published.from_json(state_path.read_text(encoding="utf-8")) if state_path.is_file() else None
        )
        read, errors = fetch_published(build_project(config), former_state or load_published(config))
        state_path.write_text(read.to_json(), encoding="utf-8")
        for error in errors:
            if not os.environ.get("DAGSTER_IS_DEV_CLI"):
                raise error
            get_dagster_logger().warning(str(error))

    def build_defs_from_state(
        self, context: dg.ComponentLoadContext, state_path: Path | None
    ) -> dg.Definitions:
        """The definitions for the tables of the state; without a state, of published.json and the lake."""
        del context
        config = load_config(self.config)
        if state_path is None:
            published = load_published(config)
        else:
            published = Published.from_json(state_path.read_text(encoding="utf-8"))
        naming = Naming(self.prefix, _ComponentTranslator(self))
        authoritative = state_path is not None
        return assemble(config, published, naming, authoritative=authoritative, spark=self.spark)


class _ComponentTranslator(PgsieveTranslator):
    """Applies the component's class, then its `translation`."""

    def __init__(self, component: PgsieveComponent) -> None:
        self._component = component

    def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
        spec = self._component.get_asset_spec(data)
        translation = self._component.translation
        return spec if translation is None else translation(spec, data)
