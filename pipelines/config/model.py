"""The configuration: `pgsieve.yaml` in, a frozen `Config` out.

Raises ConfigError with file, line, key and the allowed values. No value appears in a message, and no conninfo
in a repr, as both may contain passwords. Options of publications and subscriptions have the names, values and
defaults of CREATE PUBLICATION and CREATE SUBSCRIPTION (PostgreSQL documentation, SQL commands).

Names of publications and slots are taken literally. Names of tables and columns are read as SQL reads them:
folded to lower case unless in double quotes.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.catalog import CatalogConfig
from pgsieve.pipelines.config.dagster import DagsterConfig
from pgsieve.pipelines.config.file import (
    ConfigError,
    Document,
    Location,
    Problem,
    dotted_path,
    name_hint,
    parse,
    read_file,
)
from pgsieve.pipelines.config.history import HistoryConfig, TableHistoryConfig, expand_short_form
from pgsieve.pipelines.config.identifiers import parse_qualified
from pgsieve.pipelines.config.layout import LayoutConfig, TableLayoutConfig
from pgsieve.pipelines.config.publications import Operation, PublicationConfig, PublishedTableConfig
from pgsieve.pipelines.config.retention import RetentionConfig, Wait
from pgsieve.pipelines.config.storage import StorageConfig
from pgsieve.pipelines.config.values import (
    CAPTURE_BYTES,
    CaptureName,
    ColumnName,
    FolderName,
    NonEmptyText,
    ObjectName,
    add_names,
    false_to_off,
    has_password,
    normalise_streaming,
    refusal,
    refuse_duplicates,
    refuse_empty,
    refuse_empty_command,
    refuse_empty_secret,
    refuse_unreadable_conninfo,
    slot_name,
    to_lower_case,
)
from pgsieve.resources.lake.masters import threads_of
from pgsieve.resources.lake.stores.storage import address_problem, is_uri

__all__ = [
    "Config",
    "ConfigError",
    "Operation",
    "PublicationConfig",
    "PublishedTableConfig",
    "SourceConfig",
    "SparkConfig",
    "SubscriptionConfig",
    "load_config",
    "parse_config",
]

DEFAULT_FILE = Path("pgsieve.yaml")
FILE_VARIABLE = "PGSIEVE_CONFIG"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SparkConfig(_Section):
    """Where Spark runs: `master` is a Spark master URL or a Spark Connect address; `conf` are Spark's settings.

    With `threads[N]`, N threads of pgsieve replace Spark. If the master is local, `engine` decides whether
    runs use the warm engine: `use` uses a running one, `start` starts one if none runs, `off` uses none. An
    engine ends after `engine_idle` without use.
    """

    master: NonEmptyText = "local[*]"
    #: The address may contain credentials.
    conf: dict[str, str] = Field(default={}, repr=False)
    engine: Annotated[Literal["off", "use", "start"], BeforeValidator(false_to_off)] = "use"
    engine_idle: Wait = timedelta(minutes=15)

    @field_validator("master")
    @classmethod
    def _require_thread_count(cls, master: str) -> str:
        if master.startswith("threads") and threads_of(master) is None:
            raise refusal("does not say how many threads", "write threads[4], or threads[*] for one a core")
        return master

    @field_validator("conf", mode="before")
    @classmethod
    def _convert_scalars_to_text(cls, conf: object) -> object:
        """Spark's settings are text: true is `true`, 4 is `4`."""
        if not isinstance(conf, Mapping):
            return conf
        return {
            key: json.dumps(value) if isinstance(value, int | float) else value for key, value in conf.items()
        }


class SourceConfig(_Section):
    """One database and the replication slot that reads it."""

    name: str = ""
    conninfo: Annotated[SecretStr, AfterValidator(refuse_unreadable_conninfo)]
    password: Annotated[SecretStr, AfterValidator(refuse_empty_secret)] | None = None
    password_command: Annotated[tuple[SecretStr, ...], AfterValidator(refuse_empty_command)] | None = None
    standby: bool = False
    allow_untested_server: bool = False
    slot: str
    capture: CaptureName
    publications: dict[ObjectName, PublicationConfig] = {}

    @model_validator(mode="before")
    @classmethod
    def _derive_defaults(cls, section: object) -> object:
        if not isinstance(section, Mapping):
            return section
        name = str(section.get("name", ""))
        return {"slot": slot_name(name), "capture": slot_name(name, longest=CAPTURE_BYTES), **section}

    @model_validator(mode="after")
    def _refuse_two_passwords(self) -> Self:
        keys = [
            "password in `conninfo`" if has_password(self.conninfo) else None,
            "`password`" if self.password is not None else None,
            "`password_command`" if self.password_command is not None else None,
        ]
        if len(passwords := [key for key in keys if key]) > 1:
            raise refusal(f"has a {' and a '.join(passwords)}", "keep one of them")
        return self

    @field_validator("slot")
    @classmethod
    def _check_slot(cls, slot: str) -> str:
        if not re.fullmatch(r"[a-z0-9_]{1,63}", slot):
            raise refusal("is not a name for a replication slot", "a-z, 0-9 and _, 63 at most")
        return slot


