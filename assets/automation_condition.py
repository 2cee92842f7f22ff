"""A Dagster automation condition for the user's own assets that read replicas: at a cut.

In: a subscription's name. Out: a Dagster automation condition. Nothing here raises.
"""

from typing import Any

import dagster as dg


def at_cut(subscription: str, *, key: dg.AssetKey | None = None) -> dg.AutomationCondition[dg.AssetKey]:
    """True once for each new cut of a subscription: all replicas agree, and at least one of them has changed.

    It waits until the run that wrote the cut has ended, and the asset's own run too. `key` is the key of the
    cut's asset, where a translator has changed it. The asset needs neither the cut nor all of the replicas
    among its deps.
    """
    # Dagster's operators accept more types than their annotations say.
    condition: Any = dg.AutomationCondition
    cut = key or dg.AssetKey([subscription, "cut"])
    is_new = condition.asset_matches(cut, condition.data_version_changed())
    is_written = ~condition.asset_matches(cut, condition.in_progress())
    at: dg.AutomationCondition[dg.AssetKey] = (
        is_new.since_last_handled() & is_written & ~condition.in_progress()
    ).with_label(f"at a cut of {subscription}")
    return at
