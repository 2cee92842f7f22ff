"""`pgsieve skip` and `pgsieve enable`: change a subscription's state, which is recorded in the lake.

In: the configuration and a subscription. Out: the new state. Raises PgsieveError.
"""

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher_if_it_answers
from pgsieve.assets.steps.update_transformation.skip import Skip
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project


def skip(config: Config, selected: SubscriptionConfig, lsn: str) -> str | None:
    """Record the finish LSN of the transaction to skip; `none` cancels an earlier skip.

    Returns the LSN as PostgreSQL writes it.
    """
    project = build_project(config)
    subscription, lake = project.subscriptions[selected.name], project.lake.open()
    refuse_other_publisher_if_it_answers(subscription.feed, lake)
    chosen = None if lsn.lower() == "none" else parse_lsn(lsn)
    Skip(subscription, lake).choose(chosen)
    return None if chosen is None else format_lsn(chosen)


def enable(config: Config, selected: SubscriptionConfig) -> bool:
    """Enable a subscription; returns False if it was enabled already."""
    project = build_project(config)
    subscription, lake = project.subscriptions[selected.name], project.lake.open()
    refuse_other_publisher_if_it_answers(subscription.feed, lake)
    return SubscriptionRecord(lake, subscription.name).enable()
