"""`pgsieve check`: compare every replica with its publisher. In: the configuration. Out: a `CheckReport`."""

from collections.abc import Sequence

from assets.steps.consistency import check_consistency
from decoding.lsn import format_lsn
from pipelines.config import Config, SubscriptionConfig
from pipelines.project import project
from pipelines.results import CheckedTable, CheckReport


def check(config: Config, selected: Sequence[SubscriptionConfig]) -> CheckReport:
    """Bring the selected subscriptions up to one LSN each and compare all their tables there."""
    declared = project(config)
    lake = declared.lake.open()
    tables = []
    for chosen in selected:
        subscription = declared.subscriptions[chosen.name]
        for compared in check_consistency(subscription, lake, lambda _: None):
            keys = compared.keys if compared.problem is None else (compared.problem, *compared.keys)
            tables.append(
                CheckedTable(
                    subscription=subscription.name,
                    schema=compared.schema,
                    name=compared.table,
                    rows_publisher=compared.publisher_rows,
                    rows_replica=compared.replica_rows,
                    equal=compared.equal,
                    differing_keys=keys,
                    lsn=format_lsn(compared.lsn),
                )
            )
    return CheckReport(tuple(tables))
