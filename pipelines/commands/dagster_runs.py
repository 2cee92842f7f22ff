"""Deletes old runs of commands from Dagster's records: idle runs except the last, and runs past retention.

In: Dagster's instance. Runs that no command of pgsieve made stay, as do the run of each asset's last
materialization, and every run that copied tables.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import dagster as dg

#: A tag of a command's runs; its value is the task, such as `maintain sales`.
COMMAND = "pgsieve/command"
#: A tag of runs without work.
IDLE = "pgsieve/idle"
#: Dagster's tags of a run that copies one table, or several.
_COPY = {"dagster/partition", "dagster/asset_partition_range_start"}
#: The number of runs per query.
_PAGE = 100


def tagged(task: str, tags: Mapping[str, str] | None) -> dict[str, str]:
    """The tags of a command's run."""
    return {COMMAND: task, **(tags or {})}


def keep_one_idle(dagster: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> None:
    """If a run had no work, tag it as idle, and delete the earlier idle runs of the same task."""
    events = [event.materialization.metadata for event in result.get_asset_materialization_events()]
    if not result.success or not all(map(_is_idle, events)):
        return
    task = result.dagster_run.tags.get(COMMAND)
    if task is None:
        return
    same = dg.RunsFilter(tags={COMMAND: task, IDLE: "true"})
    for before in dagster.get_runs(same, limit=_PAGE):
        dagster.delete_run(before.run_id)
    dagster.add_run_tags(result.run_id, {IDLE: "true"})


def _is_idle(metadata: Mapping[str, dg.MetadataValue]) -> bool:
    """Whether a materialization of the change log, or of transformed changes, reports no work."""
    slices, tables = metadata.get("slices"), metadata.get("tables")
    return (slices is not None and slices.value == 0) or (tables is not None and tables.value == "no changes")


def delete_old_runs(dagster: dg.DagsterInstance, kept: timedelta | None) -> int:
    """Delete the commands' runs that ended before the retention; returns their number.

    A retention of None keeps all of them.
    """
    if kept is None:
        return 0
    finished = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
    old = dg.RunsFilter(statuses=finished, updated_before=datetime.now(UTC) - kept)
    latest = dagster.get_latest_materialization_events(dagster.all_asset_keys())
    newest = {event.run_id for event in latest.values() if event is not None}
    gone, cursor = list[str](), None
    while runs := dagster.get_runs(old, cursor=cursor, limit=_PAGE):
        cursor = runs[-1].run_id
        gone += [
            r.run_id
            for r in runs
            if COMMAND in r.tags and not _COPY & r.tags.keys() and r.run_id not in newest
        ]
    for run_id in gone:
        dagster.delete_run(run_id)
    return len(gone)
