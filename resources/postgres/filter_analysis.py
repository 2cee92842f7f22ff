"""Makes the publisher analyse the row filters of pgsieve.yaml, as CREATE PUBLICATION would.

In: a table, and the text of a row filter.
Out: the names of the columns that the filter reads.

Raises RejectedFilterError, with PostgreSQL's wording and SQLSTATE, for a filter that PostgreSQL would refuse.
Raises UncheckedFilterError if the publisher cannot analyse filters.

The filter becomes the WHERE clause of a temporary view, in a transaction that is rolled back. So the role needs no
privilege to create publications, and the server may be one of a version without row filters. The server never
evaluates the filter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import PublicationError, Table
from pgsieve.decoding.publications.filter_rules import (
    Expression,
    find_expression_columns,
    find_refusal_reason,
)
from pgsieve.decoding.publications.node_tree import TreeNode, parse_expression, parse_node_tree
from pgsieve.resources.postgres.ddl import find_failed_trigger
from pgsieve.resources.postgres.errors import is_transient, remove_values_from_message
from pgsieve.resources.postgres.sessions import read_own_search_path
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.waits import LOCK_SECONDS


class RejectedFilterError(PublicationError):
    """CREATE PUBLICATION would refuse the row filter."""


class UncheckedFilterError(PgsieveError):
    """The publisher cannot analyse row filters, so it is unknown whether it would accept them."""


@contextmanager
def begin_analysis(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction in which `read_filter_columns` can be called. It is rolled back at the end. Raises UncheckedFilterError."""
    row = connection.execute(
        "select pg_is_in_recovery(), has_database_privilege(current_database(), 'TEMPORARY')"
    ).fetchone()
    if row != (False, True):
        reason, remedy = (
            ("the server is a standby", "run `pgsieve validate` against the primary")
            if row and row[0]
            else ("the role may not create temporary views", "grant the role TEMPORARY on the database")
        )
        raise UncheckedFilterError(
            f"cannot check whether PostgreSQL accepts the row filters of pgsieve.yaml: {reason}", hint=remedy
        )
    with connection.transaction(force_rollback=True):
        connection.execute("set transaction read write")
        connection.execute(f"set local lock_timeout = '{LOCK_SECONDS:g}s'")
        yield


def read_filter_columns(connection: psycopg.Connection[Any], table: Table, where: str) -> frozenset[str]:
    """The columns of the table that a row filter reads. Must be called within `begin_analysis`.

    Raises RejectedFilterError if PostgreSQL refuses the filter, and UncheckedFilterError if it cannot analyse the
    filter. Raises psycopg.Error if the session ends meanwhile.
    """
    try:
        try:
            expression, reason = _analyse_filter(connection, table, where)
        except psycopg.Error as error:
            if is_transient(error) or find_failed_trigger(connection, error) is None:
                raise
            # An event trigger on CREATE VIEW may need the role's own search_path, so try again with it. With this path
            # a filter may find functions, operators, types and collations of users, but it is refused if it uses one.
            search_path = f"pg_catalog, pg_temp, {read_own_search_path(connection)}"
            expression, reason = _analyse_filter(connection, table, where, search_path)
    except psycopg.errors.LockNotAvailable as error:
        raise UncheckedFilterError(
            f"cannot check whether PostgreSQL accepts the row filters of pgsieve.yaml: table {table.quoted_name} is locked",
            hint="end the transaction that locks it, or wait until it has ended",
            sqlstate=error.sqlstate,
        ) from None
    except psycopg.Error as error:
        if is_transient(error):
            raise
        if (trigger_and_function := find_failed_trigger(connection, error)) is not None:
            raise UncheckedFilterError(
                f"cannot check whether PostgreSQL accepts the row filters of pgsieve.yaml: the event trigger"
                f' "{trigger_and_function[0]}" fails when a temporary view is created ({remove_values_from_message(error)})',
                hint=f"correct its function {trigger_and_function[1]}",
                sqlstate=error.sqlstate,
            ) from None
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            raise _make_privilege_error(connection, table, error) from None
        # The message names the WHERE clause of the view. CREATE PUBLICATION would name the clause PUBLICATION WHERE.
        message = (error.diag.message_primary or "").replace(
            "argument of WHERE ", "argument of PUBLICATION WHERE "
        )
        raise _make_rejection_error(
            table, where, message, error.diag.message_detail, error.sqlstate
        ) from None
    if reason is not None:
        raise _make_rejection_error(table, where, "invalid publication WHERE expression", reason, "0A000")
    return find_expression_columns(expression, table)


