"""Makes docs/types.md from the code: the type in a replica for each of PostgreSQL's types.

    python scripts/type_table.py > docs/types.md

Needs no server. tests/decoding/values/test_type_table.py compares the file with the output.
"""

import sys

from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES
from pgsieve.decoding.values.output import has_output
from pgsieve.decoding.values.types import column_type

_NUMERIC = 1700
_ACLITEM = 1033  # the only usual column type without a send function
_MODIFIER = (12 << 16 | 2) + 4  # of numeric(12,2), an example of a numeric that becomes a decimal

_HEAD = """\
# Types

The type of a replica's column, by its PostgreSQL type. `python scripts/type_table.py > docs/types.md` makes this file.

| PostgreSQL | Spark | |
|---|---|---|
| boolean | boolean | |
| smallint, integer, bigint | smallint, int, bigint | |
| oid | bigint | |
| real, double precision | float, double | bit by bit; NaN and infinities as they are |
| numeric(p,s) with p ≤ 38, 0 ≤ s ≤ p | decimal(p,s) | NaN sets the table aside |
| any other numeric | string | |
| text, varchar, name, char(n) | string | char(n) with its padding blanks |
| bytea | binary | |
| date | date | years before 1 and after 9999 are exact |
| timestamp, timestamp with time zone | timestamp_ntz, timestamp | to January 294247, Spark's last |
| arrays of PostgreSQL's own types | array of the element's type | one dimension that begins at 1, also with NULL elements; others set the table aside |
| uuid, json, jsonb and all other types: enums, domains, ranges, interval, time, money … | string | PostgreSQL's own text |

PostgreSQL's own text is the output of the type's output function with DateStyle ISO, IntervalStyle postgres, TimeZone UTC,
extra_float_digits 3, bytea_output hex and encoding UTF8. The column *binary* says whether pgsieve can read values in binary format.
If it cannot, it refuses such a change with an error that names the column. A type that is not in this table becomes text. The Spark type of an
array is `array<…>` of the Spark type here.

| oid | type | Spark | Arrow | binary | oid of array |
|---|---|---|---|---|---|
"""

_NOTES = """
| users' types | Spark | binary |
|---|---|---|
| enum, domain, composite, range, multirange, and arrays of them | string | yes, if the types inside can be read |
| base types of extensions | string | no: their send functions are their own; a type without a send function is sent as text |

## Values

| value | in a replica |
|---|---|
| float `NaN`, `Infinity`, `-Infinity`, `-0` | as it is |
| `NaN`, `Infinity`, `-Infinity` in a decimal column | sets the table aside |
| date and timestamp `infinity`, `-infinity` | a value that no other value has: [below](#infinity) |
| a timestamp after January 294247 | sets the table aside |
| array of more than one dimension, or whose first subscript is not 1 | sets the table aside |
| text that is not UTF-8 (a database in encoding SQL_ASCII) | sets the table aside |

If a value sets its table aside, the error names the column, the key and the `types` override to choose. `string` is
PostgreSQL's text for any type, also for an array: `{{1,2},{3,4}}`. Then [copy the table again](operations.md#copy-tables-again).

## Infinity

| infinity | is | no other value has it because |
|---|---|---|
| date `infinity` | 5881580-07-11, Spark's greatest | PostgreSQL's dates end in 5874897 |
| date `-infinity` | January 1 of the year −5877000 | PostgreSQL's dates begin in 4714 BC |
| timestamp `infinity` | 294247-01-10 04:00:54.775807, Spark's greatest | a later timestamp sets the table aside |
| timestamp `-infinity` | January 1 of the year −290000 | PostgreSQL's timestamps begin in 4714 BC |

## In binary format

The text of `money` depends on the server's lc_monetary, and the text of `regclass` and similar types on the server's catalog. Tables with
a column of `reg…` or `aclitem` are [copied again](limits.md) after DDL that alters such names. PostgreSQL refuses to send `aclitem[]` in
binary format, and sends `aclitem` as text.

## Other Spark types

A subscription's [types](configuration.md#types) can ask for other Spark types.
"""


def markdown() -> str:
    """The text of docs/types.md."""
    rows = []
    for oid, builtin in sorted(BUILTIN_TYPES.items()):
        if oid == _NUMERIC:
            rows.append(_row(oid, "numeric(p,s), p ≤ 38, 0 ≤ s ≤ p", _MODIFIER).replace("12, 2", "p, s"))
        rows.append(_row(oid, "any other numeric" if oid == _NUMERIC else builtin.name))
    return _HEAD + "".join(rows).replace("12,2", "p,s") + _NOTES


def _row(oid: int, name: str, modifier: int = -1) -> str:
    array_oid = BUILTIN_TYPES[oid].array_oid
    kind = column_type(oid, modifier)
    binary = "as text" if oid == _ACLITEM else "yes" if has_output(oid) else "no"
    cells = (oid, name, f"`{kind.spark_type}`", f"`{kind.arrow_type}`", binary, array_oid)
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
