"""Types whose text is a name in the catalog, which changes when an object is renamed, moved or dropped.

The values are oids, and the output functions look up the names (src/backend/utils/adt/regproc.c, acl.c). So
the text of an unchanged row may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES

#: The kind of name that each type prints; pgsieve reads these names from the publisher's catalog.
NAMES_OF: Mapping[int, str] = MappingProxyType(
    {
        24: "function",  # regproc
        1033: "role",  # aclitem
        2202: "function",  # regprocedure, with its arguments' types
        2203: "operator",  # regoper
        2204: "operator",  # regoperator, with its arguments' types
        2205: "relation",  # regclass
        2206: "type",  # regtype
        3734: "configuration",  # regconfig
        3769: "dictionary",  # regdictionary
        4089: "schema",  # regnamespace
        4096: "role",  # regrole
        4191: "collation",  # regcollation
        6490: "database",  # regdatabase
    }
)

#: The types that print names, and their array types.
PRINTING_TYPES = frozenset({*NAMES_OF, *(BUILTIN_TYPES[oid].array_oid for oid in NAMES_OF)})
