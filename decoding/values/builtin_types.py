"""PostgreSQL's built-in types that a column can have: their oids and names, and the types that they consist of.

Source: src/include/catalog/pg_type.dat and pg_range.dat. The oids are the same in all supported versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class BuiltinType:
    """A built-in type: its SQL name, and the oid of its array type.

    `subtype_oid` is the oid of a range's subtype, or of a multirange's range type. It is 0 for other types.
    """

    name: str
    array_oid: int
    subtype_oid: int = 0


BUILTIN_TYPES: Mapping[int, BuiltinType] = MappingProxyType(
    {
        16: BuiltinType("boolean", 1000),
        17: BuiltinType("bytea", 1001),
        18: BuiltinType('"char"', 1002),
        19: BuiltinType("name", 1003),
        20: BuiltinType("bigint", 1016),
        21: BuiltinType("smallint", 1005),
        22: BuiltinType("int2vector", 1006),
        23: BuiltinType("integer", 1007),
        24: BuiltinType("regproc", 1008),
        25: BuiltinType("text", 1009),
        26: BuiltinType("oid", 1028),
        27: BuiltinType("tid", 1010),
        28: BuiltinType("xid", 1011),
        29: BuiltinType("cid", 1012),
        30: BuiltinType("oidvector", 1013),
        114: BuiltinType("json", 199),
        142: BuiltinType("xml", 143),
        600: BuiltinType("point", 1017),
        601: BuiltinType("lseg", 1018),
        602: BuiltinType("path", 1019),
        603: BuiltinType("box", 1020),
        604: BuiltinType("polygon", 1027),
        628: BuiltinType("line", 629),
        650: BuiltinType("cidr", 651),
        700: BuiltinType("real", 1021),
        701: BuiltinType("double precision", 1022),
        718: BuiltinType("circle", 719),
        774: BuiltinType("macaddr8", 775),
        790: BuiltinType("money", 791),
        829: BuiltinType("macaddr", 1040),
        869: BuiltinType("inet", 1041),
        1033: BuiltinType("aclitem", 1034),
        1042: BuiltinType("character(n)", 1014),
        1043: BuiltinType("character varying", 1015),
        1082: BuiltinType("date", 1182),
        1083: BuiltinType("time", 1183),
        1114: BuiltinType("timestamp", 1115),
        1184: BuiltinType("timestamp with time zone", 1185),
        1186: BuiltinType("interval", 1187),
        1266: BuiltinType("time with time zone", 1270),
        1560: BuiltinType("bit(n)", 1561),
        1562: BuiltinType("bit varying", 1563),
        1700: BuiltinType("numeric", 1231),
        1790: BuiltinType("refcursor", 2201),
        2202: BuiltinType("regprocedure", 2207),
        2203: BuiltinType("regoper", 2208),
        2204: BuiltinType("regoperator", 2209),
        2205: BuiltinType("regclass", 2210),
        2206: BuiltinType("regtype", 2211),
        2950: BuiltinType("uuid", 2951),
        2970: BuiltinType("txid_snapshot", 2949),
        3220: BuiltinType("pg_lsn", 3221),
        3614: BuiltinType("tsvector", 3643),
        3615: BuiltinType("tsquery", 3645),
        3734: BuiltinType("regconfig", 3735),
        3769: BuiltinType("regdictionary", 3770),
        3802: BuiltinType("jsonb", 3807),
        3904: BuiltinType("int4range", 3905, 23),
        3906: BuiltinType("numrange", 3907, 1700),
        3908: BuiltinType("tsrange", 3909, 1114),
        3910: BuiltinType("tstzrange", 3911, 1184),
        3912: BuiltinType("daterange", 3913, 1082),
        3926: BuiltinType("int8range", 3927, 20),
        4072: BuiltinType("jsonpath", 4073),
        4089: BuiltinType("regnamespace", 4090),
        4096: BuiltinType("regrole", 4097),
        4191: BuiltinType("regcollation", 4192),
        4451: BuiltinType("int4multirange", 6150, 3904),
        4532: BuiltinType("nummultirange", 6151, 3906),
        4533: BuiltinType("tsmultirange", 6152, 3908),
        4534: BuiltinType("tstzmultirange", 6153, 3910),
        4535: BuiltinType("datemultirange", 6155, 3912),
        4536: BuiltinType("int8multirange", 6157, 3926),
        5038: BuiltinType("pg_snapshot", 5039),
        5069: BuiltinType("xid8", 271),
        6437: BuiltinType("oid8", 6442),
        6490: BuiltinType("regdatabase", 6491),
    }
)

ELEMENT_OIDS: Mapping[int, int] = MappingProxyType({t.array_oid: oid for oid, t in BUILTIN_TYPES.items()})
"""Maps the oid of each built-in array type to the oid of its element type."""

BOX_ARRAY_OID = 1020
"""The oid of the array of boxes, whose elements are separated by semicolons and not by commas (typdelim)."""


@dataclass(frozen=True, slots=True)
class DerivedType:
    """A type that is defined by other types or by labels (pg_type).

    - `kind` is typtype ('d', 'e', 'c', 'r' or 'm'), or 'a' for an array.
    - `underlying_oid` is the oid of another type: the base type of a domain, the subtype of a range, the range type of a
      multirange, or the element type of an array.
    - `labels` are the labels of an enum, the oldest first. `label_xids` has the transaction that last wrote each label.
    - `fields` has the number and the type oid of each field of a composite type. It is empty unless a column or another
      type contains this composite type.
    """

    kind: str
    underlying_oid: int = 0
    labels: tuple[str, ...] = ()
    fields: tuple[tuple[int, int], ...] = ()
    label_xids: tuple[int, ...] = ()


DerivedTypesByOid: TypeAlias = Mapping[int, DerivedType]
NO_DEFINED_TYPES: DerivedTypesByOid = {}  # Spark cannot send a MappingProxyType to executors.

DERIVED_TYPES: DerivedTypesByOid = MappingProxyType(
    {
        **{array: DerivedType("a", element) for array, element in ELEMENT_OIDS.items()},
        # A type over a range type is a multirange. A type over any other type is a range.
        **{
            oid: DerivedType("m" if BUILTIN_TYPES[t.subtype_oid].subtype_oid else "r", t.subtype_oid)
            for oid, t in BUILTIN_TYPES.items()
            if t.subtype_oid
        },
    }
)
"""The built-in arrays, ranges and multiranges, by oid."""
