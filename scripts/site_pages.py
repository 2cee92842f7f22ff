"""A hook of `mkdocs.yml`: adds pages from the repository's top, adapts GitHub's Markdown, and adds pages as Markdown.

README.md is the site's first page. Links are written for GitHub. The site has all pages in one folder, and
replaces a link to code by its text. The page of all modules is made from their docstrings. The site also has each
page as Markdown (`name.md` beside `name/`), and `llms.txt` lists these pages (https://llmstxt.org).
"""

import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parent.parent

#: The pages at the top of the repository, by their names on the site.
TOP_PAGES = {
    "index.md": "README.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}

_LINK = re.compile(r"\]\((?:docs/|\.\./)(?=[^)]+\))")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(?:deploy|examples|src|scripts|tests|benchmarks)/[^)]*\)")
_README = re.compile(r"\]\(README\.md(?=[)#])")
_CODE = re.compile(r"`[^`]+`")


#: The adapted text of the pages, by file.
_MARKDOWN: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the top of the repository, and the page of all modules."""
    for name, path in TOP_PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(_ROOT / path)))
    modules = runpy.run_path(str(_ROOT / "scripts" / "module_index.py"))["markdown"]()
    files.append(File.generated(config, "modules.md", content=modules))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    r"""Adapt the links and pipes of a page: in code in a table, GitHub reads `\|` as a pipe, unlike Python-Markdown."""
    text = _README.sub("](index.md", _LINK.sub("](", _OUTSIDE.sub(r"\1", markdown)))
    _MARKDOWN[page.file.src_uri] = text
    return "\n".join(
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in text.split("\n")
    )


def on_post_build(config: Any) -> None:
    """Write the pages as Markdown, and the list of pages."""
    site = Path(config.site_dir)
    for name, text in _MARKDOWN.items():
        (site / name).write_text(text, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for entry in config.nav:
        for section, pages in entry.items():
            listed = [{section: pages}] if isinstance(pages, str) else pages
            lines += [] if isinstance(pages, str) else [f"## {section}", ""]
            lines += [f"- [{title}]({name})" for each in listed for title, name in each.items()] + [""]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
