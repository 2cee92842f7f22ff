"""The built-in functions and operators that a row filter may call, as pg_proc and pg_operator list them.

In: a name and the types of the arguments. Out: the `Procedure` that PostgreSQL would call (PostgreSQL
documentation, Type Conversion of Operators and Functions; func_select_candidate in parse_func.c). All procedures that
pgsieve evaluates are immutable and strict.

Raises RefusedError if no procedure accepts these types, if PostgreSQL could choose between several procedures, or if
pgsieve does not evaluate the procedure that PostgreSQL chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    INTERVAL,
    NUMERIC,
    STRINGS,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    VARCHAR,
)

# Each line has the SQL name, the function (prosrc), the types of its arguments, and the type of its result. `!` marks
# a function that raises an error for some values. `-` in the second column stands for a function that PostgreSQL may
# choose, but that pgsieve does not evaluate.
_PROCEDURE_TABLE: Final = """
abs             numeric_abs             numeric -> numeric
abs             int2abs!                int2 -> int2
abs             int4abs!                int4 -> int4
abs             int8abs!                int8 -> int8
abs             float4abs               float4 -> float4
abs             float8abs               float8 -> float8
@               numeric_abs             numeric -> numeric
@               int2abs!                int2 -> int2
@               int4abs!                int4 -> int4
@               int8abs!                int8 -> int8
@               float4abs               float4 -> float4
@               float8abs               float8 -> float8
-               numeric_uminus          numeric -> numeric
-               int2um!                 int2 -> int2
-               int4um!                 int4 -> int4
-               int8um!                 int8 -> int8
-               float4um                float4 -> float4
-               float8um                float8 -> float8
-               -                       interval -> interval
+               numeric_uplus           numeric -> numeric
+               int2up                  int2 -> int2
+               int4up                  int4 -> int4
+               int8up                  int8 -> int8
+               float4up                float4 -> float4
+               float8up                float8 -> float8
sign            numeric_sign            numeric -> numeric
sign            dsign                   float8 -> float8
ceil            numeric_ceil            numeric -> numeric
ceil            dceil                   float8 -> float8
ceiling         numeric_ceil            numeric -> numeric
ceiling         dceil                   float8 -> float8
floor           numeric_floor           numeric -> numeric
floor           dfloor                  float8 -> float8
round           numeric_round!          numeric int4 -> numeric
round           numeric_round           numeric -> numeric
round           dround                  float8 -> float8
trunc           numeric_trunc!          numeric int4 -> numeric
trunc           numeric_trunc           numeric -> numeric
trunc           dtrunc                  float8 -> float8
trunc           -                       macaddr -> macaddr
div             numeric_div_trunc!      numeric numeric -> numeric
gcd             numeric_gcd             numeric numeric -> numeric
gcd             int4gcd!                int4 int4 -> int4
gcd             int8gcd!                int8 int8 -> int8
lcm             numeric_lcm             numeric numeric -> numeric
lcm             int4lcm!                int4 int4 -> int4
lcm             int8lcm!                int8 int8 -> int8
sqrt            numeric_sqrt!           numeric -> numeric
sqrt            dsqrt!                  float8 -> float8
|/              dsqrt!                  float8 -> float8
scale           numeric_scale           numeric -> int4
min_scale       numeric_min_scale       numeric -> int4
trim_scale      numeric_trim_scale      numeric -> numeric
power           -                       float8 float8 -> float8
power           -                       numeric numeric -> numeric
^               -                       float8 float8 -> float8
^               -                       numeric numeric -> numeric
&               int2and                 int2 int2 -> int2
&               int4and                 int4 int4 -> int4
&               int8and                 int8 int8 -> int8
|               int2or                  int2 int2 -> int2
|               int4or                  int4 int4 -> int4
|               int8or                  int8 int8 -> int8
#               int2xor                 int2 int2 -> int2
#               int4xor                 int4 int4 -> int4
#               int8xor                 int8 int8 -> int8
~               int2not                 int2 -> int2
~               int4not                 int4 -> int4
~               int8not                 int8 -> int8
to_hex          to_hex32                int4 -> text
to_hex          to_hex64                int8 -> text
||              textcat                 text text -> text
||              byteacat                bytea bytea -> bytea
length          textlen                 text -> int4
length          bpcharlen               bpchar -> int4
length          byteaoctetlen           bytea -> int4
char_length     textlen                 text -> int4
char_length     bpcharlen               bpchar -> int4
character_length textlen                text -> int4
character_length bpcharlen              bpchar -> int4
octet_length    textoctetlen            text -> int4
octet_length    bpcharoctetlen          bpchar -> int4
octet_length    byteaoctetlen           bytea -> int4
bit_length      textbitlen!             text -> int4
bit_length      byteabitlen!            bytea -> int4
lower           lower                   text -> text
upper           upper                   text -> text
initcap         initcap                 text -> text
substring       text_substr!            text int4 int4 -> text
substring       text_substr             text int4 -> text
substring       bytea_substr!           bytea int4 int4 -> bytea
substring       bytea_substr            bytea int4 -> bytea
substring       -                       text text -> text
substring       -                       text text text -> text
substr          text_substr!            text int4 int4 -> text
substr          text_substr             text int4 -> text
substr          bytea_substr!           bytea int4 int4 -> bytea
substr          bytea_substr            bytea int4 -> bytea
left            text_left               text int4 -> text
right           text_right              text int4 -> text
position        textpos                 text text -> int4
position        -                       bytea bytea -> int4
strpos          textpos                 text text -> int4
starts_with     text_starts_with        text text -> bool
^@              text_starts_with        text text -> bool
btrim           btrim                   text text -> text
btrim           btrim1                  text -> text
btrim           -                       bytea bytea -> bytea
ltrim           ltrim                   text text -> text
ltrim           ltrim1                  text -> text
ltrim           -                       bytea bytea -> bytea
rtrim           rtrim                   text text -> text
rtrim           rtrim1                  text -> text
rtrim           -                       bytea bytea -> bytea
replace         replace_text            text text text -> text
translate       translate               text text text -> text
repeat          repeat!                 text int4 -> text
reverse         text_reverse            text -> text
split_part      split_part!             text text int4 -> text
lpad            lpad!                   text int4 text -> text
lpad            lpad!                   text int4 -> text
rpad            rpad!                   text int4 text -> text
rpad            rpad!                   text int4 -> text
ascii           ascii                   text -> int4
chr             chr!                    int4 -> text
md5             md5_text                text -> text
md5             md5_bytea               bytea -> text
sha256          sha256_bytea            bytea -> bytea
sha512          sha512_bytea            bytea -> bytea
+               date_pli!               date int4 -> date
+               integer_pl_date!        int4 date -> date
-               date_mii!               date int4 -> date
-               date_mi!                date date -> int4
+               date_pl_interval!       date interval -> timestamp
+               date_pl_interval!       interval date -> timestamp
-               date_mi_interval!       date interval -> timestamp
+               datetime_pl!            date time -> timestamp
+               timedate_pl!            time date -> timestamp
+               timestamp_pl_interval!  timestamp interval -> timestamp
+               timestamp_pl_interval!  interval timestamp -> timestamp
-               timestamp_mi_interval!  timestamp interval -> timestamp
-               timestamp_mi!           timestamp timestamp -> interval
-               timestamp_mi!           timestamptz timestamptz -> interval
-               -                       time time -> interval
-               -                       time interval -> time
+               -                       time interval -> time
+               -                       interval time -> time
-               -                       interval interval -> interval
+               -                       interval interval -> interval
isfinite        date_finite             date -> bool
isfinite        timestamp_finite        timestamp -> bool
isfinite        timestamp_finite        timestamptz -> bool
isfinite        -                       interval -> bool
make_date       make_date!              int4 int4 int4 -> date
date_trunc      timestamp_trunc!        text timestamp -> timestamp
date_trunc      -                       text timestamptz -> timestamptz
date_trunc      -                       text interval -> interval
extract         extract_date            text date -> numeric
extract         extract_timestamp       text timestamp -> numeric
extract         -                       text timestamptz -> numeric
extract         -                       text time -> numeric
extract         -                       text interval -> numeric
date_part       date_part_date!         text date -> float8
date_part       timestamp_part          text timestamp -> float8
date_part       -                       text timestamptz -> float8
date_part       -                       text time -> float8
date_part       -                       text interval -> float8
date            timestamp_date          timestamp -> date
date            -                       date -> date
"""

_OIDS: Final = {
    "bool": BOOL, "bytea": BYTEA, "int2": INT2, "int4": INT4, "int8": INT8, "numeric": NUMERIC,
    "float4": FLOAT4, "float8": FLOAT8, "text": TEXT, "bpchar": BPCHAR, "date": DATE, "time": TIME,
    "timestamp": TIMESTAMP, "timestamptz": TIMESTAMPTZ, "interval": INTERVAL, "name": 19, "macaddr": 829,
}  # fmt: skip

# Maps a type to the types that PostgreSQL casts it to implicitly (pg_cast). Casts of quoted constants are not listed.
_IMPLICIT_CASTS: Final = {
    INT2: {INT4, INT8, NUMERIC, FLOAT4, FLOAT8},
    INT4: {INT8, NUMERIC, FLOAT4, FLOAT8},
    INT8: {NUMERIC, FLOAT4, FLOAT8},
    NUMERIC: {FLOAT4, FLOAT8},
    FLOAT4: {FLOAT8},
    BPCHAR: {TEXT},
    DATE: {TIMESTAMP, TIMESTAMPTZ},
    TIMESTAMP: {TIMESTAMPTZ},
    TIME: {INTERVAL},
}
_PREFERRED_TYPES: Final = frozenset((BOOL, FLOAT8, TEXT, TIMESTAMPTZ, INTERVAL))


@dataclass(frozen=True, slots=True)
class Procedure:
    """A function of pg_proc.

    `name` is its `prosrc`. `argument_oids` and `result_oid` are oids of types. `can_fail` says that the function raises an
    error for some values.
    """

    name: str
    argument_oids: tuple[int, ...]
    result_oid: int
    can_fail: bool

    def accepts(self, type_oids: Sequence[int]) -> bool:
        """Whether the function can be called with arguments of these types, with implicit casts if needed."""
        return len(type_oids) == len(self.argument_oids) and all(
            type_oid in (argument_oid, UNKNOWN) or argument_oid in _IMPLICIT_CASTS.get(type_oid, ())
            for type_oid, argument_oid in zip(type_oids, self.argument_oids, strict=True)
        )

    def count_matches(self, type_oids: Sequence[int], *, counts_preferred: bool) -> int:
        """Count the arguments that need no conversion.

        With `counts_preferred`, arguments that are converted to a type that PostgreSQL prefers (such as float8) count, too.
        """
        return sum(
            type_oid == argument_oid or (counts_preferred and argument_oid in _PREFERRED_TYPES)
            for type_oid, argument_oid in zip(type_oids, self.argument_oids, strict=True)
            if type_oid != UNKNOWN
        )


def _read_procedure_table() -> Iterator[tuple[str, Procedure]]:
    for line in filter(None, _PROCEDURE_TABLE.splitlines()):
        name, source_name, *arguments = line.split()
        *types, _, result = (_OIDS.get(word, 0) for word in arguments)
        yield name, Procedure(source_name.rstrip("!"), tuple(types), result, source_name.endswith("!"))


def _group_procedures_by_name() -> dict[str, tuple[Procedure, ...]]:
    procedures: dict[str, tuple[Procedure, ...]] = {}
    for name, procedure in _read_procedure_table():
        procedures[name] = (*procedures.get(name, ()), procedure)
    return procedures


#: Maps a SQL name to all functions with this name.
PROCEDURES: Final = MappingProxyType(_group_procedures_by_name())


def resolve_procedure(name: str, type_oids: Sequence[int]) -> Procedure:
    """Return the procedure that PostgreSQL calls for this name and these types of arguments."""
    candidates = PROCEDURES.get(name)
    if candidates is None:
        raise RefusedError(f"{name} has no exact counterpart in pgsieve")
    # varchar has no functions of its own: it is binary-coercible to text.
    type_oids = tuple(TEXT if oid == VARCHAR else oid for oid in type_oids)
    if len(type_oids) == 2 and UNKNOWN in type_oids and not name.isidentifier():
        # If one side of an operator is a quoted constant, PostgreSQL first assumes that it has the type of the other
        # side.
        same_oids = tuple(max(set(type_oids) - {UNKNOWN}, default=TEXT) for _ in type_oids)
        exact_candidates = [candidate for candidate in candidates if candidate.argument_oids == same_oids]
        candidates = tuple(exact_candidates) or candidates
    matches = [candidate for candidate in candidates if candidate.accepts(type_oids)]
    for counts_preferred in (False, True):
        most_matches = max(
            (candidate.count_matches(type_oids, counts_preferred=counts_preferred) for candidate in matches),
            default=0,
        )
        matches = [
            candidate
            for candidate in matches
            if candidate.count_matches(type_oids, counts_preferred=counts_preferred) == most_matches
        ]
    if len(matches) > 1:
        # PostgreSQL takes an argument of unknown type for a string if a candidate has a string at its position.
        unknown_positions = [position for position, type_oid in enumerate(type_oids) if type_oid == UNKNOWN]
        string_matches = [
            c for c in matches if all(c.argument_oids[position] in STRINGS for position in unknown_positions)
        ]
        matches = [
            c
            for c in string_matches
            if all(c.argument_oids[position] == TEXT for position in unknown_positions)
        ] or string_matches
    if len(matches) != 1:
        raise RefusedError(
            f"{name} has no exact counterpart in pgsieve for these types of arguments, or they need a cast"
        )
    (procedure,) = matches
    if procedure.name == "-":
        raise RefusedError(f"{name} has no exact counterpart in pgsieve for these types of arguments")
    return procedure
