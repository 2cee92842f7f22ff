"""Rules for the whole repository: names that are written twice agree, and no file depends on one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path

import grimp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pgsieve.decoding import errors
from pgsieve.decoding.errors import PgsieveError

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipelines", "assets", "resources", "decoding")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# The patterns are written so that this file does not match them: [.] is a dot, and a set of one letter is that letter.
FOREIGN = {
    "a package registry": re.compile(
        r"pypi[.](org|python)|pythonhosted[.]|repo1?[.]maven|maven[.](org|google)|repository[.]apache[.]"
        r"|sonatype[.](org|com)|anaconda[.](org|com)|npmjs[.]|crates[.]io|docker[.]io|artifactory[./]"
    ),
    "a directory of one machine": re.compile(r"(?<![\w.~$})*-])/(w[o]rk|r[o]ot|h[o]me|U[s]ers|t[m]p/w)/"),
}


@cache
def repository_files() -> tuple[Path, ...]:
    """Every file that is or would be committed. In an exported tree, every file that would be."""
    process = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if process.returncode == 0:
        names = [Path(name) for name in process.stdout.decode().split("\0") if name]
    else:
        lines = text_of(ROOT / ".gitignore").splitlines()
        anywhere = {line.strip("/") for line in lines if not line.startswith("/")}
        at_the_top = {line.strip("/") for line in lines if line.startswith("/")}
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [
            name for name in names if anywhere.isdisjoint(name.parts) and not at_the_top & set(name.parts[:1])
        ]
    return tuple(sorted(ROOT / name for name in names if (ROOT / name).is_file()))


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def text_of(path: Path) -> str:
    """The text of a file, or '' for a binary one."""
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
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    texts = [*project["dependencies"], *extras, *PROJECT["build-system"]["requires"]]
    return [required for required in map(Requirement, texts) if required.name != project["name"]]


def test_the_workspace_and_dg_load_the_same_definitions_under_the_same_name() -> None:
    entries = yaml.safe_load((ROOT / "workspace.yaml").read_text(encoding="utf-8"))["load_from"]
    project = PROJECT["tool"]["dg"]["project"]
    module = f"{project['root_module']}.definitions"
    assert entries == [
        {"python_module": {"module_name": module, "location_name": project["code_location_name"]}}
    ]
    # With [tool.dagster], dagster would not read workspace.yaml at all.
    assert "dagster" not in PROJECT["tool"]


def test_the_packages_have_the_same_names_wherever_they_are_listed() -> None:
    tool = PROJECT["tool"]
    build = tool["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    placed = {package: f"pgsieve/{package}" for package in PACKAGES}
    assert wheel["sources"] == {"src/pgsieve": "pgsieve"} | placed
    assert wheel["only-include"] == ["src/pgsieve", *PACKAGES]
    assert build["exclude"] == [f"/src/pgsieve/{package}" for package in PACKAGES]
    assert tool["importlinter"]["contracts"][0]["layers"] == [f"pgsieve.{p}" for p in PACKAGES]
    links = {path.name: path.readlink() for path in (ROOT / "src/pgsieve").iterdir() if path.is_symlink()}
    assert links == {package: Path(f"../../{package}") for package in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_imported_from_this_checkout(package: str) -> None:
    file = import_module(f"pgsieve.{package}").__file__
    assert file is not None
    assert Path(file).resolve() == ROOT / package / "__init__.py"


#: Where a file may import a package by the name of its folder. A file without it is not parsed.
BY_FOLDER = re.compile(rf"\b(?:import|from)\b.*(?<![.\w])(?:{'|'.join(PACKAGES)})\b")


def imported(path: Path) -> Iterator[str]:
    """The top-level packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


