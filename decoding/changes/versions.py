"""Versions of rows with columns for the time in which they are valid, as in a slowly changing dimension of type 2.

In: rows, and the commits that make and end their versions. Out: versions. Raises Arrow's errors.

A version is valid from the commit that made it, up to the commit that ended it. So the condition
`valid_from_lsn` <= c < `valid_to_lsn` selects the rows that the table had after the commit at an LSN c. In a current
version `valid_to_lsn` is NULL, which counts as later than any c. The commit of a copied row is not known, but
it came before the LSN of the snapshot. So the row is valid from the LSN before that one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.columns import repeat_value

_TIME = pa.timestamp("us", "UTC")
VALID_FROM, VALID_FROM_LSN, VALID_TO, VALID_TO_LSN, IS_CURRENT = (
    "valid_from",
    "valid_from_lsn",
    "valid_to",
    "valid_to_lsn",
    "is_current",
)
#: The columns that a version has after the columns of its row.
VALIDITY_SCHEMA = pa.schema(
    {
        VALID_FROM: _TIME,
        VALID_FROM_LSN: pa.int64(),
        VALID_TO: _TIME,
        VALID_TO_LSN: pa.int64(),
        IS_CURRENT: pa.bool_(),
    }
)


def versions_schema(columns: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """Return the schema of versions of rows with these columns (name, Arrow type)."""
    return pa.schema([*(pa.field(name, arrow_type) for name, arrow_type in columns), *VALIDITY_SCHEMA])


def version_encodings(schema: pa.Schema, key: Iterable[str]) -> dict[str, str]:
    """Return the Parquet encodings of columns of versions, by the names of the columns. `key` has the names of the key.

    LSNs and integers of keys often repeat or ascend, so it takes less time and space to store their differences. This
    matters most for keys, because they are read whenever versions are looked up.
    """
    integer_keys = {name for name in key if pa.types.is_signed_integer(schema.field(name).type)}
    return dict.fromkeys((*sorted(integer_keys), VALID_FROM_LSN, VALID_TO_LSN), "DELTA_BINARY_PACKED")


def lsn_before(lsn: int) -> int:
    """Return the LSN from which the rows of a snapshot at `lsn` are valid, since they were committed before `lsn`."""
    return lsn - 1


@dataclass(frozen=True)
class Commits:
    """The commits of some changes. The number of a commit is its index in these arrays.

    `lsns` has their LSNs in ascending order, and `times` has their times, or None where the time is not known.
    """

    lsns: pa.Array
    times: pa.Array

    @classmethod
    def from_changes(cls, changes: pa.Table) -> Commits:
        """Return the commits of changes. This is fastest if the changes of each commit are adjacent."""
        lsns = np.asarray(changes["commit_lsn"])
        first_changes = np.flatnonzero(np.diff(lsns, prepend=lsns[:1] - 1))
        grouped = (
            changes.select(["commit_lsn", "commit_time"])
            .take(pa.array(first_changes))
            .group_by("commit_lsn")
            .aggregate([("commit_time", "max")])
            .sort_by("commit_lsn")
        )
        return cls(
            grouped["commit_lsn"].combine_chunks(),
            grouped["commit_time_max"].combine_chunks().cast(_TIME),
        )

    @classmethod
    def single_commit(cls, lsn: int, time: datetime | None) -> Commits:
        """Return a single commit; its number is 0."""
        return cls(pa.array([lsn], pa.int64()), pa.array([time], _TIME))

    def find_numbers(self, lsns: Numbers) -> Numbers:
        """Return the numbers of the commits at these LSNs."""
        return np.searchsorted(np.asarray(self.lsns), lsns).astype(np.int64, copy=False)


def add_validity(
    rows: pa.RecordBatch, begin_commits: Numbers, end_commits: Numbers, commits: Commits
) -> pa.RecordBatch:
    """Return rows as versions.

    `begin_commits` has the number of the commit that makes each version. `end_commits` has the number of the commit
    that ends it, or `NONE` if the version is current.
    """
    begin_indexes, end_indexes = pa.array(begin_commits), pa.array(end_commits, mask=end_commits == NONE)
    validity = [
        commits.times.take(begin_indexes),
        commits.lsns.take(begin_indexes),
        commits.times.take(end_indexes),
        commits.lsns.take(end_indexes),
        pa.array(end_commits == NONE),
    ]
    return pa.RecordBatch.from_arrays(
        [*rows.columns, *validity], schema=pa.schema([*rows.schema, *VALIDITY_SCHEMA])
    )


def end_versions(versions: pa.RecordBatch, end_commits: Numbers, commits: Commits) -> pa.RecordBatch:
    """End current versions; `end_commits` has the number of the commit that ends each version.

    A version is dropped if the commit that made it also ends it, because no transaction could ever see it.
    """
    end_indexes = pa.array(end_commits)
    values = {
        VALID_TO: commits.times.take(end_indexes),
        VALID_TO_LSN: commits.lsns.take(end_indexes),
        IS_CURRENT: repeat_value(pa.array([False]), len(end_commits)),
    }
    for name, value in values.items():
        index = versions.schema.get_field_index(name)
        versions = versions.set_column(index, versions.schema.field(index), value)
    is_kept = pc.less(versions.column(VALID_FROM_LSN), versions.column(VALID_TO_LSN))
    return versions if is_kept.false_count == 0 else versions.filter(is_kept)


@dataclass(frozen=True)
class CurrentVersions:
    """Turns the rows that a replica has at an LSN into current versions with the columns of `schema`.

    Spark sends objects of this class to executors. `time` is the time of the LSN, if known.
    """

    lsn: int
    time: datetime | None
    schema: pa.Schema

    def to_versions(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the replica as versions."""
        begin_commits, end_commits = (
            np.zeros(rows.num_rows, np.int64),
            np.full(rows.num_rows, NONE, np.int64),
        )
        versions = add_validity(
            rows, begin_commits, end_commits, Commits.single_commit(lsn_before(self.lsn), self.time)
        )
        columns = [
            versions.column(versions.schema.get_field_index(field.name)).cast(field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
