"""The table `_registered` of a subscription: the names in the catalog that pgsieve has registered.

pgsieve changes only these names. Registration writes the table before it registers a name, and after it
unregisters one. The newest row of a name counts.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from pgsieve.resources.lake.catalog_names import CatalogName
from pgsieve.resources.lake.delta.records import in_order
from pgsieve.resources.lake.lake import Lake

#: `name` has the parts as a JSON list.
REGISTERED = pa.schema(
    {"at": pa.timestamp("us", "UTC"), "name": pa.string(), "path": pa.string(), "registered": pa.bool_()}
)


@dataclass(frozen=True)
class Registered:
    """The names that pgsieve has registered for one subscription."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.registered(self.subscription)

    def names(self) -> dict[CatalogName, str]:
        """Each name with the path for which it was registered."""
        newest = {row["name"]: row for row in in_order(self.lake.records.rows(self.path))}
        return {tuple(json.loads(name)): row["path"] for name, row in newest.items() if row["registered"]}

    def note(self, names: Collection[tuple[CatalogName, str]], *, registered: bool) -> None:
        """Record that names are registered for paths, or no longer are."""
        if names:
            now = datetime.now(UTC)
            rows = [
                {"at": now, "name": json.dumps(name), "path": path, "registered": registered}
                for name, path in names
            ]
            self.lake.records.append_versioned(self.path, pa.Table.from_pylist(rows, REGISTERED))
