"""A catalog as text, to be kept with the changes that were written under it.

In: a `Catalog`, and the publications that matter. Out: JSON of these publications, the tables that they publish
and the partition trees of those; and the catalog again. Raises nothing but what JSON raises for text that this
module did not write.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

from pgsieve.decoding.publications.catalog import Attribute, Catalog, Publication, PublicationTable, Table
from pgsieve.decoding.values.builtin_types import MadeOf

_NESTED = {"tables", "publications", "types"}


def catalog_to_json(catalog: Catalog, publications: Collection[str]) -> str:
    """What decides what the publications send; those that do not exist are left out."""
    chosen = [catalog.publications[name] for name in publications if name in catalog.publications]
    published = {t.oid for t in catalog.tables.values() if any(p.contains(t) for p in chosen)}
    trees = published | {a for oid in published for a in catalog.tables[oid].ancestors}
    kept = [t for t in catalog.tables.values() if t.oid in trees or trees & {*t.ancestors}]
    plain = {f.name: getattr(catalog, f.name) for f in fields(catalog) if f.init and f.name not in _NESTED}
    written = {
        **plain,
        "tables": [asdict(t) for t in kept],
        "publications": [asdict(p) for p in chosen],
        "types": {oid: asdict(made) for oid, made in catalog.types.items()},
    }
    return json.dumps(written, default=sorted)


def catalog_from_json(text: str) -> Catalog:
    """The catalog that `catalog_to_json` wrote."""
    read = json.loads(text)
    tables = [_table(**t) for t in read["tables"]]
    publications = [_publication(**p) for p in read["publications"]]
    nested = {
        "tables": {t.oid: t for t in tables},
        "publications": {p.name: p for p in publications},
        "types": {int(oid): MadeOf(**made) for oid, made in read["types"].items()},
    }
    return Catalog(**{**read, **nested})


def _table(attributes: list[dict[str, Any]], **rest: Any) -> Table:
    plain: dict[str, Any] = {
        n: tuple(value) if isinstance(value, list) else value for n, value in rest.items()
    }
    return Table(attributes=tuple(Attribute(**a) for a in attributes), **plain)


def _publication(
    operations: list[str], schemas: list[str], tables: list[dict[str, Any]], **plain: Any
) -> Publication:
    return Publication(
        operations=frozenset(operations),
        schemas=frozenset(schemas),
        tables=tuple(_listed(**t) for t in tables),
        **plain,
    )


def _listed(**entry: Any) -> PublicationTable:
    plain: dict[str, Any] = {n: frozenset(v) if isinstance(v, list) else v for n, v in entry.items()}
    return PublicationTable(**plain)
