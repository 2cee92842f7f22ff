"""Detects incomplete log entries that delta-rs would accept: entries without actions, and entries cut off after an action.

In: the bytes of an entry.
Out: a text that says what is missing.

An entry that is cut off within an action is not JSON, and delta-rs refuses it. Raises nothing.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Delta Log Entries, Commit Provenance Information)
"""

import json
from collections.abc import Sequence
from typing import Any

from pgsieve.resources.lake.delta.records import APPLICATION, position_in

#: The names of delta-rs's metrics for the number of files that a commit adds: for a write, and for a MERGE. The
#: metric for a MERGE also counts the files of the change data feed.
_ADDED = ("num_added_files", "num_target_files_added")
NO_ACTIONS = "has no actions"
_CUT_OFF = "is cut off"


def find_defect(content: bytes) -> str | None:
    """A text about the defect of an entry; None if the entry is complete.

    All engines that pgsieve supports begin an entry with a commitInfo. If the user metadata in the commitInfo has
    a position, the entry must have a txn action with the same position. delta-rs writes the txn action last.
    """
    try:
        actions: Sequence[Any] = [json.loads(line) for line in content.splitlines() if line.strip()]
    except ValueError:
        return _CUT_OFF
    if not actions:
        return NO_ACTIONS
    if not all(isinstance(action, dict) for action in actions):
        return _CUT_OFF
    information = next((action["commitInfo"] for action in actions if "commitInfo" in action), None)
    if information is None:
        return _CUT_OFF
    position, is_kept = position_in(information.get("userMetadata"))
    positions = [action["txn"]["version"] for action in actions if _is_of_pgsieve(action)]
    if position is not None and not is_kept and positions != [position]:
        return f"{_CUT_OFF}: it lacks its position"
    metrics = information.get("operationMetrics") or {}
    added = max((metrics[name] for name in _ADDED if isinstance(metrics.get(name), int)), default=0)
    if sum("add" in action or "cdc" in action for action in actions) < added:
        return f"{_CUT_OFF}: it lacks files that it adds"
    return None


def _is_of_pgsieve(action: dict[str, Any]) -> bool:
    """True if an action is a txn action with a position of pgsieve."""
    return "txn" in action and action["txn"].get("appId") == APPLICATION
