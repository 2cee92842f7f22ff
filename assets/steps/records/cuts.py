"""Cuts of a subscription: LSNs at which all its replicas agree, with their Delta versions, and reading at one.

Kept in the Delta table `_cuts`, appended to. A cut says: these versions hold just what committed before this LSN.
It stays true for later LSNs until the next one. `read_at_cut` is for users.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pgsieve.assets.steps.records.columns import CUTS
from pgsieve.assets.steps.records.table_states import Name, TableState
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.lsn import parse_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.records import version_of


@dataclass(frozen=True)
class Cut:
    """An LSN, and the Delta version of each replica table that holds just what committed before it.

    `at` is when it was recorded, `states` the newest version of the table states that it was made from; None in cuts
    that do not say so.
    """

    lsn: int
    tables: Mapping[Name, int]
    at: datetime
    states: int | None = None

    def is_after(self, state: TableState) -> bool:
        """Whether the cut was made when the table had this state already; clocks tell only where nothing else does."""
        if self.states is None:
            return state.version < 0 and (state.at is None or state.at <= self.at)
        return state.version <= self.states


def cuts(lake: Lake, subscription: str) -> list[Cut]:
    """The cuts that are kept, oldest first."""
    return _cuts(lake.records.rows(lake.cuts(subscription)))


def _order(row: Mapping[str, Any]) -> tuple[int, int, datetime]:
    return int(row["lsn"]), version_of(row), row["at"]


def last_cut(lake: Lake, subscription: Subscription) -> Cut | None:
    """The newest cut of a subscription."""
    return next(reversed(_cuts(lake.records.newest(lake.cuts(subscription.name), "lsn"))), None)


def _cuts(rows: Sequence[Mapping[str, Any]]) -> list[Cut]:
    return [
        Cut(
            int(row["lsn"]),
            {_split(name): version for name, version in row["tables"]},
            row["at"],
            row.get("states"),
        )
        for row in sorted(rows, key=_order)
    ]


def append_cut(lake: Lake, subscription: str, cut: Cut) -> None:
    """Record a cut."""
    versions = [(_join(name), version) for name, version in cut.tables.items()]
    row = {"lsn": cut.lsn, "at": cut.at, "tables": versions, "states": cut.states}
    lake.records.append_versioned(lake.cuts(subscription), pa.Table.from_pylist([row], CUTS))


def read_at_cut(
    spark: SparkSession, lake: str, subscription: str, lsn: str | None = None
) -> dict[str, DataFrame]:
    """The replicas of a subscription as they were at one LSN: DataFrames by table, as in `public.orders`.

    `lake` is the path or URI of pgsieve.yaml. Reads the newest cut, or the newest at or before `lsn` (as PostgreSQL
    writes it, `16/B374D848`). Raises LakeError where there is none: not yet, or not any more.
    """
    opened = Lake(lake, lambda: spark)
    kept = [c for c in cuts(opened, subscription) if lsn is None or c.lsn <= parse_lsn(lsn)]
    if not kept:
        raise LakeError(
            f'subscription "{subscription}" has no cut' + (f" at or before {lsn}" if lsn else ""),
            hint="`pgsieve run` writes one; how long cuts are kept is `retention.versions` in pgsieve.yaml",
        )
    return {
        quote_qualified(*name): spark.read.format("delta")
        .option("versionAsOf", version)
        .load(opened.replica(subscription, *name))
        for name, version in kept[-1].tables.items()
    }


def _join(name: Name) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in name)


def _split(qualified: str) -> Name:
    schema, table = re.findall(r'"((?:[^"]|"")*)"', qualified)
    return schema.replace('""', '"'), table.replace('""', '"')
