"""Deletes runs of commands from Dagster's records: idle runs except the last, and runs past their retention.

In: Dagster's instance. It deletes no run that Dagster started, none that copied tables, and not the run of an
asset's last materialization.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import dagster as dg

#: The tag of a command's runs; its value is the task, such as `maintain sales`.
COMMAND = "pgsieve/command"
#: The tag of runs without work.
IDLE = "pgsieve/idle"
#: Dagster's tags of a run of one partition (a table), or of several.
_COPY_TAGS = {"dagster/partition", "dagster/asset_partition_range_start"}
#: The number of runs per query.
_RUNS_PER_QUERY = 100


def run_tags(task: str, tags: Mapping[str, str] | None) -> dict[str, str]:
    """The tags for a command's run, with its own `tags`."""
    return {COMMAND: task, **(tags or {})}


def delete_earlier_idle_runs(dagster: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> None:
    """If a run had no work, tag it as idle, and delete the earlier idle runs of the same task."""
    events = [event.materialization.metadata for event in result.get_asset_materialization_events()]
    if not result.success or not all(map(_is_idle, events)):
        return
    task = result.dagster_run.tags.get(COMMAND)
    if task is None:
        return
    same = dg.RunsFilter(tags={COMMAND: task, IDLE: "true"})
    for before in dagster.get_runs(same, limit=_RUNS_PER_QUERY):
        dagster.delete_run(before.run_id)
    dagster.add_run_tags(result.run_id, {IDLE: "true"})


def _is_idle(metadata: Mapping[str, dg.MetadataValue]) -> bool:
    """Whether a materialization of the change log, or of transformed changes, reports no work."""
    slices, tables = metadata.get("slices"), metadata.get("tables")
    return (slices is not None and slices.value == 0) or (tables is not None and tables.value == "no changes")


def delete_old_runs(dagster: dg.DagsterInstance, retention: timedelta | None) -> int:
    """Delete the commands' runs that ended longer ago than the retention; returns their number.

    None retains all runs.
    """
    if retention is None:
        return 0
    finished = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
    old = dg.RunsFilter(statuses=finished, updated_before=datetime.now(UTC) - retention)
    latest = dagster.get_latest_materialization_events(dagster.all_asset_keys())
    newest = {event.run_id for event in latest.values() if event is not None}
    run_ids, cursor = list[str](), None
    while runs := dagster.get_runs(old, cursor=cursor, limit=_RUNS_PER_QUERY):
        cursor = runs[-1].run_id
        run_ids += [
            r.run_id
            for r in runs
            if COMMAND in r.tags and not _COPY_TAGS & r.tags.keys() and r.run_id not in newest
        ]
    for run_id in run_ids:
        dagster.delete_run(run_id)
    return len(run_ids)
