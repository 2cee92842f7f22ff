"""Table sync states of a subscription, like pg_subscription_rel (section 51.54).

Kept in the Delta table `_table_states`, appended to, the newest row of a table counting. A table is `d` while
it is copied, `r` from the copy's LSN on, `e` when it was set aside with a reason, `i` when it has to be copied
again, `x` when no subscribed publication has it any more, or the subscription was dropped; its LSN is 0 then unless
it was ready. A run that dies while copying leaves `d`, and the table is copied anew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from assets.frames.schema import TABLE_STATES
from assets.steps.subscription import Definition
from resources.delta import Lake

INITIALIZE, DATA_SYNC, READY, SET_ASIDE, REMOVED = "i", "d", "r", "e", "x"

MEANING: Mapping[str, str] = {
    INITIALIZE: "to be copied",
    DATA_SYNC: "data is being copied",
    READY: "ready",
    SET_ASIDE: "set aside",
    REMOVED: "not replicated any more",
}

Name = tuple[str, str]


@dataclass(frozen=True)
class TableState:
    """The state of one table: its sync state, the LSN it was copied at, its definition, and a reason.

    The definition is the last one that its replica had; `at` is when the state was written.
    """

    schema: str
    table: str
    state: str
    lsn: int = 0
    definition: Definition | None = None
    reason: str | None = None
    at: datetime | None = None

    @property
    def applies(self) -> bool:
        """Whether what is published of the table is applied: also what was, until it left the publications."""
        copied = self.state == READY or (self.state == REMOVED and self.lsn > 0)
        return copied and self.definition is not None

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table


def table_states(lake: Lake, subscription: str) -> dict[Name, TableState]:
    """The newest state of each table of the subscription."""
    states: dict[Name, Mapping[str, Any]] = {}
    for row in sorted(lake.records.rows(lake.table_states(subscription)), key=lambda row: row["at"]):
        name = (row["schema"], row["table"])
        definition = row["definition"] or states.get(name, {}).get("definition")
        states[name] = {**row, "definition": definition}
    return {
        name: TableState(
            schema=row["schema"],
            table=row["table"],
            state=row["state"],
            lsn=row["lsn"] or 0,
            definition=Definition.from_json(row["definition"]) if row["definition"] else None,
            reason=row["reason"],
            at=row["at"],
        )
        for name, row in states.items()
    }


def set_states(lake: Lake, subscription: str, states: Iterable[TableState]) -> None:
    """Append states, all in one commit."""
    now = datetime.now(UTC)
    rows = [
        {
            "schema": s.schema,
            "table": s.table,
            "state": s.state,
            "lsn": s.lsn,
            "at": now,
            "definition": s.definition.to_json() if s.definition else None,
            "reason": s.reason,
        }
        for s in states
    ]
    if rows:
        lake.records.append(lake.table_states(subscription), pa.Table.from_pylist(rows, TABLE_STATES))
