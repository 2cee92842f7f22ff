"""`at_cut` in Dagster's own evaluation: true once for each cut with a new data version, after the cut's run."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest

from pgsieve.assets.automation_condition import at_cut
from tests.fixtures.dagster_in_memory import in_memory

CUT = dg.AssetKey(["sales", "cut"])


@dg.asset(key=CUT)
def cut() -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(data_version=dg.DataVersion(VERSIONS[-1]))


VERSIONS = ["0/10"]


@dg.asset(deps=[CUT], automation_condition=at_cut("sales"))
def revenue() -> None: ...


DEFINITIONS = dg.Definitions([cut, revenue])


class Dagster:
    """An instance of Dagster that evaluates the condition when the test says so."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance, self._cursor = instance, None

    def tick(self) -> int:
        """Evaluate the condition. Returns how often the asset is requested."""
        result = dg.evaluate_automation_conditions(DEFINITIONS, self._instance, cursor=self._cursor)
        self._cursor = result.cursor
        return result.total_requested

    def write_cut(self, version: str) -> None:
        VERSIONS.append(version)
        assert dg.materialize([cut], instance=self._instance).success

    def run_asset(self) -> None:
        assert dg.materialize([cut, revenue], instance=self._instance, selection=[revenue]).success


@pytest.fixture
def dagster() -> Iterator[Dagster]:
    with in_memory() as instance:
        yield Dagster(instance)


def test_an_asset_is_requested_once_at_each_new_cut(dagster: Dagster) -> None:
    assert dagster.tick() == 0, "the asset is requested without a cut"
    for version, expected in (("0/10", 1), ("0/10", 0), ("0/20", 1), ("0/20", 0)):
        dagster.write_cut(version)
        assert dagster.tick() == expected, version
        if expected:
            dagster.run_asset()
        assert dagster.tick() == 0


def test_a_cut_during_a_run_of_the_asset_is_not_forgotten(dagster: Dagster) -> None:
    """The cut arrives right after the request, or in the same tick as the end of the requested run."""
    assert dagster.tick() == 0
    dagster.write_cut("0/10")
    assert dagster.tick() == 1
    dagster.write_cut("0/20")  # before the tick that notices the request
    dagster.run_asset()
    assert dagster.tick() == 1, "the cut right after the request"
    assert dagster.tick() == 0
    dagster.write_cut("0/30")
    dagster.run_asset()  # the run that "0/20" has requested
    assert dagster.tick() == 1, "the cut with the end of the run"
    dagster.run_asset()
    assert [dagster.tick() for _ in range(3)] == [0, 0, 0]
