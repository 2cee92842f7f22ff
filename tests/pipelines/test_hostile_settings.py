"""Objects that other roles created on the publisher, and settings of pgsieve's role, change nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import yaml
from deltalake import DeltaTable

from pgsieve.pipelines.demo.demo import SMALL_DATA
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures import commands
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, drop_slots, new_server

DATABASE = "tenants"

#: Copies of all objects of pg_catalog in public, as the role `neighbour` may create them. Each reports its use in the server's log.
PLANT = r"""
set check_function_bodies = off;
create function public.planted(what pg_catalog.text) returns pg_catalog.bool language plpgsql as
  $$begin raise log 'PLANTED %', what; raise exception 'planted %', what; end$$;
do $plant$
declare
  body constant text := 'language plpgsql as $f$begin perform public.planted(%L); end$f$';
  each record;
  arguments text;
begin
  for each in select p.*, pg_get_function_identity_arguments(p.oid) as given, pg_get_function_result(p.oid) as result
                from pg_proc p where pronamespace = 'pg_catalog'::regnamespace and prokind in ('f', 'a') loop
    begin
      execute format('create function public.%I(%s) returns %s ' || body, each.proname, each.given, each.result, each.proname);
    exception when others then null;
    end;
    foreach arguments in array array['', 'anyelement', 'anyelement, anyelement', 'anyelement, anyelement, anyelement'] loop
      continue when not 2276 = any (each.proargtypes);
      begin
        execute format('create function public.%I(%s) returns %s ' || body, each.proname, arguments, each.result, each.proname);
      exception when others then null;
      end;
    end loop;
  end loop;
  for each in select o.*, format_type(oprleft, null) as l, format_type(oprright, null) as r, format_type(oprresult, null) as result
                from pg_operator o where oprnamespace = 'pg_catalog'::regnamespace loop
    begin
      if each.oprleft = 0 then
        execute format('create function public.planted_operator_%s(%s) returns %s ' || body, each.oid, each.r, each.result, each.oprname);
        execute format('create operator public.%s (rightarg = %s, function = public.planted_operator_%s)', each.oprname, each.r, each.oid);
      else
        execute format('create function public.planted_operator_%s(%s, %s) returns %s ' || body, each.oid, each.l, each.r, each.result, each.oprname);
        execute format('create operator public.%s (leftarg = %s, rightarg = %s, function = public.planted_operator_%s)', each.oprname, each.l, each.r, each.oid);
      end if;
    exception when others then null;
    end;
  end loop;
  for each in select typname, relname from pg_type t left join pg_class c on c.oid = t.typrelid
               where typnamespace = 'pg_catalog'::regnamespace and (typtype = 'b' or relkind in ('r', 'v')) and typcategory <> 'A' loop
    begin
      if each.relname is null then
        execute format('create domain public.%I as pg_catalog.%1$I check (public.planted(%1$L))', each.typname);
      else
        execute format('create view public.%I as select * from pg_catalog.%1$I where public.planted(%1$L)', each.relname);
        execute format('grant select on public.%I to public', each.relname);
      end if;
    exception when others then null;
    end;
  end loop;
end $plant$;
create function public.to_jsonb(pg_catalog.pg_replication_slots) returns pg_catalog.jsonb language plpgsql as
  $$begin perform public.planted('to_jsonb(pg_replication_slots)'); end$$;
create type public.evil as (a int);
create function public.evil(pg_catalog.oid) returns public.evil language plpgsql as
  $$begin perform public.planted('a cast'); end$$;
create cast (pg_catalog.oid as public.evil) with function public.evil(pg_catalog.oid) as implicit;
create function public.evil(pg_catalog.text) returns public.evil language plpgsql as
  $$begin perform public.planted('a cast'); end$$;
