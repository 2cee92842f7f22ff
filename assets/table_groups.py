"""Dagster groups for many tables, nested in the group of their source or subscription.

Dagster's graph draws every asset of an expanded group in one column, so a group should be small. In: the names of
tables. Out: the path of nested groups of each table, which is empty if there are few tables. A path depends only on the
prefixes of names, so few paths change when tables come and go.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest

import dagster as dg

from pgsieve.assets.dagster_names import Name

#: The most tables in a group: this many fit on a screen.
_MAX_TABLES = 30
_SPECIAL = re.compile(r"[^A-Za-z0-9_]")

GroupPath = tuple[str, ...]


def group_paths(names: Iterable[Name]) -> Mapping[Name, GroupPath]:
    """The group path of each table: its schema if there are several schemas, then prefixes of its name."""
    tables = sorted(set(names))
    if len(tables) <= _MAX_TABLES:
        return dict.fromkeys(tables, ())
    schemas = defaultdict[str, list[Name]](list)
    for name in tables:
        schemas[name[0]].append(name)
    return {
        name: (*((_label(schema),) if len(schemas) > 1 else ()), *path)
        for schema, members in schemas.items()
        for name, path in _paths_by_prefix(members).items()
    }


def _paths_by_prefix(tables: list[Name]) -> dict[Name, GroupPath]:
    """Divide sorted tables of a schema by the first character in which names differ, until all groups are small."""
    if len(tables) <= _MAX_TABLES:
        return dict.fromkeys(tables, ())
    first, last = tables[0][1], tables[-1][1]
    length = next(i for i, (a, b) in enumerate(zip_longest(first, last), 1) if a != b)
    beginnings = defaultdict[str, list[Name]](list)
    for name in tables:
        beginnings[name[1][:length]].append(name)
    return {
        name: (_label(beginning), *path)
        for beginning, members in beginnings.items()
        for name, path in _paths_by_prefix(members).items()
    }


def _label(text: str) -> str:
    """The text in the characters that Dagster allows in the name of a group."""
    return _SPECIAL.sub(lambda special: f"_{ord(special.group()):X}_", text)


def nested_group(group: str, path: GroupPath) -> str:
    """The name of the group at a path within a group; the outer group's name if this Dagster has no nested groups."""
    return "/".join((group, *path)) if _NESTED else group


def _is_nested() -> bool:
    try:
        dg.AssetSpec("any", group_name="outer/inner")
    except dg.DagsterInvalidDefinitionError:
        return False
    return True


_NESTED = _is_nested()
