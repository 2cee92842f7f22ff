"""No setting that a session can inherit changes what pgsieve reads, or the meaning of a filter.

Every setting of the server is pinned or listed in `ALIKE`. A version with a new setting fails until a developer has classified it.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from pgsieve.resources.postgres import sessions
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sessions import Conninfo
from tests.resources.test_sessions import KINDS

#: The condition for settings that ALTER DATABASE and ALTER ROLE can set.
SETTABLE = "context in ('user', 'superuser', 'backend', 'superuser-backend')"
#: Settings that change no text, no literal and no meaning, by purpose.
ALIKE = {
    "speed and memory": """
        backend_flush_after commit_delay commit_siblings constraint_exclusion cpu_index_tuple_cost cpu_operator_cost cpu_tuple_cost
        cursor_tuple_fraction default_statistics_target effective_cache_size effective_io_concurrency enable_async_append
        enable_bitmapscan enable_distinct_reordering enable_gathermerge enable_group_by_reordering enable_hashagg enable_hashjoin
        enable_incremental_sort enable_indexonlyscan enable_indexscan enable_material enable_memoize enable_mergejoin
        enable_nestloop enable_parallel_append enable_parallel_hash enable_partition_pruning enable_partitionwise_aggregate
        enable_partitionwise_join enable_presorted_aggregate enable_self_join_elimination enable_seqscan enable_sort enable_tidscan
        file_copy_method force_parallel_mode from_collapse_limit geqo geqo_effort geqo_generations geqo_pool_size geqo_seed
        geqo_selection_bias geqo_threshold gin_pending_list_limit hash_mem_multiplier io_combine_limit jit jit_above_cost
        jit_debugging_support jit_dump_bitcode jit_expressions jit_inline_above_cost jit_optimize_above_cost jit_profiling_support
        jit_tuple_deforming join_collapse_limit logical_decoding_work_mem maintenance_io_concurrency maintenance_work_mem
        max_parallel_maintenance_workers max_parallel_workers max_parallel_workers_per_gather max_stack_depth
        min_parallel_index_scan_size min_parallel_table_scan_size parallel_leader_participation parallel_setup_cost
        parallel_tuple_cost plan_cache_mode random_page_cost recursive_worktable_factor seq_page_cost synchronize_seqscans
        temp_buffers temp_file_limit vacuum_buffer_usage_limit wal_compression wal_init_zero wal_recycle wal_skip_threshold work_mem
    """,
    "what is written, maintained or created": """
        allow_in_place_tablespaces allow_system_table_mods check_function_bodies createrole_self_grant default_table_access_method
        default_tablespace default_toast_compression event_triggers extension_control_path extension_destdir icu_validation_level
        lo_compat_privileges md5_password_warnings password_encryption scram_iterations session_replication_role
        synchronous_commit temp_tablespaces vacuum_cost_delay vacuum_cost_limit vacuum_cost_page_dirty vacuum_cost_page_hit
        vacuum_cost_page_miss vacuum_defer_cleanup_age vacuum_failsafe_age vacuum_freeze_min_age vacuum_freeze_table_age
        vacuum_max_eager_freeze_failure_rate vacuum_multixact_failsafe_age vacuum_multixact_freeze_min_age
        vacuum_multixact_freeze_table_age vacuum_truncate wal_consistency_checking
    """,
    "logs, statistics and debugging": """
        application_name backtrace_functions compute_query_id debug_discard_caches debug_logical_replication_streaming
        debug_parallel_query debug_pretty_print debug_print_parse debug_print_plan debug_print_rewritten escape_string_warning
        logical_replication_mode log_connections log_disconnections log_duration log_error_verbosity log_executor_stats
        log_lock_failures log_lock_waits log_min_duration_sample log_min_duration_statement log_min_error_statement
        log_min_messages log_parameter_max_length log_parameter_max_length_on_error log_parser_stats log_planner_stats
        log_replication_commands log_statement log_statement_sample_rate log_statement_stats log_temp_files
        log_transaction_sample_rate post_auth_delay stats_fetch_consistency trace_notify trace_recovery_messages trace_sort
        track_activities track_cost_delay_timing track_counts track_functions track_io_timing track_wal_io_timing
        update_process_title
    """,
    "connections and waits: a peer that is gone is noticed by pgsieve's own": """
        client_connection_check_interval deadlock_timeout tcp_keepalives_count tcp_keepalives_idle tcp_keepalives_interval
        tcp_user_timeout wal_sender_timeout
    """,
    "what every transaction begins with anew": "transaction_deferrable transaction_isolation transaction_read_only",
    "only functions that are not immutable, which no row filter may call": """
        default_text_search_config gin_fuzzy_search_limit lc_numeric lc_time
    """,
    "what a subscriber's walsender inherits alike: the unit of money, and filters that are the publisher's to evaluate": """
        lc_monetary timezone_abbreviations xmlbinary xmloption
    """,
    "the language of messages, of which pgsieve reads the SQLSTATE": "lc_messages",
    "an administrator's own way to read what is damaged, or not to read": """
        dynamic_library_path ignore_checksum_failure ignore_system_indexes local_preload_libraries
        restrict_nonsystem_relation_kind session_preload_libraries zero_damaged_pages
    """,
}
#: Values that differ from pgsieve's, for settings that are neither boolean nor have a list of values.
OTHERS = {
    "DateStyle": "SQL, DMY",
    "TimeZone": "Asia/Kathmandu",
    "client_encoding": "LATIN1",
    "extra_float_digits": "-15",
    "search_path": "public",
}
PINNED = {name.lower(): value for name, value in sessions._PINNED_SETTINGS.items()} | {
    "client_encoding": "UTF8"
}
TIMEOUTS = sessions._TIMEOUT_FIRST_VERSIONS

TABLE = r"""
create table public.settled (id int primary key, path text default 'C:\dir', f float8 default 0.1::float8 + 0.2, y bytea default '\x5c00ff',
  at timestamptz default '2020-02-29 01:02:03+00', d date default '2020-03-04', i interval default '1 year 2 mons -3 days 04:05:06',
  m money default 1234567.89, a text[] default '{NULL,"a\\b"}', n numeric default 1e30, "Mixed Case" text default 'select');
