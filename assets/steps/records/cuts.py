"""Cuts of a subscription, and reads at a cut.

A cut is an LSN, with a Delta version of each replica of the subscription that has exactly what committed before this
LSN. Up to the LSN of the next cut nothing else was applied. Cuts are rows of the Delta table `_cuts`. `read_at_cut` is
for users.
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
from pgsieve.resources.lake.delta.errors import PUT_BACK, LakeError, damaged_table_error
from pgsieve.resources.lake.delta.records import version_of
from pgsieve.resources.lake.lake import Lake

CUTS = pa.schema(
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
    }
)


@dataclass(frozen=True)
class Cut:
    """An LSN, and for each replica the Delta version that has exactly what committed before it (`tables`).

    - `at` is the time of the record.
    - `states` is the version of the table states from which the cut was made; None in cuts of earlier versions.
    - `entries` are the sizes in bytes of the Delta log entries of `tables`, as far as they are known.
    - `histories` are positions that the change histories had reached.
    - `records` are the Delta versions of pgsieve's record tables, by the Delta tables' identifiers.
    - `versioned` are the positions of the tables of versions of rows (`scd2`) that have no gap up to the cut.
    - `scd2` are the Delta versions of these tables; none of them was put back.
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

    def refuse_earlier_history(self, path: str, state: TableState, position: int) -> None:
        """Raise DamagedTableError if a change history is behind its position in the cut; 0 stands for no history."""
        if self.is_after(state) and 0 < position < self.histories.get(state.name, 0):
            raise damaged_table_error(path, PUT_BACK)

    def is_after(self, state: TableState) -> bool:
        """Whether the table had this state already when the cut was made.

        Their times are compared only if the cut does not record the version of the states.
        """
        if self.states is None:
            return state.version < 0 and (state.at is None or state.at <= self.at)
        return state.version <= self.states

    def refuse_earlier(self, states: TableStates) -> None:
        """Raise DamagedTableError if the table states are behind the version from which the cut was made."""
        records, path = states.lake.records, states.path
        if (self.states or 0) > (records.version(path) if records.exists(path) else -1):
            raise damaged_table_error(path, PUT_BACK)


def version_in(cut: Cut | None, versions: Mapping[Name, int], state: TableState) -> int | None:
    """A table's version in a cut, out of `versions`; None if the cut is earlier than the table's copy."""
    is_later = cut is not None and (cut.is_after(state) or cut.lsn > state.lsn)
    return versions.get(state.name) if is_later else None


@dataclass(frozen=True)
class Cuts:
    """The table `_cuts` of one subscription.

    Apply and repair write it; maintenance deletes old cuts.
    """

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.cuts(self.subscription)

    def all(self) -> list[Cut]:
        """All cuts that maintenance has not deleted, oldest first."""
        return _cuts(self.lake.records.rows(self.path))

    def last(self) -> Cut | None:
        """The newest cut; None if there is none."""
        return next(reversed(_cuts(self.lake.records.newest(self.path, "lsn"))), None)

    def newest(self, lsn: str | None = None) -> Cut:
        """The newest cut, or the newest at or before an LSN; raises LakeError if there is none."""
        cuts = [c for c in self.all() if lsn is None or c.lsn <= parse_lsn(lsn)]
        if not cuts:
            raise LakeError(
                f'subscription "{self.subscription}" has no cut' + (f" at or before {lsn}" if lsn else ""),
                hint="`pgsieve run` writes one; how long cuts are kept is `retention.versions` in pgsieve.yaml",
            )
        return cuts[-1]

    def frames(self, cut: Cut) -> dict[str, DataFrame]:
        """The replicas at a cut as Spark DataFrames."""
        return {
            quote_qualified(*name): self.lake.as_of(self._replica(name), version)
            for name, version in cut.tables.items()
        }

    def tables(self, cut: Cut) -> dict[str, DeltaTable]:
        """The replicas at a cut as delta-rs tables; raises LakeError if delta-rs cannot reach the lake."""
        self.lake.local_or(
            LakeError(
                f'only Spark reaches the lake of subscription "{self.subscription}"',
                hint="read it with `read_at_cut`",
                sqlstate="0A000",
            )
        )
        options = dict(self.lake.store.options)
        return {
            quote_qualified(*name): DeltaTable(self._replica(name), version=version, storage_options=options)
            for name, version in cut.tables.items()
        }

    def _replica(self, name: Name) -> str:
        return self.lake.paths.replica(self.subscription, *name)

    def new(self, lsn: int, tables: Mapping[Name, int], states: int | None, last: Cut | None) -> Cut:
        """A cut at an LSN with these versions of the replicas and of the table states; it is not recorded yet.

        Everything else is taken from the `last` cut. The sizes of log entries are read only for new versions.
        """
        entries = {}
        for name, version in tables.items():
            if last is not None and last.tables.get(name) == version:
                size = last.entries.get(name)
            else:
                size = self.lake.records.entry_bytes(self._replica(name), version)
            if size is not None:
                entries[name] = size
        cut = Cut(lsn, dict(tables), datetime.now(UTC), states, entries)
        if last is None:
            return cut
        return replace(
            cut,
            histories=last.histories,
            records=last.records,
            versioned=last.versioned,
            scd2=last.scd2,
        )

    def append(self, cut: Cut) -> None:
        """Record a cut, after the versions that it names are made durable."""
        self.lake.access.make_durable()
        versions, entries, histories, versioned, scd2 = (
            [(_join(name), number) for name, number in numbers.items()]
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
        }
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], CUTS))


def _order(row: Mapping[str, Any]) -> tuple[int, int, datetime]:
    return int(row["lsn"]), version_of(row), row["at"]


def _cuts(rows: Sequence[Mapping[str, Any]]) -> list[Cut]:
    return [
        Cut(
            int(row["lsn"]),
            _numbers(row, "tables"),
            row["at"],
            row.get("states"),
            _numbers(row, "entries"),
            _numbers(row, "histories"),
            dict(row.get("records") or ()),
            _numbers(row, "versioned"),
            _numbers(row, "scd2"),
        )
        for row in sorted(rows, key=_order)
    ]


def _numbers(row: Mapping[str, Any], column: str) -> dict[Name, int]:
    return {_split(name): number for name, number in row.get(column) or ()}


def read_at_cut(
    spark: SparkSession, lake: str, subscription: str, lsn: str | None = None
) -> dict[str, DataFrame]:
    """The replicas of a subscription as they were at one LSN: DataFrames by table, such as `public.orders`.

    `lake` is the path or URI in pgsieve.yaml. Reads the newest cut, or the newest at or before `lsn` (as PostgreSQL
    writes it, `16/B374D848`). Raises LakeError if there is no such cut.
    """
    cuts = Cuts(Lake(lake, lambda: spark), subscription)
    return cuts.frames(cuts.newest(lsn))


def _join(name: Name) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in name)


def _split(text: str) -> Name:
    schema, table = re.findall(r'"((?:[^"]|"")*)"', text)
    return schema.replace('""', '"'), table.replace('""', '"')