class SubscriptionConfig(_Section):
    """Publications of one source, replicated into one folder; see CREATE SUBSCRIPTION."""

    name: str = ""
    source: str
    publications: Annotated[tuple[ObjectName, ...], AfterValidator(refuse_empty)]
    row_filter: Literal["pipeline", "publisher"] = "pipeline"
    copy_data: bool = True
    origin: Annotated[Literal["any", "none"], BeforeValidator(to_lower_case)] = "any"
    binary: bool = False
    streaming: Annotated[Literal["off", "on", "parallel"], BeforeValidator(normalise_streaming)] = "parallel"
    two_phase: bool = False
    failover: bool = False
    disable_on_error: bool = False
    freshness: Wait = timedelta(minutes=15)
    types: dict[ColumnName, NonEmptyText] = {}
    layout: LayoutConfig = LayoutConfig()
    history: Annotated[HistoryConfig, BeforeValidator(expand_short_form)] = HistoryConfig()

    @field_validator("publications")
    @classmethod
    def _refuse_duplicate_publications(cls, publications: tuple[str, ...]) -> tuple[str, ...]:
        refuse_duplicates(publications, "publication")
        return publications

    @field_validator("types")
    @classmethod
    def _refuse_duplicate_columns(cls, types: dict[str, str]) -> dict[str, str]:
        refuse_duplicates((parse_qualified(key, 3) for key in types), "column")
        return types

    @property
    def slot(self) -> str:
        """The name of the subscription's slot in mode `publisher`."""
        return slot_name(self.source, self.name)

    @property
    def type_overrides(self) -> dict[tuple[str, str, str], str]:
        """`types` by schema, table and column, with names as in the catalog."""
        overrides = {}
        for key, spark_type in self.types.items():
            schema, table, column = parse_qualified(key, 3)
            overrides[schema, table, column] = spark_type
        return overrides


class Config(_Section):
    """A whole configuration file; `lake` is a URI or an absolute path, `path` the file, absolute."""

    path: Path
    lake: NonEmptyText
    storage: StorageConfig = StorageConfig()
    spark: SparkConfig = SparkConfig()
    catalog: CatalogConfig | None = None
    retention: RetentionConfig = RetentionConfig()
    dagster: DagsterConfig = DagsterConfig()
    sources: Annotated[dict[FolderName, SourceConfig], AfterValidator(refuse_empty)]
    subscriptions: dict[FolderName, SubscriptionConfig] = {}

    @field_validator("sources", "subscriptions", mode="before")
    @classmethod
    def _add_names(cls, entries: object) -> object:
        return add_names(entries)

    @field_validator("path")
    @classmethod
    def _make_path_absolute(cls, path: Path) -> Path:
        return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link to another folder

    @field_validator("lake")
    @classmethod
    def _make_lake_absolute(cls, lake: str, info: ValidationInfo) -> str:
        if not is_uri(lake):
            folder = info.data["path"].parent if "path" in info.data else Path.cwd()
            lake = os.path.normpath(os.path.join(folder, os.path.expanduser(lake)))  # noqa: PTH111, PTH118
        if problem := address_problem(lake):
            raise refusal(*problem)
        return lake.rstrip("/") or lake

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        """Refuse sections that contradict each other, also in a `Config` that was made in Python."""
        broken = list(_broken_references(self))
        if broken:
            raise _BrokenReferencesError(broken)
        return self

    @property
    def state_folder(self) -> Path:
        """The folder of records that stay on this machine, such as those of the web interface."""
        return self.path.parent / ".pgsieve"

    def select(self, names: Sequence[str]) -> tuple[SubscriptionConfig, ...]:
        """The subscriptions with these names, in the file's order; without names, all."""
        unknown = [name for name in names if name not in self.subscriptions]
        if unknown:
            raise PgsieveError(
                f"subscription {unknown[0]!r} is not in {self.path.name}",
                hint=name_hint(unknown[0], tuple(self.subscriptions)),
            )
        if not self.subscriptions:
            raise PgsieveError(
                f"{self.path.name} has no subscriptions",
                hint="add `subscriptions: {NAME: {source: …, publications: […]}}`",
            )
        return tuple(each for name, each in self.subscriptions.items() if not names or name in names)


