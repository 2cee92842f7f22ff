"""What mkdocs does not know of this repository: pages at its top, and GitHub's way to write a pipe in a table.

A hook of `mkdocs.yml`. README.md is the site's first page. Links are written for GitHub; the site has all pages in one
folder, and of a link to code only its text. The page of all modules is made from their docstrings.
"""

import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parent.parent

#: Pages at the top of the repository, by their names on the site.
TOP = {
    "index.md": "README.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}

_LINK = re.compile(r"\]\((?:docs/|\.\./)(?=[^)]+\))")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(?:examples|src|scripts|tests|benchmarks)/[^)]*\)")
_README = re.compile(r"\]\(README\.md(?=[)#])")
_CODE = re.compile(r"`[^`]+`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the top of the repository, and the one of all modules."""
    for name, path in TOP.items():
        files.append(File.generated(config, name, abs_src_path=str(_ROOT / path)))
    modules = runpy.run_path(str(_ROOT / "scripts" / "module_index.py"))["markdown"]()
    files.append(File.generated(config, "modules.md", content=modules))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""A page's text with the site's links. In code in a table GitHub reads `\|` as a pipe, Python-Markdown does not."""
    text = _README.sub("](index.md", _LINK.sub("](", _OUTSIDE.sub(r"\1", markdown)))
    return "\n".join(
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in text.split("\n")
    )
