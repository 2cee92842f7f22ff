"""Types whose text is a name of the catalog: it changes when an object, a schema or a role is renamed, moved or dropped.

Values are oids, and the output functions look names up (src/backend/utils/adt/regproc.c, acl.c). So the text
of unchanged rows may differ from one day to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES

#: The kinds of names that a type prints; the publisher's catalog is asked for them.
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

#: These types and arrays of them.
PRINTING_TYPES = frozenset({*NAMES_OF, *(BUILTIN_TYPES[oid].array_oid for oid in NAMES_OF)})
