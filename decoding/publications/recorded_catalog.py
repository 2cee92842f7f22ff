"""Converts a catalog to text, which is stored with the changes that were made under this catalog, and back.

In: a `Catalog`, and the names of publications. Out: JSON of these publications, the tables that they publish
and the partition trees of these tables; and the catalog again. Raises only JSON's errors, for text that this
module did not write.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from pgsieve.decoding.publications.catalog import Attribute, Catalog, Publication, PublicationTable, Table
from pgsieve.decoding.row_filters.letter_case import CaseMapping, Changes, Words
from pgsieve.decoding.values.builtin_types import MadeOf

#: Fields that are converted, or left out (`locked`: a recorded catalog has no locked tables); others are JSON
#: already.
_NESTED = {"tables", "publications", "types", "locked"}


def catalog_to_json(catalog: Catalog, publications: Collection[str]) -> str:
    """The part of the catalog that decides what these publications send.

    Names of missing publications are left out.
    """
    chosen = [catalog.publications[name] for name in publications if name in catalog.publications]
    published = {t.oid for t in catalog.tables.values() if any(p.contains(t) for p in chosen)}
    trees = published | {a for oid in published for a in catalog.tables[oid].ancestors}
    tables = [t for t in catalog.tables.values() if t.oid in trees or trees & {*t.ancestors}]
    plain = {f.name: getattr(catalog, f.name) for f in fields(catalog) if f.init and f.name not in _NESTED}
    mappings = {name: mapping for t in tables for name, mapping in t.case_mappings}
    written = {
        **plain,
        "tables": [_written(t) for t in tables],
        **({"case_mappings": {n: asdict(m) for n, m in mappings.items()}} if mappings else {}),
        "publications": [_defined(p) for p in chosen],
        # Decoding needs only these properties of a type.
        "types": {oid: {"kind": made.kind, "of": made.of} for oid, made in catalog.types.items()},
    }
    return json.dumps(written, default=sorted, ensure_ascii=False)


def catalog_from_json(text: str) -> Catalog:
    """The catalog that `catalog_to_json` wrote."""
    read = json.loads(text)
    mappings = {name: _mapping(**m) for name, m in read.pop("case_mappings", {}).items()}
    major_version = read["server_version"] // 10000
    tables = [_table(mappings, major_version=major_version, **t) for t in read["tables"]]
    publications = [_publication(**p) for p in read["publications"]]
    nested = {
        "tables": {t.oid: t for t in tables},
        "publications": {p.name: p for p in publications},
        "types": {int(oid): MadeOf(**made) for oid, made in read["types"].items()},
    }
    return Catalog(**{**read, **nested})


def _written(table: Table) -> dict[str, Any]:
    """A table as JSON; its case mappings are given by name, because the catalog has each mapping once."""
    plain = asdict(replace(table, case_mappings=()))
    del plain["case_mappings"], plain["major_version"]  # The catalog has the version.
    if table.encoding == "UTF8":
        del plain["encoding"]
    if table.legible:
        del plain["legible"]
    return {**plain, "cases": [name for name, _ in table.case_mappings]} if table.case_mappings else plain


def _defined(publication: Publication) -> dict[str, Any]:
    """A publication as JSON; `excluded` is left out if it is empty."""
    plain = asdict(publication)
    if not publication.excluded:
        del plain["excluded"]
    return plain


def _mapping(lower: list[str], upper: list[str], words: dict[str, Any] | None, refusal: str) -> CaseMapping:
    initials = words and Words(_changes(words["first"]), _changes(words["rest"]), words["members"])
    return CaseMapping(_changes(lower), _changes(upper), initials or None, refusal)


def _changes(read: list[str]) -> Changes:
    before, after = read
    return before, after


def _table(
    mappings: Mapping[str, CaseMapping],
    attributes: list[dict[str, Any]],
    cases: Collection[str] = (),
    **rest: Any,
) -> Table:
    plain: dict[str, Any] = {
        n: tuple(value) if isinstance(value, list) else value for n, value in rest.items()
    }
    own = tuple((name, mappings[name]) for name in cases)
    return Table(attributes=tuple(Attribute(**a) for a in attributes), case_mappings=own, **plain)


def _publication(
    operations: list[str],
    schemas: list[str],
    tables: list[dict[str, Any]],
    excluded: Collection[int] = (),
    **plain: Any,
) -> Publication:
    return Publication(
        operations=frozenset(operations),
        schemas=frozenset(schemas),
        tables=tuple(_listed(**t) for t in tables),
        excluded=frozenset(excluded),
        **plain,
    )


def _listed(**entry: Any) -> PublicationTable:
    plain: dict[str, Any] = {n: frozenset(v) if isinstance(v, list) else v for n, v in entry.items()}
    return PublicationTable(**plain)
