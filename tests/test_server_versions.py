"""One constant is the newest tested server version: CI and the documentation agree with it."""

from __future__ import annotations

import re
from pathlib import Path

from pgsieve.decoding.server_versions import NEWEST_SERVER, OLDEST_SERVER
from pgsieve.resources.postgres.embedded import POSTGRES_VERSIONS
from tests.fixtures.downloaded_postgres import DOWNLOADED_VERSION

ROOT = Path(__file__).parents[1]
NEWEST, OLDEST = NEWEST_SERVER // 10000, OLDEST_SERVER // 10000


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


EMBEDDED = max(POSTGRES_VERSIONS)


def test_the_newest_tested_server_is_the_newest_that_ci_runs() -> None:
    """All tests run on the newest version of the embedded server. Tests of new features run on the downloaded version."""
    assert NEWEST == DOWNLOADED_VERSION == EMBEDDED + 1
    of_newest = [path.name for path in (ROOT / f"tests/postgresql_{NEWEST}").glob("test_*.py")]
    assert "test_excluded_tables.py" in of_newest
    assert "test" in re.findall(r"\battempt (.*)$", _text(".ci/run"), re.MULTILINE)
    assert "PGSIEVE_POSTGRES_VERSION" not in _text(".ci/run")
    makefile = _text("Makefile")
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    assert "PGSIEVE_POSTGRES_VERSION" not in recipe.group(1)
    assert f"PGSIEVE_POSTGRES_VERSION={NEWEST} " in makefile


def test_other_versions_that_are_tested_are_older() -> None:
    """`make test-versions` and `make test-oldest` run on versions between the oldest and the newest."""
    versions = {int(number) for number in re.findall(r"test-version-(\d+)", _text("Makefile"))}
    assert versions
    assert all(OLDEST <= version < NEWEST for version in versions)
    described = re.search(r"on PostgreSQL (\d+), and (\d+) as installed", _text("Makefile"))
    assert described is not None
    assert {int(number) for number in described.groups()} == versions


def test_the_requirements_name_the_oldest_and_the_newest() -> None:
    readme = _text("README.md")
    table = re.findall(r"^\| (from|newer than) (\d+) \|", readme, re.MULTILINE)
    assert min(int(number) for word, number in table if word == "from") == OLDEST
    assert max(int(number) for word, number in table if word == "from") <= NEWEST
    assert [int(number) for word, number in table if word == "newer than"] == [NEWEST]
    assert (
        f"All tests run on {EMBEDDED}. The tests of replication also run on the release candidate of {NEWEST}."
        in readme
    )
    assert f"newer than PostgreSQL {NEWEST}," in _text("docs/limits.md")
    assert f"the newest tested one (PostgreSQL {NEWEST})" in _text("CHANGELOG.md")
