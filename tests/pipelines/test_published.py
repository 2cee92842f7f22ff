"""The stored form of the published tables: text and back, and how text of another version is handled."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.pipelines.config.model import parse_config
from pgsieve.pipelines.project import build_project
from pgsieve.pipelines.published import (
    RecordedCatalogs,
    fetch_published,
    find_recorded_tables,
    get_published_path,
    load_published,
    refresh_published,
)

SILENT = """
lake: ./lake
sources: {shop: {conninfo: "host=127.0.0.1 port=1 dbname=shop"}}
subscriptions: {sales: {source: shop, publications: [p]}}
"""


def test_the_stored_form_is_read_back() -> None:
    published = RecordedCatalogs({"shop": (7, '{"tables": ["Größe"]}')}, {"shop": {("public", "t"): "Größe"}})
    assert RecordedCatalogs.from_json(published.to_json()) == published


def test_a_text_without_comments_is_read() -> None:
    """pgsieve wrote none at first."""
    text = '{"format": 1, "feeds": {"shop": {"lsn": 7, "catalog": {}}}}'
    assert RecordedCatalogs.from_json(text) == RecordedCatalogs({"shop": (7, "{}")}, {"shop": {}})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2, "feeds": {}}', '{"format": 1, "feeds": 3}'])
def test_another_versions_text_is_ignored(text: str) -> None:
    assert RecordedCatalogs.from_json(text) == RecordedCatalogs()


def test_a_silent_source_keeps_its_part_and_a_removed_one_does_not(tmp_path: Path) -> None:
    config = parse_config(SILENT, tmp_path / "pgsieve.yaml", {})
    comments = {("public", "t"): "a comment"}
    before = RecordedCatalogs({"shop": (7, "{}"), "gone": (9, "{}")}, {"shop": comments, "gone": comments})
    read, (error,) = fetch_published(build_project(config), before)
    assert read == RecordedCatalogs({"shop": (7, "{}")}, {"shop": comments})
    assert "no connection" in error.message
    # A catalog that this version does not understand hides nothing else.
    assert find_recorded_tables(build_project(config), read) == {"sales": {}}


def test_processes_that_write_the_file_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(SILENT, tmp_path / "pgsieve.yaml", {})
    replace_file, errors_of_other = Path.replace, list[str]()

    def replace_after_other(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace_file)
        errors_of_other.extend(error.message for error in refresh_published(config, build_project(config)))
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", replace_after_other)
    errors = [error.message for error in refresh_published(config, build_project(config))]
    assert [len(errors), len(errors_of_other)] == [1, 1], (errors, errors_of_other)
    assert list(get_published_path(config).parent.glob("*published*")) == [get_published_path(config)]


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    config = parse_config(SILENT, tmp_path / "pgsieve.yaml", {})
    (tmp_path / ".pgsieve").write_text("a file")
    *_, error = refresh_published(config, build_project(config))
    assert error.message.startswith(f"{get_published_path(config)} cannot be written")
    assert load_published(config) == RecordedCatalogs()
