"""`pgsieve init`: writes a first pgsieve.yaml, and the SQL that gives a role the rights to replicate.

In: - a conninfo, from which `survey_database` learns what the database has
    - the user's `Choice` of publications or tables
Out: the two files, and an `InitReport`

The command changes nothing on the server. It writes no password: pgsieve.yaml names an environment variable instead.
Raises SourceError if the database does not answer, and PgsieveError if a file exists already.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from psycopg.conninfo import make_conninfo

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog, Publication, PublicationError, Table
from pgsieve.decoding.publications.published_tables import find_replicated_tables
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.pipelines.commands.results import InitReport, SurveyedPublication, SurveyedTable
from pgsieve.pipelines.commands.validate import validate
from pgsieve.pipelines.commands.validation_results import (
    ValidationReport,
)
from pgsieve.pipelines.config.model import Config, parse_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.passwords import SECRET_KEYWORDS
from pgsieve.resources.postgres.capture import CREATED_COMMENT
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.errors import UntestedServerError
from pgsieve.resources.postgres.sessions import parse_conninfo
from pgsieve.resources.postgres.source import Source

_HEADER = (
    "# Written by `pgsieve init`; `pgsieve validate` looks for problems. All keys: pgsieve's documentation,"
    ' "Configuration: pgsieve.yaml".\n'
)


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How to connect to the database.

    - `conninfo`: the conninfo, without a password
    - `password`: the password; None if libpq finds the password itself, for example in .pgpass
    - `password_command`: a program that prints the password, and its arguments
    - `allow_untested_server`: true if the server may be newer than the versions with which pgsieve was tested
    """

    conninfo: str
    password: str | None = field(default=None, repr=False)
    password_command: tuple[str, ...] = ()
    allow_untested_server: bool = False

    @classmethod
    def parse(
        cls,
        conninfo: str,
        password_command: str | None = None,
        environ: Mapping[str, str] = os.environ,
        *,
        allow_untested_server: bool = False,
    ) -> "ConnectionSettings":
        """Parse a conninfo of the user. The password in it may be written as `${NAME}`, for an environment variable.

        Raises PgsieveError if the conninfo or the password command cannot be used.
        """
        parameters = dict(parse_conninfo(conninfo))
        for keyword in SECRET_KEYWORDS:
            if keyword != "password" and parameters.get(keyword):
                raise PgsieveError(
                    f"the conninfo has a secret, {keyword}",
                    hint="leave it out, and add it to pgsieve.yaml as ${NAME}",
                )
        password = parameters.pop("password", None) or None
        if password and (variable := re.fullmatch(r"\$\{(\w+)\}", password)):
            if variable[1] not in environ:
                raise PgsieveError(f"environment variable {variable[1]} is not set", hint="export it first")
            password = environ[variable[1]]
        if password is not None and password_command is not None:
            raise PgsieveError(
                "the conninfo has a password, and --password-command is given", hint="keep one of the two"
            )
        try:
            command = tuple(shlex.split(password_command or ""))
        except ValueError:
            raise PgsieveError(
                "--password-command has an unclosed quote",
                hint="write the command as in a shell, in one argument",
            ) from None
        return cls(make_conninfo("", **parameters), password, command, allow_untested_server)

    @property
    def database(self) -> str:
        """The name of the database. By default libpq uses the user's name (PostgreSQL documentation, 32.1.2)."""
        parameters = parse_conninfo(self.conninfo)
        return str(
            parameters.get("dbname") or os.environ.get("PGDATABASE") or parameters.get("user") or "database"
        )


@dataclass(frozen=True, slots=True)
class Survey:
    """What a database has, and what the role of the session may do.

    - `is_superuser`, `has_replication`: whether the role has these attributes
    - `provider_role`: `rds_replication`, the role by which Amazon RDS grants replication; None if the server lacks it
    """

    database: str
    user: str
    is_superuser: bool
    has_replication: bool
    provider_role: str | None
    publications: tuple[SurveyedPublication, ...]
    tables: tuple[SurveyedTable, ...]
    catalog: Catalog


