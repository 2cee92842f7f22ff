"""`pgsieve maintain`: deletes old changes and files of subscriptions, and of the slots that they read.

It materialises the maintenance assets of the subscriptions and of their streams. A slot stream is a slot with the
subscriptions that read it. Old runs of commands are deleted from Dagster's records, too.
"""

from collections.abc import Sequence

from pgsieve.assets.maintenance import slot_stream_maintenance_asset, subscription_maintenance_asset
from pgsieve.pipelines.commands.dagster_runs import delete_old_runs
from pgsieve.pipelines.commands.in_process import DEFAULT_NAMES, materialize, open_instance
from pgsieve.pipelines.commands.results import MaintainedFolder, Progress
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project


def maintain(
    config: Config, subscription_configs: Sequence[SubscriptionConfig], progress: Progress
) -> tuple[MaintainedFolder, ...]:
    """Maintain the selected subscriptions, and then their streams.

    Raises PgsieveError if something fails. Files and rows deleted before that stay deleted.
    """
    project = build_project(config)
    subscriptions = [project.subscriptions[subscription.name] for subscription in subscription_configs]
    assets_with_names = [
        *(
            (
                subscription.name,
                subscription_maintenance_asset(
                    subscription, project.retention, DEFAULT_NAMES, name_template=project.names
                ),
            )
            for subscription in subscriptions
        ),
        *(
            (
                slot_stream.name,
                slot_stream_maintenance_asset(
                    slot_stream, project.find_subscriptions(slot_stream), project.retention, DEFAULT_NAMES
                ),
            )
            for slot_stream in project.find_slot_streams(subscriptions)
        ),
    ]
    maintained_folders = []
    with open_instance(config) as instance:
        for name, asset in assets_with_names:
            result = materialize(instance, project, [asset], progress, f"maintain {name}")
            assert result is not None
            (event,) = result.get_asset_materialization_events()
            deleted_rows, compacted_files = (
                int(str(event.materialization.metadata[key].value))
                for key in ("rows deleted", "files compacted")
            )
            maintained_folders.append(
                MaintainedFolder("/".join(asset.key.path), deleted_rows, compacted_files)
            )
        retention = project.retention
        delete_old_runs(
            instance, None if retention.changes is None else max(retention.changes, retention.versions)
        )
    return tuple(maintained_folders)
