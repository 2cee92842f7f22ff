"""`pgsieve maintain`: deletes old changes and files of subscriptions, and of the slots that they read.

It materialises the maintenance assets of the subscriptions and of their feeds. A feed is a slot with the subscriptions
that read it.
"""

from collections.abc import Sequence

from pgsieve.assets.maintenance import feed_maintenance_asset, subscription_maintenance_asset
from pgsieve.pipelines.commands.dagster_runs import delete_old_runs
from pgsieve.pipelines.commands.in_process import NAMING, instance, materialize
from pgsieve.pipelines.commands.results import MaintainedFolder, Progress
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project


def maintain(
    config: Config, selected: Sequence[SubscriptionConfig], progress: Progress
) -> tuple[MaintainedFolder, ...]:
    """Maintain the selected subscriptions, and then their feeds.

    Raises PgsieveError if something fails. What was deleted before that stays deleted.
    """
    project = build_project(config)
    subscriptions = [project.subscriptions[s.name] for s in selected]
    assets = [
        *(
            (
                s.name,
                subscription_maintenance_asset(s, project.retention, NAMING, names=project.names),
            )
            for s in subscriptions
        ),
        *(
            (
                feed.name,
                feed_maintenance_asset(feed, project.subscriptions_of(feed), project.retention, NAMING),
            )
            for feed in project.feeds_of(subscriptions)
        ),
    ]
    results = []
    with instance(config) as dagster:
        for name, asset in assets:
            result = materialize(dagster, project, [asset], progress, f"maintain {name}")
            assert result is not None
            (event,) = result.get_asset_materialization_events()
            rows, files = (
                int(str(event.materialization.metadata[key].value))
                for key in ("rows deleted", "files compacted")
            )
            results.append(MaintainedFolder("/".join(asset.key.path), rows, files))
        retention = project.retention
        delete_old_runs(
            dagster, None if retention.changes is None else max(retention.changes, retention.versions)
        )
    return tuple(results)
