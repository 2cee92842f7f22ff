"""The model of pgsieve.yaml: makes from the file a frozen `Config`, or a list of the file's problems.

Raises ConfigError for problems. Each problem names the file, the line, the key and the allowed values. A value of the
file may be a password. So no message contains a value except that of a Delta property, and the repr of a `Config`
contains no conninfo.

Options of publications and subscriptions have the names, values and defaults of CREATE PUBLICATION and CREATE
SUBSCRIPTION (PostgreSQL documentation, SQL commands). Names of publications and slots are taken literally. Names of
tables and columns are read as SQL reads them: they are folded to lower case unless they are in double quotes.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
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
    format_location,
    parse_document,
    read_file,
    suggest_name,
)
from pgsieve.pipelines.config.history import HistoryConfig, TableHistoryConfig
from pgsieve.pipelines.config.layout import LayoutConfig, TableLayoutConfig
from pgsieve.pipelines.config.publications import Operation, PublicationConfig, PublishedTableConfig
from pgsieve.pipelines.config.retention import RetentionConfig
from pgsieve.pipelines.config.source import SourceConfig
from pgsieve.pipelines.config.spark import SparkConfig
from pgsieve.pipelines.config.storage import StorageConfig
from pgsieve.pipelines.config.subscription import SubscriptionConfig
from pgsieve.pipelines.config.values import (
    FolderName,
    NonEmptyText,
    add_names,
    make_refusal,
    refuse_empty,
)
from pgsieve.resources.lake.stores.storage import find_address_problem, is_uri

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


class Config(BaseModel):
    """A whole configuration file. `lake` is a URI or an absolute path, and `path` is the absolute path of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

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
        if problem := find_address_problem(lake):
            raise make_refusal(*problem)
        return lake.rstrip("/") or lake

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        """Refuse sections that contradict each other. This check also applies to a `Config` that was made in Python."""
        contradictions = list(_find_contradictions(self))
        if contradictions:
            raise _ContradictionsError(contradictions)
        return self

    @property
    def state_folder(self) -> Path:
        """The folder for files that are only of use on this machine, such as the records of the web interface."""
        return self.path.parent / ".pgsieve"

    def select(self, names: Sequence[str]) -> tuple[SubscriptionConfig, ...]:
        """The subscriptions with these names, in the order of the file. Without names, all subscriptions of the file."""
        unknown_names = [name for name in names if name not in self.subscriptions]
        if unknown_names:
            raise PgsieveError(
                f"subscription {unknown_names[0]!r} is not in {self.path.name}",
                hint=suggest_name(unknown_names[0], tuple(self.subscriptions)),
            )
        if not self.subscriptions:
            raise PgsieveError(
                f"{self.path.name} has no subscriptions",
                hint="add `subscriptions: {NAME: {source: …, publications: […]}}`",
            )
        return tuple(
            subscription for name, subscription in self.subscriptions.items() if not names or name in names
        )


class _ContradictionsError(PgsieveError):
    """Sections of the file contradict each other.

    `contradictions` has the location, the message and the hint of each contradiction. An error of pydantic could have only one
    location.
    """

    def __init__(self, contradictions: Sequence[tuple[Location, str, str]]) -> None:
        self.contradictions = tuple(contradictions)
        location, message, hint = self.contradictions[0]
        super().__init__(f"{format_location(location)}: {message}", hint=hint)


_UNKNOWN_SOURCE_MESSAGE = "is not a source of this file"


