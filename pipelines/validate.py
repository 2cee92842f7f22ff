"""`pgsieve validate`: what stands in the way, before anything is created.

In: the configuration. Out: a `ValidationReport`: pictures of the publications, what each subscription will
receive, problems with PostgreSQL's SQLSTATE, and the SQL that somebody with more rights has to run.
"""

from collections.abc import Iterator

from assets.steps.subscription import Feed, Subscription
from assets.steps.validation import problems
from decoding.errors import PgsieveError
from decoding.publication import OPERATIONS, Catalog, Publication
from pipelines.config import Config
from pipelines.project import project
from pipelines.results import (
    PublicationPicture,
    ReceivedTable,
    ReceivedTables,
    ValidationProblem,
    ValidationReport,
)
from resources.postgres import quote, read_catalog
from resources.slot import capture_statements


def validate(config: Config) -> ValidationReport:
    """Look at every source and subscription; creates and changes nothing."""
    declared = project(config)
    pictures: dict[tuple[str, str], PublicationPicture] = {}
    received, found, statements = [], [], []
    for feed in declared.feeds.values():
        try:
            version = feed.source.check_ready()
            with feed.source.connect() as connection:
                server = read_catalog(connection)
            catalog = feed.with_defined(server)
        except PgsieveError as error:
            found.append(_problem(feed.source.name, error))
            continue
        sound = True
        for subscription in declared.reading(feed):
            errors = [
                _problem(subscription.name, error) for error in problems(feed, subscription.name, catalog)
            ]
            found += errors
            for name in feed.subscriptions[subscription.name]:
                if name in catalog.publications:
                    picture = _picture(catalog.publications[name], catalog)
                    pictures[feed.source.name, name] = PublicationPicture(feed.source.name, name, picture)
            try:
                received.append(_received(subscription, catalog))
            except PgsieveError:
                sound = False
        if sound:
            statements += list(_statements(feed, catalog, server, version))
    return ValidationReport(tuple(pictures.values()), tuple(received), tuple(found), tuple(statements))


def _problem(about: str, error: PgsieveError) -> ValidationProblem:
    return ValidationProblem(about, error.message, error.sqlstate, error.hint)


def _statements(feed: Feed, catalog: Catalog, server: Catalog, version: int) -> Iterator[str]:
    """What the first run will execute, where the role may; else for the DBA."""
    for planned in feed.planned_capture(catalog):
        yield from (
            s + ";" for s in capture_statements(feed.capture + planned.suffix, planned, server, version)
        )


def _received(subscription: Subscription, catalog: Catalog) -> ReceivedTables:
    tables = []
    for (schema, name), replicated in subscription.tables(catalog).items():
        listed = [a.name for a in replicated.table.attributes]
        tables.append(
            ReceivedTable(
                schema=schema,
                name=name,
                published_as=replicated.table.qualified,
                operations=tuple(o for o in OPERATIONS if o in replicated.operations),
                row_filter=" OR ".join(replicated.row_filters)
                if replicated.row_filters is not None
                else None,
                columns=None if list(replicated.columns) == listed else replicated.columns,
            )
        )
    return ReceivedTables(subscription.name, tuple(tables))


def _picture(publication: Publication, catalog: Catalog) -> str:
    r"""A publication as psql's \dRp+ shows it."""
    marks = ["t" if o in publication.operations else "f" for o in OPERATIONS]
    header = ["All tables", *(o.capitalize() + "s" for o in OPERATIONS), "Via root"]
    values = ["t" if publication.all_tables else "f", *marks, "t" if publication.via_root else "f"]
    widths = [max(len(h), len(v)) for h, v in zip(header, values, strict=True)]
    lines = [
        " | ".join(h.center(w) for h, w in zip(header, widths, strict=True)),
        "-+-".join("-" * w for w in widths),
        " | ".join(v.ljust(w) for v, w in zip(values, widths, strict=True)),
    ]
    if publication.tables:
        lines.append("Tables:")
    for entry in publication.tables:
        table = catalog.tables.get(entry.oid)
        if table is None:
            continue
        columns = ""
        if entry.columns is not None:
            columns = (
                " (" + ", ".join(quote(a.name) for a in table.attributes if a.name in entry.columns) + ")"
            )
        where = f" WHERE {entry.where}" if entry.where else ""
        lines.append(f'    "{table.qualified}"{columns}{where}')
    if publication.schemas:
        lines += ["Tables from schemas:", *(f'    "{schema}"' for schema in sorted(publication.schemas))]
    return "\n".join(lines)
