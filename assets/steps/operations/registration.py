"""Registers replicas in the catalog of the Spark session after their copy, and removes them there when they are dropped.

In: a subscription, and a template for names such as `{subscription}.{schema}_{table}`
Out: - external Delta tables in the catalog
     - the publisher's comments on tables and columns, in the Delta metadata of the replicas

An entry of the catalog that pgsieve has not registered stays as it is. If there is nothing to register, no session is
started. Raises CatalogNameError if a replica cannot be registered.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pgsieve.assets.steps.records.registered_names import RegisteredNames
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.access import SPARK_ERRORS
from pgsieve.resources.lake.catalog import SparkCatalog, is_location_of, quote_table_name
from pgsieve.resources.lake.catalog_names import CatalogName, format_catalog_name
from pgsieve.resources.lake.delta.errors import LakeError, describe_spark_error
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.comments import Comments, read_comments
from pgsieve.resources.work import name_jobs


class CatalogNameError(PgsieveError):
    """A replica cannot be registered under its name."""


@dataclass(frozen=True)
class Registration:
    """Registers the replicas of one subscription under names that follow a template."""

    subscription: Subscription
    lake: Lake
    template: str

    def register(self) -> tuple[str, ...]:
        """Register the replicas that are not registered yet, and update comments; returns the new names.

        If the catalog already has another entry with one of the names, CatalogNameError is raised after the registration
        of the other names.
        """
        name, record = self.subscription.name, RegisteredNames(self.lake, self.subscription.name)
        replicas = [
            state.name
            for state in TableStates(self.lake, name).read_newest().values()
            if _is_ready(state.state)
        ]
        self._set_comments(replicas)
        path_by_name = self._find_path_by_name(replicas)
        recorded_names = record.names()
        path_by_missing_name = {
            entry_name: path
            for entry_name, path in path_by_name.items()
            if recorded_names.get(entry_name) != (path, True)
        }
        if not path_by_missing_name:
            return ()
        with self.lake.access.translate_errors(self.lake.uri), name_jobs(name, "registration in the catalog"):
            catalog = SparkCatalog(self.lake.spark)
            path_by_new_name = {
                entry_name: path
                for entry_name, path in path_by_missing_name.items()
                if self._make_room(catalog, entry_name, path, recorded_names.get(entry_name, (None,))[0])
            }
            taken_names = [
                entry_name for entry_name in path_by_missing_name if entry_name not in path_by_new_name
            ]
            # Record the names first: after a crash the next run knows that they are pgsieve's own, and registers the
            # missing ones.
            record.note(list(path_by_new_name.items()), is_registered=None)
            for entry_name, path in path_by_new_name.items():
                if not is_location_of(catalog.read_location(entry_name), path):
                    self._register(catalog, entry_name, path)
            record.note(list(path_by_new_name.items()), is_registered=True)
        if taken_names:
            names = ", ".join(map(quote_table_name, taken_names))
            raise CatalogNameError(
                f'subscription "{name}": the catalog has {names} already, and pgsieve did not register it for this replica',
                hint="choose other `names` in `catalog` of pgsieve.yaml, or remove the existing entry from the catalog",
                sqlstate="42P07",
            )
        return tuple(map(quote_table_name, path_by_new_name))

    def _make_room(
        self, catalog: SparkCatalog, name: CatalogName, path: str, recorded_path: str | None
    ) -> bool:
        """Make a name of the catalog free for a path. Returns false if another entry keeps the name.

        `recorded_path` is the path for which pgsieve has recorded the name; None if there is none. If no table is at
        the path of the entry any more, the lake was moved, and the entry is removed. If a table is there, the lake was
        copied, and the entry stays with the other lake.
        """
        location = catalog.read_location(name)
        if location is None or recorded_path is None:
            return location is None
        if is_location_of(location, path):
            return True
        if not is_location_of(location, recorded_path) or self._may_exist(recorded_path):
            return False
        catalog.unregister(name)
        return True

    def _may_exist(self, path: str) -> bool:
        """True if there is a table at this path of a lake, or if that cannot be found out."""
        try:
            return self.lake.records.exists(path)
        except LakeError:
            return True

    def _register(self, catalog: SparkCatalog, name: CatalogName, path: str) -> None:
        try:
            catalog.register(name, path)
        except SPARK_ERRORS as error:
            self.lake.access.raise_if_unavailable(error)
            if is_location_of(catalog.read_location(name), path):
                return  # Another run has registered the name at the same time.
            raise CatalogNameError(
                f'subscription "{self.subscription.name}": the catalog does not take {quote_table_name(name)}: {describe_spark_error(error)}',
                hint="choose other `names` in `catalog` of pgsieve.yaml; Hive accepts letters, digits and underscores; and check that this user may create tables and databases there",
            ) from error

    def _find_path_by_name(self, replicas: list[Name]) -> dict[CatalogName, str]:
        """Map the catalog's name of each replica to its path. Raises CatalogNameError if two replicas would share a name."""
        path_by_name: dict[CatalogName, str] = {}
        table_by_folded_name: dict[CatalogName, Name] = {}
        for table in sorted(replicas):
            entry_name = format_catalog_name(self.template, self.subscription.name, *table)
            # Catalogs do not distinguish upper and lower case.
            first_table = table_by_folded_name.setdefault(tuple(part.lower() for part in entry_name), table)
            if first_table != table:
                raise CatalogNameError(
                    f'subscription "{self.subscription.name}": tables {quote_qualified(*first_table)} and {quote_qualified(*table)} would both be {quote_table_name(entry_name)} in the catalog',
                    hint="use {schema} in `names` of `catalog` in pgsieve.yaml, or rename one of them",
                    sqlstate="42P07",
                )
            path_by_name[entry_name] = self.lake.paths.replica(self.subscription.name, *table)
        return path_by_name

    def _set_comments(self, replicas: list[Name]) -> None:
        """Set the comments in the Delta metadata of replicas to those of the publisher."""
        if self.lake.is_reached_by_spark_only or not replicas:
            return
        with self.subscription.slot_stream.source.connect() as connection:
            comments: Mapping[Name, Comments] = read_comments(connection, replicas)
        for table, table_comments in comments.items():
            path = self.lake.paths.replica(self.subscription.name, *table)
            if self.lake.records.exists(path):
                columns = {
                    self.subscription.replica_name(column): text
                    for column, text in table_comments.comment_by_column.items()
                }
                self.lake.set_comments(path, table_comments.table_comment, columns)


def _is_ready(state: SyncState) -> bool:
    return state is SyncState.READY


def unregister(record: RegisteredNames) -> tuple[str, ...]:
    """Remove the names of a subscription from the catalog; returns them.

    Only names are removed that pgsieve has registered, and that still have the same path.
    """
    lake = record.lake
    if not (path_by_name := {name: path for name, (path, _) in record.names().items()}):
        return ()
    with (
        lake.access.translate_errors(lake.uri),
        name_jobs(record.subscription, "removal from the catalog"),
    ):
        catalog = SparkCatalog(lake.spark)
        present_names = [
            name for name, path in path_by_name.items() if is_location_of(catalog.read_location(name), path)
        ]
        for name in present_names:
            catalog.unregister(name)
    record.note(list(path_by_name.items()), is_registered=False)
    return tuple(map(quote_table_name, present_names))
