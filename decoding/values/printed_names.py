"""Types whose text is a name from the catalog, such as regclass.

Their values are oids, and the output functions look up the names (src/backend/utils/adt/regproc.c, acl.c). So
the text of a value changes when an object is renamed, moved or dropped, although no row changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES

#: Maps the oid of each of these types to the kind of names that it prints.
NAME_KIND_BY_OID: Mapping[int, str] = MappingProxyType(
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

#: The oids of the types that print names, and of their array types.
NAME_TYPE_OIDS = frozenset({*NAME_KIND_BY_OID, *(BUILTIN_TYPES[oid].array_oid for oid in NAME_KIND_BY_OID)})
