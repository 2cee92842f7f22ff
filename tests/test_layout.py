"""What holds for the repository as a whole: names that are written twice agree, and nothing in it is of one
machine only."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipelines", "assets", "resources", "decoding")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Written so that this file does not match: [.] is a dot, a set of one letter is that letter.
FOREIGN = {
    "a package registry": re.compile(
        r"pypi[.](org|python)|pythonhosted[.]|repo1?[.]maven|maven[.](org|google)|repository[.]apache[.]"
        r"|sonatype[.](org|com)|anaconda[.](org|com)|npmjs[.]|crates[.]io|docker[.]io|artifactory[./]"
    ),
    "a directory of one machine": re.compile(r"(?<![\w.~$})*-])/(w[o]rk|r[o]ot|h[o]me|U[s]ers|t[m]p/w)/"),
}


@cache
def repository_files() -> tuple[Path, ...]:
    """Every file that is or would be committed; of an exported tree, every file that would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    else:
        ignored = {line.strip("/") for line in text_of(ROOT / ".gitignore").splitlines()}
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [name for name in names if ignored.isdisjoint(name.parts)]
    return tuple(sorted(ROOT / name for name in names if (ROOT / name).is_file()))


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def text_of(path: Path) -> str:
    """The text of a file, empty for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    split = [line.partition("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in split}


def declared() -> list[Requirement]:
    project = PROJECT["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [Requirement(text) for text in (*texts, *PROJECT["build-system"]["requires"])]


def test_the_workspace_and_dg_load_the_same_definitions_under_the_same_name() -> None:
    entries = yaml.safe_load((ROOT / "workspace.yaml").read_text(encoding="utf-8"))["load_from"]
    project = PROJECT["tool"]["dg"]["project"]
    module = f"{project['root_module']}.definitions"
    assert entries == [
        {"python_module": {"module_name": module, "location_name": project["code_location_name"]}}
    ]
    # With [tool.dagster], dagster would not read workspace.yaml at all.
    assert "dagster" not in PROJECT["tool"]


def test_the_packages_are_named_alike_wherever_they_are_listed() -> None:
    tool = PROJECT["tool"]
    assert tool["hatch"]["build"]["targets"]["wheel"]["packages"] == list(PACKAGES)
    assert tool["importlinter"]["root_packages"] == list(PACKAGES)
    assert tool["importlinter"]["contracts"][0]["layers"] == list(PACKAGES)
    assert sorted(tool["mypy"]["packages"]) == sorted(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_imported_from_this_checkout(package: str) -> None:
    file = import_module(package).__file__
    assert file is not None
    assert Path(file).resolve() == ROOT / package / "__init__.py"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no module docstring"
    postponed = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    # Dagster evaluates annotations when it loads an asset.
    assert path.is_relative_to(ROOT / "decoding") or not postponed


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_names(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in repository_files()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if FOREIGN[what].search(line)
    ]
    assert not found, f"names {what}: {', '.join(found)}"


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry", "--index-url https://{}.org/simple"),
        ("a directory of one machine", "see {}notes.md"),
    ],
)
def test_foreign_names_are_recognized(what: str, line: str) -> None:
    name = {"a package registry": "py" + "pi", "a directory of one machine": "/ro" + "ot/"}[what]
    assert FOREIGN[what].search(line.format(name))
    assert not FOREIGN[what].search(line.format("x"))


def test_constraints_are_exact_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    loose = [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)]
    assert not loose
    assert len(pins()) == len([line for line in lines if not line.startswith("#")]), "a name twice"


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    pinned = pins()
    wrong = [
        str(requirement)
        for requirement in declared()
        if pinned.get(canonicalize_name(requirement.name)) not in requirement.specifier
    ]
    assert not wrong


def test_requirements_of_requirements_are_pinned_too() -> None:
    pinned = pins()
    waiting = declared()
    seen: set[str] = set()
    unpinned: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if name not in pinned:
            unpinned.add(name)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # what builds pgsieve is not installed
            continue
        extras = ["", *requirement.extras]
        for child in map(Requirement, requires):
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(child)
    assert not unpinned
    assert len(seen) > len(declared())
