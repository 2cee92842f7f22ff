"""Deletes runs of pgsieve's commands from Dagster's records, so that the records do not grow for ever.

In: the Dagster instance
Out: two kinds of runs are deleted: runs that found nothing to do, except the last; and runs that are older than their
     retention

Three kinds of runs are never deleted: those that Dagster started itself; those that copied tables; and those that made
the last materialization of some asset.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import dagster as dg

#: The tag by which runs of commands are recognised. Its value is the task, for example `maintain sales`.
COMMAND_TAG = "pgsieve/command"
#: The tag of runs that found nothing to do.
IDLE_TAG = "pgsieve/idle"
#: The tags that Dagster gives to a run for one partition, or for several. In pgsieve's runs a partition is a table that
#: is copied.
_COPY_TAGS = {"dagster/partition", "dagster/asset_partition_range_start"}
#: The largest number of runs that a query returns.
_MAX_RUNS_PER_QUERY = 100


def make_run_tags(task: str, tags: Mapping[str, str] | None) -> dict[str, str]:
    """Return the tags of a command's run: `tags`, and the tag with the task."""
    return {COMMAND_TAG: task, **(tags or {})}


def delete_earlier_idle_runs(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> None:
    """If a run found nothing to do, tag it as idle, and delete the earlier idle runs of the same task."""
    metadata_of_assets = [
        event.materialization.metadata for event in result.get_asset_materialization_events()
    ]
    if not result.success or not all(map(_is_idle, metadata_of_assets)):
        return
    task = result.dagster_run.tags.get(COMMAND_TAG)
    if task is None:
        return
    idle_runs_filter = dg.RunsFilter(tags={COMMAND_TAG: task, IDLE_TAG: "true"})
    for run in instance.get_runs(idle_runs_filter, limit=_MAX_RUNS_PER_QUERY):
        instance.delete_run(run.run_id)
    instance.add_run_tags(result.run_id, {IDLE_TAG: "true"})


def _is_idle(metadata: Mapping[str, dg.MetadataValue]) -> bool:
    """True if a materialization of the slot's messages, or of the decoded changes, reports no work."""
    slices, tables = metadata.get("slices"), metadata.get("tables")
    return (slices is not None and slices.value == 0) or (tables is not None and tables.value == "no changes")


def delete_old_runs(instance: dg.DagsterInstance, retention: timedelta | None) -> int:
    """Delete the commands' runs that ended longer ago than `retention`; returns the number of deleted runs.

    If `retention` is None, no run is deleted.
    """
    if retention is None:
        return 0
    end_statuses = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
    old_runs_filter = dg.RunsFilter(statuses=end_statuses, updated_before=datetime.now(UTC) - retention)
    latest_events = instance.get_latest_materialization_events(instance.all_asset_keys())
    latest_run_ids = {event.run_id for event in latest_events.values() if event is not None}
    run_ids, cursor = list[str](), None
    while runs := instance.get_runs(old_runs_filter, cursor=cursor, limit=_MAX_RUNS_PER_QUERY):
        cursor = runs[-1].run_id
        run_ids += [
            run.run_id
            for run in runs
            if COMMAND_TAG in run.tags
            and not _COPY_TAGS & run.tags.keys()
            and run.run_id not in latest_run_ids
        ]
    for run_id in run_ids:
        instance.delete_run(run_id)
    return len(run_ids)