def survey_database(settings: ConnectionSettings, source_name: str | None = None) -> Survey:
    """Examine a database, without changing anything.

    Errors name the source as `source_name`, or by default as the database.
    """
    name = source_name or make_safe_name(settings.database)
    source = Source(
        name,
        settings.conninfo,
        settings.password,
        settings.password_command,
        allow_untested_server=settings.allow_untested_server,
    )
    try:
        source.check_ready()
    except UntestedServerError as error:
        raise UntestedServerError(
            error.message,
            hint="install a pgsieve that was tested with it; or, if wrong rows do no harm, repeat the command with"
            " --allow-untested-server, which is then written to pgsieve.yaml",
            sqlstate=error.sqlstate,
        ) from None
    with source.connect() as connection:
        catalog = read_catalog(connection)
        row = connection.execute(
            "select current_database(), current_user, rolsuper, rolreplication,"
            " (select rolname from pg_roles where rolname = 'rds_replication')"
            " from pg_roles where rolname = current_user"
        ).fetchone()
        created_rows = connection.execute(
            "select pubname from pg_publication where obj_description(oid, 'pg_publication') = %s",
            [CREATED_COMMENT],
        ).fetchall()
    assert row is not None
    created_names = {name for (name,) in created_rows}  # The publications that pgsieve itself has created.
    publications = [
        SurveyedPublication(
            name,
            tuple(quote_qualified(*table) for table in _find_published_tables(publication, catalog)),
            tuple(operation for operation in OPERATIONS if operation in publication.operations),
        )
        for name, publication in sorted(catalog.publications.items())
        if name not in created_names
    ]
    database, user, is_superuser, has_replication, provider_role = row
    return Survey(
        database,
        user,
        is_superuser,
        has_replication,
        provider_role,
        tuple(publications),
        _list_tables(catalog),
        catalog,
    )


def _find_published_tables(publication: Publication, catalog: Catalog) -> list[tuple[str, str]]:
    """The tables of a publication. Empty if the publication has an error, which `validate` reports later."""
    try:
        return sorted(find_replicated_tables([publication], catalog))
    except PublicationError:
        return []


def divide_publications(names: Sequence[str], catalog: Catalog) -> list[list[str]]:
    """Divide publications into groups, so that a subscription can have all publications of a group.

    As in PostgreSQL, a subscription cannot use two publications with different column lists of a table.
    """
    groups = list[list[str]]()
    for name in names:
        for group in groups:
            with suppress(PublicationError):
                find_replicated_tables([catalog.publications[other] for other in (*group, name)], catalog)
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _list_tables(catalog: Catalog) -> tuple[SurveyedTable, ...]:
    """The tables that the user can choose. Partitions are left out, because their partitioned table stands for them."""
    return tuple(
        SurveyedTable(t.schema, t.name, _has_identity(t, catalog), t.kind == "p")
        for t in sorted(catalog.tables.values(), key=lambda t: (t.schema, t.name))
        if not t.ancestors
    )


