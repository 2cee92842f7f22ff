"""Delta in Spark commits what the functions on Arrow batches decide: the rows and the counts are those of the other ways."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.batch import Plan, _merge_by_spark
from pgsieve.assets.steps.apply.key_conflicts import ConflictSearch, KeyConflictError
from pgsieve.assets.steps.apply.merging import make_keyless_clauses
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableBatch, TableResult
from pgsieve.assets.steps.records.table_states import SyncState, TableState
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.digests import compute_row_digests
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.resources.lake import policy
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.lake import Lake
from tests.assets.steps.apply.test_ended_rows import _ALL, _DEFINITION, _LIVES, _followed, _soft
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.replica_changes import (
    COLUMNS,
    ENDS,
    Change,
    Changes,
    Columns,
    Row,
    count_rows,
    definition,
    delete,
    draw_changes,
    followed,
    insert,
    row,
    update,
)

pytestmark = pytest.mark.spark

#: How many workloads are tried: each takes seconds.
_SEEDS = 4


def by_spark(changes: Changes, replicated: Definition) -> TableResult:
    """Apply changes as in a lake that only Spark reaches."""
    session = engine().session.newSession()
    lake = Lake(Path(changes.lake.uri).as_uri(), lambda: session)
    assert lake.delta_rs is None
    path, log = (Path(each).as_uri() for each in (changes.path, changes.log))
    plan = Plan(
        PendingChanges(changes.slices, lake.records.head(path)),
        TableState("public", "t", SyncState.READY, 100),
    )
    search = ConflictSearch(TableBatch(lake, path, log, replicated, plan.pending))
    return _merge_by_spark(search, plan, ENDS[-1])


def _outcome(apply: Callable[[], TableResult]) -> TableResult | str:
    try:
        return apply()
    except KeyConflictError as conflict:
        return conflict.message


@pytest.mark.drawn
@pytest.mark.parametrize("key", [("k",), ("t", "k")])
def test_random_changes_leave_the_rows_and_counts_of_files(tmp_path: Path, key: tuple[str, ...]) -> None:
    """It takes long: each batch of random changes is a MERGE by Spark."""
    applied = 0
    for seed in range(_SEEDS):
        rows, changes = draw_changes(random.Random(seed))
        files, spark = (Changes(tmp_path / f"{seed}{way}", rows, changes) for way in ("files", "spark"))
        expected = _outcome(lambda made=files: made.by_files(definition(*key)))
        done = _outcome(lambda made=spark: by_spark(made, definition(*key)))
        if isinstance(expected, str) or isinstance(done, str):
            assert done == expected, f"seed {seed}"
            continue
        applied += 1
        assert count_rows(done) == count_rows(expected), f"seed {seed}"
        assert spark.rows() == files.rows() == followed(rows, changes, key), f"seed {seed}"
        written = spark.lake.records.position(spark.path) == ENDS[-1]
        assert written == (files.lake.records.position(files.path) == ENDS[-1]), f"seed {seed}"
    assert applied


@pytest.mark.drawn
def test_random_changes_keep_deleted_rows(tmp_path: Path) -> None:
    """It takes long: each batch of random changes is a MERGE by Spark."""
    ended = compared = 0
    for seed in range(_SEEDS):
        rows, changes = draw_changes(random.Random(seed))
        lives, soft = [{**row, **_LIVES} for row in rows], [_soft(each) for each in changes]
        files, spark = (Changes(tmp_path / f"{seed}{way}", lives, soft, _ALL) for way in ("files", "spark"))
        expected = _outcome(lambda made=files: made.by_files(_DEFINITION))
        done = _outcome(lambda made=spark: by_spark(made, _DEFINITION))
        if isinstance(expected, str) or isinstance(done, str):
            assert done == expected, f"seed {seed}"
            continue
        left = sorted(spark.rows(), key=lambda row: str(row["k"]))
        assert left == _followed(rows, changes), f"seed {seed}"
        assert count_rows(done) == count_rows(expected), f"seed {seed}"
        ended += sum(bool(row["_deleted"]) for row in left)
        compared += 1
    assert compared
    assert ended


def _values(*rows: Sequence[object]) -> list[Row]:
    return [dict(zip("kv", row, strict=True)) for row in rows]


_NAN = float("nan")
_DAYS: list[object] = [dt.date(1, 1, 1), dt.date(2026, 1, 1), dt.date(9999, 12, 31)]
_LOCAL_TIMES: list[object] = [dt.datetime(year, 1, 1, 0, 0, 0, 999_999) for year in (1, 2026, 9999)]  # noqa: DTZ001
_TIMES: list[object] = [dt.datetime(year, 1, 1, 0, 0, 0, 999_999, dt.UTC) for year in (1, 2026, 9999)]


#: By type in Spark: Arrow's type, three values as the replica has them, and as they are sent.
_FORMS: dict[str, tuple[pa.DataType, list[object], list[object]]] = {
    "double": (pa.float64(), [-0.0, _NAN, 2.5], [0.0, _NAN, 2.5]),
    "float": (pa.float32(), [0.0, _NAN, 2.5], [-0.0, _NAN, 2.5]),
    "array<double>": (
        pa.list_(pa.float64()),
        [[-0.0], [_NAN, None], []],
        [[0.0], [_NAN, None], []],
    ),
    "string": (pa.string(), ["a", "A ", "ä"], ["a", "A ", "ä"]),
    "decimal(38,4)": (pa.decimal128(38, 4), [0, 1, 2], [0, 1, 2]),
    "date": (pa.date32(), _DAYS, _DAYS),
    "timestamp": (pa.timestamp("us", "UTC"), _TIMES, _TIMES),
    "timestamp_ntz": (pa.timestamp("us"), _LOCAL_TIMES, _LOCAL_TIMES),
}


@pytest.mark.parametrize("types", [("double",), tuple(_FORMS)], ids=["alone", "all"])
def test_a_key_is_found_whatever_form_its_value_has(tmp_path: Path, types: tuple[str, ...]) -> None:
    """Also by a MERGE, which gets the key as the replica has it. Some keys differ in a single column: one for each type and value."""
    names = [f"k{number}" for number in range(len(types))]
    columns: Columns = (*((n, _FORMS[t][0]) for n, t in zip(names, types, strict=True)), ("v", pa.string()))
    #: By name of a key, which of its type's values each column has.
    keys = {"first": [0] * len(types)} | {
        f"{value} of {kind}": [value if kind == other else 0 for other in types]
        for kind in types
        for value in (1, 2)
    }

    def key(name: str, form: int) -> Row:
        return {n: _FORMS[t][form][at] for n, t, at in zip(names, types, keys[name], strict=True)}

    *others, moved = keys
    changes = [
        *(update({**key(name, 2), "v": f"after {name}"}) for name in others),
        delete({**key(moved, 2), "v": None}),
        insert({**key(moved, 2), "v": f"after {moved}"}),
    ]
    replicated = Definition(
        (*zip(names, types, strict=True), ("v", "string")), tuple(names), Layout(1, (), len(columns), ())
    )
    made = Changes(tmp_path / "made", [{**key(name, 1), "v": "before"} for name in keys], changes, columns)
    done = by_spark(made, replicated)
    assert sorted(str(each["v"]) for each in made.rows()) == sorted(f"after {name}" for name in keys)
    assert count_rows(done) == (0, len(keys), 0, 0)


def test_rows_of_a_large_replica_are_marked_once_it_has_deletion_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enabling them is a commit of its own, after which the changes are planned again."""
    monkeypatch.setattr(policy, "_MARKED_BYTES", 0)
    made = Changes(tmp_path, [row(key, "before") for key in range(9)], [update(row(3, "after"))])
    with pytest.raises(OvertakenError):
        by_spark(made, definition("k"))
    assert count_rows(by_spark(made, definition("k"))) == (0, 1, 0, 0)
    assert sorted(str(each["v"]) for each in made.rows()) == ["after", *["before"] * 8]
    newest_entry = max(Path(made.path, "_delta_log").glob("*.json"))
    assert '"deletionVector"' in newest_entry.read_text()


