"""`pgsieve read`: reads the replicas of a subscription as they were at a moment.

In: the configuration and a moment (an LSN or a time; None for the newest cut)
Out: the list of tables, or the rows of one table

A cut names a version of each replica; together these versions equal the publisher at one LSN. Raises MomentError if the
lake no longer has the versions and changes that are needed.
"""

from collections.abc import Sequence
from dataclasses import replace

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.moments.moment import Moment
from pgsieve.assets.steps.moments.reading import TableVersion, find_tables
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.pipelines.commands.moment_results import MomentReport, TableAtLsn
from pgsieve.pipelines.config.file import suggest_name
from pgsieve.pipelines.config.identifiers import parse_table_name
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project


def read(config: Config, subscription_config: SubscriptionConfig, moment_text: str | None) -> MomentReport:
    """The tables that a subscription had at a moment."""
    moment = find_moment(config, subscription_config, moment_text)
    return make_moment_report(moment, find_tables(moment))


def read_table(
    config: Config, subscription_config: SubscriptionConfig, moment_text: str | None, table_text: str
) -> TableVersion:
    """One table as it was at a moment."""
    moment = find_moment(config, subscription_config, moment_text)
    table_name = parse_table_name(table_text)
    for moment_table in find_tables(moment, only_table=table_name):
        return moment_table
    states = TableStates(moment.lake, moment.subscription).read_newest()
    ready_tables = sorted(name for name, state in states.items() if state.state == SyncState.READY)
    others = tuple(quote_qualified(*name) for name in ready_tables if name != table_name)
    raise PgsieveError(
        f'subscription "{subscription_config.name}" had no table "{table_text}" at {format_lsn(moment.lsn)}',
        hint=_describe_obstacle(states.get(table_name)) or suggest_name(table_text, others),
        sqlstate="42P01",
    )


def _describe_obstacle(state: TableState | None) -> str | None:
    """Say why the replica of a table cannot be read now. None if it can be read, or if the table is not published."""
    if state is None or state.state in {SyncState.READY, SyncState.REMOVED}:
        return None
    reason = f": {state.reason}" if state.reason else ""
    return f"{quote_qualified(*state.name)} is {state.state.meaning}{reason}"


def find_moment(config: Config, subscription_config: SubscriptionConfig, moment_text: str | None) -> Moment:
    """Find the moment of an LSN or a time. If `moment_text` is None, it is the moment of the newest cut."""
    project = build_project(config)
    lake, subscription = project.lake.open(), project.subscriptions[subscription_config.name]
    if moment_text is None:
        newest_cut = Cuts(lake, subscription_config.name).find_newest()
        moment = Moment(lake, subscription_config.name, newest_cut.lsn, is_of_newest_cut=True)
    else:
        moment = Moment.from_user_input(lake, subscription_config.name, moment_text)
    progress = ReplicaProgress(subscription, lake)
    return replace(moment, complete_lsn=progress.find_complete_lsn(progress.read_transformed_lsn()))


def make_moment_report(
    moment: Moment, tables: Sequence[TableVersion], folder: str | None = None
) -> MomentReport:
    """The result of `read` or `restore` for these tables. `folder` is the folder into which they were restored."""

    def describe_table(table: TableVersion) -> TableAtLsn:
        # `read` makes clones of tables, and deletes them when the command ends. So their paths are not reported.
        is_kept = folder is not None or table.lake is moment.lake
        path_and_version = (table.path, table.version) if is_kept else (None, None)
        return TableAtLsn(*table.name, table.count_rows(), table.change_count, *path_and_version)

    ordered_tables = sorted(tables, key=lambda table: table.name)
    states, found_names = (
        TableStates(moment.lake, moment.subscription).read_newest(),
        {table.name for table in tables},
    )
    obstacles = [_describe_obstacle(states[name]) for name in sorted(states.keys() - found_names)]
    return MomentReport(
        moment.subscription,
        format_lsn(moment.lsn),
        tuple(map(describe_table, ordered_tables)),
        folder,
        tuple(f"a table is missing here: {obstacle}" for obstacle in obstacles if obstacle),
    )
