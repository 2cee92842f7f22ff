"""A Dagster automation condition, by which a user's own assets are materialised at each new cut.

A cut is a version of each replica of a subscription, so that together they equal the publisher at one LSN.
"""

from typing import Any

import dagster as dg


def at_cut(subscription: str, *, key: dg.AssetKey | None = None) -> dg.AutomationCondition[dg.AssetKey]:
    """True once for each new cut of a subscription. A new cut means that at least one replica has changed.

    The condition waits until the run that wrote the cut has ended, and until no run of the user's asset is in progress.
    If a translator has changed the key of the cut's asset, pass it as `key`. The user's asset does not have to depend
    on the cut, or on all replicas.
    """
    # Dagster's operators accept more types than their annotations say.
    condition: Any = dg.AutomationCondition
    cut = key or dg.AssetKey([subscription, "cut"])
    is_new = condition.asset_matches(cut, condition.data_version_changed())
    is_written = ~condition.asset_matches(cut, condition.in_progress())
    up_to_cut: dg.AutomationCondition[dg.AssetKey] = (
        is_new.since_last_handled() & is_written & ~condition.in_progress()
    ).with_label(f"at a cut of {subscription}")
    return up_to_cut
