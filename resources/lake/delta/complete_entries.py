"""Detects incomplete log entries that delta-rs would accept: entries without actions, and entries cut off after an action.

In: the bytes of an entry.
Out: a text that says what is missing.

An entry that is cut off within an action is not JSON, and delta-rs refuses it; `find_defect` reports it, too. Raises
nothing.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Delta Log Entries, Commit Provenance Information)
"""

import json
from collections.abc import Sequence
from typing import Any

from pgsieve.resources.lake.delta.records import APPLICATION_ID, parse_position

#: The names of delta-rs's metrics for the number of files that a commit adds: for a write, and for a MERGE. The
#: metric for a MERGE also counts the files of the change data feed.
_ADDED_FILE_METRICS = ("num_added_files", "num_target_files_added")
NO_ACTIONS = "has no actions"
_CUT_OFF = "is cut off"


def find_defect(content: bytes) -> str | None:
    """A text about the defect of an entry; None if the entry is complete.

    All engines (delta-rs, Spark) that pgsieve supports begin an entry with a commitInfo. If the user metadata in the
    commitInfo has a position (the LSN of a commit of pgsieve), the entry must have a txn action with the same position.
    delta-rs writes this action last, so an entry that is cut off lacks it.
    """
    try:
        actions: Sequence[Any] = [json.loads(line) for line in content.splitlines() if line.strip()]
    except ValueError:
        return _CUT_OFF
    if not actions:
        return NO_ACTIONS
    if not all(isinstance(action, dict) for action in actions):
        return _CUT_OFF
    commit_info = next((action["commitInfo"] for action in actions if "commitInfo" in action), None)
    if commit_info is None:
        return _CUT_OFF
    position, only_keeps_position = parse_position(commit_info.get("userMetadata"))
    positions = [action["txn"]["version"] for action in actions if _is_position_action(action)]
    if position is not None and not only_keeps_position and positions != [position]:
        return f"{_CUT_OFF}: it lacks its position"
    metrics = commit_info.get("operationMetrics") or {}
    added_file_count = max(
        (metrics[name] for name in _ADDED_FILE_METRICS if isinstance(metrics.get(name), int)), default=0
    )
    if sum("add" in action or "cdc" in action for action in actions) < added_file_count:
        return f"{_CUT_OFF}: it lacks files that it adds"
    return None


def _is_position_action(action: dict[str, Any]) -> bool:
    """True if an action is a txn action with a position of pgsieve."""
    return "txn" in action and action["txn"].get("appId") == APPLICATION_ID
