"""`pgsieve skip` and `pgsieve enable`: change the state of a subscription, which the lake records.

In: the configuration and a subscription
Out: the new state. Raises PgsieveError if the subscription cannot have this state.
"""

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.slot_consumption.slot import refuse_other_publisher_if_it_answers
from pgsieve.assets.steps.update_transformation.skip import Skip
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project


def skip(config: Config, subscription_config: SubscriptionConfig, lsn_text: str) -> str | None:
    """Record which transaction to skip, by its commit LSN. The text `none` cancels an earlier skip.

    Returns the LSN as PostgreSQL writes it; None if no transaction is skipped.
    """
    project = build_project(config)
    subscription, lake = project.subscriptions[subscription_config.name], project.lake.open()
    refuse_other_publisher_if_it_answers(subscription.slot_stream, lake)
    skip_lsn = None if lsn_text.lower() == "none" else parse_lsn(lsn_text)
    Skip(subscription, lake).set_lsn(skip_lsn)
    return None if skip_lsn is None else format_lsn(skip_lsn)


def enable(config: Config, subscription_config: SubscriptionConfig) -> bool:
    """Enable a subscription. Returns false if it was already enabled."""
    project = build_project(config)
    subscription, lake = project.subscriptions[subscription_config.name], project.lake.open()
    refuse_other_publisher_if_it_answers(subscription.slot_stream, lake)
    return SubscriptionRecord(lake, subscription.name).enable()
