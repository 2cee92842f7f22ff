"""`pgsieve restore`: the replicas of a subscription as they were at a moment, put into another folder.

In: the configuration, a moment (none: the newest cut) and a folder. Out: a `MomentReport`. Raises MomentError.
"""

from pgsieve.assets.steps.moments.restore import restore as restore_tables
from pgsieve.pipelines.commands.moment_results import MomentReport
from pgsieve.pipelines.commands.read import complete, lsn_in, report
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import project


def restore(config: Config, selected: SubscriptionConfig, moment: str | None, folder: str) -> MomentReport:
    """Put the tables that a subscription had at a moment into a folder."""
    declared = project(config)
    lake, subscription = declared.lake.open(), declared.subscriptions[selected.name]
    lsn = lsn_in(lake, selected.name, moment)
    made = restore_tables(lake, selected.name, lsn, folder, complete(lake, subscription))
    return report(selected.name, lsn, made, folder)
