"""One constant says what the newest tested server is: what CI runs, and what users read, agree with it."""

from __future__ import annotations

import re
from pathlib import Path

from pgsieve.decoding.server_versions import NEWEST_SERVER, OLDEST_SERVER
from pgsieve.resources.postgres.embedded import POSTGRES_VERSIONS

ROOT = Path(__file__).parents[1]
NEWEST, OLDEST = NEWEST_SERVER // 10000, OLDEST_SERVER // 10000


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_newest_tested_server_is_the_one_that_ci_runs(postgres_version: int) -> None:
    """The embedded server's newest version is what all tests run on; .ci/run and the Makefile choose no other for them."""
    assert max(POSTGRES_VERSIONS) == NEWEST
    targets = re.search(r"^for target in (.*); do$", _text(".ci/run"), re.MULTILINE)
    assert targets is not None
    assert "test" in targets.group(1).split()
    assert "PGSIEVE_POSTGRES_VERSION" not in _text(".ci/run")
    makefile = _text("Makefile")
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    assert "PGSIEVE_POSTGRES_VERSION" not in recipe.group(1)


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
    assert f"All tests run on {NEWEST}." in readme
    assert f"newer than PostgreSQL {NEWEST}," in _text("docs/limits.md")
    assert f"the newest tested one (PostgreSQL {NEWEST})" in _text("CHANGELOG.md")
