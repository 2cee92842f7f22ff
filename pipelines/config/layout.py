"""`layout` of a subscription in pgsieve.yaml: the layout of its replicas in the lake.

In: the section of the file. Out: the layout of the subscription's tables. Raises errors that pydantic turns
into a ConfigError.
"""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator

from pgsieve.decoding.changes.deleted_rows import OF_KEPT
from pgsieve.pipelines.config.identifiers import parse_qualified
from pgsieve.pipelines.config.values import Filled, Metadata, PlainName, distinct, qualified, refusal
from pgsieve.resources.lake.delta.layout import (
    FOLDER_FIELDS,
    FOLDERS,
    PROPERTIES,
    SubscriptionLayout,
    TableLayout,
)

_UNITS = {"kB": 1024, "MB": 1024**2, "GB": 1024**3}
_SIZE = re.compile(r"(\d+) ?(kB|MB|GB)")
_LEAST_BYTES = 64 * 1024
_HINTS = {
    "delta.appendOnly": "a replica's rows are updated and deleted",
    "delta.enableDeletionVectors": "pgsieve enables them in tables of 64 MB and more, unless `spark: {conf: {…}}` says no",
    "delta.deletedFileRetentionDuration": "`retention: {versions: …}` says how long old versions are kept",
    "delta.logRetentionDuration": "`retention: {versions: …}` says how long old versions are kept",
    "delta.targetFileSize": "use `target_file_size` of the layout",
    "delta.columnMapping.mode": "names are mapped in tables that Spark writes, for a column such as Line No",
    "delta.setTransactionRetentionDuration": "the positions of replicas are kept for good",
}


def _folders(text: str) -> str:
    """Refuse a template that could give two tables the same folder, or a folder that Spark ignores."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError:
        parsed = []
    fields = [field for _, field, _, _ in parsed if field is not None]
    plain = not any(spec or conversion for _, _, spec, conversion in parsed)
    if not plain or set(fields) - set(FOLDER_FIELDS) or "table" not in fields:
        allowed = ", ".join(f"{{{name}}}" for name in FOLDER_FIELDS)
        raise refusal("is not a template for folders", f"text with {allowed}; {{table}} has to be there")
    literal = "".join(text for text, _, _, _ in parsed)
    if not re.fullmatch(r"[a-z0-9_./-]*", literal) or any(not p or p[0] in "_." for p in text.split("/")):
        raise refusal(
            "cannot be the name of a folder",
            "a-z, 0-9, _, -, . and / beside what is in braces; no name in it is empty or begins with _ or .",
        )
    return text


def _bytes(text: object) -> object:
    match = _SIZE.fullmatch(str(text))
    if match is None or (size := int(match[1]) * _UNITS[match[2]]) < _LEAST_BYTES:
        raise refusal("is not a size for files", "a number of kB, MB or GB, 64 kB at least: 256 MB")
    return size


def _columns(names: tuple[str, ...]) -> tuple[str, ...]:
    columns = tuple(qualified(name, 1, 'region, "Unit Price"')[0] for name in names)
    distinct(columns, "column")
    return columns


def _names_once(columns: dict[str, str]) -> dict[str, str]:
    distinct((name.lower() for name in columns.values()), "column")
    return columns


def _as_text(properties: object) -> object:
    """Properties as text, as in Delta; a `Config` made in Python may have booleans and numbers."""
    if not isinstance(properties, Mapping):
        return properties
    return {
        name: str(value).lower() if isinstance(value, bool | int) else value
        for name, value in properties.items()
    }


def _properties(properties: dict[str, str]) -> dict[str, str]:
    for name, value in properties.items():
        if (pattern := PROPERTIES.get(name)) is None:
            allowed = ", ".join(PROPERTIES)
            why = f"{_HINTS[name]}; " if name in _HINTS else ""
            raise refusal(
                f"has {name}, which a layout cannot set",
                f"{why}allowed here: {allowed}",
            )
        if not re.fullmatch(pattern.values, value):
            raise refusal(f"has {name}, which cannot be {value!r}", f"it is {pattern.meaning}")
    return properties


class TableLayoutConfig(BaseModel):
    """The layout of one replica; the subscription's values replace missing ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    cluster_by: Annotated[tuple[str, ...], AfterValidator(_columns)] | None = None
    properties: Annotated[dict[str, str], BeforeValidator(_as_text), AfterValidator(_properties)] = {}
    target_file_size: Annotated[int, BeforeValidator(_bytes)] | None = None
    columns: Annotated[dict[Metadata, PlainName], AfterValidator(_names_once)] | None = None
    deletes: Literal["soft", "hard"] | None = None

    def layout(self) -> TableLayout:
        """The layout in the form of the steps."""
        columns = None if self.columns is None else dict[str, str](sorted(self.columns.items()))
        keeps = None if self.deletes is None else self.deletes == "soft"
        return TableLayout(self.cluster_by, self.properties, self.target_file_size, columns, keeps)


class LayoutConfig(TableLayoutConfig):
    """The layout of a subscription's replicas."""

    folders: Annotated[Filled, AfterValidator(_folders)] = FOLDERS
    names: Literal["published", "snake"] = "published"
    tables: dict[str, TableLayoutConfig] = {}

    @field_validator("tables")
    @classmethod
    def _tables_once(cls, tables: dict[str, TableLayoutConfig]) -> dict[str, TableLayoutConfig]:
        distinct((qualified(name, 2, 'public.orders, "Sales"."Order Lines"') for name in tables), "table")
        return tables

    @model_validator(mode="after")
    def _marks_rows_that_are_kept(self) -> Self:
        layouts: tuple[TableLayoutConfig, ...] = (self, *self.tables.values())
        kinds = {kind for each in layouts for kind in each.columns or {}} & OF_KEPT.keys()
        if kinds and not any(each.deletes == "soft" for each in layouts):
            raise refusal(
                f"has columns of deleted rows ({', '.join(sorted(kinds))}), which are deleted",
                "`deletes: soft` beside them",
            )
        return self

    def of_subscription(self) -> SubscriptionLayout:
        """The layout in the form of the steps."""
        tables = {parse_qualified(name, 2): each.layout() for name, each in self.tables.items()}
        by_name = {(s, t): v for (s, t), v in tables.items()}
        return SubscriptionLayout(self.folders, self.layout(), by_name, plain_names=self.names == "snake")
