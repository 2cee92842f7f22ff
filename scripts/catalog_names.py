"""Write decoding/values/catalog_names.py from the catalog of the newest embedded PostgreSQL.

Out: the module's text on standard output; `tests/decoding/values/test_catalog_names.py` compares it.
    python scripts/catalog_names.py > decoding/values/catalog_names.py
"""

import sys
import tempfile
import textwrap
from pathlib import Path

import psycopg

from pgsieve.resources.postgres.embedded import EmbeddedServer

HEADER = '''"""PostgreSQL's names for built-in objects; written by scripts/catalog_names.py, not by hand.

`TYPE_NAMES`: the SQL name of each built-in type by its oid, as format_type prints it (format_type.c).
`KEYWORDS`: all key words but the unreserved ones; quote_identifier puts them in quotes (ruleutils.c).
The names are those of PostgreSQL {version}, and the types also those of 19.
"""

from __future__ import annotations

from types import MappingProxyType

'''
#: Types with oids from FirstGenbkiObjectId (10000) on are left out: the oids differ between servers, and pgoutput
#: sends Type messages.
TYPES = """
select oid::bigint, format_type(oid, null) from pg_type where oid < 10000 and typtype <> 'p' order by oid
"""
#: The types that 19 adds (first release candidate).
OF_19 = {2173: "pg_parameter_acl", 6437: "oid8", 6442: "oid8[]", 6490: "regdatabase", 6491: "regdatabase[]"}
KEYWORDS = "select word from pg_get_keywords() where catcode <> 'U' order by word collate \"C\""


def module(connection: psycopg.Connection[tuple[object, ...]]) -> str:
    """The module's text, from the catalog of a server."""
    names = dict(connection.execute(TYPES).fetchall()) | OF_19
    types = [f"        {oid}: {_quoted(name)},\n" for oid, name in sorted(names.items())]
    words = textwrap.fill(" ".join(str(word) for (word,) in connection.execute(KEYWORDS)), 110 - 4)
    return (
        HEADER.format(version=connection.info.server_version // 10000)
        + f"TYPE_NAMES = MappingProxyType(\n    {{\n{''.join(types)}    }}\n)\n\n"
        + f'KEYWORDS = frozenset(\n    """\n{textwrap.indent(words, "    ")}\n    """.split()  # noqa: SIM905 - a list would be one line per word\n)\n'
    )


def _quoted(name: object) -> str:
    return f"'{name}'" if '"' in str(name) else f'"{name}"'


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer(Path(folder) / "data") as server,
        psycopg.connect(server.conninfo()) as connection,
    ):
        sys.stdout.write(module(connection))
