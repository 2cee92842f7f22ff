"""Records the published tables in a file, so that Dagster's definitions load without asking a source.

In: the catalogs of the sources, at deploy time or on request (`fetch_published`). Out: text (`to_json`), and
from it the tables of each subscription (`recorded_tables`). A feed (a slot with its subscriptions) that is not in
the file has the tables of the lake's records: those of the last recorded catalog, or else of the table states.
Missing information is no error.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dagster import get_dagster_logger

from pgsieve.assets.dagster_names import Name
from pgsieve.assets.published import PublishedTable, Tables
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import Project
from pgsieve.resources.postgres.comments import read_comments
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.wal import current_lsn

_FORMAT_VERSION = 1
#: The errors that parsing the text of another version may raise.
_OTHER_VERSION_ERRORS = (AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Published:
    """By feed: an LSN, and the part of the catalog at this LSN that its subscriptions need, as JSON.

    `comments` has the comments on tables, by feed.
    """

    catalogs: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    comments: Mapping[str, Mapping[Name, str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text for `from_json`."""
        feeds = {
            name: {
                "lsn": lsn,
                "catalog": json.loads(text),
                "comments": [[*table, comment] for table, comment in self.comments.get(name, {}).items()],
            }
            for name, (lsn, text) in self.catalogs.items()
        }
        return json.dumps({"format": _FORMAT_VERSION, "feeds": feeds}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Published":
        """Parse a text of `to_json`; empty if another version of pgsieve wrote it."""
        try:
            read = json.loads(text)
            if read["format"] != _FORMAT_VERSION:
                return cls()
            feeds = read["feeds"].items()
            return cls(
                {n: (int(f["lsn"]), json.dumps(f["catalog"], ensure_ascii=False)) for n, f in feeds},
                {n: {(schema, name): text for schema, name, text in f.get("comments", ())} for n, f in feeds},
            )
        except _OTHER_VERSION_ERRORS:
            return cls()


def _fetch_feed(feed: Feed) -> tuple[tuple[int, str], dict[Name, str]]:
    """The LSN and catalog of a feed, and the comments on its tables."""
    with feed.source.connect() as connection:
        lsn, catalog = current_lsn(connection), feed.with_defined_publications(present_catalog(connection))
        comments = read_comments(connection, [(t.schema, t.name) for t in catalog.tables.values()])
    names = sorted({p for publications in feed.subscriptions.values() for p in publications})
    return (lsn, catalog_to_json(catalog, names)), {n: c.table for n, c in comments.items() if c.table}


def state_file(config: Config) -> Path:
    """The file of `pgsieve ui` and `pgsieve refresh-defs-state`, beside the configuration file."""
    return config.state_folder / "published.json"


def load_published(config: Config) -> Published:
    """Read the file; empty if it does not exist."""
    try:
        return Published.from_json(state_file(config).read_text(encoding="utf-8"))
    except OSError:
        return Published()


def fetch_published(project: Project, earlier: Published) -> tuple[Published, list[PgsieveError]]:
    """Ask the sources for their publications; also returns the errors.

    The feed of a source with an error keeps its earlier entry.
    """
    catalogs = {n: c for n, c in earlier.catalogs.items() if n in project.feeds}
    comments, errors = {n: c for n, c in earlier.comments.items() if n in project.feeds}, []
    for feed in project.feeds.values():
        try:
            catalogs[feed.name], comments[feed.name] = _fetch_feed(feed)
        except PgsieveError as error:
            errors.append(error)
    return Published(catalogs, comments), errors


def refresh_published(config: Config, project: Project) -> list[PgsieveError]:
    """Ask the sources for their publications, and write the file; returns the errors.

    The feed of a source with an error keeps its earlier entry.
    """
    published, errors = fetch_published(project, load_published(config))
    file = state_file(config)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".new")
        temporary.write_text(published.to_json(), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        errors.append(
            PgsieveError(
                f"{file} cannot be written: {error.strerror}",
                hint="make its folder writable; until then the published tables are taken from the lake's records",
            )
        )
    return errors


def recorded_tables(
    project: Project, published: Published, *, authoritative: bool = False
) -> dict[str, Tables]:
    """The tables of each subscription, without asking a source; raises nothing.

    If both `published` and the lake have a feed's catalog, the newer catalog decides. With `authoritative` the
    catalog of the lake is read only for feeds that `published` lacks.
    """
    by_subscription: dict[str, Tables] = {}
    catalogs_by_feed: dict[str, list[tuple[int, Catalog]]] = {}
    for subscription in project.subscriptions.values():
        feed = subscription.feed
        if feed.name not in catalogs_by_feed:
            catalogs_by_feed[feed.name] = list(
                _recorded_catalogs(project, feed, published, authoritative=authoritative)
            )
        comments = published.comments.get(feed.name, {})
        candidates = (
            _tables_of_catalog(subscription, catalog, comments) for _, catalog in catalogs_by_feed[feed.name]
        )
        tables = next((each for each in candidates if each is not None), None)
        by_subscription[subscription.name] = (
            _replica_tables(project, subscription, without_spark=True) if tables is None else tables
        )
    return by_subscription


def published_tables(project: Project, subscriptions: Iterable[Subscription]) -> dict[str, Tables]:
    """The tables that each subscription replicates, by the current catalog of its source.

    If the source does not answer or a publication is missing, the tables with replicas are returned. The run
    then reports the problem, which has no effect on other subscriptions.
    """
    catalogs: dict[str, Catalog | None] = {}
    tables: dict[str, Tables] = {}
    for subscription in subscriptions:
        feed = subscription.feed
        if feed.source.name not in catalogs:
            catalogs[feed.source.name] = _current_catalog(feed)
        catalog = catalogs[feed.source.name]
        present_tables = None if catalog is None else _tables_of_catalog(subscription, catalog, {})
        tables[subscription.name] = (
            _replica_tables(project, subscription) if present_tables is None else present_tables
        )
    return tables


def _current_catalog(feed: Feed) -> Catalog | None:
    try:
        with feed.source.connect() as connection:
            return present_catalog(connection)
    except SourceUnreachableError as error:
        get_dagster_logger().warning(str(error))
        return None


def _recorded_catalogs(
    project: Project, feed: Feed, published: Published, *, authoritative: bool
) -> Iterator[tuple[int, Catalog]]:
    """The recorded catalogs of a feed's publications, the newest first."""
    catalogs: list[tuple[int, Catalog]] = []
    if (catalog := published.catalogs.get(feed.name)) is not None:
        try:
            catalogs.append((catalog[0], catalog_from_json(catalog[1])))
        except _OTHER_VERSION_ERRORS:
            get_dagster_logger().warning(
                f"{feed.name}: another version of pgsieve has recorded its publications"
            )
    if not (authoritative and catalogs):
        catalogs += _lake_catalog(project, feed)
    yield from sorted(catalogs, key=lambda each: each[0], reverse=True)


def _lake_catalog(project: Project, feed: Feed) -> list[tuple[int, Catalog]]:
    """The lake's last catalog of a feed; empty if only Spark can read the lake, as that takes long."""
    try:
        lake = project.lake.open()
        newest = None if lake.by_spark_alone else Catalogs(lake, feed).newest()
    except PgsieveError as error:
        get_dagster_logger().warning(f"{feed.name}: {error}")
        return []
    except _OTHER_VERSION_ERRORS:
        get_dagster_logger().warning(f"{feed.name}: the catalog in the lake is of another version")
        return []
    return [] if newest is None else [newest]


def _tables_of_catalog(
    subscription: Subscription, catalog: Catalog, comments: Mapping[Name, str]
) -> Tables | None:
    """The tables that a catalog publishes to a subscription; None if its publications have an error."""
    try:
        replicated_tables = subscription.tables(subscription.feed.with_defined_publications(catalog))
    except PgsieveError as error:
        get_dagster_logger().warning(f"{subscription.name}: {error}")
        return None
    return {
        name: PublishedTable.of_catalog(table, comments.get(name))
        for name, table in replicated_tables.items()
    }


def _replica_tables(project: Project, subscription: Subscription, *, without_spark: bool = False) -> Tables:
    """The tables with a replica, from the lake.

    With `without_spark`, empty if only Spark can read the lake, which takes long.
    """
    publications = subscription.feed.subscriptions[subscription.name]
    try:
        lake = project.lake.open()
        states = (
            {} if without_spark and lake.by_spark_alone else TableStates(lake, subscription.name).newest()
        )
    except PgsieveError as error:
        get_dagster_logger().warning(f"{subscription.name}: {error}")
        return {}
    return {
        name: PublishedTable.of_replica(state, publications)
        for name, state in states.items()
        if state.definition is not None and state.state != SyncState.REMOVED
    }
