"""New features of PostgreSQL 19: in this folder publisher and subscriber have that version."""

from __future__ import annotations

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def publisher_server(publisher_19: EmbeddedServer) -> EmbeddedServer:
    """The server whose databases are replicated."""
    return publisher_19


@pytest.fixture(scope="session")
def subscriber_server(subscriber_19: EmbeddedServer) -> EmbeddedServer:
    """The server whose databases have the built-in subscriptions."""
    return subscriber_19
