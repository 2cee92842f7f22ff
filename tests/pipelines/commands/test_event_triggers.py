"""Event triggers of the publisher run with pgsieve's DDL as with any other client's. A failing trigger is named."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Shop

#: It relies on the search_path of the session that runs the DDL.
LOGGING = """
create table ddl_log (tag text);
create function log_ddl() returns event_trigger language plpgsql as $$begin insert into ddl_log values (tg_tag); end$$;
create event trigger log_all on ddl_command_end execute function log_ddl();
create event trigger log_drops on sql_drop execute function log_ddl();
"""
REFUSING = """
create function refuse_ddl() returns event_trigger language plpgsql as
  $$begin if current_user <> 'postgres' then raise 'no DDL of %s', current_user; end if; end$$;
create event trigger refuse_all on ddl_command_start when tag in ('CREATE PUBLICATION', 'DROP PUBLICATION', 'CREATE VIEW')
  execute function refuse_ddl();
"""


@pytest.fixture
def owner(shop: Shop) -> Iterator[str]:
    """The role that owns the tables, with the number of sessions that the documentation says."""
    conninfo = shop.written["sources"]["shop"]["conninfo"]
    database = conninfo_to_dict(conninfo)["dbname"]
    role = f"owner_of_{database}"
    tables = ("orders", "notes", "stock")
    shop.database.execute(f"create role {role} login replication connection limit 6")
    shop.database.execute(f"grant create, temporary on database {database} to {role}")
    shop.database.execute(f"grant create, usage on schema public to {role}")
    for table in tables:
        shop.database.execute(f"alter table {table} owner to {role}")
    defined = {"own": {"tables": [{"table": "public.orders", "where": "id > 1"}]}}
    shop.configure(
        sources={"shop": {"conninfo": make_conninfo(conninfo, user=role), "publications": defined}},
        subscriptions={
            "one": {"source": "shop", "publications": ["own"]},
            "two": {"source": "shop", "publications": ["p"], "row_filter": "publisher"},
        },
    )
    yield role
    shop.database.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = current_database()"
    )
    for (trigger,) in shop.database.execute("select evtname from pg_event_trigger").fetchall():
        shop.database.execute(f'drop event trigger "{trigger.replace(chr(34), chr(34) * 2)}"')
    for table in tables:
        shop.database.execute(f"alter table {table} owner to postgres")
    shop.database.execute(f"drop owned by {role}; drop role {role}")


@pytest.mark.drawn
def test_a_trigger_runs_as_for_any_other_client(shop: Shop, owner: str) -> None:
    shop.database.execute(LOGGING)
    shop.database.execute(f"grant insert on ddl_log to {owner}")
    shop.database.execute("delete from ddl_log")
    code, output = shop.cli("validate")
    assert code == 0, output
    assert shop.database.execute("select * from ddl_log").fetchall() == []
    code, output = shop.cli("run")
    assert code == 0, output
    logged = [tag for (tag,) in shop.database.execute("select tag from ddl_log")]
    assert logged == ["CREATE PUBLICATION", "COMMENT"]
    code, output = shop.cli("check")
    assert code == 0, output
    code, output = shop.cli("drop", "one")
    assert code == 0, output
    logged = [tag for (tag,) in shop.database.execute("select tag from ddl_log")]
    assert logged[2:] == ["DROP PUBLICATION", "DROP PUBLICATION"]


@pytest.fixture
def system_path(publisher_server: EmbeddedServer) -> Iterator[str]:
    """A search_path in the settings of the server, where ALTER SYSTEM writes it."""
    schema = "of_system"

    def reload() -> None:
        admin.execute("select pg_reload_conf()")
        shown = "select setting from pg_settings where name = 'search_path' and source <> 'default'"
        wait_until(lambda: (admin.execute(shown).fetchone() is None) == is_reset, lambda: "not reloaded")

    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        is_reset = False
        admin.execute(f"alter system set search_path = {schema}")
        reload()
        yield schema
        is_reset = True
        admin.execute("alter system reset search_path")
        reload()


@pytest.mark.parametrize("wins", ["system", "role", "options"])
def test_a_trigger_sees_the_search_path_that_the_roles_sessions_begin_with(
    shop: Shop, owner: str, system_path: str, wins: str
) -> None:
    """The number of sessions is limited to those of a run."""
    for schema in ("of_system", "of_role", "of_options"):
        shop.database.execute(f"create schema {schema} create table ddl_log (tag text)")
        shop.database.execute(f"grant usage on schema {schema} to {owner}")
        shop.database.execute(f"grant insert on {schema}.ddl_log to {owner}")
    shop.database.execute(LOGGING.replace("create table ddl_log (tag text);", ""))
    shop.database.execute(f"alter role {owner} connection limit 4")
    if wins != "system":
        shop.database.execute(f"alter role {owner} set search_path = of_role, public")
    if wins == "options":
        source = shop.written["sources"]["shop"]
        options = make_conninfo(source["conninfo"], options="-c search_path=of_options")
        shop.configure(sources={"shop": {**source, "conninfo": options}})
    shop.database.execute(f"delete from {f'of_{wins}'}.ddl_log")
    code, output = shop.cli("run")
    assert code == 0, output
    logged = [tag for (tag,) in shop.database.execute(f"select tag from of_{wins}.ddl_log")]
    assert logged == ["CREATE PUBLICATION", "COMMENT"]


@pytest.mark.drawn
def test_a_failing_trigger_is_named_with_statements_to_run_by_hand(shop: Shop, owner: str) -> None:
    shop.database.execute(REFUSING)
    code, output = shop.cli("validate", "--json")
    assert code == 1, output
    assert (
        output.count('the event trigger \\"refuse_all\\" fails') == 2
    )  # for the capture, and for the analysis of the filter
    code, output = shop.cli("run")
    output = " ".join(output.split())
    assert code == 2, output
    assert (
        'cannot prepare the capture publication "pgsieve_shop": the event trigger "refuse_all" fails'
        in output
    )
    assert 'correct its function "public"."refuse_ddl"' in output
    by_hand = re.search(r"run by hand, as a role for which it does not fail: (.*?;) ?(\[|$)", output)
    assert by_hand is not None, output
    shop.database.execute(by_hand[1].encode())
    code, output = shop.cli("run")
    assert code == 0, output
    assert shop.ids("one", "orders")
    code, output = shop.cli("drop", "one")
    assert code == 2, output
    assert 'the event trigger "refuse_all" fails' in " ".join(output.split())


def test_a_failing_login_trigger_is_reported(shop: Shop, owner: str) -> None:
    shop.database.execute("create table logins (name text)")
    shop.database.execute(
        "create function greet() returns event_trigger language plpgsql as"
        f" $$begin if session_user = '{owner}' then insert into logins values (session_user); end if; end$$"
    )
    shop.database.execute(f"grant insert on logins to {owner}")
    shop.database.execute("create event trigger greet on login execute function greet()")
    code, output = shop.cli("validate")
    assert code != 0
    assert "an event trigger on login fails" in " ".join(output.split())
    shop.database.execute("alter function greet() set search_path = public")
    code, output = shop.cli("validate")
    assert code == 0, output


def test_too_few_sessions_are_reported(shop: Shop, owner: str) -> None:
    name = conninfo_to_dict(shop.written["sources"]["shop"]["conninfo"])["dbname"]
    shop.database.execute(f"alter role {owner} connection limit 5")
    shop.database.execute(f"alter database {name} connection limit 3")
    code, output = shop.cli("validate")
    shop.database.execute(f"alter database {name} connection limit -1")
    output = " ".join(output.split())
    assert code == 1, output
    assert f'the role "{owner}" may have no more than 5 sessions: a run needs 4, a check 6' in output
    assert f'the database "{name}" may have no more than 3 sessions' in output
    assert f"ALTER ROLE {owner} CONNECTION LIMIT 8" in output
