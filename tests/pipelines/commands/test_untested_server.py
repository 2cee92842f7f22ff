"""A server newer than the newest tested version: every command refuses it before it creates anything, and names the way out.

The server really has the newest tested version. libpq learns the version from a ParameterStatus message at the start of a session
(PostgreSQL documentation, Start-up). A proxy alters this message, so that the server claims to be one major version newer.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgsieve.decoding.server_versions import NEWEST_SERVER
from pgsieve.pipelines.component import PgsieveComponent
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions, register_tables
from pgsieve.pipelines.jobs import find_slot_problem
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import UntestedServerError
from pgsieve.resources.postgres.source import Source, _warn_once
from tests.faults.proxy import Proxy
from tests.fixtures.dagster_in_memory import in_memory
from tests.fixtures.shop import Shop

NEWEST = NEWEST_SERVER // 10000
REFUSED = f'source "shop": PostgreSQL {NEWEST + 1} is newer than {NEWEST}, the newest that this pgsieve was tested with'
WAY_OUT = "set `allow_untested_server: true` in pgsieve.yaml, at `sources.shop`"


@pytest.fixture
def publisher_server(publisher_19: EmbeddedServer) -> EmbeddedServer:
    """Its catalogs have the columns that pgsieve reads from the newest version."""
    return publisher_19


@pytest.fixture
def newer(shop: Shop, publisher_server: EmbeddedServer) -> Iterator[str]:
    """The conninfo of the shop's database, on a server that claims the next major version."""
    with Proxy(publisher_server.port) as proxy:
        says = b"server_version\0%d"
        proxy.alters = says % publisher_server.version, says % (NEWEST + 1)
        conninfo = make_conninfo(
            shop.written["sources"]["shop"]["conninfo"], port=proxy.port, gssencmode="disable"
        )
        with psycopg.connect(conninfo) as session:
            assert session.info.server_version // 10000 == NEWEST + 1
        yield conninfo


def _configure(shop: Shop, conninfo: str, **settings: object) -> None:
    source = {**shop.written["sources"]["shop"], "conninfo": conninfo, **settings}
    shop.configure(sources={"shop": source})


def _says_why(output: str) -> bool:
    return REFUSED in " ".join(output.split()) and WAY_OUT in " ".join(output.split())


@pytest.mark.parametrize("row_filter", ["pipeline", "publisher"])
def test_every_command_refuses_an_untested_server_and_creates_nothing(
    shop: Shop, newer: str, row_filter: str
) -> None:
    _configure(shop, newer)
    subscriptions = {
        name: {**settings, "row_filter": row_filter}
        for name, settings in shop.written["subscriptions"].items()
    }
    shop.configure(subscriptions=subscriptions)
    commands = {
        ("validate",): 1,
        ("run",): 2,
        ("run", "--follow"): 2,
        ("resync", "one"): 2,
        ("check",): 2,
        ("check", "--repair"): 2,
        ("decode", "shop", "--plugin", "json"): 2,
        ("status",): 2,
        ("drop", "one"): 2,
        ("refresh-defs-state",): 2,
    }
    if row_filter == "publisher":
        commands[("decode", "shop", "--plugin", "json", "--slot", "pgsieve_shop_one")] = 2
        del commands[("decode", "shop", "--plugin", "json")]
    for command, code in commands.items():
        ended, output = shop.cli(*command)
        assert ended == code, (command, ended, output)
        assert _says_why(output), (command, output)
    assert shop.on_server() == ([], ["p", "q"])
    assert not (shop.path.parent / "lake" / "one").exists()


def test_assets_definitions_and_sensors_refuse_an_untested_server(shop: Shop, newer: str) -> None:
    _configure(shop, newer)
    config = load_config(shop.path)
    with in_memory() as instance:
        register_tables(config, instance)  # Warns, and keeps the tables that it already has.
        ran = (
            build_ui_definitions(config)
            .resolve_job_def("shop_increments")
            .execute_in_process(instance=instance, raise_on_error=False)
        )
        assert not ran.success
        failures = [event.step_failure_data for event in ran.filter_events(lambda e: e.is_step_failure)]
        assert any(REFUSED in str(failure.error) for failure in failures)
    with pytest.raises(UntestedServerError, match="is newer than"):
        PgsieveComponent(shop.path).write_state_to_path(shop.path.with_name("state.json"))
    (slot_stream,) = build_project(config).slot_streams.values()
    problem = find_slot_problem(slot_stream, shop.lake)
    assert problem is not None
    assert (problem.text, WAY_OUT in problem.remedy) == (REFUSED, True)
    assert shop.on_server() == ([], ["p", "q"])


@pytest.mark.drawn
def test_an_untested_server_is_used_with_a_warning_if_allowed(
    shop: Shop, newer: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_once.cache_clear()
    _configure(shop, newer, allow_untested_server=True)
    code, output = shop.cli("run")
    assert code == 0, output
    assert f"{REFUSED}: replicas may differ from a built-in subscription's" in caplog.messages
    assert caplog.messages.count(next(m for m in caplog.messages if m.startswith(REFUSED))) == 1
    assert shop.ids("one", "orders") == [2, 3, 4]
    assert shop.cli("check")[0] == 0
    # The key is removed, or the server was upgraded: existing objects are left alone, and continue with the key.
    before = shop.on_server()
    _configure(shop, newer, allow_untested_server=False)
    for command in (("run",), ("drop", "one"), ("resync", "one", "public.orders")):
        code, output = shop.cli(*command)
        assert (code, _says_why(output)) == (2, True), output
    assert shop.on_server() == before
    _configure(shop, newer, allow_untested_server=True)
    shop.database.execute("insert into orders values (5)")
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [2, 3, 4, 5]


def test_init_refuses_an_untested_server_and_writes_the_key_on_request(shop: Shop, newer: str) -> None:
    written = shop.path.with_name("first.yaml")
    arguments = ("init", "-c", str(written), "--conninfo", newer, "--publication", "p", "--source", "shop")
    code, output = shop.cli(*arguments)
    assert (code, REFUSED in " ".join(output.split()), "--allow-untested-server" in output) == (
        2,
        True,
        True,
    ), output
    assert not written.exists()
    code, output = shop.cli(*arguments, "--allow-untested-server")
    assert code == 0, output
    assert load_config(written).sources["shop"].allow_untested_server


def test_an_executors_session_is_refused_too(newer: str) -> None:
    with pytest.raises(UntestedServerError):
        Source("shop", newer).make_executor_conninfo()
