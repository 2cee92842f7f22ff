"""Poolers: PgBouncer is recognised in each mode and named. Other poolers are recognised by the host's name."""

from __future__ import annotations

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceSettingError, SourceUnreachableError
from pgsieve.resources.postgres.pooler import find_pooler
from pgsieve.resources.postgres.source import Source
from tests.fixtures.pooler import Pooler

#: With this setting PgBouncer ignores parameters that it does not know.
TAKEN = "options,extra_float_digits,replication"


def test_a_pooler_that_refuses_pgsieves_settings_is_named(
    publisher_server: EmbeddedServer, pooler: Pooler
) -> None:
    source = Source("shop", pooler(publisher_server.port) + " dbname=postgres")
    with pytest.raises(SourceUnreachableError, match="no connection through PgBouncer") as refused:
        source.check_ready()
    assert (
        refused.value.hint
        == "name the server itself in conninfo: its own host and port instead of the pooler's"
    )


def test_a_pooler_in_transaction_mode_is_refused(publisher_server: EmbeddedServer, pooler: Pooler) -> None:
    at = pooler(publisher_server.port, pool_mode="transaction", ignore_startup_parameters=TAKEN)
    with pytest.raises(SourceSettingError, match="locks and settings do not last there") as refused:
        Source("shop", at + " dbname=postgres").check_ready()
    assert refused.value.sqlstate == "0A000"


def test_a_pooler_without_replication_is_refused(publisher_server: EmbeddedServer, pooler: Pooler) -> None:
    at = pooler(publisher_server.port, pool_mode="session", ignore_startup_parameters=TAKEN)
    with pytest.raises(SourceSettingError, match="a connection pooler: it does not let replication through"):
        Source("shop", at + " dbname=postgres").check_ready()


def test_a_server_is_not_mistaken_for_a_pooler(publisher_server: EmbeddedServer) -> None:
    assert Source("shop", publisher_server.conninfo()).check_ready() >= 150000


@pytest.mark.parametrize(
    ("host", "text", "name"),
    [
        ("aws-0-eu-west-1.pooler.supabase.com", "", "Supabase's pooler (Supavisor)"),
        ("ep-cool-sun-123456-pooler.eu-central-1.aws.neon.tech", "", "Neon's pooler"),
        ("shop.proxy-abc123.eu-west-1.rds.amazonaws.com", "", "RDS Proxy"),
        ("db", "FATAL:  Tenant or user not found", "Supabase's pooler (Supavisor)"),
        ("db", "FATAL:  unsupported startup parameter: replication", "PgBouncer, or a pooler like it"),
        ("db.abcdefgh.supabase.co", "", None),
        ("ep-cool-sun-123456.eu-central-1.aws.neon.tech", "", None),
        ("shop.abc123.eu-west-1.rds.amazonaws.com", "timeout expired", None),
        (None, "", None),
    ],
)
def test_poolers_are_recognised_by_their_hosts_and_messages(
    host: str | None, text: str, name: str | None
) -> None:
    pooler = find_pooler(host, text)
    assert (pooler.name if pooler else None) == name
