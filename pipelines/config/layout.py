"""The section `layout` of a subscription in pgsieve.yaml: how its replicas are laid out in the lake.

In: the section of the file
Out: a `SubscriptionLayout`, the object that the steps of a run use

Raises the errors of `values.make_refusal` for invalid values; the loader of the file turns them into a ConfigError.
"""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator

from pgsieve.decoding.changes.deleted_rows import DELETED_ROW_COLUMNS
from pgsieve.pipelines.config.identifiers import parse_qualified_name
from pgsieve.pipelines.config.values import (
    MetadataKind,
    NonEmptyText,
    PlainName,
    make_refusal,
    refuse_duplicates,
    split_name,
)
from pgsieve.resources.lake.delta.layout import (
    DEFAULT_FOLDER_TEMPLATE,
    FOLDER_PLACEHOLDERS,
    PROPERTIES,
    SubscriptionLayout,
    TableLayout,
)

_BYTES_BY_UNIT = {"kB": 1024, "MB": 1024**2, "GB": 1024**3}
_SIZE_PATTERN = re.compile(r"(\d+) ?(kB|MB|GB)")
_MIN_FILE_BYTES = 64 * 1024
_PROPERTY_HINTS = {
    "delta.appendOnly": "a replica's rows are updated and deleted",
    "delta.enableDeletionVectors": "pgsieve enables them in tables of 64 MB and more, unless `spark: {conf: {…}}` says no",
    "delta.deletedFileRetentionDuration": "`retention: {versions: …}` says how long old versions are kept",
    "delta.logRetentionDuration": "`retention: {versions: …}` says how long old versions are kept",
    "delta.targetFileSize": "use `target_file_size` of the layout",
    "delta.columnMapping.mode": "names are mapped in tables that Spark writes, for a column such as Line No",
    "delta.setTransactionRetentionDuration": "the positions of replicas are transaction identifiers",
}


def _check_folder_template(text: str) -> str:
    """Refuse a template for folders without `{table}`, or one whose folders Spark would ignore.

    Without `{table}` all tables of a schema would get the same folder. Spark ignores files and folders whose names begin
    with `_` or `.`.
    """
    try:
        template_parts = list(Formatter().parse(text))
    except ValueError:
        template_parts = []
    fields = [field for _, field, _, _ in template_parts if field is not None]
    is_plain = not any(spec or conversion for _, _, spec, conversion in template_parts)
    if not is_plain or set(fields) - set(FOLDER_PLACEHOLDERS) or "table" not in fields:
        allowed = ", ".join(f"{{{name}}}" for name in FOLDER_PLACEHOLDERS)
        raise make_refusal("is not a template for folders", f"text with {allowed}; {{table}} has to be there")
    fixed_text = "".join(text for text, _, _, _ in template_parts)
    if not re.fullmatch(r"[a-z0-9_./-]*", fixed_text) or any(
        not folder_name or folder_name[0] in "_." for folder_name in text.split("/")
    ):
        raise make_refusal(
            "cannot be the name of a folder",
            "a-z, 0-9, _, -, . and / beside what is in braces; no name in it is empty or begins with _ or .",
        )
    return text


def _parse_size(text: object) -> object:
    """Convert a size such as `256 MB` to a number of bytes."""
    match = _SIZE_PATTERN.fullmatch(str(text))
    if match is None or (size := int(match[1]) * _BYTES_BY_UNIT[match[2]]) < _MIN_FILE_BYTES:
        raise make_refusal("is not a size for files", "a number of kB, MB or GB, 64 kB at least: 256 MB")
    return size


def _parse_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    columns = tuple(split_name(name, 1, 'region, "Unit Price"')[0] for name in names)
    refuse_duplicates(columns, "column")
    return columns


def _refuse_duplicate_names(columns: dict[str, str]) -> dict[str, str]:
    refuse_duplicates((name.lower() for name in columns.values()), "column")
    return columns


def _convert_values_to_text(properties: object) -> object:
    """Convert values of properties to text, as they are in Delta.

    A `Config` that is made in Python may have booleans and numbers.
    """
    if not isinstance(properties, Mapping):
        return properties
    return {
        name: str(value).lower() if isinstance(value, bool | int) else value
        for name, value in properties.items()
    }


def _check_properties(properties: dict[str, str]) -> dict[str, str]:
    """Refuse Delta properties that a layout may not set, and values that Delta would refuse."""
    for name, value in properties.items():
        if (pattern := PROPERTIES.get(name)) is None:
            allowed_properties = ", ".join(PROPERTIES)
            reason = f"{_PROPERTY_HINTS[name]}; " if name in _PROPERTY_HINTS else ""
            raise make_refusal(
                f"has {name}, which a layout cannot set",
                f"{reason}allowed here: {allowed_properties}",
            )
        if not re.fullmatch(pattern.pattern, value):
            raise make_refusal(f"has {name}, which cannot be {value!r}", f"it is {pattern.meaning}")
    return properties


class TableLayoutConfig(BaseModel):
    """The layout of one replica. If a value is not given, the value of the subscription applies."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    cluster_by: Annotated[tuple[str, ...], AfterValidator(_parse_columns)] | None = None
    properties: Annotated[
        dict[str, str], BeforeValidator(_convert_values_to_text), AfterValidator(_check_properties)
    ] = {}
    target_file_size: Annotated[int, BeforeValidator(_parse_size)] | None = None
    columns: Annotated[dict[MetadataKind, PlainName], AfterValidator(_refuse_duplicate_names)] | None = None
    deletes: Literal["soft", "hard"] | None = None

    def to_table_layout(self) -> TableLayout:
        """Convert to the object that the steps use."""
        columns = None if self.columns is None else dict[str, str](sorted(self.columns.items()))
        keeps_deleted_rows = None if self.deletes is None else self.deletes == "soft"
        return TableLayout(
            self.cluster_by, self.properties, self.target_file_size, columns, keeps_deleted_rows
        )


class LayoutConfig(TableLayoutConfig):
    """The layout of a subscription's replicas."""

    folders: Annotated[NonEmptyText, AfterValidator(_check_folder_template)] = DEFAULT_FOLDER_TEMPLATE
    names: Literal["published", "snake"] = "published"
    tables: dict[str, TableLayoutConfig] = {}

    @field_validator("tables")
    @classmethod
    def _refuse_duplicate_tables(cls, tables: dict[str, TableLayoutConfig]) -> dict[str, TableLayoutConfig]:
        refuse_duplicates(
            (split_name(name, 2, 'public.orders, "Sales"."Order Lines"') for name in tables), "table"
        )
        return tables

    @model_validator(mode="after")
    def _require_soft_deletes(self) -> Self:
        """Refuse metadata columns (data about each row) of deleted rows if no table keeps deleted rows."""
        layouts: tuple[TableLayoutConfig, ...] = (self, *self.tables.values())
        kinds = {kind for layout in layouts for kind in layout.columns or {}} & DELETED_ROW_COLUMNS.keys()
        if kinds and not any(layout.deletes == "soft" for layout in layouts):
            raise make_refusal(
                f"has columns of deleted rows ({', '.join(sorted(kinds))}), but keeps no deleted rows",
                "set `deletes: soft`",
            )
        return self

    def to_subscription_layout(self) -> SubscriptionLayout:
        """Convert to the object that the steps use."""
        layout_by_table = {
            (schema, table): layout_config.to_table_layout()
            for name, layout_config in self.tables.items()
            for schema, table in [parse_qualified_name(name, 2)]
        }
        return SubscriptionLayout(
            self.folders, self.to_table_layout(), layout_by_table, uses_plain_names=self.names == "snake"
        )
