"""The documentation is right: its commands are accepted, its configurations are read, and its links exist."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import dagster as dg
import pytest
import typer
import yaml
from dagster._core.instance_for_test import instance_for_test
from dagster.components.testing.utils import create_defs_folder_sandbox
from typer.testing import CliRunner

from pgsieve.pipelines.command_line.cli import app
from pgsieve.pipelines.config.model import Config, SourceConfig, load_config

ROOT = Path(__file__).resolve().parent.parent
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = (*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md")))
PACKAGES = ("assets", "decoding", "pipelines", "resources")

FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
KEYS = set(Config.model_fields)

#: The rest of the file around a block that shows only a part of it.
AROUND: dict[str, Any] = {
    "lake": "./lake",
    "sources": {"shop": {"conninfo": "host=db dbname=shop user=pgsieve"}},
}


def blocks(*languages: str) -> list[Any]:
    """Every fenced block of these languages, named by its page and line."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[2] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(dedent(match[3]), id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def commands(click: Any, name: str = "pgsieve") -> Iterator[str]:
    """Every command, with the groups that contain it."""
    yield name
    for child in getattr(click, "commands", {}).values():
        yield from commands(child, f"{name} {child.name}")


COMMAND: Any = typer.main.get_command(app)
COMMANDS = tuple(commands(COMMAND))


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of each `pgsieve` in a shell block: up to `|`, `>`, `&&` or `;`, and after variables and prompts."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|[|;>]", re.sub(r"\$ |#.*", "", line)):
            if match := re.match(r"(?:\w+=\S* )*(?:[\w.]+/)*pgsieve(?= |$)", part.strip()):
                yield shlex.split(part.strip()[match.end() :])