create cast (pg_catalog.text as public.evil) with function public.evil(pg_catalog.text) as implicit;
"""

#: Words before a parenthesis that are not function calls.
SYNTAX = {"coalesce", "nullif", "exists", "values", "row"}


@dataclass
class Publisher:
    """A database whose tables belong to the role `replicator`. The role `neighbour` may create objects in public."""

    server: EmbeddedServer
    admin: psycopg.Connection

    @property
    def conninfo(self) -> str:
        return self.server.conninfo(dbname=DATABASE, user="replicator")

    def logged(self, since: int) -> str:
        return self.server.log_path.read_text(errors="replace")[since:]

    def log_ends(self) -> int:
        return len(self.server.log_path.read_text(errors="replace"))


@pytest.fixture
def publisher(postgres_version: int) -> Iterator[Publisher]:
    settings = {**TEST_SETTINGS, "log_line_prefix": "%u|"}
    with new_server(postgres_version, settings) as server:
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"create database {DATABASE}")
            admin.execute("create role replicator login replication")
            admin.execute("create role neighbour")
            admin.execute(f"grant create, temporary on database {DATABASE} to replicator")
            admin.execute("alter role replicator set log_statement = 'all'")
        with psycopg.connect(server.conninfo(dbname=DATABASE), autocommit=True) as admin:
            admin.execute("grant create on schema public to neighbour, replicator")
            admin.execute("grant execute on function pg_control_system() to replicator")
            admin.execute("set role replicator")
            admin.execute("create table public.orders (id int primary key, note text, at timestamptz)")
            admin.execute(
                "insert into public.orders select i, 'One', now() from generate_series(1, 100000) i"
            )
            admin.execute("create publication p for table public.orders")
            admin.execute("create table public.notes (id int primary key, note text)")
            admin.execute("alter table public.notes replica identity full")
            admin.execute("insert into public.notes values (1, 'One'), (2, 'two')")
            admin.execute("reset role")
            yield Publisher(server, admin)
            drop_slots(admin)


_ENVIRONMENT = {**os.environ, "DAGSTER_HOME": "", "COLUMNS": "200"}


class Site:
    """A pgsieve.yaml, and the commands."""

    def __init__(self, folder: Path, publisher: Publisher, *, spark: bool) -> None:
        """`spark`: Spark does everything that it can."""
        self.folder, self.path = folder, folder / "pgsieve.yaml"
        notes = {"table": "public.notes", "where": "upper(note collate \"C\") = 'ONE' and id % 2 = 1"}
        written = {
            "lake": "./lake",
            "spark": {"conf": {**SMALL_DATA, **({"spark.pgsieve.smallBytes": "-1"} if spark else {})}},
            "sources": {
                "shop": {"conninfo": publisher.conninfo, "publications": {"own": {"tables": [notes]}}}
            },
            "subscriptions": {
                "server": {"source": "shop", "publications": ["p"], "row_filter": "publisher"},
                "pipeline": {"source": "shop", "publications": ["own"]},
            },
        }
        self.path.write_text(yaml.safe_dump(written))

    def _arguments(self, *command: str) -> list[str]:
        return ["--verbose", *command, "-c", str(self.path)]

    def __call__(self, *command: str) -> None:
        done = commands.run(*self._arguments(*command), environment=_ENVIRONMENT)
        assert done.returncode == 0, done.stdout + done.stderr

    def follow(self, publisher: Publisher, key: int) -> None:
        """Follow until a row that is inserted meanwhile has arrived."""
        log = self.folder / "follow.log"
        following = commands.start(self._arguments("run", "--follow"), log, environment=_ENVIRONMENT)
        assert following.pid is not None
        try:
            publisher.admin.execute(f"insert into public.orders values ({key}, 'followed')")
            wait_until(
                lambda: key in self.ids("server", "orders") or following.exitcode is not None,
                lambda: "not followed",
                120,
            )
        finally:
            os.kill(following.pid, signal.SIGINT)
            following.join(120)
        assert key in self.ids("server", "orders"), log.read_text()

    def ids(self, subscription: str, table: str) -> set[int]:
        replica = DeltaTable(str(self.folder / "lake" / subscription / "public" / table))
        return set(replica.to_pyarrow_table(columns=["id"])["id"].to_pylist())

    def live(self, publisher: Publisher) -> None:
        """Run all commands of a subscription's life."""
        self("validate")
        self("run")
        publisher.admin.execute("insert into public.orders values (100001, 'more'), (100002, 'more')")
        publisher.admin.execute("delete from public.orders where id = 1")
        publisher.admin.execute("insert into public.notes values (3, 'One'), (4, 'One'), (5, 'x')")
        self("decode", "shop", "--plugin", "json", "--slot", "pgsieve_shop")
        self("run")
        assert self.ids("server", "orders") == {*range(2, 100003)}
        assert self.ids("pipeline", "notes") == {1, 3}
        self("status")
        self("check")
        self.follow(publisher, 100003)
        for name in ("server", "pipeline"):
            self("drop", name)