def _find_contradictions(config: Config) -> Iterator[tuple[Location, str, str]]:
    """Yields the location, the message and the hint of each contradiction between sections that are valid by themselves.

    For example, a subscription may name a source that the file does not have.
    """
    for name, message, hint in config.storage.find_option_problems(config.lake):
        yield ("storage", name), message, hint
    yield from _find_names_differing_in_case("sources", config.sources)
    yield from _find_names_differing_in_case("subscriptions", config.subscriptions)
    owner_by_folder = {name.lower(): f"source {name}" for name in config.sources}
    source_by_slot: dict[tuple[str, str], str] = {}
    for name, source in config.sources.items():
        location: Location = ("sources", name, "slot")
        slot_address = (source.conninfo.get_secret_value(), source.slot)
        if slot_address in source_by_slot:
            yield (
                location,
                f"is the slot of source {source_by_slot[slot_address]} too",
                "only one source can read a slot: give one of them another slot",
            )
        source_by_slot.setdefault(slot_address, name)
    for name, subscription in config.subscriptions.items():
        location = ("subscriptions", name)
        subscribed_source = config.sources.get(subscription.source)
        if subscribed_source is None:
            hint = suggest_name(subscription.source, tuple(config.sources))
            yield (*location, "source"), _UNKNOWN_SOURCE_MESSAGE, hint
            continue
        if subscription.row_filter != "publisher":
            continue
        for index, publication in enumerate(subscription.publications):
            if publication in subscribed_source.publications:
                yield (
                    (*location, "publications", index),
                    "is defined in this file, so the publisher cannot filter by it",
                    "use row_filter: pipeline, or create the publication on the server",
                )
        slot = subscription.slot
        if slot in owner_by_folder or (subscribed_source.conninfo.get_secret_value(), slot) in source_by_slot:
            owner = (
                owner_by_folder.get(slot)
                or f"source {source_by_slot[subscribed_source.conninfo.get_secret_value(), slot]}"
            )
            yield (
                location,
                f"needs the slot and folder {slot}, which {owner} has",
                "give one of them another name",
            )
        owner_by_folder.setdefault(slot, f"subscription {name}")


def _find_names_differing_in_case(section: str, names: Iterable[str]) -> Iterator[tuple[Location, str, str]]:
    """Yields a contradiction for each name that differs from an earlier name only in case.

    Both would have the same slot, since names of slots are lower case; and some file systems do not distinguish case.
    """
    first_name_by_lower_case: dict[str, str] = {}
    for name in names:
        first_name = first_name_by_lower_case.setdefault(name.lower(), name)
        if first_name != name:
            yield (section, name), f"differs from {first_name} only in case", "give one of them another name"