insert into public.settled (id) select generate_series(1, 3);
"""
PUBLISHED = r"""
create publication settled for table public.settled where (path = 'C:\dir' and path like 'C:\\%' and f > 0.30000000000000004::float8
  and y <> '\x5c' and at < '2020-03-01 00:00+00' and d < '2020-05-06' and i > '1 mon -1 days' and "Mixed Case" = 'select' and a <> '{NULL}')
"""
#: Queries of definitions, rows, and the meaning of literals and conditions.
READ = r"""
select (select array_agg(pg_get_expr(adbin, adrelid) order by adnum) from pg_attrdef where adrelid = 'public.settled'::regclass)::text,
       {where}, (select string_agg(s::text, ' ') from public.settled s where path = 'C:\dir'), 'C:\dir' like 'C:\\%',
       (null = null) is null, '{{NULL}}'::text[] is distinct from array['NULL'], '{{null}}'::int[]::text, 0.1::float8 + 0.2,
       1234.5::money::text, now() - now(), '\x00ff'::bytea::text, current_setting('transaction_isolation'),
       current_setting('transaction_read_only'), row_security_active('public.settled')
"""


@pytest.fixture
def conninfo(publisher_server: EmbeddedServer) -> Iterator[str]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database settled")
        admin.execute("create role settler superuser login replication")
        yield publisher_server.conninfo(dbname="settled", user="settler")
        admin.execute("drop database settled with (force)")
        admin.execute("drop role settler")


def test_each_setting_of_a_server_is_pinned_or_harmless(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo()) as connection:
        settable = {
            name.lower() for (name,) in connection.execute(f"select name from pg_settings where {SETTABLE}")
        }
    alike = [name for names in ALIKE.values() for name in names.split()]
    assert len(alike) == len(set(alike))
    pinned = PINNED.keys() | TIMEOUTS.keys()
    assert pinned.isdisjoint(alike)
    assert settable - pinned - set(alike) == set()


def _other(name: str, kind: str, setting: str, values: list[str] | None) -> str | None:
    """An unusual value of a setting, or None if there is no choice."""
    if name in OTHERS:
        return OTHERS[name]
    if kind == "bool":
        return "off" if setting == "on" else "on"
    return next((value for value in values or () if value != setting), None)


def _others(connection: psycopg.Connection, condition: str) -> dict[str, str]:
    rows = connection.execute(
        f"select name, vartype, setting, enumvals from pg_settings where {condition}"
    ).fetchall()
    return {row[0]: other for row in rows if (other := _other(*row)) is not None}


def test_settings_of_the_database_and_the_role_do_not_count(
    conninfo: str, publisher_server: EmbeddedServer
) -> None:
    """Each pinned setting has another value, in the database and in the role."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        others = {n: v for n, v in _others(admin, SETTABLE).items() if n.lower() in PINNED}
        assert {n.lower() for n in others} >= PINNED.keys()
        for place in ("database settled", "role settler"):
            for name, value in others.items():
                literal = value if "," in value else sql.Literal(value).as_string(None)
                admin.execute(f"alter {place} set {name} = {literal}".encode())
    names = sorted(PINNED)
    with psycopg.connect(conninfo) as inherited:
        before = {name: inherited.execute(f"show {name}".encode()).fetchone() for name in names}
    for kind in KINDS.values():
        shown = ", ".join(f"pg_catalog.current_setting('{name}')" for name in names)
        answer = (
            kind(conninfo, f"select {shown}").strip("()").replace("pg_catalog, pg_temp", "pg_catalog,pg_temp")
        )
        values = dict(zip(names, (value.strip("'") for value in answer.split("', ")), strict=True))
        assert values == {**PINNED, "datestyle": "ISO, MDY"}
    assert {n for n in names if before[n] == (PINNED[n],)} == set()


