"""Registers existing Delta tables by name in the catalog of the Spark session.

In: a session, names, and the paths of Delta tables.
Out: external tables in the session's catalog, for example the Hive metastore, Glue or Unity Catalog. The
     statements here work in each of them.

Callers call `read_location` first, so that they do not change an entry that exists already. Raises Spark's errors.

https://docs.delta.io/latest/delta-batch.html#create-a-table
"""

from dataclasses import dataclass
from urllib.parse import unquote

from pyspark.sql import SparkSession

from pgsieve.resources.lake.catalog_names import CatalogName
from pgsieve.resources.lake.delta.records import quote_name, quote_text


def quote_table_name(name: CatalogName) -> str:
    """A name of a table, quoted for Spark SQL."""
    return ".".join(map(quote_name, name))


@dataclass(frozen=True)
class SparkCatalog:
    """The catalog of a session."""

    spark: SparkSession

    def read_location(self, name: CatalogName) -> str | None:
        """The location of the table with this name; "" for an entry without a location, such as a view.

        None if there is no entry.
        """
        if not self.spark.catalog.tableExists(quote_table_name(name)):
            return None
        rows = self.spark.sql(f"describe table extended {quote_table_name(name)}").collect()
        return next((row["data_type"] for row in rows if row["col_name"] == "Location"), "")

    def register(self, name: CatalogName, path: str) -> None:
        """Register the Delta table at a path. Create the database of the name if it is missing."""
        self.spark.sql(f"create database if not exists {quote_table_name(name[:-1])}")
        self.spark.sql(f"create table {quote_table_name(name)} using delta location {quote_text(path)}")

    def unregister(self, name: CatalogName) -> None:
        """Remove an external table from the catalog. Its files stay."""
        self.spark.sql(f"drop table if exists {quote_table_name(name)}")


def is_location_of(location: str | None, path: str) -> bool:
    """True if a location in Spark's catalog is this path of the lake.

    Catalogs write `file:` before the path of a folder, and some of them encode the path as a URI. A path of the lake with
    `://` is encoded already, and Spark may write it decoded. So both are compared in both forms.
    """
    if location is None:
        return False
    paths = {path, unquote(path)} if "://" in path else {path}
    return not {_remove_scheme(location), _remove_scheme(unquote(location))}.isdisjoint(
        map(_remove_scheme, paths)
    )


def _remove_scheme(location: str) -> str:
    if location.startswith("file:"):
        location = "/" + location.removeprefix("file:").lstrip("/")
    return location.rstrip("/")
