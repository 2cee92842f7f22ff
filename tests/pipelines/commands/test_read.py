"""`pgsieve read` of one table gives its rows at a moment between two cuts, and clones no other table. No JVM."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import re
import shutil
from operator import itemgetter
from pathlib import Path

import pytest

from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.postgres.source import quote_literal
from tests.fixtures.samples import TYPES, scalars, without_output
from tests.fixtures.shop import Shop


@pytest.mark.usefixtures("orchestrator")
def test_one_table_is_read_as_of_an_lsn_between_two_cuts(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    database = shop.database
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    database.execute("insert into orders values (77, 1)")
    database.execute("insert into notes values (77, 1)")
    row = database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    database.execute("update orders set n = 2 where id = 77")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    clones = _remembered_clones(monkeypatch)
    code, printed = shop.cli("read", "one", "public.orders", "--at", row[0], "--json")
    assert code == 0, printed
    rows = [json.loads(line) for line in printed.splitlines()]
    assert {"id": 77, "n": 1} in rows
    assert {"id": 77, "n": 2} not in rows
    assert clones == ["orders"], "other tables are cloned, too"
    code, printed = shop.cli("read", "one", "--at", row[0], "--json")
    assert code == 0, printed
    listed = {table["name"]: table for table in json.loads(printed)["tables"]}
    assert listed["orders"]["path"] is listed["orders"]["version"] is None, "its clone is gone by now"
    code, printed = shop.cli("read", "one", "--json")
    assert code == 0, printed
    listed = {table["name"]: table for table in json.loads(printed)["tables"]}
    assert Path(listed["orders"]["path"], "_delta_log").is_dir()
    code, refused = shop.cli("read", "one", "public.order", "--at", row[0])
    assert code == 2
    assert "42P01" in refused
    assert "did you mean 'public.orders'?" in " ".join(refused.split())


def _follow_hint(shop: Shop, moment: str) -> tuple[str, set[int]]:
    """Read `orders` at a moment that is refused, then at the LSN of the hint. Returns the refusal and the ids."""
    code, refused = shop.cli("read", "one", "public.orders", "--at", moment)
    assert code == 2, refused
    refused = " ".join(refused.split())
    (named,) = re.findall(r"(?:name|at) LSN ([0-9A-F]+/[0-9A-F]+)", refused.split("hint:")[1])
    code, printed = shop.cli("read", "one", "public.orders", "--at", named, "--json")
    assert code == 0, printed
    return refused, {json.loads(line)["id"] for line in printed.splitlines()}


@pytest.mark.usefixtures("orchestrator")
def test_the_hint_for_a_moment_that_is_not_recorded_names_one_that_is(shop: Shop) -> None:
    """After empty transactions, which runs need not record, and in the time between the copy and the first change."""
    database = shop.database

    def value(sql: str) -> str:
        row = database.execute(f"select ({sql})::text").fetchone()
        assert row is not None
        return str(row[0])

    before = value("now()")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    copied = value("now()")
    for _ in range(3):
        database.execute("create temp table nothing (); drop table nothing")
    empty = value("pg_current_wal_insert_lsn()")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    refused, ids = _follow_hint(shop, empty)
    assert "has not been read yet" in refused
    assert ids == {2, 3, 4}
    database.execute("insert into orders values (77, 1)")
    after = value("pg_current_wal_insert_lsn()")
    database.execute("insert into orders values (78, 1)")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    for lsn, expected in {empty: set[int](), after: {77}}.items():
        code, printed = shop.cli("read", "one", "public.orders", "--at", lsn, "--json")
        assert code == 0, printed
        assert {json.loads(line)["id"] for line in printed.splitlines()} == {2, 3, 4} | expected
    for time, reason in {
        before: "the tables were copied later",
        copied: "nothing changed in between",
    }.items():
        refused, ids = _follow_hint(shop, time)
        assert "the first change that is kept" in refused
        assert reason in refused
        assert "retention" not in refused
        assert ids == {2, 3, 4}


@pytest.mark.usefixtures("orchestrator")
@pytest.mark.parametrize("is_repaired", [False, True])
def test_rows_that_another_writer_changed_are_read_as_the_publisher_had_them(
    shop: Shop, *, is_repaired: bool
) -> None:
    """Between the cut before the damage and the next one the changes are added to the cut."""
    database = shop.database
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    replica = shop.table("one", "orders")
    replica.delete("id = 3")
    replica.update({"n": "0"}, predicate="id = 2")
    database.execute("insert into orders values (77, 1)")
    row = database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    database.execute("insert into orders values (78, 1)")
    if is_repaired:
        assert (checked := shop.cli("check", "--repair", "one"))[0] == 1, checked
    else:
        assert (ran := shop.cli("run", "one"))[0] == 0, ran
    code, printed = shop.cli("read", "one", "public.orders", "--at", row[0], "--json")
    assert code == 0, printed
    rows = [json.loads(line) for line in printed.splitlines()]
    assert sorted((row["id"], row["n"]) for row in rows) == [(2, 2), (3, 3), (4, 4), (77, 1)]
    assert ({(2, 2), (3, 3)} <= set(shop.pairs("one", "orders"))) is is_repaired


def test_a_table_is_read_between_two_cuts_although_another_one_was_copied_again(shop: Shop) -> None:
    """A change of type begins a table anew, and its changes before are lost. Those of the other tables are not."""
    database = shop.database
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    database.execute("insert into orders values (77, 1)")
    row = database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    database.execute("insert into orders values (78, 1); alter table notes alter n type bigint")
    reason = 'column "n" has another type'
    code, printed = shop.cli("run", "one", "--explain")
    assert code == 0, printed
    assert f"{reason}; this process commits it" in " ".join(printed.split())
    code, printed = shop.cli("run", "one")
    assert code == 0, printed
    assert f"public.notes is copied again: {reason}" in printed
    code, printed = shop.cli("read", "one", "public.orders", "--at", row[0], "--json")
    assert code == 0, printed
    assert {77, 78} & {json.loads(line)["id"] for line in printed.splitlines()} == {77}
    for table in (["public.notes"], []):
        code, refused = shop.cli("read", "one", *table, "--at", row[0])
        refused = " ".join(refused.split())
        assert code == 2
        assert 'table "public.notes" cannot be read' in refused
        assert f"it had to be copied again ({reason}); it was copied at" in refused
    code, refused = shop.cli("read", "one", "public.order", "--at", row[0])
    assert code == 2
    assert "did you mean 'public.orders'?" in " ".join(refused.split())


def test_a_table_is_printed_with_the_texts_of_the_server(shop: Shop) -> None:
    """Each type that is no array, with its edge values and years below 1000, in UTC and in ISO format as psql prints them."""
    samples = [*scalars(random.Random(1)), *without_output(random.Random(1))]
    extra = {"date": ("0999-01-01", "0044-03-15 BC"), "interval": ("178000000 years", "-1 mon +1 day")}
    extra |= dict.fromkeys(
        ("timestamp", "timestamptz"),
        ("0001-01-01 00:00", "0999-12-31 23:59:59.5", "0044-03-15 01:02:03.000001 BC", "20000-01-01 00:00"),
    )
    values = [(*sample.edges, *extra.get(sample.type, ())) for sample in samples]
    database = shop.database
    database.execute("set timezone = 'UTC'")
    database.execute(TYPES)
    columns = ", ".join(f"c{n} {sample.type}" for n, sample in enumerate(samples))
    database.execute(
        f"create table edges (id int primary key, {columns}); alter publication p add table edges"
    )
    for number, row in enumerate(itertools.zip_longest(*values)):
        cells = ", ".join("null" if value is None else quote_literal(value) for value in row)
        database.execute(f"insert into edges values ({number}, {cells})")
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    texts = ", ".join(f"case when num_nulls(c{n}) = 0 then concat(c{n}) end" for n in range(len(samples)))
    expected = database.execute(f"select id::text, {texts} from edges order by id").fetchall()

    code, printed = shop.cli("read", "one", "public.edges", "--json")
    assert code == 0, printed
    objects = sorted((json.loads(line) for line in printed.splitlines()), key=itemgetter("id"))
    code, printed = shop.cli("read", "one", "public.edges")
    assert code == 0, printed
    lines = sorted(csv.DictReader(io.StringIO(printed)), key=lambda line: int(line["id"]))
    for line, row, expected_row in zip(lines, objects, expected, strict=True):
        for n, (sample, text) in enumerate(zip(samples, expected_row[1:], strict=True)):
            cell, value, case = line[f"c{n}"], row[f"c{n}"], f"{sample.type} {text!r}"
            if isinstance(value, bool):
                assert cell == str(value).lower() == {"t": "true", "f": "false"}[text], case
                continue
            assert cell == (text or ""), case
            assert value == (type(value)(text) if isinstance(value, int | float) else text), case


def _remembered_clones(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that are cloned from now on."""
    from pgsieve.assets.steps.moments import reading

    names, clone = list[str](), reading.clone

    def remembered(table: object, path: str, *rest: object) -> None:
        names.append(Path(path).name)
        clone(table, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "clone", remembered)
    return names