def _read(connection: psycopg.Connection, has_filters: bool) -> str:
    where = "(select pg_get_expr(prqual, prrelid) from pg_publication_rel)" if has_filters else "null"
    result = connection.pgconn.exec_(READ.format(where=where).encode())
    if result.ntuples != 1:
        return result.error_message.decode()
    return "\n".join((result.get_value(0, n) or b"NULL").decode() for n in range(result.nfields))


def test_no_single_setting_changes_what_is_read(conninfo: str) -> None:
    """Each setting has another value in turn. Without pgsieve's own settings the results would differ."""
    with Conninfo(conninfo).connect() as connection:
        connection.execute(TABLE.encode())
        has_filters = connection.info.server_version >= 150000
        if has_filters:
            connection.execute(PUBLISHED.encode())
        expected, differing = _read(connection, has_filters), set()
        assert "ERROR" not in expected
        for name, value in _others(connection, f"{SETTABLE} and context not like '%backend'").items():
            literal = value if "," in value else sql.Literal(value).as_string(None)
            connection.pgconn.exec_(
                f"reset all;{sessions._SET_PINNED_STATEMENTS}set {name} = {literal}".encode()
            )
            if _read(connection, has_filters) != expected:
                differing.add(name)
            connection.pgconn.exec_(sessions._SET_PINNED_STATEMENTS.encode())
            assert _read(connection, has_filters) == expected, name
    assert differing >= {"DateStyle", "IntervalStyle", "extra_float_digits", "bytea_output", "TimeZone"}
    assert differing >= {
        "standard_conforming_strings",
        "array_nulls",
        "transform_null_equals",
        "quote_all_identifiers",
    }
