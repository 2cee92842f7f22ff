"""Spark as a resource of dagster-pyspark: each step requires it, its session has Delta, and it starts only when needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource, PySparkResource
from pyspark.errors import ParseException

import pgsieve
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.pyspark_resource import make_pyspark_resource
from pgsieve.resources.lake.session import SparkEngine
from tests.fixtures.pgsieve_replica import engine

pytestmark = pytest.mark.slow

_FILE = """
lake: ./lake
sources: {shop: {conninfo: "host=203.0.113.1 dbname=shop connect_timeout=60"}}
subscriptions: {sales: {source: shop, publications: [p]}}
"""


class _BegunError(Exception):
    """A session was started."""


class _Eager(PySparkResource):
    """Starts its session with the step, as dagster-pyspark's own resource does."""

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        raise _BegunError(self.spark_config["spark.app.name"])


class _WithoutDelta(LazyPySparkResource):
    """A session without Delta."""

    class _Session:
        class conf:  # noqa: N801 - as Spark names it
            set = staticmethod(lambda name, value: None)
            get = staticmethod(lambda name, default: default)

        def sql(self, _statement: str) -> Any:
            raise ParseException("[PARSE_SYNTAX_ERROR] Syntax error", errorClass="PARSE_SYNTAX_ERROR")

    @property
    def spark_session(self) -> Any:
        return self._Session()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pgsieve.yaml"
    path.write_text(_FILE)
    return path


def test_each_step_requires_a_resource_of_dagster_pyspark(file: Path) -> None:
    defs = pgsieve.build_definitions(file, prefix="crm")
    spark = (defs.resources or {})["crm_spark"]
    assert isinstance(spark, LazyPySparkResource)
    assert isinstance(spark, SparkEngine)
    steps = {
        each.op.name: each.required_resource_keys
        for each in defs.assets or []
        if isinstance(each, dg.AssetsDefinition)
    }
    for step in ("sales__initial_sync", "shop__change_log", "sales__table_changes", "sales_replica_tables"):
        assert steps[f"crm_{step}"] >= {"crm_lake", "crm_spark"}, step


def test_the_projects_own_spark_starts_only_when_a_step_needs_it(file: Path) -> None:
    own = _Eager(spark_config={"spark.app.name": "ours"})
    defs = pgsieve.build_definitions(file, spark=own)
    with dg.build_resources(dict(defs.resources or {})) as resources:
        lake = resources.pgsieve_lake.open(lambda: resources.pgsieve_spark.spark_session)
        for begun in (lambda: lake.spark, lambda: resources.pgsieve_lake.open().spark):
            with pytest.raises(SparkUnavailableError, match="resource _Eager: ours"):
                begun()


def test_a_session_without_delta_is_refused_with_what_it_needs() -> None:
    with pytest.raises(SparkUnavailableError, match="_WithoutDelta has no Delta Lake") as refused:
        _ = make_pyspark_resource(SparkEngine(), _WithoutDelta(spark_config={})).spark_session
    assert "DeltaSparkSessionExtension" in (refused.value.hint or "")


@pytest.mark.spark
def test_steps_work_in_the_projects_application_without_changing_its_settings(tmp_path: Path) -> None:
    application = engine().session.sparkContext.applicationId
    theirs = PySparkResource(spark_config={}).process_config_and_initialize().spark_session
    theirs.conf.set("spark.sql.caseSensitive", "false")
    spark = make_pyspark_resource(SparkEngine(lake=str(tmp_path)), PySparkResource(spark_config={}))
    ours = spark.spark_session
    assert spark.spark_context.applicationId == application
    ours.range(3).write.format("delta").save(str(tmp_path / "t"))
    assert ours.read.format("delta").load(str(tmp_path / "t")).count() == 3
    assert (ours.conf.get("spark.sql.caseSensitive"), theirs.conf.get("spark.sql.caseSensitive")) == (
        "true",
        "false",
    )
    theirs.conf.set("spark.sql.caseSensitive", "true")


@pytest.mark.drawn
def test_a_command_that_needs_no_definitions_does_not_import_it() -> None:
    program = "import sys, pgsieve.pipelines.command_line.cli, pgsieve.pipelines.commands.run; print('dagster_pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
