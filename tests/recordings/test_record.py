"""A repeated recording is the same, except LSNs, transaction ids, OIDs and times."""

from __future__ import annotations

import re

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.recordings import FOLDER
from tests.recordings.record import Scenario, record


def without_numbers(lines: list[str]) -> list[str]:
    """The statements and messages, without bytes and without numbers of more than two digits."""
    relevant = [line for line in lines if line.startswith(("==", ">", "    "))]
    return [re.sub(r"(?<![\w'.])\d{3,}", "…", line) for line in relevant]


@pytest.mark.parametrize("name", ["changes", "streams", "two_phase"])
def test_a_repeated_recording_is_the_same(
    publisher_server: EmbeddedServer, postgres_version: int, name: str
) -> None:
    scenario = Scenario.parse((FOLDER / f"{name}.sql").read_text(encoding="utf-8"))
    recorded = (FOLDER / str(postgres_version) / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    again = [line for reading in scenario.readings for line in record(publisher_server, scenario, reading)]
    assert without_numbers(again) == without_numbers(recorded)
    assert len(again) > 50
