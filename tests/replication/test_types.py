"""Columns of every kind of type, above all arrays: as keys, in whole rows, and stored out of line (chapter 8)."""

from __future__ import annotations

import pytest

from pgsieve.assets.steps.checks.consistency import check_consistency
from tests.fixtures.oracle import Scenario, both_writers
from tests.fixtures.pgsieve_replica import PgsieveReplica

pytestmark = [pytest.mark.spark, both_writers]

COLUMNS = """
    numbers int[], names text[], prices numeric(8,2)[], reals float8[], flags bool[], days date[],
    moments timestamptz[], raw bytea[], ids uuid[], documents jsonb[], spans interval[], anything numeric[],
    span int4range, address inet, free numeric
"""
VALUES = """
    (1, '{1,NULL,3}', '{"a,b","\\"",NULL,"NULL",""}', '{1.50,-2}', '{NaN,-0,0.1}', '{t,f,NULL}',
     '{2024-02-29,NULL}', '{"2024-01-01 12:00:00.5+00"}', '{"\\\\x00ff"}',
     '{00000000-0000-0000-0000-000000000001}', '{"{\\"a\\": 1}"}', '{"1 year -2 days"}', '{1.000,NaN}',
     '[1,5)', '10.0.0.0/8', '1.500'),
    (2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 'empty', '::1', 'NaN'),
    (3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)
"""


def consistent(scenario: Scenario) -> None:
    """Assert that the consistency check, which compares whole rows, finds no difference."""
    for replica in scenario.replicas.values():
        assert isinstance(replica, PgsieveReplica)
        for result in check_consistency(replica.subscription, replica.lake, lambda _: None):
            assert result.equal, result


@pytest.mark.drawn
@pytest.mark.parametrize("binary", [False, True])
def test_columns_of_all_kinds_are_copied_and_changed(scenario: Scenario, binary: bool) -> None:
    scenario.tables(f"CREATE TABLE kinds (id int PRIMARY KEY, {COLUMNS})")
    scenario.tables("ALTER TABLE kinds ALTER COLUMN names SET STORAGE EXTERNAL")
    scenario.publisher(f"INSERT INTO kinds VALUES {VALUES}")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE kinds")
    scenario.subscribe("pub", binary=binary)
    scenario.check("kinds")
    scenario.publisher(f"INSERT INTO kinds SELECT id + 10, {names()} FROM kinds")
    scenario.publisher("UPDATE kinds SET names = array_fill('long'::text, ARRAY[2000]) WHERE id = 2")
    scenario.check("kinds")
    # The long array is stored out of line, and not sent again.
    scenario.publisher("UPDATE kinds SET numbers = numbers || 4, prices = NULL WHERE id < 10")
    scenario.publisher("UPDATE kinds SET id = 20 WHERE id = 11; DELETE FROM kinds WHERE id = 12")
    scenario.check("kinds")
    consistent(scenario)


def test_columns_of_all_kinds_in_binary_format(scenario: Scenario) -> None:
    """Section 29.2, binary. A domain is sent in the format of its base type, an enum as its text."""
    scenario.tables(
        "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN price AS numeric CHECK (VALUE > 0)"
    )
    scenario.tables(f"CREATE TABLE kinds (id int PRIMARY KEY, {COLUMNS}, m mood, ms mood[], p price)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE kinds")
    scenario.subscribe("pub", binary=True)
    scenario.publisher(f"INSERT INTO kinds VALUES {VALUES}")
    scenario.publisher("UPDATE kinds SET m = 'sad', ms = '{ok,NULL}', p = 1.50 WHERE id = 1")
    scenario.publisher("UPDATE kinds SET numbers = numbers || 4 WHERE id < 3; DELETE FROM kinds WHERE id = 3")
    scenario.check("kinds")
    consistent(scenario)


def names() -> str:
    return ", ".join(column.split()[0] for column in COLUMNS.replace("numeric(8,2)", "numeric").split(","))


@pytest.mark.long
def test_an_array_is_a_key(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE keyed (a int[] PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO keyed VALUES ('{}', 'none'), ('{1}', 'one'), ('{1,NULL}', 'two')")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE keyed")
    scenario.subscribe("pub")
    scenario.publisher("UPDATE keyed SET b = 'more' WHERE a = '{1}'; DELETE FROM keyed WHERE a = '{}'")
    scenario.check(expect={"keyed": ["{1}|more", "{1,NULL}|two"]})
    scenario.publisher("UPDATE keyed SET a = a || 2 WHERE a = '{1}'; INSERT INTO keyed VALUES ('{1}', 'new')")
    scenario.check(expect={"keyed": ["{1}|new", "{1,NULL}|two", "{1,2}|more"]})
    consistent(scenario)


def test_rows_with_arrays_are_equal_as_a_whole(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE whole (a float8[], b text[]); ALTER TABLE whole REPLICA IDENTITY FULL")
    scenario.publisher(
        "INSERT INTO whole VALUES ('{1,NULL}', '{x}'), ('{1,NULL}', '{x}'), ('{NaN,-0}', NULL)"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE whole")
    scenario.subscribe("pub")
    # One of several equal rows is deleted.
    scenario.publisher("DELETE FROM whole WHERE ctid = (SELECT min(ctid) FROM whole)")
    scenario.publisher(
        "UPDATE whole SET b = '{NULL,\"\"}' WHERE b IS NULL; INSERT INTO whole VALUES ('{}', '{}')"
    )
    scenario.check(expect={"whole": ["{1,NULL}|{x}", '{NaN,-0}|{NULL,""}', "{}|{}"]})
    consistent(scenario)


def test_signed_and_unsigned_zeros_are_kept_in_equal_rows(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE zeros (a float8, b real, c int); ALTER TABLE zeros REPLICA IDENTITY FULL")
    scenario.publisher("INSERT INTO zeros VALUES (0, '-0', 1), ('-0', 0, 1), ('-0', 0, 1), ('NaN', '-0', 1)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE zeros")
    scenario.subscribe("pub")
    scenario.publisher(
        "UPDATE zeros SET c = 2; INSERT INTO zeros VALUES ('-0', '-0', 3); UPDATE zeros SET c = 3"
    )
    scenario.check(expect={"zeros": ["0|-0|3", "-0|0|3", "-0|0|3", "NaN|-0|3", "-0|-0|3"]})
    consistent(scenario)
