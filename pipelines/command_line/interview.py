"""The questions of `pgsieve init`, which it asks on a terminal for options that were not given.

In: the options
Out: the connection, a survey of its database, and the user's choice

Questions are printed on stderr. Raises PgsieveError in two cases: if stdin is not a terminal, and an option without a
default is missing; and if an option names something that does not exist.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import typer

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.pipelines.command_line import reports
from pgsieve.pipelines.commands.init import (
    Choice,
    ConnectionSettings,
    Survey,
    divide_publications,
    make_safe_name,
    make_unknown_name_error,
    propose_role,
    survey_database,
)
from pgsieve.pipelines.commands.results import SurveyedTable
from pgsieve.pipelines.config.identifiers import parse_qualified_name
from pgsieve.resources.postgres.errors import SourceUnreachableError


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _ask(question: str, default: str | None = None, *, is_hidden: bool = False) -> str:
    return str(typer.prompt(question, default=default, hide_input=is_hidden, err=True))


def _ask_yes_no(question: str) -> bool:
    return bool(typer.confirm(question, default=True, err=True))


@dataclass(frozen=True)
class Options:
    """The options of `pgsieve init` about the source and its tables. An option that was not given is None or empty."""

    conninfo: str | None
    password_command: str | None
    allow_untested_server: bool
    source: str | None
    subscription: str | None
    publications: Sequence[str]
    tables: Sequence[str]
    lake: str
    role: str | None
    via_root: bool | None


def connect_and_survey(options: Options) -> tuple[ConnectionSettings, Survey]:
    """Connect to the database, and find out what it has. If the server requires a password, ask for it.

    Raises SourceUnreachableError if the server does not answer.
    """
    conninfo, source_name = options.conninfo, options.source
    if conninfo is None:
        if not _is_interactive():
            raise PgsieveError(
                "--conninfo is missing", hint="e.g. --conninfo 'host=db dbname=shop user=pgsieve'"
            )
        conninfo = _ask("conninfo (e.g. host=db dbname=shop user=pgsieve, or a postgresql:// URI)")
    settings = ConnectionSettings.parse(
        conninfo, options.password_command, allow_untested_server=options.allow_untested_server
    )
    try:
        return settings, survey_database(settings, source_name)
    except SourceUnreachableError as error:
        has_password = settings.password is not None or settings.password_command
        if has_password or "password" not in error.message or not _is_interactive():
            raise
    settings = replace(settings, password=_ask("password", is_hidden=True))
    return settings, survey_database(settings, source_name)


def make_choice(survey: Survey, options: Options) -> Choice:
    """Find out what to replicate, and under which names. By default, a partitioned table is replicated as one table."""
    publications, tables, via_root = options.publications, options.tables, options.via_root
    if publications and tables:
        raise PgsieveError(
            "--publication and --table exclude each other",
            hint="name publications of the server, or tables for a publication that pgsieve.yaml defines",
        )
    other_groups = list[list[str]]()
    if not publications and not tables:
        (publications, *other_groups), tables = _ask_what_to_replicate(survey)
    publication_names = [publication.name for publication in survey.publications]
    for name in publications:
        if name not in publication_names:
            raise make_unknown_name_error("publication", name, publication_names)
    survey_tables = tuple(_find_table(survey, table) for table in tables)
    partitioned_tables = [
        quote_qualified(table.schema, table.name) for table in survey_tables if table.partitioned
    ]
    if via_root is None and partitioned_tables and _is_interactive():
        via_root = _ask_yes_no(
            f"publish {', '.join(partitioned_tables)} as one table each, not as its partitions"
        )
    source_name = options.source or make_safe_name(survey.database)
    default_name = make_safe_name(publications[0] if publications else f"{source_name}_replica")
    subscription_name = options.subscription or default_name
    return Choice(
        source=source_name,
        subscription=subscription_name,
        lake=options.lake,
        role=options.role or propose_role(survey),
        publications=tuple(publications),
        tables=survey_tables,
        via_root=via_root is not False,
        other_subscriptions=_name_subscriptions(other_groups, subscription_name),
    )


def _name_subscriptions(groups: Sequence[Sequence[str]], taken_name: str) -> dict[str, Sequence[str]]:
    """Name a subscription for each group of publications, after its first one; no name occurs twice."""
    group_by_name = dict[str, Sequence[str]]()
    for group in groups:
        name = base = make_safe_name(group[0])
        numbers = count(2)
        while name == taken_name or name in group_by_name:
            name = f"{base}_{next(numbers)}"
        group_by_name[name] = group
    return group_by_name


def _ask_what_to_replicate(survey: Survey) -> tuple[list[list[str]], list[str]]:
    """Ask for publications, or for tables if there are no publications.

    Returns the chosen publications, in a group for each subscription, and the chosen tables. If tables are chosen, the only
    group is empty. Without a terminal, all publications that have tables are chosen. Together they may need
    several subscriptions (`divide_publications`).
    """
    publications = [publication.name for publication in survey.publications if publication.tables]
    all_tables = [quote_qualified(table.schema, table.name) for table in survey.tables]
    if not _is_interactive():
        if not publications:
            raise PgsieveError(
                f'database "{survey.database}" has no publication with tables',
                hint="name tables with --table, or create a publication",
            )
        return divide_publications(publications, survey.catalog), []
    reports.print_survey(survey.publications, survey.tables)
    if publications:
        all_names = ", ".join(publications)
        answer = _ask("publications, separated by commas", all_names)
        # A name may contain a comma.
        if answer == all_names:
            return divide_publications(publications, survey.catalog), []
        return [_strip_names(answer.split(","))], []
    if not all_tables:
        raise PgsieveError(f'database "{survey.database}" has no tables', hint="name another database")
    answer = _ask("no publication yet; tables to publish by pgsieve.yaml, separated by commas", "all")
    # A comma within double quotes is a part of a name.
    return [[]], all_tables if answer == "all" else _strip_names(re.findall(r'(?:[^",]|"[^"]*"?)+', answer))


def _strip_names(names: Sequence[str]) -> list[str]:
    return [name.strip() for name in names if name.strip()]


def _find_table(survey: Survey, name: str) -> SurveyedTable:
    try:
        schema, table = parse_qualified_name(name, 2)
    except ValueError as error:
        raise PgsieveError(
            f"table {name}: {error}", hint="write it as in SQL, with its schema: public.orders"
        ) from None
    tables_by_name = {
        (surveyed_table.schema, surveyed_table.name): surveyed_table for surveyed_table in survey.tables
    }
    if (schema, table) not in tables_by_name:
        raise make_unknown_name_error(
            "table", name, [quote_qualified(*table_name) for table_name in list(tables_by_name)[:20]]
        )
    return tables_by_name[schema, table]
