"""Groups for many tables in Dagster. They are nested in the group of the tables' source or subscription.

If a group is expanded in Dagster's graph, all of its assets are drawn in one column, so a group should be small.

In: the names of tables
Out: for each table the path of its nested groups. The path is empty if there are few tables.

A path depends only on the beginnings of names. So if tables are added or removed, few paths change.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest

import dagster as dg

from pgsieve.resources.lake.delta.layout import TableName

#: The largest number of tables in a group. This many fit on a screen.
_MAX_TABLES = 30
_SPECIAL_CHARACTER = re.compile(r"[^A-Za-z0-9_]")

GroupPath = tuple[str, ...]


def group_paths(names: Iterable[TableName]) -> Mapping[TableName, GroupPath]:
    """Maps each table to the path of its groups: its schema if there are several schemas, and then beginnings of its name."""
    tables = sorted(set(names))
    if len(tables) <= _MAX_TABLES:
        return dict.fromkeys(tables, ())
    tables_by_schema = defaultdict[str, list[TableName]](list)
    for name in tables:
        tables_by_schema[name[0]].append(name)
    return {
        name: (*((_encode_label(schema),) if len(tables_by_schema) > 1 else ()), *path)
        for schema, members in tables_by_schema.items()
        for name, path in _find_paths_by_prefix(members).items()
    }


def _find_paths_by_prefix(tables: list[TableName]) -> dict[TableName, GroupPath]:
    """Divide sorted tables of one schema into groups by the beginnings of their names, until all groups are small.

    The names in a group share at least one leading character more than the names of all `tables`.
    """
    if len(tables) <= _MAX_TABLES:
        return dict.fromkeys(tables, ())
    first_name, last_name = tables[0][1], tables[-1][1]
    length = next(i for i, (a, b) in enumerate(zip_longest(first_name, last_name), 1) if a != b)
    tables_by_beginning = defaultdict[str, list[TableName]](list)
    for name in tables:
        tables_by_beginning[name[1][:length]].append(name)
    return {
        name: (_encode_label(beginning), *path)
        for beginning, members in tables_by_beginning.items()
        for name, path in _find_paths_by_prefix(members).items()
    }


def _encode_label(text: str) -> str:
    """Replace the characters that Dagster does not allow in the name of a group by their codes."""
    return _SPECIAL_CHARACTER.sub(lambda match: f"_{ord(match.group()):X}_", text)


def nested_group(group: str, path: GroupPath) -> str:
    """The name of the group at a path within another group.

    If this version of Dagster has no nested groups, it is the name of the outer group.
    """
    return "/".join((group, *path)) if _HAS_NESTED_GROUPS else group


def _has_nested_groups() -> bool:
    """True if this version of Dagster has nested groups."""
    try:
        dg.AssetSpec("any", group_name="outer/inner")
    except dg.DagsterInvalidDefinitionError:
        return False
    return True


_HAS_NESTED_GROUPS = _has_nested_groups()
