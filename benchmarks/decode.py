"""Measures how many changes per second one core decodes, from raw pgoutput messages to typed Arrow columns.

    python benchmarks/decode.py [--rows 400000] [--runs 5] [--case ten ...]

The benchmark makes the messages itself, so that it measures only decoding: batches of 16 MB of Insert and
Update messages, as a peek of a slot returns them, with values in text and in binary format. Prints for each
case the best run by processor time, which other work on the machine changes least, and the ratio of the rates
of binary and text.
"""

import argparse
import datetime as dt
import random
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.decoding.protocol.messages import (
    NULL,
    Begin,
    Binary,
    ColumnValue,
    Commit,
    Insert,
    OldRow,
    Text,
    Update,
    encode,
)
from pgsieve.decoding.protocol.tuples import RelationColumns, decode_changes
from pgsieve.decoding.values.types import column_type

RELATION = 16_384
BATCH_BYTES = 16 << 20
PREPARED = 20_000  # The number of distinct rows; longer workloads repeat them.

INT4, INT8, FLOAT8, TEXT, BOOL, TIMESTAMPTZ, NUMERIC, UUID, INT4_ARRAY = (
    23,
    20,
    701,
    25,
    16,
    1184,
    1700,
    2950,
    1007,
)
NUMERIC_12_2 = (12 << 16 | 2) + 4
POSTGRES_EPOCH = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and the functions for its value in row `i`, in text and in binary format."""

    name: str
    type_oid: int
    text: Callable[[int], str]
    binary: Callable[[int], bytes]
    type_modifier: int = -1


def integer(name: str, value: Callable[[int], int], type_oid: int = INT4) -> Column:
    """Make a column of integers."""
    layout = ">q" if type_oid == INT8 else ">i"
    return Column(name, type_oid, lambda i: str(value(i)), lambda i: struct.pack(layout, value(i)))


def text(name: str, value: Callable[[int], str]) -> Column:
    """Make a column of text; both formats have the same bytes."""
    return Column(name, TEXT, value, lambda i: value(i).encode())


def amount(name: str, type_modifier: int = NUMERIC_12_2) -> Column:
    """Make a column of numbers with two decimal places."""

    def binary(i: int) -> bytes:
        whole = i * 13 % 1_000_000
        digits = [whole // 10_000, whole % 10_000, i % 100 * 100]
        weight = 1
        while digits and not digits[0]:
            digits, weight = digits[1:], weight - 1
        while digits and not digits[-1]:
            digits = digits[:-1]
        return struct.pack(f">hhHh{len(digits)}H", len(digits), weight if digits else 0, 0, 2, *digits)

    return Column(name, NUMERIC, lambda i: f"{i * 13 % 1_000_000}.{i % 100:02}", binary, type_modifier)


def moment(i: int) -> dt.datetime:
    """Return the time of row `i`."""
    return dt.datetime(2024, 5, i % 28 + 1, 7, 44, i % 60, i % 999_999 + 1, dt.UTC)


def numbers(i: int) -> bytes:
    """Return the array of row `i` in binary format."""
    elements = b"".join(struct.pack(">ii", 4, i + n) for n in range(8))
    return struct.pack(">iiIii", 1, 0, INT4, 8, 1) + elements


ORDERS = (
    integer("id", lambda i: i, INT8),
    integer("customer_id", lambda i: i * 7919 % 10_000),
    text("status", lambda i: ("new", "paid", "shipped", "done")[i % 4]),
    amount("amount"),
    Column(
        "created_at",
        TIMESTAMPTZ,
        lambda i: f"{moment(i):%Y-%m-%d %H:%M:%S.%f}".rstrip("0") + "+00",
        lambda i: struct.pack(">q", (moment(i) - POSTGRES_EPOCH) // dt.timedelta(microseconds=1)),
    ),
    text("note", lambda i: f"note number {i} some more text for row"),
    integer("qty", lambda i: i % 50),
    Column("price", FLOAT8, lambda i: repr(i / 3), lambda i: struct.pack(">d", i / 3)),
    Column("flag", BOOL, lambda i: "tf"[i % 2], lambda i: bytes([1 - i % 2])),
    integer("tenant", lambda i: i % 16),
)
OTHERS = (
    integer("id", lambda i: i, INT8),
    Column("uuid", UUID, lambda i: str(uuid.UUID(int=i << 80)), lambda i: uuid.UUID(int=i << 80).bytes),
    Column(
        "list",
        INT4_ARRAY,
        lambda i: "{" + ",".join(str(i + n) for n in range(8)) + "}",
        numbers,
    ),
    amount("free", -1),
)
LARGE = (
    integer("id", lambda i: i, INT8),
    text("document", lambda i: f"{i} some words of a long text;" * 140),
)
WIDE = tuple(replace(column, name=f"{column.name}_{n}") for n in range(5) for column in ORDERS)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of some columns, the share of values that are NULL, and the share of changes with an old row."""

    columns: tuple[Column, ...]
    rows: int
    nulls: float = 0.0
    old_rows: float = 0.0
    needed: frozenset[str] | None = None


