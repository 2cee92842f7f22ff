"""`at_cut` in Dagster's own evaluation: true once for each cut with a new data version, after the cut's run."""

from __future__ import annotations

import dagster as dg

from pgsieve.assets.automation_condition import at_cut

CUT = dg.AssetKey(["sales", "cut"])


@dg.asset(key=CUT)
def cut() -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(data_version=dg.DataVersion(VERSIONS[-1]))


VERSIONS = ["0/10"]


@dg.asset(deps=[CUT], automation_condition=at_cut("sales"))
def revenue() -> None: ...


def test_an_asset_is_requested_once_at_each_new_cut() -> None:
    defs = dg.Definitions([cut, revenue])
    with dg.DagsterInstance.ephemeral() as dagster:
        cursor = None

        def requested() -> int:
            nonlocal cursor
            result = dg.evaluate_automation_conditions(defs, dagster, cursor=cursor)
            cursor = result.cursor
            return result.total_requested

        assert requested() == 0, "the asset is requested without a cut"
        for version, expected in (("0/10", 1), ("0/10", 0), ("0/20", 1), ("0/20", 0)):
            VERSIONS.append(version)
            assert dg.materialize([cut], instance=dagster).success
            assert requested() == expected, version
            if expected:
                assert dg.materialize([cut, revenue], instance=dagster, selection=[revenue]).success
            assert requested() == 0
