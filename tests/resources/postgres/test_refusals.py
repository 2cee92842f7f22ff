"""What the server refuses is said in its own words, whichever driver asked."""

from __future__ import annotations

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.source import PassingFaultError, refusing


def test_a_refusal_of_what_a_driver_asks_for_itself_shows_the_servers_words(
    publisher_server: EmbeddedServer,
) -> None:
    impatient = Conninfo(publisher_server.conninfo(options="-c lock_timeout=100ms"))
    with psycopg.connect(publisher_server.conninfo()) as other:
        # ADBC's driver reads the types when it connects.
        other.execute("LOCK TABLE pg_catalog.pg_type IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(PassingFaultError) as refused, refusing("shop", "read"), impatient.adbc():
            pass
    assert refused.value.message == ('source "shop": cannot read (canceling statement due to lock timeout)')
