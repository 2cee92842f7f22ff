"""Arrays and user-defined types arrive as PostgreSQL prints them.

PostgreSQL documentation, Data Types; src/test/subscription/t/002.

Each test has one table per kind of type, and changes all of them in one run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.decoding.errors import UnsupportedFilterError
from pgsieve.decoding.publications.filters import parse_table_filter
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import Scenario

pytestmark = pytest.mark.spark

TYPES = """
CREATE TYPE tst_enum AS ENUM ('a', 'b', 'c', 'd', 'e');
CREATE TYPE tst_comp AS (a float, b text, c int);
CREATE DOMAIN tst_dom AS int CHECK (VALUE > 0);
CREATE TYPE tst_nested AS (comp tst_comp, enums tst_enum[], span int4range)
"""
TABLES = """
CREATE TABLE one_array (a int PRIMARY KEY, b int[]);
CREATE TABLE arrays (a int[] PRIMARY KEY, b text[], c float[], d interval[]);
CREATE TABLE one_enum (a int PRIMARY KEY, b tst_enum);
CREATE TABLE enums (a tst_enum PRIMARY KEY, b tst_enum[]);
CREATE TABLE one_comp (a int PRIMARY KEY, b tst_comp);
CREATE TABLE comps (a tst_comp PRIMARY KEY, b tst_comp[]);
CREATE TABLE one_range (a int PRIMARY KEY, b int4range);
CREATE TABLE ranges (a int PRIMARY KEY, b tstzrange, c int8range[], d nummultirange);
CREATE TABLE one_domain (a int PRIMARY KEY, b tst_dom);
CREATE TABLE domains (a tst_dom PRIMARY KEY, b tst_dom[]);
CREATE TABLE plain (a int PRIMARY KEY, b numeric, c text, d float8)
"""


def publish(scenario: Scenario) -> None:
    scenario.tables(TYPES)
    scenario.tables(TABLES)
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")


@pytest.mark.drawn
@pytest.mark.parametrize(
    "copied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["copied", "streamed"]
)
def test_values_of_every_kind_of_type_arrive_as_postgresql_prints_them(
    scenario: Scenario, copied: bool
) -> None:
    publish(scenario)
    if not copied:
        scenario.subscribe("pub")
    scenario.publisher("""
        INSERT INTO one_array VALUES (1, '{1,2,3}'), (2, '{2,3,1}'), (3, '{3,2,1}'), (4, '{4,3,2}'), (5, '{5,NULL,3}');
        INSERT INTO arrays VALUES ('{1,2,3}', '{a,b,c}', '{1.1,2.2,3.3}', '{1 day,2 days,3 days}'),
            ('{2,3,1}', '{b,c,a}', '{2.2,3.3,1.1}', '{2 minutes,3 minutes,1 minute}'),
            ('{3,1,2}', '{c,a,b}', '{3.3,1.1,2.2}', '{3 years,1 year,2 years}'),
            ('{4,1,2}', '{d,a,b}', '{4.4,1.1,2.2}', '{4 years,1 year,2 years}'),
            ('{5,NULL,NULL}', '{e,NULL,b}', '{5.5,1.1,NULL}', '{5 years,NULL,NULL}');
        INSERT INTO one_enum VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd'), (5, NULL);
        INSERT INTO enums VALUES ('a', '{b,c}'), ('b', '{c,a}'), ('c', '{b,a}'), ('d', '{c,b}'), ('e', '{d,NULL}');
        INSERT INTO one_comp VALUES (1, '(1,a,1)'), (2, '(2,b,2)'), (3, '(3,c,3)'), (4, '(4,d,4)'), (5, '(,,5)');
        INSERT INTO comps VALUES ('(1,a,1)', ARRAY['(1,"q, x",)'::tst_comp, NULL]), ('(2,b,2)', '{}');
        INSERT INTO one_range VALUES (1, '[1,10]'), (2, '[2,20]'), (3, '[3,30]'), (4, '[4,40]'), (5, '[5,50]');
        INSERT INTO ranges VALUES (1, '["2014-08-04 00:00:00+02",infinity)', '{"[1,3)","[10,21)"}', '{[1,2),(3.5,)}'),
            (2, 'empty', '{}', '{}'), (3, NULL, '{NULL,empty}', NULL);
        INSERT INTO one_domain VALUES (1, 10), (2, 11), (3, NULL);
        INSERT INTO domains VALUES (1, '{1,2}'), (2, '{NULL}');
        INSERT INTO plain VALUES (1, 1.50, 'é', 0.1), (2, 1e10, '', 'NaN'), (3, NULL, NULL, NULL)
    """)
    if copied:
        scenario.subscribe("pub")
    rows = scenario.check(
        *scenario.subscribed(),
        expect={
            "one_domain": ["1|10", "2|11", "3|"],
            "one_range": ["1|[1,11)", "2|[2,21)", "3|[3,31)", "4|[4,41)", "5|[5,51)"],
            "plain": ["1|1.50|é|0.1", "2|10000000000||NaN", "3|||"],
        },
    )
    assert all(rows.values())  # no comparison is of an empty table
    scenario.publisher("""
        UPDATE one_array SET b = '{4,5,6}' WHERE a = 1; UPDATE one_array SET b = '{4,5,6,1}' WHERE a > 3;
        UPDATE arrays SET b = '{1a,2b,3c}', c = '{1,2,3}' WHERE a = '{1,2,3}';
        UPDATE arrays SET a = '{9}', d = '{1 day 1 second}' WHERE a[1] > 3 AND b[2] IS NOT NULL;
        UPDATE one_enum SET b = 'c' WHERE a = 1; UPDATE one_enum SET b = NULL WHERE a > 3;
        UPDATE enums SET b = '{e,NULL}' WHERE a = 'a'; UPDATE enums SET b = '{e,d}' WHERE a > 'c';
        UPDATE one_comp SET b = ROW(1, 'A', 1) WHERE a = 1; UPDATE one_comp SET b = ROW(NULL, 'x', -1) WHERE a > 3;
        UPDATE comps SET a = ROW(1, 'moved', 1) WHERE (a).b = 'a';
        UPDATE one_range SET b = '[100,1000]' WHERE a = 1; UPDATE one_range SET b = '(1, 90)' WHERE a > 3;
        UPDATE ranges SET b = '(,)', d = d + '{[2,3]}' WHERE a = 1;
        UPDATE one_domain SET b = 7 WHERE a > 1; UPDATE domains SET a = 3, b = NULL WHERE a = 2
    """)
    scenario.check(*scenario.subscribed())
    scenario.publisher("""
        DELETE FROM one_array WHERE a = 1 OR b = '{2,3,1}'; DELETE FROM arrays WHERE a[1] = 2;
        DELETE FROM one_enum WHERE a = 1 OR b = 'b'; DELETE FROM enums WHERE a = 'a' OR b[1] = 'b';
        DELETE FROM one_comp WHERE a = 1 OR (b).a = 2; DELETE FROM comps WHERE (a).b = 'b';
        DELETE FROM one_range WHERE a = 1 OR b && '[10,20]'; DELETE FROM ranges WHERE isempty(b);
        DELETE FROM domains WHERE a = 1
    """)
    scenario.check(
        *scenario.subscribed(),
        expect={
            "one_array": ["3|{3,2,1}", "4|{4,5,6,1}", "5|{4,5,6,1}"],
            "one_enum": ["3|c", "4|", "5|"],
            "enums": ["b|{c,a}", "d|{e,d}", "e|{e,d}"],
            "one_comp": ["3|(3,c,3)", "4|(,x,-1)", "5|(,x,-1)"],
            "one_range": [],
            "domains": ["3|"],
        },
    )


def test_a_type_of_an_extension_arrives_as_its_text(
    decoding_server: EmbeddedServer, subscriber_server: EmbeddedServer, tmp_path: Path
) -> None:
    # The wheel's servers have no hstore. A subscriber may store any type as text.
    with Scenario(decoding_server, subscriber_server, tmp_path) as scenario:
        scenario.publisher("CREATE EXTENSION hstore; CREATE TABLE tst_hstore (a int PRIMARY KEY, b hstore)")
        scenario.subscriber("CREATE TABLE tst_hstore (a int PRIMARY KEY, b text)")
        scenario.publisher("""INSERT INTO tst_hstore VALUES (1, '"a"=>"1"'), (2, '"zzz"=>"foo"')""")
        scenario.publisher("CREATE PUBLICATION pub FOR TABLE tst_hstore")
        scenario.subscribe("pub")
        scenario.publisher("""
            INSERT INTO tst_hstore VALUES (3, '"123"=>"321"'), (4, '"yellow horse"=>"moaned","n"=>NULL');
            UPDATE tst_hstore SET b = '"updated"=>"value"' WHERE a < 3; UPDATE tst_hstore SET b = '"also"=>"updated"'
            WHERE a = 3
        """)
        scenario.check(
            expect={
                "tst_hstore": [
                    '1|"updated"=>"value"',
                    '2|"updated"=>"value"',
                    '3|"also"=>"updated"',
                    '4|"n"=>NULL, "yellow horse"=>"moaned"',
                ]
            }
        )


@pytest.mark.drawn
@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_text_is_converted_from_the_encoding_of_the_publisher(
    publisher_server: EmbeddedServer, subscriber_server: EmbeddedServer, tmp_path: Path, encoding: str
) -> None:
    # Section 23.3.4: conversion between server and client; src/test/subscription/t/005.
    word, table = {"LATIN1": ("Motörhead", "größe"), "EUC_JP": ("鉄道", "表")}[encoding]
    with Scenario(publisher_server, subscriber_server, tmp_path, encoding=encoding) as scenario:
        scenario.tables(f'CREATE TABLE "{table}" (a int PRIMARY KEY, "{word}" text)')
        scenario.publisher(f"""INSERT INTO "{table}" VALUES (1, '{word}'), (2, 'plain')""")
        where = (
            f"""("{word}" <> 'plain' AND length("{word}") < 20 AND "{word}" LIKE '{word[:1]}%{word[1:]}')"""
        )
        scenario.publisher(
            f"""CREATE PUBLICATION pub FOR TABLE "{table}" WHERE {where} WITH (publish = 'insert')"""
        )
        scenario.subscribe("pub")
        scenario.publisher(f"""INSERT INTO "{table}" VALUES (3, '{word}{word}'), (4, 'plain')""")
        scenario.check(expect={table: [f"1|{word}", f"3|{word}{word}"]})
        with Source("s", scenario.publisher_conninfo).connect() as connection:
            catalog = read_catalog(connection)
    encoded = catalog_from_json(catalog_to_json(catalog, ["pub"])).table_by_name["public", table]
    with pytest.raises(UnsupportedFilterError, match=f"encoding, which is {encoding}, not UTF8"):
        parse_table_filter(encoded, f"""octet_length("{word}") > 8""")
