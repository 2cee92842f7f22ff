"""Records the published tables in a file, so that Dagster can load the definitions without a connection to a source.

A slot stream is a replication slot with the subscriptions that read it.

In: the catalogs of the sources. They are read at deploy time or on request (`fetch_published`).
Out: - the text of the file (`RecordedCatalogs.to_json`)
     - from that text, the published tables of each subscription (`find_recorded_tables`)

If the file lacks a stream, the lake's own records are used instead: the catalog that was recorded last for the stream, or
if there is none, the states of the tables. If the lake has no records either, the subscription has no tables yet. None
of this is an error.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from dagster import get_dagster_logger

from pgsieve.assets.published import PublishedTable, Tables
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import Project
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.postgres.comments import read_comments
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.wal import read_current_lsn

_FORMAT_VERSION = 1
#: If the text was written by another version of pgsieve, parsing it may raise these errors.
_PARSE_ERRORS = (AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class RecordedCatalogs:
    """The catalogs of the streams at the time they were read.

    - `catalogs`: maps the name of a stream to an LSN, and to the catalog at this LSN as JSON. The catalog has only the
      publications to which the stream's subscriptions subscribe, and their tables.
    - `comments`: maps the name of a stream to the comments (COMMENT ON TABLE) on its tables
    """

    catalogs: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    comments: Mapping[str, Mapping[TableName, str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write the catalogs and comments as text, which `from_json` reads."""
        slot_streams = {
            name: {
                "lsn": lsn,
                "catalog": json.loads(text),
                "comments": [[*table, comment] for table, comment in self.comments.get(name, {}).items()],
            }
            for name, (lsn, text) in self.catalogs.items()
        }
        return json.dumps({"format": _FORMAT_VERSION, "feeds": slot_streams}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "RecordedCatalogs":
        """Parse a text of `to_json`. If another version of pgsieve wrote the text, the result is empty."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT_VERSION:
                return cls()
            slot_streams = content["feeds"].items()
            return cls(
                {
                    slot_stream_name: (
                        int(slot_stream_entry["lsn"]),
                        json.dumps(slot_stream_entry["catalog"], ensure_ascii=False),
                    )
                    for slot_stream_name, slot_stream_entry in slot_streams
                },
                {
                    slot_stream_name: {
                        (schema, name): text for schema, name, text in slot_stream_entry.get("comments", ())
                    }
                    for slot_stream_name, slot_stream_entry in slot_streams
                },
            )
        except _PARSE_ERRORS:
            return cls()


def _fetch_catalog(slot_stream: SlotStream) -> tuple[tuple[int, str], dict[TableName, str]]:
    """Read the catalog of a stream from its source: the LSN and the catalog as JSON, and the comments on the tables."""
    with slot_stream.source.connect() as connection:
        lsn, catalog = (
            read_current_lsn(connection),
            slot_stream.with_defined_publications(read_present_catalog(connection)),
        )
        comments = read_comments(connection, [(t.schema, t.name) for t in catalog.tables.values()])
    names = sorted(
        {
            publication_name
            for publications in slot_stream.subscriptions.values()
            for publication_name in publications
        }
    )
    return (lsn, catalog_to_json(catalog, names)), {
        table_name: comment.table_comment for table_name, comment in comments.items() if comment.table_comment
    }


def get_published_path(config: Config) -> Path:
    """The path of the file, in a folder beside pgsieve.yaml. `pgsieve ui` and `pgsieve refresh-defs-state` write the file."""
    return config.state_folder / "published.json"


def load_published(config: Config) -> RecordedCatalogs:
    """Read the file. The result is empty if the file cannot be read."""
    try:
        return RecordedCatalogs.from_json(get_published_path(config).read_text(encoding="utf-8"))
    except OSError:
        return RecordedCatalogs()


def fetch_published(
    project: Project, earlier_published: RecordedCatalogs
) -> tuple[RecordedCatalogs, list[PgsieveError]]:
    """Read the catalogs of all streams from their sources. Returns the catalogs, and the errors of sources that failed.

    If a source fails, its streams keep their entries in `earlier_published`.
    """
    catalogs_by_slot_stream = {
        name: catalog for name, catalog in earlier_published.catalogs.items() if name in project.slot_streams
    }
    comments_by_slot_stream = {
        name: texts for name, texts in earlier_published.comments.items() if name in project.slot_streams
    }
    errors = []
    for slot_stream in project.slot_streams.values():
        try:
            catalogs_by_slot_stream[slot_stream.name], comments_by_slot_stream[slot_stream.name] = (
                _fetch_catalog(slot_stream)
            )
        except PgsieveError as error:
            errors.append(error)
    return RecordedCatalogs(catalogs_by_slot_stream, comments_by_slot_stream), errors


def refresh_published(config: Config, project: Project) -> list[PgsieveError]:
    """Read the catalogs of all streams from their sources, and write them to the file; returns the errors.

    If a source fails, its streams keep their entries in the file.
    """
    published, errors = fetch_published(project, load_published(config))
    path = get_published_path(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may do this at the same time, so each has a temporary file of its own.
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            temporary_path = Path(folder) / path.name
            temporary_path.write_text(published.to_json(), encoding="utf-8")
            temporary_path.replace(path)
    except OSError as error:
        errors.append(
            PgsieveError(
                f"{path} cannot be written: {error.strerror}",
                hint="make its folder writable; until then the published tables are taken from the lake's records",
            )
        )
    return errors


def find_recorded_tables(
    project: Project, published: RecordedCatalogs, *, is_authoritative: bool = False
) -> dict[str, Tables]:
    """Maps each subscription to its published tables, as they were recorded last.

    Connects to no source, and raises no error. Both `published` and the lake may have a catalog of a stream. In that case
    the newer catalog is used. With `is_authoritative`, that of `published` is used even if it is older, and the lake is
    read only for streams that `published` lacks.
    """
    tables_by_subscription: dict[str, Tables] = {}
    catalogs_by_slot_stream: dict[str, list[tuple[int, Catalog]]] = {}
    for subscription in project.subscriptions.values():
        slot_stream = subscription.slot_stream
        if slot_stream.name not in catalogs_by_slot_stream:
            catalogs_by_slot_stream[slot_stream.name] = list(
                _list_recorded_catalogs(project, slot_stream, published, is_authoritative=is_authoritative)
            )
        comments = published.comments.get(slot_stream.name, {})
        recorded_tables_of_slot_stream = (
            _find_tables_in_catalog(subscription, catalog, comments)
            for _, catalog in catalogs_by_slot_stream[slot_stream.name]
        )
        tables = next(
            (candidate for candidate in recorded_tables_of_slot_stream if candidate is not None), None
        )
        tables_by_subscription[subscription.name] = (
            _find_replica_tables(project, subscription, is_spark_avoided=True) if tables is None else tables
        )
    return tables_by_subscription


def find_published_tables(project: Project, subscriptions: Iterable[Subscription]) -> dict[str, Tables]:
    """Maps each subscription to the tables that it replicates, by the present catalog of its source.

    If the source cannot be reached, or a publication is missing, the tables that have a replica are returned instead.
    The run that follows reports the problem, and the other subscriptions are not affected.
    """
    catalogs_by_source: dict[str, Catalog | None] = {}
    tables_by_subscription: dict[str, Tables] = {}
    for subscription in subscriptions:
        slot_stream = subscription.slot_stream
        if slot_stream.source.name not in catalogs_by_source:
            catalogs_by_source[slot_stream.source.name] = _read_current_catalog(slot_stream)
        catalog = catalogs_by_source[slot_stream.source.name]
        present_tables = None if catalog is None else _find_tables_in_catalog(subscription, catalog, {})
        tables_by_subscription[subscription.name] = (
            _find_replica_tables(project, subscription) if present_tables is None else present_tables
        )
    return tables_by_subscription


def _read_current_catalog(slot_stream: SlotStream) -> Catalog | None:
    """Read the catalog of a stream's source. Returns None, and logs a warning, if the source cannot be reached."""
    try:
        with slot_stream.source.connect() as connection:
            return read_present_catalog(connection)
    except SourceUnreachableError as error:
        get_dagster_logger().warning(str(error))
        return None


def _list_recorded_catalogs(
    project: Project, slot_stream: SlotStream, published: RecordedCatalogs, *, is_authoritative: bool
) -> Iterator[tuple[int, Catalog]]:
    """The recorded catalogs of a stream with their LSNs, the newest first: from the file, and from the lake."""
    catalogs: list[tuple[int, Catalog]] = []
    if (file_catalog := published.catalogs.get(slot_stream.name)) is not None:
        try:
            catalogs.append((file_catalog[0], catalog_from_json(file_catalog[1])))
        except _PARSE_ERRORS:
            get_dagster_logger().warning(
                f"{slot_stream.name}: another version of pgsieve has recorded its publications"
            )
    if not (is_authoritative and catalogs):
        catalogs += _read_lake_catalog(project, slot_stream)
    yield from sorted(catalogs, key=lambda catalog_with_lsn: catalog_with_lsn[0], reverse=True)


def _read_lake_catalog(project: Project, slot_stream: SlotStream) -> list[tuple[int, Catalog]]:
    """The catalog that the lake recorded last for a stream, in a list; the list is empty if there is none.

    If only Spark can read the lake, the result is also empty, because the start of Spark would take long.
    """
    try:
        lake = project.lake.open()
        newest_catalog = None if lake.is_reached_by_spark_only else Catalogs(lake, slot_stream).read_newest()
    except PgsieveError as error:
        get_dagster_logger().warning(f"{slot_stream.name}: {error}")
        return []
    except _PARSE_ERRORS:
        get_dagster_logger().warning(f"{slot_stream.name}: the catalog in the lake is of another version")
        return []
    return [] if newest_catalog is None else [newest_catalog]


def _find_tables_in_catalog(
    subscription: Subscription, catalog: Catalog, comments: Mapping[TableName, str]
) -> Tables | None:
    """The tables that a catalog publishes to a subscription; None if there is a problem, such as a missing publication.

    `comments` maps tables to their comments.
    """
    try:
        replicated_tables = subscription.tables(subscription.slot_stream.with_defined_publications(catalog))
    except PgsieveError as error:
        get_dagster_logger().warning(f"{subscription.name}: {error}")
        return None
    return {
        name: PublishedTable.from_catalog(table, comments.get(name))
        for name, table in replicated_tables.items()
    }


def _find_replica_tables(
    project: Project, subscription: Subscription, *, is_spark_avoided: bool = False
) -> Tables:
    """The tables of a subscription that have a replica, by the table states in the lake.

    With `is_spark_avoided` the result is empty if only Spark can read the lake, because it would take long to start Spark.
    """
    publications = subscription.slot_stream.subscriptions[subscription.name]
    try:
        lake = project.lake.open()
        states_by_name = (
            {}
            if is_spark_avoided and lake.is_reached_by_spark_only
            else TableStates(lake, subscription.name).read_newest()
        )
    except PgsieveError as error:
        get_dagster_logger().warning(f"{subscription.name}: {error}")
        return {}
    return {
        name: PublishedTable.from_state(state, publications)
        for name, state in states_by_name.items()
        if state.definition is not None and state.state != SyncState.REMOVED
    }