def _analyse_filter(
    connection: psycopg.Connection[Any], table: Table, where: str, search_path: str | None = None
) -> tuple[Expression, str | None]:
    """The analysed filter, and PostgreSQL's reason to refuse it; None if PostgreSQL accepts it.

    `search_path` replaces the session's search_path.
    """
    with connection.transaction(force_rollback=True):
        if search_path is not None:
            connection.execute("select set_config('search_path', %s, true)", [search_path])
        _check_syntax(connection, where)
        expression = _read_expression(connection, table, where)
        return expression, find_refusal_reason(expression, *_find_refusable_functions(connection, expression))


def _make_rejection_error(
    table: Table, where: str, message: str, detail: str | None, sqlstate: str | None
) -> RejectedFilterError:
    reason = f"{message}: {detail}" if detail else message
    return RejectedFilterError(
        reason, hint=f"correct `where` of {table.quoted_name}: {where}", sqlstate=sqlstate
    )


def _make_privilege_error(
    connection: psycopg.Connection[Any], table: Table, error: psycopg.Error
) -> UncheckedFilterError:
    """The error for a role without a right that the analysis needs, such as USAGE on the schema of the table."""
    row = connection.execute(
        "select current_user, has_schema_privilege(%s::text, 'usage')", [table.schema]
    ).fetchone()
    assert row is not None
    role, may_use_schema = row
    grantee = quote(role)
    return UncheckedFilterError(
        "cannot check whether PostgreSQL accepts the row filters of pgsieve.yaml:"
        f" {remove_values_from_message(error)}",
        hint=f"grant {grantee} this right, which `where` of {table.quoted_name} needs"
        if may_use_schema
        else f"GRANT USAGE ON SCHEMA {quote(table.schema)} TO {grantee}",
        sqlstate=error.sqlstate,
    )


def _check_syntax(connection: psycopg.Connection[Any], where: str) -> None:
    """Make the server parse the filter as one expression in parentheses, as CREATE PUBLICATION does.

    The statement CREATE POLICY has the same grammar rule for its expression, in all versions. So a text such as
    `true) limit (1` is refused, although it would be valid in a view. The statement is only parsed, and not run.
    """
    statement = f"create policy p on t using ({where}\n)"
    result = connection.pgconn.prepare(b"", statement.encode())
    if result.status != ExecStatus.COMMAND_OK:
        raise error_from_result(result, "utf-8")


def _read_expression(connection: psycopg.Connection[Any], table: Table, where: str) -> Expression:
    """Create the temporary view, and read the analysed filter from the catalog.

    The expressions of the table's virtual generated columns are read, too, because the filter may use these columns.
    """
    # `binary` selects the extended query protocol, which refuses a text with several statements.
    connection.execute(
        f"create temporary view pgsieve_filter as select 1 from only {quote(table.schema, table.name)} where ({where}\n)",
        binary=True,
    )
    row = connection.execute(
        "select ev_action::text from pg_rewrite where ev_class = 'pg_temp.pgsieve_filter'::regclass"
    ).fetchone()
    assert row is not None
    generation_expressions = connection.execute(
        "select d.adnum, d.adbin::text from pg_attrdef d join pg_attribute a on a.attrelid = d.adrelid"
        " and a.attnum = d.adnum where d.adrelid = %s and a.attgenerated = 'v'",
        [table.oid],
    )
    return Expression(
        _parse_quals(row[0]), {number: parse_expression(text) for number, text in generation_expressions}
    )


def _parse_quals(action: str) -> TreeNode:
    """The WHERE clause of the view, from the action of the view's only rule."""
    actions = parse_node_tree(action)
    query = actions[0] if isinstance(actions, tuple) else actions
    assert isinstance(query, TreeNode)
    jointree = query.fields["jointree"]
    assert isinstance(jointree, TreeNode)
    quals = jointree.fields["quals"]
    assert isinstance(quals, TreeNode)
    return quals


def _find_refusable_functions(
    connection: psycopg.Connection[Any], expression: Expression
) -> tuple[frozenset[int], frozenset[int]]:
    """Find the functions in the expression that PostgreSQL may refuse in a filter, and the operators that call them.

    Returns two sets of oids. Such a function was defined by a user, or is not immutable.
    """
    functions = connection.execute(
        "select oid::bigint from pg_proc where oid = any(%s) and (provolatile <> 'i' or oid >= 16384)",
        [list(expression.find_function_oids())],
    ).fetchall()
    operators = connection.execute(
        "select o.oid::bigint from pg_operator o join pg_proc p on p.oid = o.oprcode"
        " where o.oid = any(%s) and (p.provolatile <> 'i' or p.oid >= 16384)",
        [list(expression.find_operator_oids())],
    ).fetchall()
    return frozenset(oid for (oid,) in functions), frozenset(oid for (oid,) in operators)
