"""The folders that a demo refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.demo.servers import make_demo_folder


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in (("file", "File exists"), ("file/below", "Not a directory")):
        with pytest.raises(PgsieveError, match=f'/{folder}" cannot be made: {reason}'):
            make_demo_folder(tmp_path / folder)


def test_only_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert make_demo_folder(tmp_path / "new" / "folder").is_dir()
    assert make_demo_folder(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    with pytest.raises(PgsieveError, match="is not empty"):
        make_demo_folder(tmp_path)
