"""The cuts of a subscription, and reads of replicas at a cut.

A cut is an LSN, and for each replica of the subscription the Delta version that contains exactly what was committed
before this LSN. A cut is recorded after a batch (changes that are applied together), if all replicas have the batch.
Cuts are rows of the Delta table `_cuts`. `read_at_cut` is a function for users.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates
from pgsieve.decoding.lsn import parse_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.errors import PUT_BACK_PROBLEM, LakeError, make_damaged_table_error
from pgsieve.resources.lake.delta.records import get_commit_version
from pgsieve.resources.lake.lake import Lake

CUT_SCHEMA = pa.schema(
    {
        "lsn": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "tables": pa.map_(pa.string(), pa.int64()),
        "states": pa.int64(),
        "entries": pa.map_(pa.string(), pa.int64()),
        "histories": pa.map_(pa.string(), pa.int64()),
        "records": pa.map_(pa.string(), pa.int64()),
        "versioned": pa.map_(pa.string(), pa.int64()),
        "scd2": pa.map_(pa.string(), pa.int64()),
        "rows_at": pa.timestamp("us", "UTC"),
    }
)


@dataclass(frozen=True)
class Cut:
    """An LSN, and for each replica the Delta version that contains exactly what was committed before this LSN (`tables`).

    - `at`: the time at which the cut was recorded
    - `states`: the version of the table states (`_table_states`) from which the cut was made; None in cuts of earlier
      versions of pgsieve
    - `entries`: the sizes in bytes of the Delta log entries of `tables`, if they are known. If the entry of the same
      version has another size now, the table was put back to an earlier version and written again.
    - `histories`: the LSNs that the change histories (the Delta tables with all changes of a table) had reached
    - `records`: maps the identifiers of pgsieve's own Delta tables to their versions
    - `versioned`: maps tables to the LSN up to which their versions of rows (`history: scd2`) have all changes. Tables
      whose versions lack earlier changes are left out.
    - `scd2`: the Delta versions of the tables with versions of rows, except those that were put back
    - `rows_at`: the time of the first cut with the same rows, if this cut repeats an earlier one; otherwise None
    """

    lsn: int
    tables: Mapping[Name, int]
    at: datetime
    states: int | None = None
    entries: Mapping[Name, int] = field(default_factory=dict)
    histories: Mapping[Name, int] = field(default_factory=dict)
    records: Mapping[str, int] = field(default_factory=dict)
    versioned: Mapping[Name, int] = field(default_factory=dict)
    scd2: Mapping[Name, int] = field(default_factory=dict)
    rows_at: datetime | None = None

    @property
    def rows_time(self) -> datetime:
        """The time of the first cut with the same rows."""
        return self.rows_at or self.at

    def refuse_earlier_history(self, path: str, state: TableState, position: int) -> None:
        """Raise DamagedTableError if a change history has an earlier position than the cut records for it.

        `position` is its present position; 0 if there is no history.
        """
        if self.has_state(state) and 0 < position < self.histories.get(state.name, 0):
            raise make_damaged_table_error(path, PUT_BACK_PROBLEM)

    def has_state(self, state: TableState) -> bool:
        """True if the table already had this state when the cut was made.

        If the cut does not record the version of the table states, it is earlier than a state that has a version. For a
        state without a version, the times of the state and of the cut are compared.
        """
        if self.states is None:
            return state.version < 0 and (state.at is None or state.at <= self.at)
        return state.version <= self.states

    def refuse_earlier_states(self, states: TableStates) -> None:
        """Raise DamagedTableError if the table states have an earlier version than the one from which the cut was made."""
        records, path = states.lake.records, states.path
        if (self.states or 0) > (records.version(path) if records.exists(path) else -1):
            raise make_damaged_table_error(path, PUT_BACK_PROBLEM)


def find_version_in_cut(cut: Cut | None, versions: Mapping[Name, int], state: TableState) -> int | None:
    """The version that a table has in a cut, according to `versions`; None if the cut is earlier than the table's copy."""
    is_later = cut is not None and (cut.has_state(state) or cut.lsn > state.lsn)
    return versions.get(state.name) if is_later else None