@pytest.mark.drawn
@pytest.mark.spark
def test_no_function_that_another_role_planted_is_executed(tmp_path: Path, publisher: Publisher) -> None:
    """It takes long: every function and operator of pg_catalog is planted, and each command is a process."""
    site = Site(tmp_path, publisher, spark=True)
    publisher.admin.execute("set role neighbour")
    publisher.admin.execute(PLANT)
    publisher.admin.execute("reset role")
    # public comes before pg_catalog, so that planted functions need no better match than those that they hide.
    publisher.admin.execute("alter role replicator set search_path = public, pg_catalog")
    with psycopg.connect(publisher.conninfo, autocommit=True) as victim:
        for statement in (
            "select upper('a')",
            "select oid from pg_publication",
            "select 'a'::text",
            "select 1::int < 2::int",
            "select to_jsonb(s) from pg_catalog.pg_replication_slots s right join (values (1)) v(a) on true",
        ):
            with pytest.raises(psycopg.errors.RaiseException, match="planted"):
                victim.execute(statement)
    begins = publisher.log_ends()

    site.live(publisher)

    log = publisher.logged(begins)
    assert re.findall("PLANTED.*", log) == []
    sent = "\n".join(
        re.findall(r"^replicator\|LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)", log, re.MULTILINE)
    )
    called = set(re.findall(r"\b([a-z_0-9]+) ?\(", sent.lower()))
    builtin = {
        name
        for (name,) in publisher.admin.execute("select proname from pg_catalog.pg_proc where oid < 16384")
    }
    planted = {
        name
        for (name,) in publisher.admin.execute(
            "select proname from pg_catalog.pg_proc where pronamespace = 'public'::regnamespace"
        )
    }
    assert len(called & builtin) > 30
    assert (called & builtin) - planted - SYNTAX == set(), "pgsieve sends a call that was not planted"


TIMEOUTS = {
    "statement_timeout": ("1ms", 0),
    "lock_timeout": ("1ms", 0),
    "idle_in_transaction_session_timeout": ("1ms", 0),
    "idle_session_timeout": ("1ms", 140000),
    # A shorter timeout ends even the start of a session.
    "transaction_timeout": ("200ms", 170000),
}
#: Other settings that an administrator may have made for a role, for its owner or for its other work.
SETTINGS = {
    "quote_all_identifiers": "on",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "transform_null_equals": "on",
    "array_nulls": "off",
    "row_security": "off",
    "bytea_output": "escape",
    "datestyle": "SQL, DMY",
    "intervalstyle": "iso_8601",
    "timezone": "Asia/Kathmandu",
    "extra_float_digits": "-15",
    "client_encoding": "LATIN1",
    "synchronous_commit": "off",
    "enable_seqscan": "off",
    "work_mem": "64kB",
    "client_min_messages": "debug5",
}


@pytest.mark.drawn
@pytest.mark.slow
def test_a_role_with_short_timeouts_and_settings_of_its_own_is_enough(
    tmp_path: Path, publisher: Publisher
) -> None:
    """It takes long: a new server, and all commands of a subscription, each a process."""
    version = publisher.admin.info.server_version
    for name, (value, least) in TIMEOUTS.items():
        if least <= version:
            publisher.admin.execute(f"alter role replicator set {name} = '{value}'")
    with pytest.raises(psycopg.Error), psycopg.connect(publisher.conninfo) as ended:
        ended.execute("select pg_sleep(1)")
    if version >= 140000:
        with pytest.raises(psycopg.Error), psycopg.connect(publisher.conninfo) as idle:
            _use_later(idle)

    # From 19 on all string literals are standard ones.
    outdated = {"standard_conforming_strings"} if version >= 190000 else set()
    for name, value in SETTINGS.items() - {(name, SETTINGS[name]) for name in outdated}:
        # Two of the values are lists; as a literal each would be a single name.
        publisher.admin.execute(
            f"alter role replicator set {name} = {value if ',' in value else repr(value)}"
        )
    Site(tmp_path, publisher, spark=False).live(publisher)


def _use_later(session: psycopg.Connection) -> None:
    time.sleep(0.5)
    session.execute("select 1")
