"""PostgreSQL's names in Dagster: parts of asset keys, Dagster partition keys, names of inputs and outputs.

In: names of schemas and tables as the catalog has them. Out: text that Dagster accepts everywhere, and that
`decode_identifier` turns back into the name. Dagster makes the names of inputs and outputs from asset keys: they have
only `[A-Za-z0-9_]`, and `AssetKey.to_python_identifier` turns `-` into `_`.
"""

import re
from collections.abc import Iterable, Mapping

import dagster as dg

Name = tuple[str, str]

#: Characters that Dagster forbids, and `-`, which introduces an encoded character.
_SPECIAL = re.compile(r"[^A-Za-z0-9_]")
_ENCODED = re.compile(r"-([0-9A-F]+)-")


def encode_identifier(identifier: str) -> str:
    """An identifier as a part of an asset key: ASCII letters, digits and `_` stay, another character becomes `-CODE-`.

    CODE is the character's code point: `order items` becomes `order-20-items`. Two identifiers never become the same
    text.
    """
    return _SPECIAL.sub(lambda special: f"-{ord(special.group()):X}-", identifier)


def decode_identifier(text: str) -> str:
    """The identifier that `encode_identifier` wrote."""
    return _ENCODED.sub(lambda code: chr(int(code.group(1), 16)), text)


def encode_partition_key(name: Name) -> str:
    """The Dagster partition key of a published table: no part has a dot in it."""
    return ".".join(map(encode_identifier, name))


def decode_partition_key(key: str) -> Name:
    """The (schema, table) of a Dagster partition key."""
    schema, _, table = key.partition(".")
    return decode_identifier(schema), decode_identifier(table)


def output_names(keys: Iterable[dg.AssetKey]) -> dict[dg.AssetKey, str]:
    """A name for the output of each asset of an op: Dagster's name, with a number if another asset has the same name."""
    names: dict[str, dg.AssetKey] = {}
    for key in keys:
        name = base = key.to_python_identifier()
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names[name] = key
    return {key: name for name, key in names.items()}


def groups_of_distinct_names(keys: Mapping[dg.AssetKey, Name]) -> list[dict[dg.AssetKey, Name]]:
    """Divide assets into the fewest groups in which all names differ.

    Dagster names a check's output by the asset's key with `__` between its parts, and its input with `_`.
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
