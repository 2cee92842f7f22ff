"""Versions of rows with columns for their validity, as in a slowly changing dimension of type 2.

A version is valid from the commit that made it, up to the commit that ended it. So the condition
`valid_from_lsn` <= c < `valid_to_lsn` selects the rows after the commit at an LSN c. A copied row is valid
from the last LSN before its snapshot's. Raises Arrow's errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import repeat_value
from pgsieve.decoding.changes.net_change import NONE, Numbers

_TIME = pa.timestamp("us", "UTC")
VALID_FROM, VALID_FROM_LSN, VALID_TO, VALID_TO_LSN, IS_CURRENT = (
    "valid_from",
    "valid_from_lsn",
    "valid_to",
    "valid_to_lsn",
    "is_current",
)
#: The columns of a version that follow those of its row.
VALIDITY_SCHEMA = pa.schema(
    {
        VALID_FROM: _TIME,
        VALID_FROM_LSN: pa.int64(),
        VALID_TO: _TIME,
        VALID_TO_LSN: pa.int64(),
        IS_CURRENT: pa.bool_(),
    }
)

#: Parquet's encodings: LSNs repeat or ascend, so their differences take less time and space.
VALIDITY_ENCODINGS = dict.fromkeys((VALID_FROM_LSN, VALID_TO_LSN), "DELTA_BINARY_PACKED")


def versions_schema(columns: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """The schema of versions of rows with these columns."""
    return pa.schema([*(pa.field(name, kind) for name, kind in columns), *VALIDITY_SCHEMA])


def lsn_before(lsn: int) -> int:
    """The LSN from which rows of a snapshot at `lsn` are valid, as their commits are unknown."""
    return lsn - 1


@dataclass(frozen=True)
class Commits:
    """Commits by number: their LSNs, in order, and their times, None if unknown."""

    lsns: pa.Array
    times: pa.Array

    @classmethod
    def of(cls, changes: pa.Table) -> Commits:
        """The commits of changes."""
        grouped = (
            changes.select(["commit_lsn", "commit_time"])
            .group_by("commit_lsn")
            .aggregate([("commit_time", "max")])
            .sort_by("commit_lsn")
        )
        return cls(
            grouped["commit_lsn"].combine_chunks(),
            grouped["commit_time_max"].combine_chunks().cast(_TIME),
        )

    @classmethod
    def one(cls, lsn: int, time: datetime | None) -> Commits:
        """One commit, whose number is 0."""
        return cls(pa.array([lsn], pa.int64()), pa.array([time], _TIME))

    def numbers(self, lsns: Numbers) -> Numbers:
        """The numbers of the commits at these LSNs."""
        return np.searchsorted(np.asarray(self.lsns), lsns).astype(np.int64)


def add_validity(rows: pa.RecordBatch, begun: Numbers, until: Numbers, commits: Commits) -> pa.RecordBatch:
    """Return rows as versions, given the numbers of the commits that begin and end them, or `NONE`."""
    first_commits, last_commits = pa.array(begun), pa.array(until, mask=until == NONE)
    validity = [
        commits.times.take(first_commits),
        commits.lsns.take(first_commits),
        commits.times.take(last_commits),
        commits.lsns.take(last_commits),
        pa.array(until == NONE),
    ]
    return pa.RecordBatch.from_arrays(
        [*rows.columns, *validity], schema=pa.schema([*rows.schema, *VALIDITY_SCHEMA])
    )


def end_versions(versions: pa.RecordBatch, until: Numbers, commits: Commits) -> pa.RecordBatch:
    """End current versions by the commits with these numbers; drop a version that its own commit ends."""
    last_commits = pa.array(until)
    values = {
        VALID_TO: commits.times.take(last_commits),
        VALID_TO_LSN: commits.lsns.take(last_commits),
        IS_CURRENT: repeat_value(pa.array([False]), len(until)),
    }
    for name, value in values.items():
        index = versions.schema.get_field_index(name)
        versions = versions.set_column(index, versions.schema.field(index), value)
    is_version = pc.less(versions.column(VALID_FROM_LSN), versions.column(VALID_TO_LSN))
    return versions if is_version.false_count == 0 else versions.filter(is_version)


@dataclass(frozen=True)
class OpenedVersions:
    """Turns a replica's rows at an LSN into current versions with this schema.

    Spark sends it to executors.
    """

    lsn: int
    time: datetime | None
    schema: pa.Schema

    def to_versions(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the replica as versions."""
        first_commits, last_commits = (
            np.zeros(rows.num_rows, np.int64),
            np.full(rows.num_rows, NONE, np.int64),
        )
        versions = add_validity(
            rows, first_commits, last_commits, Commits.one(lsn_before(self.lsn), self.time)
        )
        columns = [
            versions.column(versions.schema.get_field_index(field.name)).cast(field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
