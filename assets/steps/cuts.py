"""Cuts of a subscription: LSNs at which all its replicas agree, with their Delta versions, and reading at one.

Kept in the Delta table `_cuts`, appended to. A cut says: these versions hold just what committed before this LSN.
It stays true for later LSNs until the next one. `read_at_cut` is for users.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from assets.frames.schema import CUTS
from assets.steps.subscription import Subscription
from assets.steps.table_states import Name
from decoding.lsn import parse_lsn
from decoding.quoting import quote_qualified
from resources.delta import Lake
from resources.lake_errors import LakeError


@dataclass(frozen=True)
class Cut:
    """An LSN, and the Delta version of each replica table that holds just what committed before it.

    `at` is when it was recorded.
    """

    lsn: int
    tables: Mapping[Name, int]
    at: datetime


def cuts(lake: Lake, subscription: str) -> list[Cut]:
    """The cuts that are kept, oldest first."""
    rows = sorted(lake.records.rows(lake.cuts(subscription)), key=lambda row: (row["lsn"], row["at"]))
    return [
        Cut(int(row["lsn"]), {_split(name): version for name, version in row["tables"]}, row["at"])
        for row in rows
    ]


def last_cut(lake: Lake, subscription: Subscription) -> Cut | None:
    """The newest cut of a subscription."""
    return next(reversed(cuts(lake, subscription.name)), None)


def append_cut(lake: Lake, subscription: str, cut: Cut) -> None:
    """Record a cut."""
    versions = [(_join(name), version) for name, version in cut.tables.items()]
    row = {"lsn": cut.lsn, "at": cut.at, "tables": versions}
    lake.records.append(lake.cuts(subscription), pa.Table.from_pylist([row], CUTS))


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
