"""Converts a catalog to JSON, and JSON to a catalog.

pgsieve records this JSON in the lake, together with the LSN from which it is valid. Changes from this LSN on are
decoded and filtered by the recorded catalog, because the publisher's catalog may be newer than the changes. The JSON
contains only the publications that the caller names, the tables that they publish, and the partition trees of these
tables.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from pgsieve.decoding.publications.catalog import Attribute, Catalog, Publication, PublicationTable, Table
from pgsieve.decoding.row_filters.letter_case import CaseMapping, CharacterReplacements, InitcapRules
from pgsieve.decoding.values.builtin_types import DerivedType

#: The fields of `Catalog` that are not copied into the JSON as they are. The functions below convert the first three.
#: `locked` is left out: a catalog is recorded only once no lock of another session hides a part of it.
_FIELDS_NOT_COPIED = {"tables", "publications", "types", "locked"}


def catalog_to_json(catalog: Catalog, publications: Collection[str]) -> str:
    """Return the JSON of the part of a catalog that these publications depend on.

    Publications that do not exist are ignored.
    """
    selected_publications = [
        catalog.publications[name] for name in publications if name in catalog.publications
    ]
    published_oids = {
        t.oid for t in catalog.tables.values() if any(p.contains(t) for p in selected_publications)
    }
    tree_oids = published_oids | {
        ancestor for oid in published_oids for ancestor in catalog.tables[oid].ancestors
    }
    tables = [t for t in catalog.tables.values() if t.oid in tree_oids or tree_oids & {*t.ancestors}]
    plain_fields = {
        f.name: getattr(catalog, f.name)
        for f in fields(catalog)
        if f.init and f.name not in _FIELDS_NOT_COPIED
    }
    mappings = {name: mapping for t in tables for name, mapping in t.case_mappings}
    document = {
        **plain_fields,
        "tables": [_table_to_json(t) for t in tables],
        **(
            {"case_mappings": {name: asdict(mapping) for name, mapping in mappings.items()}}
            if mappings
            else {}
        ),
        "publications": [_publication_to_json(p) for p in selected_publications],
        # Decoding needs only these properties of a type.
        "types": {
            oid: {"kind": derived_type.kind, "of": derived_type.underlying_oid}
            for oid, derived_type in catalog.types.items()
        },
    }
    return json.dumps(document, default=sorted, ensure_ascii=False)


def catalog_from_json(text: str) -> Catalog:
    """Return the catalog that `catalog_to_json` wrote."""
    document = json.loads(text)
    mappings = {
        name: _mapping_from_json(**mapping) for name, mapping in document.pop("case_mappings", {}).items()
    }
    major_version = document["server_version"] // 10000
    tables = [_table_from_json(mappings, major_version=major_version, **t) for t in document["tables"]]
    publications = [_publication_from_json(**p) for p in document["publications"]]
    converted_fields = {
        "tables": {t.oid: t for t in tables},
        "publications": {p.name: p for p in publications},
        "types": {
            int(oid): DerivedType(type_document["kind"], type_document["of"])
            for oid, type_document in document["types"].items()
        },
    }
    return Catalog(**{**document, **converted_fields})


def _table_to_json(table: Table) -> dict[str, Any]:
    """Return a table as JSON, with only the names of its case mappings.

    Many tables share a mapping, so the JSON of the catalog has each mapping once.
    """
    table_document = asdict(replace(table, case_mappings=()))
    del (
        table_document["case_mappings"],
        table_document["major_version"],
    )  # `catalog_from_json` adds the catalog's version.
    if table.encoding == "UTF8":
        del table_document["encoding"]
    if table.legible:
        del table_document["legible"]
    return (
        {**table_document, "cases": [name for name, _ in table.case_mappings]}
        if table.case_mappings
        else table_document
    )


def _publication_to_json(publication: Publication) -> dict[str, Any]:
    """Return a publication as JSON; `excluded` is left out if it is empty."""
    publication_document = asdict(publication)
    del publication_document["entry_by_oid"]  # It follows from `tables`.
    if not publication.excluded:
        del publication_document["excluded"]
    return publication_document


def _mapping_from_json(
    lower: list[str], upper: list[str], words: dict[str, Any] | None, refusal: str
) -> CaseMapping:
    initcap_rules = words and InitcapRules(
        _replacements_from_json(words["first"]), _replacements_from_json(words["rest"]), words["members"]
    )
    return CaseMapping(
        _replacements_from_json(lower), _replacements_from_json(upper), initcap_rules or None, refusal
    )


def _replacements_from_json(pair: list[str]) -> CharacterReplacements:
    characters, replacements = pair
    return characters, replacements


def _table_from_json(
    mappings: Mapping[str, CaseMapping],
    attributes: list[dict[str, Any]],
    cases: Collection[str] = (),
    **other_fields: Any,
) -> Table:
    fields_by_name: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in other_fields.items()
    }
    table_mappings = tuple((name, mappings[name]) for name in cases)
    return Table(
        attributes=tuple(Attribute(**a) for a in attributes), case_mappings=table_mappings, **fields_by_name
    )


def _publication_from_json(
    operations: list[str],
    schemas: list[str],
    tables: list[dict[str, Any]],
    excluded: Collection[int] = (),
    **plain_fields: Any,
) -> Publication:
    return Publication(
        operations=frozenset(operations),
        schemas=frozenset(schemas),
        tables=tuple(_publication_table_from_json(**t) for t in tables),
        excluded=frozenset(excluded),
        **plain_fields,
    )


def _publication_table_from_json(**entry: Any) -> PublicationTable:
    fields_by_name: dict[str, Any] = {
        name: frozenset(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    return PublicationTable(**fields_by_name)
