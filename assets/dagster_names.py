"""Names of PostgreSQL in Dagster: parts of asset keys, Dagster partition keys, and names of inputs and outputs.

In: names of schemas and tables, as they are in the catalog
Out: text that Dagster accepts everywhere. `decode_identifier` converts it back to the name.

Dagster makes the names of inputs and outputs from asset keys. These names may have only letters, digits and `_`, so
`AssetKey.to_python_identifier` replaces `-` by `_`.
"""

import re
from collections.abc import Iterable, Mapping

import dagster as dg

Name = tuple[str, str]

#: The characters that are encoded. Dagster forbids most of them, and `-` begins and ends an encoded character.
_SPECIAL = re.compile(r"[^A-Za-z0-9_]")
_ENCODED = re.compile(r"-([0-9A-F]+)-")


def encode_identifier(identifier: str) -> str:
    """Encode an identifier as a part of an asset key.

    ASCII letters, digits and `_` stay. Each other character becomes `-CODE-`, where CODE is its code point in
    hexadecimal digits: `order items` becomes `order-20-items`. Two different identifiers never become the same text.
    """
    return _SPECIAL.sub(lambda special: f"-{ord(special.group()):X}-", identifier)


def decode_identifier(text: str) -> str:
    """Decode a text that `encode_identifier` has made."""
    return _ENCODED.sub(lambda code: chr(int(code.group(1), 16)), text)


def encode_partition_key(name: Name) -> str:
    """The Dagster partition key of a published table. An encoded identifier has no dot, so a dot separates the two parts."""
    return ".".join(map(encode_identifier, name))


def decode_partition_key(key: str) -> Name:
    """The schema and the name of the table to which a Dagster partition key belongs."""
    schema, _, table = key.partition(".")
    return decode_identifier(schema), decode_identifier(table)


def output_names(keys: Iterable[dg.AssetKey]) -> dict[dg.AssetKey, str]:
    """Maps each asset of an op to a name for its output.

    The name is the one that Dagster would give it. If another asset has the same name, a number is added.
    """
    names: dict[str, dg.AssetKey] = {}
    for key in keys:
        name = base = key.to_python_identifier()
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names[name] = key
    return {key: name for name, key in names.items()}


def groups_of_distinct_names(keys: Mapping[dg.AssetKey, Name]) -> list[dict[dg.AssetKey, Name]]:
    """Divide assets into groups, as few as possible, so that no group has two assets to which Dagster gives the same name.

    In a check, Dagster makes the name of the output from the asset's key with `__` between the parts, and the name of
    the input with `_`. Neither may occur twice in a group.
    """
    groups: list[tuple[dict[dg.AssetKey, Name], set[str]]] = []
    for key, table in keys.items():
        names = {key.to_python_identifier(), "_".join(key.path).replace("-", "_")}
        group, used_names = next((g for g in groups if not g[1] & names), ({}, set()))
        if not group:
            groups.append((group, used_names))
        group[key] = table
        used_names |= names
    return [group for group, _ in groups]