@dataclass(frozen=True)
class Cuts:
    """The table `_cuts` of one subscription.

    Cuts are written where changes are applied to replicas or replicas are repaired. Maintenance deletes old ones. If
    the newest cut is old, or if replicas were compacted, it writes this cut again.
    """

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.cuts(self.subscription)

    def read_all(self) -> list[Cut]:
        """All cuts that maintenance has not deleted, the oldest first."""
        return _parse_cuts(self.lake.records.rows(self.path))

    def read_last(self) -> Cut | None:
        """The newest cut; None if there is none."""
        return next(reversed(_parse_cuts(self.lake.records.newest_rows(self.path, "lsn"))), None)

    def find_newest(self, lsn: str | None = None) -> Cut:
        """The newest cut. With `lsn`, the newest cut at or before this LSN. Raises LakeError if there is none."""
        cuts = [cut for cut in self.read_all() if lsn is None or cut.lsn <= parse_lsn(lsn)]
        if not cuts:
            raise LakeError(
                f'subscription "{self.subscription}" has no cut' + (f" at or before {lsn}" if lsn else ""),
                hint="`pgsieve run` writes one; how long cuts are kept is `retention.versions` in pgsieve.yaml",
            )
        return cuts[-1]

    def read_frames(self, cut: Cut) -> dict[str, DataFrame]:
        """Maps the name of each table to its replica at a cut, as a Spark DataFrame."""
        return {
            quote_qualified(*name): self.lake.read_version(self._get_replica_path(name), version)
            for name, version in cut.tables.items()
        }

    def open_tables(self, cut: Cut) -> dict[str, DeltaTable]:
        """Maps the name of each table to its replica at a cut, as a delta-rs table.

        Raises LakeError if delta-rs cannot reach the lake.
        """
        self.lake.require_delta_rs(
            LakeError(
                f'only Spark reaches the lake of subscription "{self.subscription}"',
                hint="read it with `read_at_cut`",
                sqlstate="0A000",
            )
        )
        options = dict(self.lake.store.options)
        return {
            quote_qualified(*name): DeltaTable(
                self._get_replica_path(name), version=version, storage_options=options
            )
            for name, version in cut.tables.items()
        }

    def _get_replica_path(self, name: Name) -> str:
        return self.lake.paths.replica(self.subscription, *name)

    def make_cut(self, lsn: int, tables: Mapping[Name, int], states: int | None, last_cut: Cut | None) -> Cut:
        """Make a cut at an LSN with these versions of the replicas and of the table states, without recording it.

        The other versions and positions are those of `last_cut`, the newest cut. The sizes of log entries are read only
        for versions that are new.
        """
        entries = {}
        for name, version in tables.items():
            if last_cut is not None and last_cut.tables.get(name) == version:
                entry_bytes = last_cut.entries.get(name)
            else:
                entry_bytes = self.lake.records.entry_bytes(self._get_replica_path(name), version)
            if entry_bytes is not None:
                entries[name] = entry_bytes
        cut = Cut(lsn, dict(tables), datetime.now(UTC), states, entries)
        if last_cut is None:
            return cut
        return replace(
            cut,
            histories=last_cut.histories,
            records=last_cut.records,
            versioned=last_cut.versioned,
            scd2=last_cut.scd2,
        )

    def append(self, cut: Cut) -> None:
        """Sync the versions in a cut to disk, and then record the cut."""
        self.lake.access.make_durable()
        versions, entries, histories, versioned, scd2 = (
            [(_join_name(name), number) for name, number in numbers.items()]
            for numbers in (cut.tables, cut.entries, cut.histories, cut.versioned, cut.scd2)
        )
        row = {
            "lsn": cut.lsn,
            "at": cut.at,
            "tables": versions,
            "states": cut.states,
            "entries": entries,
            "histories": histories,
            "records": list(cut.records.items()),
            "versioned": versioned,
            "scd2": scd2,
            "rows_at": cut.rows_at,
        }
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], CUT_SCHEMA))


def _get_sort_key(row: Mapping[str, Any]) -> tuple[int, int, datetime]:
    return int(row["lsn"]), get_commit_version(row), row["at"]


def _parse_cuts(rows: Sequence[Mapping[str, Any]]) -> list[Cut]:
    return [
        Cut(
            int(row["lsn"]),
            _parse_numbers(row, "tables"),
            row["at"],
            row.get("states"),
            _parse_numbers(row, "entries"),
            _parse_numbers(row, "histories"),
            dict(row.get("records") or ()),
            _parse_numbers(row, "versioned"),
            _parse_numbers(row, "scd2"),
            row.get("rows_at"),
        )
        for row in sorted(rows, key=_get_sort_key)
    ]


def _parse_numbers(row: Mapping[str, Any], column: str) -> dict[Name, int]:
    return {_split_name(name): number for name, number in row.get(column) or ()}


def read_at_cut(
    spark: SparkSession, lake: str, subscription: str, lsn: str | None = None
) -> dict[str, DataFrame]:
    """The replicas of a subscription as they were at one LSN: maps each table, such as `public.orders`, to a DataFrame.

    `lake` is the path or URI in pgsieve.yaml. The replicas are read at the newest cut, or at the newest one at or
    before `lsn`, which is written as PostgreSQL writes it (`16/B374D848`). Raises LakeError if there is no such cut.
    """
    cuts = Cuts(Lake(lake, lambda: spark), subscription)
    return cuts.read_frames(cuts.find_newest(lsn))


def _join_name(name: Name) -> str:
    """Write a schema and a table as one text, which `_split_name` splits again."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in name)


def _split_name(text: str) -> Name:
    schema, table = re.findall(r'"((?:[^"]|"")*)"', text)
    return schema.replace('""', '"'), table.replace('""', '"')
