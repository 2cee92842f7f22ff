"""The names of replicas in a catalog.

In: a template and a table. Out: the parts of its name. Raises nothing.
"""

#: The placeholders that a template for names may have in braces.
FIELDS = ("subscription", "schema", "table")

CatalogName = tuple[str, ...]


def catalog_name(template: str, subscription: str, schema: str, table: str) -> CatalogName:
    """The parts of a replica's name.

    The template is split before the values are put in, so a dot in a table's name does not separate parts.
    """
    values = dict(zip(FIELDS, (subscription, schema, table), strict=True))
    return tuple(part.format(**values) for part in template.split("."))