class _BrokenReferencesError(PgsieveError):
    """Sections that contradict each other, with their locations; an error of pydantic has only one location."""

    def __init__(self, broken: Sequence[tuple[Location, str, str]]) -> None:
        self.broken = tuple(broken)
        location, message, hint = self.broken[0]
        super().__init__(f"{dotted_path(location)}: {message}", hint=hint)


_UNKNOWN_SOURCE = "is not a source of this file"


def _broken_references(config: Config) -> Iterator[tuple[Location, str, str]]:
    """The contradictions between sections that are valid by themselves: location, message, hint."""
    for name, message, hint in config.storage.option_problems(config.lake):
        yield ("storage", name), message, hint
    yield from _names_differing_in_case("sources", config.sources)
    yield from _names_differing_in_case("subscriptions", config.subscriptions)
    folder_owners = {name.lower(): f"source {name}" for name in config.sources}
    slots: dict[tuple[str, str], str] = {}
    for name, source in config.sources.items():
        place: Location = ("sources", name, "slot")
        address = (source.conninfo.get_secret_value(), source.slot)
        if address in slots:
            yield (
                place,
                f"is the slot of source {slots[address]} too",
                "only one source can read a slot: give one of them another slot",
            )
        slots.setdefault(address, name)
    for name, subscription in config.subscriptions.items():
        place = ("subscriptions", name)
        subscribed = config.sources.get(subscription.source)
        if subscribed is None:
            hint = name_hint(subscription.source, tuple(config.sources))
            yield (*place, "source"), _UNKNOWN_SOURCE, hint
            continue
        if subscription.row_filter != "publisher":
            continue
        for position, publication in enumerate(subscription.publications):
            if publication in subscribed.publications:
                yield (
                    (*place, "publications", position),
                    "is defined in this file, so the publisher cannot filter by it",
                    "use row_filter: pipeline, or create the publication on the server",
                )
        slot = subscription.slot
        if slot in folder_owners or (subscribed.conninfo.get_secret_value(), slot) in slots:
            owner = folder_owners.get(slot) or f"source {slots[subscribed.conninfo.get_secret_value(), slot]}"
            yield (
                place,
                f"needs the slot and folder {slot}, which {owner} has",
                "give one of them another name",
            )
        folder_owners.setdefault(slot, f"subscription {name}")


def _names_differing_in_case(section: str, names: Iterable[str]) -> Iterator[tuple[Location, str, str]]:
    """Names that differ only in case: slots are lower case, and some file systems ignore case."""
    names_by_folded: dict[str, str] = {}
    for name in names:
        first = names_by_folded.setdefault(name.lower(), name)
        if first != name:
            yield (section, name), f"differs from {first} only in case", "give one of them another name"


#: The model of each mapping in the file, by its path of keys (`*` is any key).
_MODELS: dict[tuple[str, ...], type[BaseModel]] = {
    (): Config,
    ("spark",): SparkConfig,
    ("storage",): StorageConfig,
    ("catalog",): CatalogConfig,
    ("retention",): RetentionConfig,
    ("dagster",): DagsterConfig,
    ("sources", "*"): SourceConfig,
    ("sources", "*", "publications", "*"): PublicationConfig,
    ("sources", "*", "publications", "*", "tables", "*"): PublishedTableConfig,
    ("subscriptions", "*"): SubscriptionConfig,
    ("subscriptions", "*", "layout"): LayoutConfig,
    ("subscriptions", "*", "layout", "tables", "*"): TableLayoutConfig,
    ("subscriptions", "*", "history"): HistoryConfig,
    ("subscriptions", "*", "history", "tables", "*"): TableHistoryConfig,
}

#: Fields of the models that are not keys of the file.
_NOT_IN_FILE: dict[type[BaseModel], str] = {Config: "path", SourceConfig: "name", SubscriptionConfig: "name"}

