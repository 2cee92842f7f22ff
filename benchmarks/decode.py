"""How many changes a second one core decodes: raw pgoutput messages in, typed Arrow columns out.

    python benchmarks/decode.py [--rows 400000] [--runs 5] [--case ten ...]

The messages are made here, so nothing but decoding is measured: batches of 16 MB of Insert and Update
messages, as a peek of a slot yields them. Per case the best and the median of the runs, by processor time
and by wall time; on a busy machine only the former means something.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from decoding.messages import NULL, Begin, ColumnValue, Commit, Insert, OldRow, Text, Update, encode
from decoding.tuples import HeaderScanner, RelationColumns, decode_changes
from decoding.types import column_type

RELATION = 16_384
BATCH_BYTES = 16 << 20
PREPARED = 20_000  # rows made one by one; longer workloads repeat them

INT4, INT8, FLOAT8, TEXT, BOOL, TIMESTAMPTZ, NUMERIC = 23, 20, 701, 25, 16, 1184, 1700
NUMERIC_12_2 = (12 << 16 | 2) + 4


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and a value of row `i` as PostgreSQL prints it."""

    name: str
    type_oid: int
    value: Callable[[int], str]
    type_modifier: int = -1


ORDERS = (
    Column("id", INT8, str),
    Column("customer_id", INT4, lambda i: str(i * 7919 % 10_000)),
    Column("status", TEXT, lambda i: ("new", "paid", "shipped", "done")[i % 4]),
    Column("amount", NUMERIC, lambda i: f"{i * 13 % 1_000_000}.{i % 100:02}", NUMERIC_12_2),
    Column(
        "created_at", TIMESTAMPTZ, lambda i: f"2024-05-{i % 28 + 1:02} 07:44:{i % 60:02}.{i % 10**6:06}+00"
    ),
    Column("note", TEXT, lambda i: f"note number {i} some more text for row"),
    Column("qty", INT4, lambda i: str(i % 50)),
    Column("price", FLOAT8, lambda i: repr(i / 3)),
    Column("flag", BOOL, lambda i: "tf"[i % 2]),
    Column("tenant", INT4, lambda i: str(i % 16)),
)
WIDE = tuple(
    Column(f"{column.name}_{n}", column.type_oid, column.value, column.type_modifier)
    for n in range(5)
    for column in ORDERS
)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of some columns: which share of the values is NULL, and which share of the changes has an old row."""

    columns: tuple[Column, ...]
    rows: int
    nulls: float = 0.0
    old_rows: float = 0.0
    needed: frozenset[str] | None = None


def cases(rows: int) -> dict[str, Case]:
    """Return the cases; the wide one has fewer rows, for as many values."""
    return {
        "narrow (3 columns)": Case(ORDERS[:3], rows),
        "ten columns": Case(ORDERS, rows),
        "ten, a fifth NULL": Case(ORDERS, rows, nulls=0.2),
        "ten, every other an update with old row": Case(ORDERS, rows, old_rows=0.5),
        "ten, two needed": Case(ORDERS, rows, needed=frozenset({"id", "tenant"})),
        "wide (50 columns)": Case(WIDE, rows // 5),
    }


def messages(case: Case) -> list[pa.Array]:
    """Make the batches of a case."""
    chance = random.Random(1)

    def row(i: int) -> tuple[ColumnValue, ...]:
        return tuple(
            NULL if chance.random() < case.nulls else Text(column.value(i).encode())
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


def measure(run: Callable[[], None], runs: int) -> tuple[list[float], list[float]]:
    """Return processor and wall seconds of each run, in ascending order."""
    processor, wall = [], []
    run()  # the first pays for memory
    for _ in range(runs):
        before, begun = time.process_time(), time.perf_counter()
        run()
        processor.append(time.process_time() - before)
        wall.append(time.perf_counter() - begun)
    return sorted(processor), sorted(wall)


def report(name: str, count: int, size: int, runs: tuple[list[float], list[float]]) -> None:
    """Print one line of the table."""
    processor, wall = runs
    rates = [
        count / seconds for seconds in (processor[0], statistics.median(processor), statistics.median(wall))
    ]
    print(f"{name:42}" + "".join(f"{rate:14,.0f}" for rate in rates) + f"{size / processor[0] / 1e6:10,.0f}")


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--case", nargs="+", default=[""], help="only cases whose name starts so")
    options = parser.parse_args()
    pa.set_cpu_count(1)

    print(f"{'rows/s on one core':42}{'best (cpu)':>14}{'median (cpu)':>14}{'median (wall)':>14}{'MB/s':>10}")
    for name, case in cases(options.rows).items():
        if not name.startswith(tuple(options.case)):
            continue
        batches = messages(case)
        columns = RelationColumns(
            tuple(column.name for column in case.columns),
            tuple(column_type(column.type_oid, column.type_modifier) for column in case.columns),
        )

        def decode(
            batches: list[pa.Array] = batches, columns: RelationColumns = columns, case: Case = case
        ) -> None:
            for batch in batches:
                decode_changes(batch, columns, old_columns=case.needed, new_columns=case.needed)

        report(name, case.rows, sum(batch.nbytes for batch in batches), measure(decode, options.runs))

    if "headers".startswith(tuple(options.case)):
        change = [encode(Insert(RELATION, (Text(b"x" * 150),)))] * 8
        transaction = [encode(Begin(1 << 40, 0, 7)), *change, encode(Commit(1 << 40, (1 << 40) + 48, 0))]
        batch = pa.array(transaction * (options.rows // len(transaction)), pa.binary())

        def scan() -> None:
            HeaderScanner().scan(batch)

        report(
            "headers (messages, 8 changes a transaction)",
            len(batch),
            batch.nbytes,
            measure(scan, options.runs),
        )


if __name__ == "__main__":
    main()