#: Maps the path of each mapping in the file to its model. A path is a tuple of keys, in which `*` stands for any key.
_MODELS_BY_PATH: dict[tuple[str, ...], type[BaseModel]] = {
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

#: Maps a model to the one of its fields that is not a key of the file.
_FIELDS_NOT_IN_FILE: dict[type[BaseModel], str] = {
    Config: "path",
    SourceConfig: "name",
    SubscriptionConfig: "name",
}

#: Maps the type of an error of pydantic to a message in the words of the file.
_MESSAGES_BY_ERROR_TYPE = {
    "missing": "is missing",
    "string_type": "should be text",
    "dict_type": "should be a mapping (key: value)",
    "model_type": "should be a mapping (key: value)",
    "tuple_type": "should be a list",
    "frozen_set_type": "should be a list",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
}
_HINTS_BY_ERROR_TYPE = dict.fromkeys(
    ("tuple_type", "frozen_set_type"), "write it in brackets, even a single entry: `[…]`"
)


def _list_allowed_keys(location: Location) -> tuple[str, ...]:
    """The keys that are allowed in the mapping at this location of the file."""
    for pattern, model in _MODELS_BY_PATH.items():
        if len(pattern) == len(location) and all(
            expected_part in ("*", part) for expected_part, part in zip(pattern, location, strict=True)
        ):
            keys_by_field = {name: field.alias or name for name, field in model.model_fields.items()}
            return tuple(key for name, key in keys_by_field.items() if name != _FIELDS_NOT_IN_FILE.get(model))
    return ()


def _convert_error(error: ErrorDetails, document: Document) -> Problem:
    """Convert an error of pydantic to a problem of the file."""
    error_type, location, context = error["type"], error["loc"], error.get("ctx", {})
    if location and location[-1] == "[key]" and error_type != "extra_forbidden":
        location = location[:-1]
    key, line = format_location(location), document.find_line(location)
    if error_type == "extra_forbidden":
        allowed = _list_allowed_keys(location[:-1])
        return Problem(key, line, "unknown key", suggest_name(str(location[-1]), allowed), allowed)
    if error_type == "literal_error":
        allowed = tuple(re.findall(r"'([^']*)'", str(context.get("expected"))))
        hint = suggest_name(document.find_text(location), allowed)
        return Problem(key, line, f"should be one of {', '.join(allowed)}", hint, allowed)
    if error_type == "refused":
        return Problem(key, line, context["message"], context["hint"])
    return Problem(
        key, line, _MESSAGES_BY_ERROR_TYPE.get(error_type, error["msg"]), _HINTS_BY_ERROR_TYPE.get(error_type)
    )


def _find_missing_sources(document: Document) -> Iterator[Problem]:
    """Yields a problem for each subscription that names a source which the file does not have.

    `_find_contradictions` finds these contradictions, too, but pydantic calls it only if all sections are valid.
    """
    sources, subscriptions = (document.content.get(section) for section in ("sources", "subscriptions"))
    if not isinstance(sources, dict) or not isinstance(subscriptions, dict):
        return
    for name, subscription in subscriptions.items():
        source = subscription.get("source") if isinstance(subscription, dict) else None
        if isinstance(source, str) and source not in sources:
            source_location = ("subscriptions", name, "source")
            yield Problem(
                format_location(source_location),
                document.find_line(source_location),
                _UNKNOWN_SOURCE_MESSAGE,
                suggest_name(source, tuple(sources)),
            )


def _refuse_model_fields(document: Document, path: Path) -> dict[str, Any]:
    """Return the content of a file. Raises ConfigError if the file has a key that is only a field of the model.

    For example `Config` has the field `path`, but the file has no key `path`.
    """
    content = document.content
    forbidden_keys: list[tuple[Location, object, str]] = [((), content, "path")]
    for section in ("sources", "subscriptions"):
        entries = content.get(section)
        if isinstance(entries, dict):
            forbidden_keys += [((section, name), entry, "name") for name, entry in entries.items()]
    problems = []
    for location, mapping, forbidden_key in forbidden_keys:
        if isinstance(mapping, dict) and forbidden_key in mapping:
            key_location, allowed = (*location, forbidden_key), _list_allowed_keys(location)
            hint = (
                f"the key above it is the name already; {suggest_name(None, allowed)}"
                if location
                else suggest_name(None, allowed)
            )
            problems.append(
                Problem(
                    format_location(key_location),
                    document.find_line(key_location),
                    "unknown key",
                    hint,
                    allowed,
                )
            )
    if problems:
        raise ConfigError(path, problems)
    return content


def parse_config(text: str, path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Parse the text of a configuration file. Paths in the text are relative to the folder of `path`.

    Raises ConfigError.
    """
    document = parse_document(text, path, environ)
    content = _refuse_model_fields(document, path)
    try:
        return Config.model_validate({**content, "path": path})
    except ValidationError as error:
        problems = [
            *(
                _convert_error(details, document)
                for details in error.errors(include_url=False, include_input=False)
            ),
            *_find_missing_sources(document),
        ]
    except _ContradictionsError as error:
        problems = [
            Problem(format_location(location), document.find_line(location), message, hint)
            for location, message, hint in error.contradictions
        ]
    # The exceptions of pydantic contain values of the file. If ConfigError were raised within a handler, Python would
    # add such an exception to it as its context, and print both.
    raise ConfigError(path, problems)


def load_config(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read a configuration file.

    The file is `path` if given, or else the file that PGSIEVE_CONFIG names, or else ./pgsieve.yaml.
    """
    config_path = path or Path(environ.get(FILE_VARIABLE) or DEFAULT_FILE)
    return parse_config(read_file(config_path), config_path, environ)
