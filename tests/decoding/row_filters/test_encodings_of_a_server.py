"""Row filters interpret each code of an encoding as a server does."""

from __future__ import annotations

from collections import Counter

import psycopg

from pgsieve.decoding.row_filters.encodings import ENCODINGS, UTF8
from pgsieve.resources.postgres.embedded import EmbeddedServer

CONVERTED = """create function pg_temp.converted(code bytea, encoding text) returns text language plpgsql as
$$begin return convert_from(code, encoding); exception when others then return null; end$$"""
#: Encodings that a database can have, and whose text a client can receive as UTF-8 (table 23.3).
NAMES = """
select pg_encoding_to_char(c.conforencoding) from pg_conversion c
 where c.contoencoding = pg_char_to_encoding('UTF8') and c.condefault
   and pg_encoding_to_char(c.conforencoding) not in ('BIG5', 'GB18030', 'GBK', 'JOHAB', 'SHIFT_JIS_2004', 'SJIS', 'UHC')
"""
#: All codes beyond ASCII: of one byte, and of two to four bytes with the lead bytes of such codes (wchar.c).
CODES = """
with high(byte) as (select decode(to_hex(n), 'hex') from generate_series(128, 255) n),
     codes(code) as (
  select byte from high where %(encoding)s not like 'EUC%%'
  union all select a.byte || b.byte from high a, high b where %(encoding)s like 'EUC%%'
  union all select '\\x8f'::bytea || a.byte || b.byte from high a, high b where %(encoding)s like 'EUC_J%%'
  union all select '\\x8e'::bytea || p.byte || a.byte || b.byte from high p, high a, high b
             where %(encoding)s = 'EUC_TW' and p.byte in ('\\xa1', '\\xa2') and a.byte >= '\\xa1' and b.byte >= '\\xa1')
select code, text from (select code, pg_temp.converted(code, %(encoding)s) from codes offset 0) c(code, text)
 where text is not null order by code
"""


def test_filters_interpret_each_code_as_the_server_does(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo(), client_encoding="UTF8") as connection:
        connection.execute(CONVERTED)
        names = [name for (name,) in connection.execute(NAMES)]
        assert set(names) == ENCODINGS.keys() - {UTF8, "SQL_ASCII"}
        for name in names:
            rows = connection.execute(CODES, {"encoding": name}).fetchall()
            texts, traits = [text for _, text in rows], ENCODINGS[name]
            assert len(texts) > 80
            assert not any(character.isascii() for text in texts for character in text), name
            assert not traits.has_same_bytes
            assert traits.has_same_characters == all(len(text) == 1 for text in texts), name
            assert traits.has_same_codes == all(
                code == text.encode("latin-1", "replace") for code, text in rows
            ), name
            assert traits.has_same_order == (texts == sorted(texts)), name
            if traits.ambiguous_characters is not None:
                assert traits.ambiguous_characters == {
                    text for text, count in Counter(texts).items() if count > 1
                }, name
