"""The site's page *Modules*: every module, with the first paragraph of its docstring.

    python scripts/module_index.py

`scripts/site_pages.py` adds the page to each build of the site. This script imports nothing of pgsieve.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent

#: The packages from the top layer to the lowest. Each imports only later ones.
PACKAGES = ("pipelines", "assets", "resources", "decoding")

_HEAD = """\
# Modules

Each module, and the first paragraph of its docstring. [Architecture](ARCHITECTURE.md) describes how they work together.
"""


def markdown() -> str:
    """The page, as Markdown."""
    return _HEAD + "".join(_section(folder) for package in PACKAGES for folder in _folders(_ROOT / package))


def _folders(package: Path) -> Iterator[Path]:
    return (file.parent for file in sorted(package.rglob("__init__.py"), key=lambda file: file.parent.parts))


def _section(folder: Path) -> str:
    """The section of a folder and its modules."""
    modules = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    rows = "".join(f"| `{file.name}` | {_summary(file)} |\n" for file in modules)
    table = f"\n| module | is |\n|---|---|\n{rows}" if rows else ""
    return f"\n## {folder.relative_to(_ROOT)}\n\n{_summary(folder / '__init__.py')}\n{table}"


def _summary(file: Path) -> str:
    """The first paragraph of a module's docstring, as one line for a table."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(markdown())
