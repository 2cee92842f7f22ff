"""A Dagster automation condition, by which a user's own assets are materialised at each new cut.

A cut names a version of each replica of a subscription; together these versions equal the publisher at one LSN.
"""

from typing import Any

import dagster as dg


def at_cut(subscription: str, *, key: dg.AssetKey | None = None) -> dg.AutomationCondition[dg.AssetKey]:
    """True once for each new cut of a subscription.

    A run writes a cut only if a replica has changed, come or gone. If maintenance writes the newest cut again, this is
    not a new cut.

    The condition waits until the run that wrote the cut has ended, and until no run of the user's asset is in progress.
    If a translator (a subclass of `PgsieveTranslator`) has changed the key of the cut's asset, pass it as `key`. The
    user's asset need not depend on the cut, nor on every replica.
    """
    # Dagster's operators accept more types than their annotations say.
    condition: Any = dg.AutomationCondition
    cut_key = key or dg.AssetKey([subscription, "cut"])
    has_new_cut = condition.asset_matches(cut_key, condition.data_version_changed())
    # A requested run handles only the cuts from before its request. If one evaluation of Dagster saw a new cut and also a
    # request, or the end of a requested run, Dagster's `since_last_handled` would forget the cut.
    has_had_cut = has_new_cut.since(condition.initial_evaluation())
    is_handled = (condition.newly_requested() & ~has_new_cut).since(has_new_cut)
    has_run_ended = ~condition.asset_matches(cut_key, condition.in_progress())
    at_new_cut: dg.AutomationCondition[dg.AssetKey] = (
        has_had_cut & ~is_handled & has_run_ended & ~condition.in_progress()
    ).with_label(f"at a cut of {subscription}")
    return at_new_cut
