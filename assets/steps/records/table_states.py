"""Table sync states of a subscription, like pg_subscription_rel (section 51.54).

Kept in the Delta table `_table_states`, appended to, the newest row of a table counting: newest by the
Delta version that it came with, as clocks of several hosts disagree. A table is `d` while it is copied, `f` once it
is, and `r` from the copy's LSN on when every slice after that is transformed for it; `e` when it was set aside with a
reason, `i` when it has to be copied
again, `x` when no subscribed publication has it any more, or the subscription was dropped; its LSN is 0 then unless
it was ready. A run that dies while copying leaves `d`, and the table is copied anew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.records.columns import TABLE_STATES
from pgsieve.assets.steps.subscription import Definition
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.records import in_order, version_of

INITIALIZE, DATA_SYNC, FINISHED_COPY, READY, SET_ASIDE, REMOVED = "i", "d", "f", "r", "e", "x"

MEANING: Mapping[str, str] = {
    INITIALIZE: "to be copied",
    DATA_SYNC: "data is being copied",
    FINISHED_COPY: "has been copied",
    READY: "ready",
    SET_ASIDE: "set aside",
    REMOVED: "not replicated any more",
}

Name = tuple[str, str]


@dataclass(frozen=True)
class TableState:
    """The state of one table: its sync state, the LSN it was copied at, its definition, and a reason.

    The definition is the last one that its replica had; `at` is when the state was written, `version` as which Delta
    version of `_table_states`, -1 where it does not say so.
    """

    schema: str
    table: str
    state: str
    lsn: int = 0
    definition: Definition | None = None
    reason: str | None = None
    at: datetime | None = None
    version: int = -1

    @property
    def applies(self) -> bool:
        """Whether what is published of the table is applied: also what was, until it left the publications."""
        copied = self.state == READY or (self.state == REMOVED and self.lsn > 0)
        return copied and self.definition is not None

    @property
    def transforms(self) -> bool:
        """Whether what is published of the table is transformed: also where the copy is still to be declared ready."""
        return self.applies or (self.state == FINISHED_COPY and self.definition is not None)

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table


def table_states(lake: Lake, subscription: str) -> dict[Name, TableState]:
    """The newest state of each table of the subscription."""
    states: dict[Name, Mapping[str, Any]] = {}
    for row in in_order(lake.records.rows(lake.table_states(subscription))):
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
            version=version_of(row),
        )
        for name, row in states.items()
    }


def newest_version(states: Iterable[TableState]) -> int:
    """The version of the newest of some states: others that come later have later ones."""
    return max((state.version for state in states), default=-1)


def set_states(lake: Lake, subscription: str, states: Iterable[TableState], base: int | None = None) -> None:
    """Append states, all in one commit; the last one that is given of a table counts.

    Raises OverrunError where the table has another version than `base`.
    """
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
        for s in {state.name: state for state in states}.values()
    ]
    if rows:
        lake.records.append_versioned(
            lake.table_states(subscription), pa.Table.from_pylist(rows, TABLE_STATES), base=base
        )
