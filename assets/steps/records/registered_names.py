"""The table `_registered` of a subscription: the names that pgsieve has registered in Spark's catalog.

pgsieve changes no other names in the catalog. A name is recorded twice: before it is registered, with NULL as
`registered`, and afterwards with true. After a name was removed from the catalog, it is recorded with false. The newest
row of a name counts.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from pgsieve.resources.lake.catalog_names import CatalogName
from pgsieve.resources.lake.delta.records import sort_by_version
from pgsieve.resources.lake.lake import Lake

#: The column `name` has the parts of the name as a JSON list.
REGISTERED_SCHEMA = pa.schema(
    {"at": pa.timestamp("us", "UTC"), "name": pa.string(), "path": pa.string(), "registered": pa.bool_()}
)


@dataclass(frozen=True)
class RegisteredNames:
    """The table `_registered` of one subscription. `Registration` writes it."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.registered_names(self.subscription)

    def names(self) -> dict[CatalogName, tuple[str, bool]]:
        """Maps each name to the path of its table, and to whether it is certainly registered.

        If it is not certain, a process has begun to register the name, and may have been killed.
        """
        newest_rows = {row["name"]: row for row in sort_by_version(self.lake.records.rows(self.path))}
        return {
            tuple(json.loads(name)): (row["path"], row["registered"] is True)
            for name, row in newest_rows.items()
            if row["registered"] is not False
        }

    def note(self, names: Collection[tuple[CatalogName, str]], *, is_registered: bool | None) -> None:
        """Record whether names are registered for paths. None means that they are about to be registered."""
        if names:
            time = datetime.now(UTC)
            rows = [
                {"at": time, "name": json.dumps(name), "path": path, "registered": is_registered}
                for name, path in names
            ]
            self.lake.records.append_versioned(self.path, pa.Table.from_pylist(rows, REGISTERED_SCHEMA))
