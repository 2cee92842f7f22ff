"""Under wal_level = replica, the first logical slot enables logical decoding and the last one disables it.

PostgreSQL documentation, Write Ahead Log Settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceSettingError
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, new_server
from tests.fixtures.shop import Shop
from tests.fixtures.standby import standby_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def publisher_server(publisher_19: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server that decodes only while it has a logical slot."""
    with new_server(publisher_19.version, {**TEST_SETTINGS, "wal_level": "replica"}) as server:
        yield server


@pytest.mark.drawn
def test_replication_needs_no_wal_level_logical_and_says_what_disables_decoding(shop: Shop) -> None:
    def in_effect() -> str:
        return str(shop.database.execute("SHOW effective_wal_level").fetchone())

    assert "replica" in in_effect()
    shop.configure(subscriptions={"two": shop.written["subscriptions"]["two"]})
    ended, validated = shop.cli("validate", "--json")
    report = json.loads(validated)
    assert (ended, report["problems"]) == (0, [])
    [warning] = [w for w in report["warnings"] if "switches it off" in w["message"]]
    assert warning["object"] == "shop"
    assert shop.cli("run")[0] == 0
    assert "logical" in in_effect()
    shop.database.execute("INSERT INTO stock VALUES (5, 5)")
    assert shop.cli("run")[0] == 0
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
    [slot] = json.loads(shop.cli("status", "--json")[1])["slots"]
    assert slot["decoding"] == "while a slot exists"
    assert "switches logical decoding off" in shop.cli("status")[1]
    assert shop.cli("drop", "two")[0] == 0
    wait_until(lambda: "replica" in in_effect(), in_effect)


def test_below_wal_level_replica_no_slot_decodes(publisher_19: EmbeddedServer) -> None:
    settings = {**TEST_SETTINGS, "wal_level": "minimal", "max_wal_senders": "0"}
    with (
        new_server(publisher_19.version, settings) as server,
        pytest.raises(SourceSettingError, match='requires "wal_level" >= "replica", it is "minimal"'),
    ):
        Source("shop", server.conninfo()).check_ready()


def test_a_standby_decodes_once_its_primary_has_a_slot_or_wal_level_logical(
    publisher_server: EmbeddedServer, server_folder: Path
) -> None:
    with standby_of(publisher_server, server_folder / "standby") as standby:
        source = Source("shop", standby.conninfo(), standby=True)
        with psycopg.connect(standby.conninfo(), autocommit=True) as replica:

            def in_effect(level: str) -> bool:
                return replica.execute("SHOW effective_wal_level").fetchone() == (level,)

            with psycopg.connect(publisher_server.conninfo(), autocommit=True) as primary:
                wait_until(lambda: in_effect("replica"), str)
                with pytest.raises(SourceSettingError, match='requires "wal_level" >= "logical"') as caught:
                    source.check_ready()
                assert "make a logical replication slot there" in str(caught.value.hint)
                primary.execute("SELECT pg_create_logical_replication_slot('on', 'pgoutput')")
                wait_until(lambda: in_effect("logical"), str)
                assert source.check_ready() >= 190000
                primary.execute("SELECT pg_drop_replication_slot('on')")