def numbers_before_a_plural(path: Path) -> Iterator[str]:
    """Parts of a module's messages that could print `1 tables`: a number in braces before a word that ends with s."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, after in pairwise(node.values):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            shown = ast.unparse(value.value) + (ast.unparse(value.format_spec) if value.format_spec else "")
            is_number = (
                "len(" in shown or ":," in ast.unparse(value) or re.search(r"\b(rows|count|number)$", shown)
            )
            if is_number and re.match(
                r" (\w+ )?(?!is\b|was\b|has\b|as\b|bytes\b)[a-z]+s\b", str(after.value)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_numbers_of_things_are_printed_by_one_function() -> None:
    """`counted` of decoding/wording.py gives 1 table, 2 tables."""
    assert not [each for path in modules() for each in numbers_before_a_plural(path)]


def test_nothing_is_imported_under_two_names() -> None:
    """In a checkout the folders are on the path: `import decoding` would be a second module."""
    others = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in repository_files()
        if path.suffix == ".py" and BY_FOLDER.search(text_of(path))
        for name in imported(path)
        if name in PACKAGES
    ]
    assert not others


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_docstring(package: str) -> None:
    without, postponing = list[str](), list[str]()
    for path in (path for path in modules() if path.is_relative_to(ROOT / package)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            without.append(str(path))
        if any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body):
            postponing.append(str(path))
    assert not without
    # Dagster evaluates annotations when it loads an asset.
    assert package == "decoding" or not postponing


@cache
def functions(package: str) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """The functions of a package: the place of each, its lines, and its parameters except self."""
    found = list[tuple[str, int, tuple[str, ...]]]()
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                place = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                lines = (node.end_lineno or 0) - node.lineno
                found.append((place, lines, tuple(name for name in names if name not in {"self", "cls"})))
    return tuple(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_have_60_lines_and_7_parameters_at_most(package: str) -> None:
    long = [place for place, lines, _ in functions(package) if lines >= 60]
    # A command of Typer has a parameter for each option.
    wide = [
        place
        for place, _, names in functions(package)
        if len(names) > 7 and not place.startswith("pipelines/command_line/")
    ]
    assert (long, wide) == ([], [])


def test_few_functions_of_the_steps_take_a_lake_and_a_subscription() -> None:
    """A lake and a subscription that travel together belong to an object whose methods do the work of a step."""
    taking = [
        place
        for place, _, names in functions("assets")
        if place.startswith("assets/steps/") and {"lake", "subscription"} <= {*names}
    ]
    assert len(taking) < 40, taking


def test_steps_leave_the_choice_of_a_committer_to_the_policy() -> None:
    """A step asks the policy for the committer that it needs. It does not ask which one it has, or which engines reach the lake."""
    asking = re.compile(r"isinstance\(.*Committer|\blake\.local\b")
    steps = [path for package in ("assets", "pipelines") for path in (ROOT / package).rglob("*.py")]
    assert not [str(path.relative_to(ROOT)) for path in steps if asking.search(text_of(path))]


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_names(what: str) -> None:
    names = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in repository_files()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if FOREIGN[what].search(line)
    ]
    assert not names, f"names {what}: {', '.join(names)}"


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
    assert len(pins()) == len([line for line in lines if not line.startswith("#")]), (
        "a package is pinned twice"
    )


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    pinned = pins()
    wrong = [
        str(requirement)
        for requirement in declared()
        if pinned.get(canonicalize_name(requirement.name)) not in requirement.specifier
    ]
    assert not wrong


def test_indirect_requirements_are_pinned_too() -> None:
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
        except PackageNotFoundError:  # a build dependency of pgsieve may not be installed
            continue
        extras = ["", *requirement.extras]
        for child in map(Requirement, requires):
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(child)
    assert not unpinned
    assert len(seen) > len(declared())


#: Modules that may open sessions. Any other session would have the role's search_path and timeouts, and would show libpq's messages.
SESSIONS = ROOT / "resources" / "postgres" / "sessions.py"


def connecting(tree: ast.AST) -> list[int]:
    """The lines that open a session of PostgreSQL with a driver's own function, or import such a function."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="psycopg" | "dbapi" | "pq"), attr="connect" | "PGconn"):
                lines.append(node.lineno)
            case ast.Attribute(value=ast.Name(id="Connection" | "AsyncConnection"), attr="connect"):
                lines.append(node.lineno)
            case ast.Attribute(attr="Connection" | "AsyncConnection", value=ast.Name(id="psycopg")):
                lines += [
                    parent.lineno
                    for parent in ast.walk(tree)
                    if isinstance(parent, ast.Attribute) and parent.value is node and parent.attr == "connect"
                ]
            case ast.ImportFrom(module="adbc_driver_postgresql" | "adbc_driver_postgresql.dbapi"):
                lines.append(node.lineno)
            case ast.Import(names=names) if any(n.name.startswith("adbc_driver_postgresql") for n in names):
                lines.append(node.lineno)
            case ast.ImportFrom(module="psycopg", names=names) if any(n.name == "connect" for n in names):
                lines.append(node.lineno)
    return sorted(lines)