def test_a_slice_of_inserts_counts_those_after_a_truncate(tmp_path: Path) -> None:
    changes = [insert(row(1, "a")), insert(row(2, "b")), Change("truncate"), insert(row(1, "c"))]
    for number, key in enumerate([("k",), ()]):
        made = Changes(tmp_path / str(number), [row(7, "before")], changes)
        assert count_rows(by_spark(made, definition(*key))) == (1, 0, 0, 0)
        assert made.rows() == [row(1, "c")]


@pytest.mark.drawn
def test_random_changes_of_a_multiset_leave_the_rows_and_counts_of_files(tmp_path: Path) -> None:
    """It takes long: Spark applies each of the random batches as several jobs."""
    columns = (*COLUMNS, ("f", pa.float64()))
    replicated = Definition(
        (("k", "bigint"), ("t", "string"), ("v", "string"), ("f", "double")), (), Layout(1, (), 4, ())
    )
    for seed in range(_SEEDS):
        draw = random.Random(seed)

        def drawn(draw: random.Random = draw) -> Row:
            value = draw.choice([0.0, -0.0, None, 1.5])
            return {"k": draw.randrange(2), "t": "t", "v": draw.choice(["v", None]), "f": value}

        rows, changes = [drawn() for _ in range(12)], list[Change]()
        for _ in range(12):
            old = drawn()
            changes.append(draw.choice([insert(drawn()), update(drawn(), old), delete(old)]))
        if draw.random() < 0.3:
            changes.insert(draw.randrange(len(changes)), Change("truncate"))
        files, spark = (
            Changes(tmp_path / f"{seed}{way}", rows, changes, columns) for way in ("files", "spark")
        )
        expected, done = files.by_files(replicated), by_spark(spark, replicated)
        assert count_rows(done) == count_rows(expected), f"seed {seed}"
        printed = [sorted(map(repr, made.rows())) for made in (spark, files)]
        assert printed[0] == printed[1], f"seed {seed}"


