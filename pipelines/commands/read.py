"""`pgsieve read`: the replicas of a subscription as they were at a moment.

In: the configuration and a moment (none: the newest cut). Out: which tables there were, or the rows of one. Raises MomentError where the
lake does not hold the moment any more.
"""

from collections.abc import Sequence

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.moments.bases import bases
from pgsieve.assets.steps.moments.moment import lsn_of
from pgsieve.assets.steps.moments.reading import TableAt, tables_at
from pgsieve.assets.steps.records.cuts import cut_before
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.pipelines.commands.moment_results import MomentReport, TableOfMoment
from pgsieve.pipelines.config.file import name_hint
from pgsieve.pipelines.config.identifiers import table_name
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import project
from pgsieve.resources.lake.lake import Lake


def read(config: Config, selected: SubscriptionConfig, moment: str | None) -> MomentReport:
    """The tables that a subscription had at a moment."""
    lake, lsn, known = _looked_at(config, selected, moment)
    return report(selected.name, lsn, tables_at(lake, selected.name, lsn, complete=known))


def read_table(config: Config, selected: SubscriptionConfig, moment: str | None, table: str) -> TableAt:
    """One table as it was at a moment."""
    lake, lsn, known = _looked_at(config, selected, moment)
    for each in tables_at(lake, selected.name, lsn, complete=known, only=table_name(table)):
        return each
    names = tuple(quote_qualified(*base.name) for base in bases(lake, selected.name, lsn, known))
    raise PgsieveError(
        f'subscription "{selected.name}" had no table "{table}" at {format_lsn(lsn)}',
        hint=name_hint(table, names),
        sqlstate="42P01",
    )


def _looked_at(config: Config, selected: SubscriptionConfig, moment: str | None) -> tuple[Lake, int, int]:
    """The lake, the LSN of the moment, and the one before which the subscription is complete."""
    declared = project(config)
    lake, subscription = declared.lake.open(), declared.subscriptions[selected.name]
    return lake, lsn_in(lake, selected.name, moment), complete(lake, subscription)


def lsn_in(lake: Lake, subscription: str, moment: str | None) -> int:
    """The LSN of a moment; that of the newest cut where none is named."""
    return cut_before(lake, subscription).lsn if moment is None else lsn_of(lake, subscription, moment)


def complete(lake: Lake, subscription: Subscription) -> int:
    """The LSN before which a subscription lacks nothing that its slot has sent."""
    progress = ReplicaProgress(subscription, lake)
    return progress.complete_up_to(progress.transformed_up_to())


def report(subscription: str, lsn: int, tables: Sequence[TableAt], folder: str | None = None) -> MomentReport:
    """The result of a command that made these tables."""
    return MomentReport(
        subscription,
        format_lsn(lsn),
        tuple(
            TableOfMoment(*each.name, each.count(), each.changes, each.path, each.version)
            for each in sorted(tables, key=lambda each: each.name)
        ),
        folder,
    )
