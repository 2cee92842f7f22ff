"""A publisher whose changes are streamed to tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.streaming_publisher import Publisher, streaming_database


@pytest.fixture
def publisher(publisher_server: EmbeddedServer) -> Iterator[Publisher]:
    with streaming_database(publisher_server) as made:
        made.new_slot()
        yield made
