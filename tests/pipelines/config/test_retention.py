"""Times as pgsieve.yaml says them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import TypeAdapter, ValidationError

from pgsieve.pipelines.config.retention import RetentionConfig, Wait


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("1 hour", timedelta(hours=1)),
        ("36 hours", timedelta(hours=36)),
        ("2 weeks", timedelta(days=14)),
        ("off", timedelta()),
        ("forever", None),
    ],
)
def test_how_long_something_is_kept(text: str, kept: timedelta | None) -> None:
    assert RetentionConfig(change_log=text).change_log == kept  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["7", "7 Days", "0 days", "-1 days", "1.5 days", "100000 days", "7 months"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is not a time"):
        RetentionConfig(changes=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1 hour", "off", "forever"])
def test_versions_are_kept_for_readers_that_are_under_way_and_not_for_ever(text: str) -> None:
    with pytest.raises(ValidationError, match="2 hours at least"):
        RetentionConfig(versions=text)  # type: ignore[arg-type]


def test_a_wait_has_minutes_too_and_ends() -> None:
    wait = TypeAdapter(Wait)
    assert wait.validate_python("15 minutes") == timedelta(minutes=15)
    assert wait.validate_python("2 hours") == timedelta(hours=2)
    for text in ("off", "forever", "0 minutes"):
        with pytest.raises(ValidationError, match="is not a time"):
            wait.validate_python(text)
