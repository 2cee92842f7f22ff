"""Names of PostgreSQL in Dagster: parts of asset keys, Dagster partition keys, and names of inputs and outputs.

In: names of schemas and tables, as they are in the catalog
Out: text that Dagster accepts everywhere. `decode_identifier` converts it back to the name.

Dagster makes the names of inputs and outputs from asset keys. These names may have only letters, digits and `_`, so
`AssetKey.to_python_identifier` replaces `-` by `_`.
"""

import re
from collections.abc import Iterable, Mapping

import dagster as dg

from pgsieve.resources.lake.delta.layout import TableName

#: The characters that are encoded. Dagster forbids most of them, and `-` begins and ends an encoded character.
_SPECIAL_CHARACTER = re.compile(r"[^A-Za-z0-9_]")
_ENCODED_CHARACTER = re.compile(r"-([0-9A-F]+)-")


def encode_identifier(identifier: str) -> str:
    """Encode an identifier as a part of an asset key.

    ASCII letters, digits and `_` stay. Each other character becomes `-CODE-`, where CODE is its code point in
    hexadecimal digits: `order items` becomes `order-20-items`. Two different identifiers never become the same text.
    """
    return _SPECIAL_CHARACTER.sub(lambda match: f"-{ord(match.group()):X}-", identifier)


def decode_identifier(text: str) -> str:
    """Decode a text that `encode_identifier` has made."""
    return _ENCODED_CHARACTER.sub(lambda match: chr(int(match.group(1), 16)), text)


def encode_partition_key(name: TableName) -> str:
    """The Dagster partition key of a published table. An encoded identifier has no dot, so a dot separates the two parts."""
    return ".".join(map(encode_identifier, name))


def decode_partition_key(partition_key: str) -> TableName:
    """The schema and the name of the table to which a Dagster partition key belongs."""
    schema, _, table = partition_key.partition(".")
    return decode_identifier(schema), decode_identifier(table)


def name_outputs(asset_keys: Iterable[dg.AssetKey]) -> dict[dg.AssetKey, str]:
    """Map each asset of an op to a name for its output.

    The name is the one that Dagster would give it. If another asset has the same name, a number is added.
    """
    key_by_name: dict[str, dg.AssetKey] = {}
    for key in asset_keys:
        name = dagster_name = key.to_python_identifier()
        suffix = 2
        while name in key_by_name:
            name, suffix = f"{dagster_name}_{suffix}", suffix + 1
        key_by_name[name] = key
    return {key: name for name, key in key_by_name.items()}


def group_by_distinct_names(
    table_by_key: Mapping[dg.AssetKey, TableName],
) -> list[dict[dg.AssetKey, TableName]]:
    """Divide assets into few groups, so that no group has two assets to which Dagster gives the same name.

    For a check, Dagster makes two names from the asset's key: the name of the output has `__` between the parts of the
    key, and the name of the input has `_`. Neither name may occur twice in a group.
    """
    groups_with_names: list[tuple[dict[dg.AssetKey, TableName], set[str]]] = []
    for key, table in table_by_key.items():
        dagster_names_of_key = {key.to_python_identifier(), "_".join(key.path).replace("-", "_")}
        group, used_names = next(
            (g for g in groups_with_names if not g[1] & dagster_names_of_key), ({}, set())
        )
        if not group:
            groups_with_names.append((group, used_names))
        group[key] = table
        used_names |= dagster_names_of_key
    return [group for group, _ in groups_with_names]