def test_sessions_are_opened_in_one_place() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in modules()}
    # A module without these words is not parsed.
    opening = {
        path: connecting(ast.parse(text))
        for path, text in texts.items()
        if re.search(r"connect\b|PGconn|adbc_driver_postgresql", text)
    }
    assert len(opening.pop(SESSIONS)) == 2
    assert {str(path): lines for path, lines in opening.items() if lines} == {}


@pytest.mark.parametrize(
    "program",
    [
        "psycopg.connect('')",
        "psycopg.Connection.connect('')",
        "from psycopg import connect",
        "from adbc_driver_postgresql import dbapi",
        "import adbc_driver_postgresql.dbapi",
        "psycopg.AsyncConnection.connect('')",
    ],
)
def test_code_that_opens_a_session_is_recognized(program: str) -> None:
    assert connecting(ast.parse(program)) == [1]


def test_functions_that_executors_get_do_not_carry_the_environment() -> None:
    """A default value is sent with its function, and the environment of the driver may have passwords."""
    sent = [
        path for path in modules() if path.relative_to(ROOT).parts[0] in {"decoding", "resources", "assets"}
    ]
    assert sent
    carrying = [
        f"{path}:{node.lineno}"
        for path in sent
        if "os.environ" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        and any(
            default and "os.environ" in ast.unparse(default)
            for default in (*node.args.defaults, *node.args.kw_defaults)
        )
    ]
    assert carrying == []


def test_classes_that_executors_get_have_no_lock() -> None:
    """Before Python 3.12 a cached_property has a lock, and cloudpickle cannot send a class with a lock."""
    sent = [path for path in modules() if path.is_relative_to(ROOT / "decoding")]
    assert sent
    assert [str(path) for path in sent if "import cached_property" in path.read_text(encoding="utf-8")] == []


def test_no_test_loads_what_was_sent_by_value_in_its_own_process() -> None:
    """cloudpickle gives the methods of a class that it knows the variables of the pickled modules.

    Each later test in the process would then have two copies of these variables.
    """
    loading = "cloudpickle" + ".loads("
    assert [
        str(path) for path in (ROOT / "tests").rglob("*.py") if loading in path.read_text(encoding="utf-8")
    ] == []


@pytest.mark.parametrize("depth", ["modules", "folders"])
def test_imports_have_no_circle(depth: str) -> None:
    graph = grimp.build_graph("pgsieve")

    def place(module: str) -> str:
        return module if depth == "modules" or graph.find_children(module) else module.rpartition(".")[0]

    imports: dict[str, set[str]] = {}
    for module in graph.modules - {"pgsieve"}:  # it names the public names of all folders
        others = {place(other) for other in graph.find_modules_directly_imported_by(module)}
        imports.setdefault(place(module), set()).update(others - {place(module), "pgsieve"})
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_the_drawn_tree_of_errors_is_right() -> None:
    for module in grimp.build_graph("pgsieve").modules - {"pgsieve.__main__"}:
        import_module(module)

    def drawn(error: type[PgsieveError], depth: int) -> Iterator[str]:
        module = error.__module__.removeprefix("pgsieve.").replace("decoding.errors", "")
        yield f"{'    ' * depth + error.__name__:<38}{module}".rstrip()
        for subclass in sorted(error.__subclasses__(), key=lambda each: each.__name__):
            if subclass.__module__.startswith("pgsieve.") and not subclass.__name__.startswith("_"):
                yield from drawn(subclass, depth + 1)

    assert "\n".join(drawn(PgsieveError, 1)) in (errors.__doc__ or "")
