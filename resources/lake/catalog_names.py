"""The names of replicas in a catalog.

In: a template and a table. Out: the parts of the replica's name. Raises nothing.
"""

#: The placeholders that a template for names may have in braces.
FIELDS = ("subscription", "schema", "table")

CatalogName = tuple[str, ...]


def catalog_name(template: str, subscription: str, schema: str, table: str) -> CatalogName:
    """The parts of a replica's name. The template is split at dots before values are inserted, which may have dots."""
    values = dict(zip(FIELDS, (subscription, schema, table), strict=True))
    return tuple(part.format(**values) for part in template.split("."))
