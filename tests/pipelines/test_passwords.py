"""No command shows a part of a password, however it is written and however libpq parses it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
import yaml
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from pgsieve.pipelines.command_line import cli
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.tries import drawn_seed

pytestmark = pytest.mark.slow

#: Letters in sequences that occur in no word, and characters with a meaning for libpq and URIs.
_LETTERS, _SPECIAL = "qxzjQXZJ", " %@:/?#[]'\"\\=&,+;"

_FORMS: dict[str, Callable[[str, str, str], dict[str, str]]] = {
    "quoted": lambda password, base, _: {"conninfo": make_conninfo(base, password=password)},
    "unquoted": lambda password, base, _: {"conninfo": f"{base} password={password}"},
    "unquoted first": lambda password, base, _: {"conninfo": f"password={password} {base}"},
    "badly quoted": lambda password, base, _: {"conninfo": f"password='{password}' {base}"},
    "encoded": lambda password, _, at: {"conninfo": f"postgresql://secured:{quote(password, '')}@{at}"},
    "not encoded": lambda password, _, at: {"conninfo": f"postgresql://secured:{password}@{at}"},
    "in the query": lambda password, _, at: {"conninfo": f"postgresql://secured@{at}?password={password}"},
    "apart": lambda password, base, _: {"conninfo": base, "password": password},
    "by command": lambda password, base, _: {
        "conninfo": base,
        "password_command": ["printf", "%s", password],
    },
}


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server on which the role `secured` has another password."""
    access = publisher_server.data_path / "pg_hba.conf"
    before = access.read_text()
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create role secured login replication password 'of somebody else'")
        access.write_text(f"host all secured all scram-sha-256\n{before}")
        admin.execute("select pg_reload_conf()")
        time.sleep(0.2)
        yield publisher_server
        access.write_text(before)
        admin.execute("select pg_reload_conf()")
        admin.execute("drop role secured")


def _password(rng: random.Random) -> str:
    letters = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(8, 16)))
    return "".join(c + rng.choice(_SPECIAL) if rng.random() < 0.3 else c for c in letters)


def _shown(password: str, output: str) -> list[str]:
    fragments = (password[at : at + 4] for at in range(len(password) - 3))
    return [f for f in fragments if not set(f).isdisjoint(_LETTERS) and f in output]


@pytest.mark.parametrize("drawn", [8, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", _FORMS)
def test_no_part_of_a_password_is_shown(
    server: EmbeddedServer, tmp_path: Path, form: str, drawn: int
) -> None:
    """It takes long: every command runs with each of many passwords."""
    seed = drawn_seed()
    rng = random.Random(seed)
    base, at = server.conninfo(user="secured"), f"127.0.0.1:{server.port}/postgres"
    path, codes = tmp_path / "pgsieve.yaml", set()
    for _ in range(drawn):
        password = _password(rng)
        written = {
            "lake": "./lake",
            "sources": {"shop": _FORMS[form](password, base, at)},
            "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
        }
        path.write_text(yaml.safe_dump(written))
        for command in (["validate"], ["status"], ["status", "--json"], ["decode", "shop", "-P", "json"]):
            result = CliRunner().invoke(
                cli.app, ["--verbose", "-c", str(path), *command], prog_name="pgsieve"
            )
            codes.add(result.exit_code)
            output = result.stdout + result.stderr
            assert _shown(password, output) == [], f"PGSIEVE_SEED={seed}: {output}"
            assert _shown(password, repr(output)) == [], f"PGSIEVE_SEED={seed}: {output}"
            assert output
    assert 2 in codes
