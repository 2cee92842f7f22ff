"""Makes a pgsieve.yaml part of a Dagster project, as a Dagster Component.

`dg scaffold defs pgsieve.PgsieveComponent replicas` adds such a component to a project.

In: the component's defs.yaml. It names a pgsieve.yaml, and may have a `translation` that changes the assets.
Out: the Dagster definitions of that pgsieve.yaml

The component has a state, which Dagster keeps: the published tables. `dg utils refresh-defs-state` reads them from the
sources. To build the definitions, no connection to a source is needed.
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

from pgsieve.assets.translator import DagsterNames, PgsieveAsset, PgsieveTranslator
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import assemble_definitions
from pgsieve.pipelines.project import build_project
from pgsieve.pipelines.published import RecordedCatalogs, fetch_published, load_published

_EXAMPLE_CONFIG = """\
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

#: Matches the line of a defs.yaml that says that the file is for a PgsieveComponent.
_COMPONENT_TYPE = re.compile(r"^type: *['\"]?pgsieve\.(\w+\.)*PgsieveComponent\b", re.MULTILINE)


class PgsieveScaffolder(Scaffolder[Any]):
    """Writes a defs.yaml, and beside it a pgsieve.yaml that the user completes.

    The folder of the lake is not inside the project's Python package. If the project already has a PgsieveComponent,
    the new component gets another prefix, since the names of two components must differ.
    """

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write defs.yaml and pgsieve.yaml."""
        folder = request.target_path
        prefix_entry = (
            {"prefix": re.sub(r"[^A-Za-z0-9_]", "_", folder.name)} if _has_other_component(folder) else {}
        )
        scaffold_component(request, {"config": "pgsieve.yaml", **prefix_entry})
        config_path = folder / "pgsieve.yaml"
        if not config_path.exists():
            root = folder if request.project_root is None else request.project_root
            lake = Path(os.path.relpath(root / "lake", folder)).as_posix()
            config_path.write_text(
                _EXAMPLE_CONFIG.format(lake=lake if lake.startswith(".") else f"./{lake}"), encoding="utf-8"
            )


def _has_other_component(folder: Path) -> bool:
    """True if a folder beside this one, or below such a folder, already has a PgsieveComponent."""
    return any(
        defs_path.parent != folder
        and _COMPONENT_TYPE.search(defs_path.read_text(encoding="utf-8", errors="replace"))
        for defs_path in folder.parent.rglob("defs.yaml")
    )


def _resolve_path(context: dg.ResolutionContext, path: str) -> Path:
    """Resolve a path in defs.yaml. It is relative to the folder of defs.yaml."""
    return Path(context.resolve_source_relative_path(path))


def _make_template_variables(data: PgsieveAsset) -> Mapping[str, Any]:
    """The variables that a `translation` in YAML may use, by name."""
    return {"data": data}


@scaffold_with(PgsieveScaffolder)
@dataclass
class PgsieveComponent(dg.StateBackedComponent, dg.Resolvable):
    """Tables of PostgreSQL databases, replicated into Delta Lake with the row filters of their publications.

    - `config`: the configuration file
    - `prefix`: the names of jobs, schedules, sensors and ops begin with it; the resources are `<prefix>_lake` and
      `<prefix>_spark`
    - `spark`: a dagster-pyspark resource of the user's project, which YAML names by a template variable. Without it,
      pgsieve starts Spark itself.
    - `translation`: changes the assets. Its variable `data` is a `PgsieveAsset`.

    Subclasses may override `get_asset_spec`.
    """

    config: Annotated[Path, dg.Resolver(_resolve_path, model_field_type=str)] = Path("pgsieve.yaml")
    prefix: str = "pgsieve"
    spark: dg.Injected[PySparkResource | LazyPySparkResource] | None = None
    translation: (
        Annotated[TranslationFn[PgsieveAsset], TranslationFnResolver[PgsieveAsset](_make_template_variables)]
        | None
    ) = None
    defs_state: ResolvedDefsStateConfig = field(default_factory=DefsStateConfigArgs.local_filesystem)

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """Where Dagster keeps the state of the component. Each prefix has a state of its own."""
        return DefsStateConfig.from_args(self.defs_state, default_key=f"PgsieveComponent[{self.prefix}]")

    def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
        """Make the spec of an asset. `translation` is applied to the result, and afterwards pgsieve adds its own `deps`.

        A subclass that overrides this method may add `deps`, for example.
        """
        return PgsieveTranslator().get_asset_spec(data)

    def write_state_to_path(self, state_path: Path) -> None:
        """Read the published tables from the sources, and write them as the state.

        If a source does not answer, its part of the former state is kept, and the state is written. After that, the
        error is raised. During development (`dg dev`) the error is only logged, so that the definitions still load.
        """
        config = load_config(self.config)
        former_state = (
            RecordedCatalogs.from_json(state_path.read_text(encoding="utf-8"))
            if state_path.is_file()
            else None
        )
        published, errors = fetch_published(build_project(config), former_state or load_published(config))
        state_path.write_text(published.to_json(), encoding="utf-8")
        for error in errors:
            if not os.environ.get("DAGSTER_IS_DEV_CLI"):
                raise error
            get_dagster_logger().warning(str(error))

    def build_defs_from_state(
        self, context: dg.ComponentLoadContext, state_path: Path | None
    ) -> dg.Definitions:
        """Build the definitions for the tables of the state.

        If there is no state yet, the tables come from the file of `pgsieve.pipelines.published`, or from the lake.
        """
        del context
        config = load_config(self.config)
        if state_path is None:
            published = load_published(config)
        else:
            published = RecordedCatalogs.from_json(state_path.read_text(encoding="utf-8"))
        dagster_names = DagsterNames(self.prefix, _ComponentTranslator(self))
        is_authoritative = state_path is not None
        return assemble_definitions(
            config, published, dagster_names, is_authoritative=is_authoritative, spark=self.spark
        )


class _ComponentTranslator(PgsieveTranslator):
    """Makes the spec of an asset by the component's method `get_asset_spec`, and then by its `translation`."""

    def __init__(self, component: PgsieveComponent) -> None:
        self._component = component

    def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
        spec = self._component.get_asset_spec(data)
        translation = self._component.translation
        return spec if translation is None else translation(spec, data)
