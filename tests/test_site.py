"""The site as `make docs` builds it: its pages also as Markdown, and the list of them for readers of text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_each_page_is_there_as_markdown_and_listed_for_readers_of_text(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    pages = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("index.html")}
    texts = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")}
    assert {"." if name == "index" else name for name in texts} == pages
    for name, text in texts.items():
        assert text.lstrip().startswith(("#", "---")), name
        linked = re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text)
        assert not [link for link in linked if not (tmp_path / link).exists()], name
    listed = re.findall(
        r"^- \[.+\]\((.+)\)$", (tmp_path / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(f"{name}.md" for name in texts)