def accepted(words: list[str]) -> None:
    """Let the parser accept these arguments. Nothing is run."""
    command = COMMAND
    context = command.make_context("pgsieve", list(words))
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, context._protected_args + context.args)
        context = command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_that_it_accepts(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    examples = re.findall(r"Example: (pgsieve .*?)\s*$", done.output, re.MULTILINE)
    assert examples
    for words in command_lines("\n".join(examples)):
        accepted(words)


#: Names of the documentation's parts in messages and in files that pgsieve writes: a wheel has no documentation beside it.
REFERENCE = re.compile(r"pgsieve's documentation, \"(.+?)\"")


def test_messages_name_existing_sections_and_no_file_of_the_repository() -> None:
    headings = {
        line.lstrip("# ")
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if line[:1] == "#"
    }
    named = set[str]()
    for path in (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        explained = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
                assert not re.search(r"docs/[\w-]+\.md", node.value), f"{path}:{node.lineno}"
                named |= set(REFERENCE.findall(node.value))
    assert named
    assert named <= headings


def test_the_index_of_modules_has_every_module_with_its_docstring() -> None:
    """The site's page, made from the docstrings: each module once, in its folder's section, with a text."""
    text = runpy.run_path(str(ROOT / "scripts/module_index.py"))["markdown"]()
    listed = list[str]()
    for section in text.split("\n## ")[1:]:
        folder, _, rest = section.partition("\n\n")
        assert re.match(r"[\w`]", rest), folder
        listed.append(f"{folder}/__init__.py")
        listed += [
            f"{folder}/{name}" for name in re.findall(r"^\| `(\w+\.py)` \| \S.* \|$", rest, re.MULTILINE)
        ]
    modules = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in modules)
    assert "modules.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_architecture_names_existing_files() -> None:
    """Either the whole path, or the path in the folder of the step that the section describes."""
    named = re.findall(r"`([\w/]+/(?:\w+\.py)?)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert named
    places = (ROOT, ROOT / "assets/steps")
    assert not [name for name in named if not any((place / name).exists() for place in places)]


def test_every_command_is_in_the_reference() -> None:
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS[1:] if not re.search(rf"{name}\b", text)]


@pytest.mark.parametrize("text", blocks("console", "sh", "bash"))
def test_the_parser_accepts_the_commands_of_the_documentation(text: str) -> None:
    for words in command_lines(text):
        accepted(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_that_sentences_name_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for words in re.findall(r"`pgsieve ([a-z][^`]*)`", text):
        command = COMMAND
        for word in re.findall(r"--[\w-]+|\w[\w-]*", words):
            if hasattr(command, "commands"):
                command = command.commands[word]
            elif word.startswith("--"):
                assert word in {option for parameter in command.params for option in parameter.opts}, words


def _read_as_component(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a defs.yaml beside the pgsieve.yaml that it names: Dagster makes definitions of it."""
    rest = {"subscriptions": {"sales": {"source": "shop", "publications": ["sales"]}}}
    with instance_for_test(), create_defs_folder_sandbox() as sandbox:
        file = sandbox.defs_folder_path / "replicas" / "defs.yaml"
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        name = yaml.safe_load(text)["attributes"]["config"]
        file.with_name(name).write_text(yaml.safe_dump({**AROUND, **rest}), encoding="utf-8")
        with sandbox.load_component_and_build_defs(defs_path=file.parent) as (_, defs):
            keys = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    assert any(key.endswith("sales/cut") for key in keys)


def _read_by_dagster(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a dagster.yaml: an instance has the pools' limit that it sets."""
    (folder / "dagster.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("DAGSTER_HOME", str(folder))
    with dg.DagsterInstance.get() as dagster:
        assert dagster.get_settings("concurrency") == yaml.safe_load(text)["concurrency"]


def _read_by_prometheus(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a prometheus.yml: its rules are those in docs/monitoring, which tests/test_monitoring.py reads."""
    written = yaml.safe_load(text)
    assert all((ROOT / "docs/monitoring" / name).exists() for name in written["rule_files"])
    targets = [t for c in written["scrape_configs"] for s in c["static_configs"] for t in s["targets"]]
    assert all(re.fullmatch(r"[\w.-]+:\d+", target) for target in targets)


#: Readers of blocks that are not a pgsieve.yaml, by a key that only such a file has.
OTHER_FILES = {
    "type": _read_as_component,
    "concurrency": _read_by_dagster,
    "scrape_configs": _read_by_prometheus,
}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_each_yaml_block_is_a_readable_configuration_or_another_known_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set(yaml.safe_load(text))
    if keys <= set(SourceConfig.model_fields):
        text, keys = "sources:\n  shop:\n" + indent(text, "    "), {"sources"}
    if not keys <= KEYS:
        readers = [read for key, read in OTHER_FILES.items() if key in keys]
        assert len(readers) == 1, "the keys do not tell which file it is"
        readers[0](text, tmp_path, monkeypatch)
        return
    for name in set(re.findall(r"(?<!\$)\$\{(\w+)\}", text)):
        monkeypatch.setenv(name, "x")
    file = tmp_path / "pgsieve.yaml"
    rest = {key: value for key, value in AROUND.items() if key not in keys}
    file.write_text(text + "\n" + (yaml.safe_dump(rest) if rest else ""), encoding="utf-8")
    load_config(file, os.environ)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as anchors of GitHub."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = [
        re.sub(r"[`*]|\]\([^)]*\)", "", line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_within_the_repository_is_dead(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


def test_every_page_of_the_documentation_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"[\w-]+\.md", nav))


def test_every_page_of_the_documentation_is_in_the_readmes_table() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked


def test_every_picture_is_on_a_page_and_has_a_text() -> None:
    """Each picture has a text for people who cannot see it, and every file of docs/images is on a page."""
    shown = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown |= {Path(target).name: words for words, target in re.findall(r"!\[(.*?)\]\((.+?)\)", text)}
    assert all(len(words) > 20 for words in shown.values()), shown
    pictures = {path.name for path in (ROOT / "docs/images").iterdir() if path.suffix != ".cast"}
    assert pictures == shown.keys()
