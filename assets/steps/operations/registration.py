"""Registers replicas in the catalog of the Spark session after their copy, and unregisters them when they are dropped.

In: a subscription, and a template for names. Out: external Delta tables in the catalog, and the publisher's comments on
tables and columns in their Delta metadata. A catalog entry that pgsieve did not register stays as it is. No session is
started if there is nothing to register. Raises CatalogNameError.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pgsieve.assets.steps.records.registered_names import RegisteredNames
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.access import SPARK_ERRORS
from pgsieve.resources.lake.catalog import SparkCatalog, is_at, quoted_name
from pgsieve.resources.lake.catalog_names import CatalogName, catalog_name
from pgsieve.resources.lake.delta.errors import spark_message
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.comments import Comments, read_comments


class CatalogNameError(PgsieveError):
    """A replica cannot be registered under its name."""


@dataclass(frozen=True)
class Registration:
    """The registration of one subscription's replicas under names from a template."""

    subscription: Subscription
    lake: Lake
    template: str

    def register(self) -> tuple[str, ...]:
        """Register the replicas that are not registered yet, and update comments; returns the new names.

        Raises CatalogNameError if another entry has a name, after the other names are registered.
        """
        name, record = self.subscription.name, RegisteredNames(self.lake, self.subscription.name)
        replicas = [s.name for s in TableStates(self.lake, name).newest().values() if _is_there(s.state)]
        self._comment(replicas)
        paths_by_name = self._names(replicas)
        registered_names = record.names()
        missing = {each: path for each, path in paths_by_name.items() if registered_names.get(each) != path}
        if not missing:
            return ()
        with self.lake.access.translate_errors(self.lake.uri):
            catalog = SparkCatalog(self.lake.spark)
            taken_names = [
                each
                for each in missing
                if each not in registered_names and catalog.location(each) is not None
            ]
            new_names = {each: path for each, path in missing.items() if each not in taken_names}
            # Names are recorded before they are registered: after a crash in between, the next run registers them.
            record.note(list(new_names.items()), registered=True)
            for each, path in new_names.items():
                if not is_at(catalog.location(each), path):
                    self._register(catalog, each, path)
        if taken_names:
            names = ", ".join(map(quoted_name, taken_names))
            raise CatalogNameError(
                f'subscription "{name}": the catalog has {names} already, and pgsieve did not register it',
                hint="choose other `names` in `catalog` of pgsieve.yaml, or remove the existing entry from the catalog",
                sqlstate="42P07",
            )
        return tuple(map(quoted_name, new_names))

    def _register(self, catalog: SparkCatalog, name: CatalogName, path: str) -> None:
        try:
            catalog.register(name, path)
        except SPARK_ERRORS as error:
            self.lake.access.refuse_unavailable(error)
            if is_at(catalog.location(name), path):
                return  # Another run has registered it at the same time.
            raise CatalogNameError(
                f'subscription "{self.subscription.name}": the catalog does not take {quoted_name(name)}: {spark_message(error)}',
                hint="choose other `names` in `catalog` of pgsieve.yaml; Hive accepts letters, digits and underscores; and check"
                " that this user may create tables and databases there",
            ) from error

    def _names(self, replicas: list[Name]) -> dict[CatalogName, str]:
        """The path of each name; raises CatalogNameError if two replicas would have the same name."""
        names: dict[CatalogName, str] = {}
        tables_by_folded: dict[CatalogName, Name] = {}
        for table in sorted(replicas):
            each = catalog_name(self.template, self.subscription.name, *table)
            # Catalogs ignore letter case.
            first_table = tables_by_folded.setdefault(tuple(part.lower() for part in each), table)
            if first_table != table:
                raise CatalogNameError(
                    f'subscription "{self.subscription.name}": tables {".".join(first_table)} and {".".join(table)} would both be'
                    f" {quoted_name(each)} in the catalog",
                    hint="use {schema} in `names` of `catalog` in pgsieve.yaml, or rename one of them",
                    sqlstate="42P07",
                )
            names[each] = self.lake.paths.replica(self.subscription.name, *table)
        return names

    def _comment(self, replicas: list[Name]) -> None:
        """Set the comments in the Delta metadata of replicas to the publisher's."""
        if self.lake.by_spark_alone or not replicas:
            return
        with self.subscription.feed.source.connect() as connection:
            comments: Mapping[Name, Comments] = read_comments(connection, replicas)
        for table, of_table in comments.items():
            path = self.lake.paths.replica(self.subscription.name, *table)
            if self.lake.records.exists(path):
                columns = {self.subscription.replica_name(n): text for n, text in of_table.columns.items()}
                self.lake.comment(path, of_table.table, columns)


def _is_there(state: SyncState) -> bool:
    return state is SyncState.READY


def unregister(record: RegisteredNames) -> tuple[str, ...]:
    """Unregister the names of a subscription that pgsieve has registered and that still have their path; returns them."""
    lake = record.lake
    if not (ours := record.names()):
        return ()
    with lake.access.translate_errors(lake.uri):
        catalog = SparkCatalog(lake.spark)
        present_names = [name for name, path in ours.items() if is_at(catalog.location(name), path)]
        for name in present_names:
            catalog.unregister(name)
    record.note(list(ours.items()), registered=False)
    return tuple(map(quoted_name, present_names))
