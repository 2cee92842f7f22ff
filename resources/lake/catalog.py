"""Registers existing Delta tables by name in the catalog of the Spark session.

In: a session, names, the paths of Delta tables. Out: external tables of the Hive metastore, Glue, Unity
Catalog, or another catalog of the session. The statements are those that every catalog supports. Callers
first ask `location`, so no existing entry is changed. Raises Spark's errors.

https://docs.delta.io/latest/delta-batch.html#create-a-table
"""

from dataclasses import dataclass
from urllib.parse import unquote

from pyspark.sql import SparkSession

from pgsieve.resources.lake.catalog_names import CatalogName
from pgsieve.resources.lake.delta.records import literal, quoted


def written(name: CatalogName) -> str:
    """A quoted name for Spark SQL."""
    return ".".join(map(quoted, name))


@dataclass(frozen=True)
class SparkCatalog:
    """The catalog of one session."""

    spark: SparkSession

    def location(self, name: CatalogName) -> str | None:
        """The location of the table of this name.

        Empty for an entry without a location (a view), None if there is no entry.
        """
        if not self.spark.catalog.tableExists(written(name)):
            return None
        rows = self.spark.sql(f"describe table extended {written(name)}").collect()
        return next((row["data_type"] for row in rows if row["col_name"] == "Location"), "")

    def register(self, name: CatalogName, path: str) -> None:
        """Register the Delta table at a path; create its database if it is missing."""
        self.spark.sql(f"create database if not exists {written(name[:-1])}")
        self.spark.sql(f"create table {written(name)} using delta location {literal(path)}")

    def unregister(self, name: CatalogName) -> None:
        """Remove an external table from the catalog; its files stay."""
        self.spark.sql(f"drop table if exists {written(name)}")


def is_at(location: str | None, path: str) -> bool:
    """Whether a catalog's location is a path of the lake.

    Catalogs write `file:` before a folder, and may encode it.
    """
    return location is not None and _bare(location) in {_bare(path), _bare(unquote(path))}


def _bare(location: str) -> str:
    if location.startswith("file:"):
        location = "/" + location.removeprefix("file:").lstrip("/")
    return location.rstrip("/")
