"""Makes the names under which replicas (the lake's copies of published tables) are registered in a catalog.

In: a template of pgsieve.yaml, for example `{subscription}.{schema}_{table}`, and a table.
Out: the parts of the replica's name, for example catalog, schema and table.

Raises nothing.
"""

#: The placeholders that a template may have in braces.
PLACEHOLDERS = ("subscription", "schema", "table")

CatalogName = tuple[str, ...]


def format_catalog_name(template: str, subscription: str, schema: str, table: str) -> CatalogName:
    """The parts of a replica's name.

    The template is split at its dots before the names are inserted, because these names may contain dots, too.
    """
    values = dict(zip(PLACEHOLDERS, (subscription, schema, table), strict=True))
    return tuple(part.format(**values) for part in template.split("."))
