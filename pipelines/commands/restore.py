"""`pgsieve restore`: copies the replicas of a subscription, as they were at a moment, into another folder.

In: the configuration, a moment (None for the newest cut) and a folder
Out: a `MomentReport`. Raises MomentError if the lake no longer has what is needed for this moment.

A cut names a version of each replica; together these versions equal the publisher at one LSN.
"""

from pgsieve.assets.steps.moments.restore import restore_tables
from pgsieve.pipelines.commands.moment_results import MomentReport
from pgsieve.pipelines.commands.read import find_moment, make_moment_report
from pgsieve.pipelines.config.model import Config, SubscriptionConfig


def restore(
    config: Config, subscription_config: SubscriptionConfig, moment_text: str | None, folder: str
) -> MomentReport:
    """Copy the tables of a subscription, as they were at a moment, into a folder."""
    moment = find_moment(config, subscription_config, moment_text)
    return make_moment_report(moment, restore_tables(moment, folder), folder)
