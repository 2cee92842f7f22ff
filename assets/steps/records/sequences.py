"""The table `_sequences` of a subscription: the values of published sequences, as they were last read from the publisher.

Each process that reads the slot writes the table if a value has changed, and so does `pgsieve resync`. For each
sequence, the row with the greatest Delta version counts (column `version`, which each append adds). In this row, `published` is false if the
sequence is no longer published.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.delta.records import get_commit_version, sort_by_version
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.sequences import SequenceName, SequenceValue

#: The column `at` has the time of the read. `page_lsn` is null if the server does not report it, as servers before
#: PostgreSQL 19 do not. If a sequence cannot be read, its row has its former value and a `problem`.
SEQUENCE_SCHEMA = pa.schema(
    {
        "schema": pa.string(),
        "name": pa.string(),
        "last_value": pa.int64(),
        "is_called": pa.bool_(),
        "page_lsn": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "published": pa.bool_(),
        "problem": pa.string(),
    }
)


@dataclass(frozen=True)
class Sequences:
    """The table `_sequences` of one subscription."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.sequences(self.subscription)

    def read_version(self) -> int:
        """The newest version of the table; 0 if there is no table."""
        return self.lake.records.version(self.path) if self.lake.records.exists(self.path) else 0

    def read_newest(self) -> dict[SequenceName, SequenceValue]:
        """The values of the sequences that were published at the last read, by name."""
        return {
            name: SequenceValue(
                *name, row["last_value"], row["is_called"], row["page_lsn"], problem=row["problem"]
            )
            for name, row in self._read_newest_rows().items()
            if row["published"]
        }

    def describe_problems(self) -> list[str]:
        """A sentence for each sequence that could not be read, with the reason."""
        return describe_unread_sequences(self.read_newest().values())

    def find_counting_versions(self) -> set[int]:
        """The Delta versions of the rows that count."""
        return {get_commit_version(row) for row in self._read_newest_rows().values()}

    def _read_newest_rows(self) -> dict[SequenceName, Any]:
        return {
            (row["schema"], row["name"]): row for row in sort_by_version(self.lake.records.rows(self.path))
        }

    def append(
        self,
        values: Collection[SequenceValue],
        unpublished_values: Collection[SequenceValue],
        base_version: int,
    ) -> None:
        """Record the values of sequences. `unpublished_values` are sequences that are no longer published.

        Raises OvertakenError if `base_version` is not the present version of the table.
        """
        time = datetime.now(UTC)
        rows = [
            {
                "schema": value.schema,
                "name": value.name,
                "last_value": value.last_value,
                "is_called": value.is_called,
                "page_lsn": value.page_lsn,
                "at": time,
                "published": is_published,
                "problem": value.problem,
            }
            for group, is_published in ((values, True), (unpublished_values, False))
            for value in group
        ]
        if rows:
            self.lake.records.append_versioned(
                self.path, pa.Table.from_pylist(rows, SEQUENCE_SCHEMA), expected_version=base_version
            )


def describe_unread_sequences(values: Iterable[SequenceValue]) -> list[str]:
    """A sentence for each sequence that cannot be read, with the reason."""
    return sorted(
        f"sequence {quote_qualified(value.schema, value.name)}: {value.problem}"
        for value in values
        if value.problem
    )
