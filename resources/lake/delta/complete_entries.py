"""Detects incomplete log entries that delta-rs accepts: entries without actions, or cut off after an action.

In: the bytes of an entry. Out: a text about the missing content. An entry that is cut off within an action is
not JSON, and delta-rs refuses it. Raises nothing.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Delta Log Entries, Commit Provenance Information)
"""

import json
from collections.abc import Sequence
from typing import Any

from pgsieve.resources.lake.delta.records import APPLICATION, position_in

#: delta-rs's metrics of the number of added files: of a write, and of a MERGE, which also counts files of the
#: change data feed.
_ADDED = ("num_added_files", "num_target_files_added")
NO_ACTIONS = "has no actions"
_CUT_OFF = "is cut off"


def find_defect(content: bytes) -> str | None:
    """The defect of an incomplete entry, as text; None if the entry is complete.

    All supported engines begin an entry with a commitInfo. If that has a position, so does a txn action, which
    delta-rs writes last.
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
    return "txn" in action and action["txn"].get("appId") == APPLICATION
