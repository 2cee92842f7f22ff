"""Defines the layout of replicas (the lake's copies of published tables).

A layout has the folders, the order of rows, the size of files, and Delta properties.

In: `layout` of pgsieve.yaml.
Out: the layout of each table, and its Delta properties.

Raises nothing.

https://docs.delta.io/latest/table-properties.html
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pgsieve.resources.lake.delta.feed_property import FEED_PROPERTY, find_reserved_columns

TableName = tuple[str, str]

#: The default template of the folder of a replica, relative to the folder of its subscription.
DEFAULT_FOLDER_TEMPLATE = "{schema}/{table}"
#: The placeholders that a template for folders may have in braces.
FOLDER_PLACEHOLDERS = ("schema", "table")


@dataclass(frozen=True)
class LayoutProperty:
    """A Delta property that a layout may set.

    - `meaning`: the values that are allowed, in words
    - `pattern`: the same values as a pattern
    - `default`: the default value
    """

    meaning: str
    pattern: str
    default: str


#: The properties that each writer of replicas respects. The writers are delta-rs, Spark, and executors that write
#: files.
PROPERTIES = {
    FEED_PROPERTY: LayoutProperty("true or false", "true|false", "false"),
    "delta.checkpointInterval": LayoutProperty("a number of commits, 1 at least", "[1-9][0-9]{0,5}", "10"),
}
#: The size in bytes that files shall have by default.
DEFAULT_FILE_BYTES = 128 * 1024 * 1024
#: The property for the size that files shall have. delta-rs, pgsieve's own writers and the maintenance read it.
FILE_BYTES_PROPERTY = "delta.targetFileSize"


@dataclass(frozen=True)
class TableLayout:
    """The layout of one replica.

    A field that is None has the value of the subscription's layout. If that value is None, too, pgsieve's default applies.

    `columns` maps each kind of metadata, such as `commit_lsn`, to the name of the replica's column that has it. With
    `keeps_deleted`, a deleted row stays in the replica, with a mark.
    """

    cluster_by: tuple[str, ...] | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    file_bytes: int | None = None
    columns: Mapping[str, str] | None = None
    keeps_deleted: bool | None = None

    def with_defaults(self, defaults: "TableLayout") -> "TableLayout":
        """Take the values that are None in this layout from `defaults`."""
        return TableLayout(
            defaults.cluster_by if self.cluster_by is None else self.cluster_by,
            {**defaults.properties, **self.properties},
            self.file_bytes or defaults.file_bytes,
            defaults.columns if self.columns is None else self.columns,
            defaults.keeps_deleted if self.keeps_deleted is None else self.keeps_deleted,
        )

    def make_delta_properties(self, columns: Iterable[str] = ()) -> dict[str, str]:
        """The Delta properties of a table with these columns.

        There is no change data feed if one of them has the name of a column of the feed.
        """
        size = {} if self.file_bytes is None else {FILE_BYTES_PROPERTY: str(self.file_bytes)}
        properties = {**self.properties, **size}
        return {
            name: value
            for name, value in properties.items()
            if name != FEED_PROPERTY or not find_reserved_columns(columns)
        }


@dataclass(frozen=True)
class SubscriptionLayout:
    """The layout of the replicas of a subscription.

    - `folder_template`: the template of the replicas' folders
    - `default_layout`: the layout of each table
    - `layout_by_table`: exceptions for some tables
    - `uses_plain_names`: whether columns get names that consist of `a-z`, `0-9` and `_`, and are derived from the
      publisher's names
    """

    folder_template: str = DEFAULT_FOLDER_TEMPLATE
    default_layout: TableLayout = field(default_factory=TableLayout)
    layout_by_table: Mapping[TableName, TableLayout] = field(default_factory=dict)
    uses_plain_names: bool = False

    def find_table_layout(self, name: TableName) -> TableLayout:
        """The layout of one table."""
        table = self.layout_by_table.get(name)
        return self.default_layout if table is None else table.with_defaults(self.default_layout)

    def format_properties(self) -> str | None:
        """The Delta properties of all tables as JSON. None if no property is set.

        The lake records this text, so that a later run can see whether the properties have changed.
        """
        tables = {
            json.dumps(name): self.find_table_layout(name).make_delta_properties()
            for name in sorted(self.layout_by_table)
        }
        if not self.default_layout.make_delta_properties() and not any(tables.values()):
            return None
        return json.dumps(
            {"every": self.default_layout.make_delta_properties(), "tables": tables}, sort_keys=True
        )


def find_target_file_bytes(properties: Mapping[str, str]) -> int:
    """The size in bytes that files shall have in a table with these properties. For an invalid value it is the default."""
    size = properties.get(FILE_BYTES_PROPERTY, "")
    return int(size) if size.isascii() and size.isdigit() else DEFAULT_FILE_BYTES


def parse_recorded_properties(text: str | None) -> set[str]:
    """The names of all properties in a text that `format_properties` made. Empty if the text is None."""
    if text is None:
        return set()
    properties_by_scope = json.loads(text)
    return {
        name
        for names in (properties_by_scope["every"], *properties_by_scope["tables"].values())
        for name in names
    }