def test_a_table_that_is_set_aside_is_named_with_the_command_that_copies_it(
    shop: Shop, tmp_path: Path
) -> None:
    assert (ran := shop.cli("run", "one"))[0] == 0, ran
    shutil.rmtree(shop.lake.paths.replica("one", "public", "orders"))
    shop.database.execute("insert into orders values (77, 1)")
    assert (ran := shop.cli("run", "one"))[0] == 1, ran
    command = "resync one public.orders"
    for listing in (["read", "one"], ["restore", "one", str(tmp_path / "restored")]):
        code, printed = shop.cli(*listing)
        printed = " ".join(printed.split())
        assert code == 0
        assert "warning: a table is missing here: public.orders is set aside: its replica" in printed
        assert f"`pgsieve {command}` copies the table again" in printed
    cut = Cuts(shop.lake, "one").find_newest()
    code, refused = shop.cli("read", "one", "--at", format_lsn(cut.lsn))
    assert code == 2, refused
    assert 'table "public.orders" cannot be read as of' in " ".join(refused.split())
    code, refused = shop.cli("read", "one", "public.orders")
    assert code == 2
    assert "did you mean" not in refused
    assert f"`pgsieve {command}` copies the table again" in " ".join(refused.split())
    code, refused = shop.cli("read", "one", "public.order")
    assert code == 2
    assert "allowed here: public.notes" in refused, "a table without rows is suggested"

    assert (ran := shop.cli(*command.split()))[0] == 0, ran
    assert "warning" not in shop.cli("read", "one")[1]
    assert shop.cli("read", "one", "public.orders")[0] == 0