def cases(rows: int) -> dict[str, Case]:
    """Return the cases; the wide one has fewer rows, so that it has as many values."""
    return {
        "narrow (3 columns)": Case(ORDERS[:3], rows),
        "ten columns": Case(ORDERS, rows),
        "ten, a fifth NULL": Case(ORDERS, rows, nulls=0.2),
        "ten, every other an update with old row": Case(ORDERS, rows, old_rows=0.5),
        "ten, two needed": Case(ORDERS, rows, needed=frozenset({"id", "tenant"})),
        "uuid, int[8], numeric without precision": Case(OTHERS, rows),
        "large (4 kB of text)": Case(LARGE, rows // 20),
        "wide (50 columns)": Case(WIDE, rows // 5),
    }


def messages(case: Case, *, binary: bool) -> list[pa.Array]:
    """Make the batches of a case, with values in one of the formats."""
    chance = random.Random(1)

    def row(i: int) -> tuple[ColumnValue, ...]:
        return tuple(
            NULL
            if chance.random() < case.nulls
            else Binary(column.binary(i))
            if binary
            else Text(column.text(i).encode())
            for column in case.columns
        )

    def change(i: int) -> bytes:
        if chance.random() < case.old_rows:
            return encode(Update(RELATION, OldRow(row(i)), row(i + 1)))
        return encode(Insert(RELATION, row(i)))

    prepared = [change(i * 48_271 % 1_000_000) for i in range(min(PREPARED, case.rows))]
    per_batch = max(1, BATCH_BYTES * len(prepared) // sum(map(len, prepared)))
    batches = []
    for first in range(0, case.rows, per_batch):
        numbers = range(first, min(first + per_batch, case.rows))
        batches.append(pa.array([prepared[i % len(prepared)] for i in numbers], pa.binary()))
    return batches


def measure(run: Callable[[], None], runs: int) -> float:
    """Return the processor seconds of the best run."""
    run()  # the first pays for memory
    seconds = []
    for _ in range(runs):
        before = time.process_time()
        run()
        seconds.append(time.process_time() - before)
    return min(seconds)


def measure_decoding(case: Case, runs: int, *, binary: bool) -> tuple[float, float]:
    """Return rows and megabytes per second, with values in one of the formats."""
    batches = messages(case, binary=binary)
    columns = RelationColumns(
        tuple(column.name for column in case.columns),
        tuple(column_type(column.type_oid, column.type_modifier) for column in case.columns),
    )

    def decode() -> None:
        for batch in batches:
            decode_changes(batch, columns, old_columns=case.needed, new_columns=case.needed)

    seconds = measure(decode, runs)
    return case.rows / seconds, sum(batch.nbytes for batch in batches) / seconds / 1e6


def main() -> None:
    """Run the chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--case", nargs="+", default=[""], help="only cases whose names start with one of these"
    )
    options = parser.parse_args()
    pa.set_cpu_count(1)

    print(f"{'on one core':42}{'text, rows/s':>14}{'MB/s':>8}{'binary, rows/s':>18}{'MB/s':>8}{'ratio':>8}")
    for name, case in cases(options.rows).items():
        if name.startswith(tuple(options.case)):
            rates = [measure_decoding(case, options.runs, binary=binary) for binary in (False, True)]
            (in_text, text_bytes), (in_binary, binary_bytes) = rates
            print(
                f"{name:42}{in_text:14,.0f}{text_bytes:8,.0f}{in_binary:18,.0f}{binary_bytes:8,.0f}"
                f"{in_binary / in_text:8.2f}"
            )

    if "headers".startswith(tuple(options.case)):
        change = [encode(Insert(RELATION, (Text(b"x" * 150),)))] * 8
        transaction = [encode(Begin(1 << 40, 0, 7)), *change, encode(Commit(1 << 40, (1 << 40) + 48, 0))]
        batch = pa.array(transaction * (options.rows // len(transaction)), pa.binary())
        seconds = measure(lambda: HeaderScanner().scan(batch) and None, options.runs)
        print(
            f"{'headers (messages, 8 changes a transaction)':42}{len(batch) / seconds:13,.0f}"
            f"{batch.nbytes / seconds / 1e6:8,.0f}"
        )


if __name__ == "__main__":
    main()