def _has_identity(table: Table, catalog: Catalog) -> bool:
    """True if UPDATE and DELETE on a table can be published, since it has a replica identity.

    For a partitioned table, the server checks the partition that contains the row, so all partitions need a replica
    identity (CheckCmdReplicaIdentity() in src/backend/executor/execReplication.c).
    """
    leaves = (
        [table] if table.kind != "p" else [catalog.tables[o] for o in table.leaves if o in catalog.tables]
    )
    return all(bool(relation.identity) or relation.replica_identity == "f" for relation in [table, *leaves])


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user has chosen to replicate, and the names for pgsieve.yaml.

    - `publications`: publications of the server
    - `tables`: tables for which pgsieve.yaml defines publications, if no publications of the server are chosen
    - `other_subscriptions`: further subscriptions, with publications that cannot be in one subscription with the others
    - `via_root`: true if a partitioned table becomes one replica, false if each partition becomes a replica of its own
    """

    source: str
    subscription: str
    lake: str
    role: str
    publications: tuple[str, ...] = ()
    tables: tuple[SurveyedTable, ...] = ()
    via_root: bool = True
    other_subscriptions: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def tables_without_identity(self) -> tuple[str, ...]:
        """The chosen tables that have no replica identity.

        Only INSERTs on them are published. If UPDATE and DELETE were published, the server would refuse these
        statements.
        """
        return tuple(quote_qualified(t.schema, t.name) for t in self.tables if not t.has_identity)


def make_safe_name(text: str) -> str:
    """Make a valid name for a source or a subscription from any text."""
    name = re.sub(r"[^a-z0-9_]", "_", text.lower()).strip("_")
    return name[:40] or "replica"


def propose_role(survey: Survey) -> str:
    """The role that should replicate.

    It is the role of the session. If that is a superuser, or if the server is on Amazon RDS, a role `pgsieve` is
    proposed instead.
    """
    return "pgsieve" if survey.is_superuser or survey.provider_role == "rds_replication" else survey.user


def write_configuration(
    config_path: Path, settings: ConnectionSettings, survey: Survey, choice: Choice, *, force: bool = False
) -> InitReport:
    """Write pgsieve.yaml and, beside it, the SQL for the role that replicates.

    The SQL is not written if `validate` finds a problem. The role may not exist yet, so `validate` connects as the role
    of the session.
    """
    role_sql_path = config_path.with_name(f"{config_path.stem}-role.sql")
    for path in (config_path, role_sql_path):
        refuse_existing_file(path, force=force)
    password_variable = (
        f"{make_safe_name(choice.source).upper()}_PASSWORD" if settings.password is not None else None
    )
    text = _make_configuration(settings, choice, password_variable)
    environ = {**os.environ, password_variable: settings.password or ""} if password_variable else os.environ
    config = parse_config(text, config_path, environ)  # If the configuration is invalid, no file is written.
    # Missing rights are no problem: the SQL will grant them.
    validation = validate(config, are_rights_checked=False)
    role_settings = settings
    if choice.role != survey.user:
        role_settings = replace(settings, conninfo=make_conninfo(settings.conninfo, user=choice.role))
    _write_file(config_path, _make_configuration(role_settings, choice, password_variable), force=force)
    written_sql_path = None
    if not validation.problems:
        role_sql = make_role_statements(survey, choice, config, validation)
        _write_file(role_sql_path, role_sql, force=force)
        written_sql_path = role_sql_path.absolute()
    return InitReport(
        config.path,
        written_sql_path,
        password_variable,
        choice.role,
        validation,
        choice.tables_without_identity,
    )


def refuse_existing_file(path: Path, *, force: bool) -> None:
    """Raise PgsieveError if a file exists, unless `force` allows replacing it."""
    if path.exists() and not force:
        raise PgsieveError(
            f"{path} exists already", hint="choose another file with -c/--config, or replace it with --force"
        )


def _write_file(path: Path, text: str, *, force: bool) -> None:
    """Write a file. Raises PgsieveError if it cannot be written, or if it exists and `force` does not allow to replace it."""
    try:
        # With the mode "x", this fails if another `pgsieve init` has created the file in the meantime.
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        refuse_existing_file(path, force=False)
    except OSError as error:
        raise PgsieveError(
            f"{path} cannot be written: {error.strerror}", hint="choose another file with -c/--config"
        ) from error


def _make_configuration(settings: ConnectionSettings, choice: Choice, password_variable: str | None) -> str:
    """The text of pgsieve.yaml.

    `password_variable` is the environment variable that has the password; None if no password is needed.
    """
    source_content: dict[str, object] = {"conninfo": settings.conninfo}
    if password_variable:
        source_content["password"] = f"${{{password_variable}}}"
    if settings.allow_untested_server:
        source_content["allow_untested_server"] = True
    publication_names = choice.publications
    if settings.password_command:
        # In pgsieve.yaml `${NAME}` stands for an environment variable, and `$${` for the characters `${`. The command
        # must get these characters as the user wrote them.
        source_content["password_command"] = [part.replace("${", "$${") for part in settings.password_command]
    if choice.tables:
        defined_publications = _define_publications(choice)
        source_content["publications"] = defined_publications
        publication_names = tuple(defined_publications)
    publications_by_subscription = {choice.subscription: publication_names, **choice.other_subscriptions}
    content = {
        "lake": choice.lake,
        "sources": {choice.source: source_content},
        "subscriptions": {
            name: {"source": choice.source, "publications": list(publications)}
            for name, publications in publications_by_subscription.items()
        },
    }
    return _HEADER + yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None
    )


def _define_publications(choice: Choice) -> dict[str, object]:
    """The publications that pgsieve.yaml defines for the chosen tables.

    Tables that have no replica identity are in a publication of their own, which publishes only INSERTs.
    """
    publications_by_name: dict[str, object] = {}
    for has_identity, name in ((True, choice.subscription), (False, f"{choice.subscription}_inserts")):
        tables = [table for table in choice.tables if table.has_identity == has_identity]
        if tables:
            publication_content: dict[str, object] = {
                "tables": [{"table": quote_qualified(table.schema, table.name)} for table in tables]
            }
            if not has_identity:
                publication_content["publish"] = ["insert"]
            if choice.via_root and any(table.partitioned for table in tables):
                publication_content["publish_via_partition_root"] = True
            publications_by_name[name] = publication_content
    return publications_by_name


def make_role_statements(survey: Survey, choice: Choice, config: Config, validation: ValidationReport) -> str:
    """Return the SQL that grants a role exactly the rights that docs/operations.md lists, and creates capture publications.

    Capture publications are pgsieve's own publications, with which it reads the slot.
    """
    role, subscription = quote_identifier(choice.role), config.subscriptions[choice.subscription]
    table_names = _find_replicated_tables(survey, config)
    sequence_names = [
        (sequence.schema, sequence.name)
        for validated_subscription in validation.subscriptions
        for sequence in validated_subscription.sequences
    ]
    schemas = sorted({schema for schema, _ in (*table_names, *sequence_names)})
    lines = [
        f"-- The rights that the role {role} needs for pgsieve in the database {quote_identifier(survey.database)}, and no more.",
        "-- Run it as the owner of the tables, or as an administrator. It contains no password: in psql, set one with",
        f"-- \\password {choice.role}",
        "",
    ]
    is_existing_role = choice.role == survey.user
    if not is_existing_role:
        login = "LOGIN" if survey.provider_role else "LOGIN REPLICATION"
        lines.append(f"CREATE ROLE {role} {login};  -- leave it out if the role exists")
    if survey.provider_role:
        lines.append(f"GRANT {survey.provider_role} TO {role};")
    elif is_existing_role and not (survey.has_replication or survey.is_superuser):
        lines.append(f"ALTER ROLE {role} REPLICATION;")
    lines += [f"GRANT USAGE ON SCHEMA {quote_identifier(schema)} TO {role};" for schema in schemas]
    lines += [f"GRANT SELECT ON {quote_qualified(*table_name)} TO {role};" for table_name in table_names]
    lines += [
        f"GRANT SELECT ON SEQUENCE {quote_qualified(*sequence_name)} TO {role};"
        for sequence_name in sequence_names
    ]
    if subscription.row_filter == "pipeline" and validation.statements:
        lines += [
            "",
            "-- The publications that the slot reads. A role that owns the tables creates them itself at the first run.",
            "-- For any other role, `pgsieve validate` prints these statements again whenever the tables change.",
            *validation.statements,
        ]
    return "\n".join(lines) + "\n"


def _find_replicated_tables(survey: Survey, config: Config) -> list[tuple[str, str]]:
    """The tables that will be copied, which the role has to be able to read."""
    names = set[tuple[str, str]]()
    for subscription in build_project(config).subscriptions.values():
        names |= subscription.tables(
            subscription.slot_stream.with_defined_publications(survey.catalog)
        ).keys()
    return sorted(names)


def make_unknown_name_error(kind: str, name: str, existing_names: Sequence[str]) -> PgsieveError:
    """The error for a name that the database does not have. `kind` is what the name should be, for example "table"."""
    name_list = ", ".join(existing_names) or "none"
    return PgsieveError(f'{kind} "{name}" does not exist', hint=f"there are: {name_list}", sqlstate="42704")