#: pydantic's error types in the words of the file.
_MESSAGES = {
    "missing": "is missing",
    "string_type": "should be text",
    "dict_type": "should be a mapping (key: value)",
    "model_type": "should be a mapping (key: value)",
    "tuple_type": "should be a list",
    "frozen_set_type": "should be a list",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
}
_HINTS = dict.fromkeys(("tuple_type", "frozen_set_type"), "in brackets, also a single entry: `[…]`")


def _allowed_keys(location: Location) -> tuple[str, ...]:
    """The keys that are allowed in the mapping at this place."""
    for pattern, model in _MODELS.items():
        if len(pattern) == len(location) and all(
            expected in ("*", part) for expected, part in zip(pattern, location, strict=True)
        ):
            keys = {name: each.alias or name for name, each in model.model_fields.items()}
            return tuple(key for name, key in keys.items() if name != _NOT_IN_FILE.get(model))
    return ()


def _problem(details: ErrorDetails, document: Document) -> Problem:
    kind, location, context = details["type"], details["loc"], details.get("ctx", {})
    if location and location[-1] == "[key]" and kind != "extra_forbidden":
        location = location[:-1]
    key, line = dotted_path(location), document.line(location)
    if kind == "extra_forbidden":
        allowed = _allowed_keys(location[:-1])
        return Problem(key, line, "unknown key", name_hint(str(location[-1]), allowed), allowed)
    if kind == "literal_error":
        allowed = tuple(re.findall(r"'([^']*)'", str(context.get("expected"))))
        hint = name_hint(document.text(location), allowed)
        return Problem(key, line, f"should be one of {', '.join(allowed)}", hint, allowed)
    if kind == "refused":
        return Problem(key, line, context["message"], context["hint"])
    return Problem(key, line, _MESSAGES.get(kind, details["msg"]), _HINTS.get(kind))


def _missing_sources(document: Document) -> Iterator[Problem]:
    """The problems of subscriptions whose source the file lacks.

    `_broken_references` finds them only in a file without other problems.
    """
    sources, subscriptions = (document.content.get(section) for section in ("sources", "subscriptions"))
    if not isinstance(sources, dict) or not isinstance(subscriptions, dict):
        return
    for name, subscription in subscriptions.items():
        source = subscription.get("source") if isinstance(subscription, dict) else None
        if isinstance(source, str) and source not in sources:
            place = ("subscriptions", name, "source")
            yield Problem(
                dotted_path(place), document.line(place), _UNKNOWN_SOURCE, name_hint(source, tuple(sources))
            )


def _refuse_model_fields(document: Document, file: Path) -> dict[str, Any]:
    """Return the content; raise ConfigError for fields of the models that are not keys of the file."""
    content = document.content
    places: list[tuple[Location, object, str]] = [((), content, "path")]
    for section in ("sources", "subscriptions"):
        entries = content.get(section)
        if isinstance(entries, dict):
            places += [((section, name), each, "name") for name, each in entries.items()]
    problems = []
    for location, mapping, field_name in places:
        if isinstance(mapping, dict) and field_name in mapping:
            place, allowed = (*location, field_name), _allowed_keys(location)
            hint = (
                f"the key above it is its name; {name_hint(None, allowed)}"
                if location
                else name_hint(None, allowed)
            )
            problems.append(Problem(dotted_path(place), document.line(place), "unknown key", hint, allowed))
    if problems:
        raise ConfigError(file, problems)
    return content


def parse_config(text: str, path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Parse the text of a configuration file; paths in it are relative to the folder of `path`.

    Raises ConfigError.
    """
    document = parse(text, path, environ)
    content = _refuse_model_fields(document, path)
    try:
        return Config.model_validate({**content, "path": path})
    except ValidationError as error:
        problems = [
            *(
                _problem(details, document)
                for details in error.errors(include_url=False, include_input=False)
            ),
            *_missing_sources(document),
        ]
    except _BrokenReferencesError as error:
        problems = [
            Problem(dotted_path(place), document.line(place), message, hint)
            for place, message, hint in error.broken
        ]
    # Raised outside of the handlers, whose exceptions contain values and would become the context.
    raise ConfigError(path, problems)


def load_config(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read this file, else the file that PGSIEVE_CONFIG names, else ./pgsieve.yaml."""
    file = path or Path(environ.get(FILE_VARIABLE) or DEFAULT_FILE)
    return parse_config(read_file(file), file, environ)
