"""Soft deletes: the living rows equal the built-in subscriber's, and all former rows stay in their last state.

This holds for every writer, and wherever batches end (`PgsieveReplica._compare`).
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pgsieve.decoding.changes.metadata_columns import TYPE_OID_BY_KIND
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.tries import drawn_seed

_WRITERS = [
    "driver large alone",
    pytest.param("driver large marking on_s3", marks=pytest.mark.long),
    *(
        pytest.param(writer, marks=[pytest.mark.spark, pytest.mark.long])
        for writer in ("spark", "spark large", "spark large marking", "committing")
    ),
]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("scenario", _WRITERS, indirect=True)]
_NAMES = {kind: f"_{kind}" for kind in TYPE_OID_BY_KIND}
_BIG = "repeat('{}', 9000)"

#: A row without its key: a number, and the first letter of a large value, or None for NULL.
_Row = tuple[int, str | None]


@pytest.fixture(autouse=True)
def _with_soft_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PgsieveReplica, "metadata", _NAMES)
    monkeypatch.setattr(PgsieveReplica, "keeps_deleted", True)


class _Model:
    """The living and the former rows of t (id, v, big), for a publication WHERE (id % 3 <> 0)."""

    def __init__(self) -> None:
        self.published: dict[int, _Row] = {}
        self.living: dict[int, _Row] = {}
        #: The row's last state, and whether it left the filter.
        self.dead: dict[int, tuple[_Row, bool]] = {}

    def _begin(self, key: int, row: _Row) -> None:
        self.living[key] = row
        self.dead.pop(key, None)

    def _end(self, key: int, *, filtered: bool = False) -> _Row:
        row = self.living.pop(key)
        self.dead[key] = row, filtered
        return row

    def insert(self, key: int) -> str:
        """SQL that inserts a row unless its key exists."""
        if key not in self.published:
            self.published[key] = (0, "n")
            if key % 3:
                self._begin(key, (0, "n"))
        return f"INSERT INTO t VALUES ({key}, 0, {_BIG.format('n')}) ON CONFLICT DO NOTHING"

    def update(self, key: int) -> str:
        """SQL that changes the number. The large value is not sent."""
        for rows in (self.published, self.living):
            if key in rows:
                rows[key] = (rows[key][0] + 1, rows[key][1])
        return f"UPDATE t SET v = v + 1 WHERE id = {key}"

    def enlarge(self, key: int, letter: str) -> str:
        """SQL that changes the large value."""
        for rows in (self.published, self.living):
            if key in rows:
                rows[key] = (rows[key][0], letter)
        return f"UPDATE t SET big = {_BIG.format(letter)} WHERE id = {key}"

    def move(self, key: int, to: int) -> str:
        """SQL that gives a row another, free key. If the row starts to match the filter, its large value is missing."""
        if key in self.published and to not in self.published:
            number, _ = self.published[to] = self.published.pop(key)
            row = self._end(key, filtered=not to % 3) if key % 3 else (number, None)
            if to % 3:
                self._begin(to, row)
        return f"UPDATE t SET id = {to} WHERE id = {key} AND NOT EXISTS (SELECT FROM t WHERE id = {to})"

    def delete(self, key: int) -> str:
        """SQL that deletes a row."""
        if self.published.pop(key, None) and key % 3:
            self._end(key)
        return f"DELETE FROM t WHERE id = {key}"

    def truncate(self) -> str:
        """SQL that empties the table."""
        self.published.clear()
        for key in list(self.living):
            self._end(key)
        return "TRUNCATE t"

    def drawn(self, random: Random) -> str:
        """A random statement."""
        key, other = random.randint(1, 12), random.randint(1, 12)
        (choice,) = random.choices("iuemdt", [6, 6, 3, 6, 5, 1])
        match choice:
            case "i":
                return self.insert(key)
            case "u":
                return self.update(key)
            case "e":
                return self.enlarge(key, random.choice("xyz"))
            case "m":
                return self.move(key, other)
            case "d":
                return self.delete(key)
        return self.truncate()


def _row(row: dict[str, Any]) -> _Row:
    return row["v"], None if row["big"] is None else row["big"][0]


def _agrees(scenario: Scenario, model: _Model) -> None:
    for mode, replica in scenario.replicas.items():
        rows = replica.whole_rows("t")
        ended = [row for row in rows if row["_deleted"]]
        assert len({row["id"] for row in rows}) == len(rows)
        assert {row["id"]: _row(row) for row in rows if not row["_deleted"]} == model.living
        assert {row["id"]: _row(row) for row in ended} == {key: row for key, (row, _) in model.dead.items()}
        assert all(row["_deleted_at"] is not None and row["_applied_at"] is not None for row in ended)
        assert all(
            row["_deleted_at"] is None and row["_filtered"] is False for row in rows if not row["_deleted"]
        )
        # If the publisher filters, it sends a DELETE.
        left = {key for key, (_, filtered) in model.dead.items() if filtered and mode.endswith("pipeline")}
        assert {row["id"] for row in ended if row["_filtered"]} == left


@pytest.mark.drawn
def test_deleted_rows_stay_in_their_last_state(scenario: Scenario) -> None:
    """Some twenty random transactions, each a slice, in both modes."""
    seed = drawn_seed()
    print(f"again: PGSIEVE_SEED={seed}")
    random, model = Random(str(seed)), _Model()
    scenario.tables("CREATE TABLE t (id int PRIMARY KEY, v int, big text)")
    scenario.publisher("""
        ALTER TABLE t ALTER big SET STORAGE EXTERNAL; CREATE PUBLICATION p FOR TABLE t WHERE (id % 3 <> 0)
    """)
    scenario.publisher("; ".join(model.insert(key) for key in (1, 2, 3, 4, 5)))
    scenario.subscribe("p")
    for _ in range(4):
        for _ in range(random.randint(1, 4)):
            for _ in range(random.randint(1, 4)):
                scenario.publisher("; ".join(model.drawn(random) for _ in range(random.randint(1, 6))))
            scenario.receive()
        scenario.check("t")
        _agrees(scenario, model)