def test_a_moved_row_keeps_unsent_values_of_its_former_key(tmp_path: Path) -> None:
    columns: Columns = (("k", pa.float64()), ("v", pa.string()))
    moves = [
        Change("update", {"k": 1.0}, {"k": 0.0, "v": None}, ("v",)),
        Change("update", {"k": 2.0}, {"k": 1.0, "v": None}, ("v",)),
    ]
    replicated = Definition((("k", "double"), ("v", "string")), ("k",), Layout(1, (), 2, ()))
    made = Changes(tmp_path, _values((-0.0, "large"), (5.0, "other")), moves, columns)
    assert count_rows(by_spark(made, replicated)) == (1, 0, 1, 0)
    assert made.rows() == _values((2.0, "large"), (5.0, "other"))


_SAMPLES: dict[str, tuple[pa.DataType, list[object]]] = {
    "d": (pa.float64(), [0.0, -0.0, _NAN, 1e300, None]),
    "f": (pa.float32(), [0.0, -0.0, _NAN, 0.1, None]),
    "l": (pa.list_(pa.float64()), [[0.0], [-0.0], [_NAN, None], [], [None], None]),
    "t": (pa.string(), ["a", "A", "a ", "", None]),
    "texts": (pa.list_(pa.string()), [["a", "b"], ["ab", ""], ["a", None], None]),
    "o": (pa.binary(), [b"", b"\0", b"\0\0", None]),
    "n": (pa.decimal128(38, 4), [Decimal("1.0000"), Decimal("-1.0000"), None]),
    "day": (pa.date32(), [*_DAYS, None]),
    "at": (pa.timestamp("us", "UTC"), [*_TIMES, None]),
    "b": (pa.bool_(), [True, False, None]),
    "a.b": (pa.int64(), [2**63 - 1, -(2**63), 0, None]),
}


@pytest.mark.parametrize("name", _SAMPLES)
def test_a_merge_finds_exactly_the_rows_with_the_same_digest(name: str) -> None:
    """MERGE can compare rows by Spark's expressions only, so each type is compared with the digests that decide."""
    kind, values = _SAMPLES[name]
    rows = pa.table([pa.array(values, kind)], [name])
    digests = compute_row_digests(rows.combine_chunks().to_batches()[0])["digest"].to_pylist()
    session = engine().session
    numbered = rows.append_column("i", pa.array(range(len(values))))
    left = session.createDataFrame(numbered).alias("t")
    row = F.struct(F.col(quote_name(name)).alias(name)).alias("row")
    right = session.createDataFrame(numbered).select(
        row, F.lit("delete").alias("action"), F.col("i").alias("j")
    )
    found = (
        left.join(right.alias("s"), F.expr(make_keyless_clauses(right, [name], [name]).match_condition))
        .select("i", "j")
        .toArrow()
    )
    every = range(len(values))
    same = {(i, j) for i in every for j in every if digests[i] == digests[j]}
    assert set(zip(found["i"].to_pylist(), found["j"].to_pylist(), strict=True)) == same
