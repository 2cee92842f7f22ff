"""The values, names and references that the configuration file refuses, each with its line, reason and hint."""

from __future__ import annotations

import pytest

from tests.fixtures.configs import (
    LEAST,
    assert_refused,
    with_published,
    with_source,
    with_subscription,
)

# Text, then line, key and message, then the hint

OBJECT = "write it as it is on the server, unquoted"
FOLDER = (
    "letters, digits and underscores, no underscore first, 63 at most: "
    "it becomes a folder of the lake and part of an asset key"
)
QUOTED = "is not a name as SQL writes it (double quotes around names with other characters)"
TABLE = 'write it as in SQL: public.orders, "Sales"."Order Lines"'
COLUMN = 'write it as in SQL: region, "Unit Price"'
TIME = "a number of hours, days or weeks, as in `7 days`; `off`; `forever`"
TYPED = 'write it as in SQL: public.orders.amount, "Sales".lines."Unit Price"'

REFUSED = {
    "freshness": (
        with_subscription("freshness: 30 seconds"),
        (5, "subscriptions.sales.freshness", "is not a time to wait for"),
        "a number of minutes, hours, days or weeks, as in `15 minutes`",
    ),
    "row_filter": (
        with_subscription("row_filter: publsher"),
        (5, "subscriptions.sales.row_filter", "should be one of pipeline, publisher"),
        "did you mean 'publisher'? allowed here: pipeline, publisher",
    ),
    "streaming": (
        with_subscription("streaming: of"),
        (5, "subscriptions.sales.streaming", "should be one of off, on, parallel"),
        "did you mean 'off'? allowed here: off, on, parallel",
    ),
    "origin": (
        with_subscription("origin: local"),
        (5, "subscriptions.sales.origin", "should be one of any, none"),
        "allowed here: any, none",
    ),
    "a retention": (
        LEAST + "retention: {changes: 7 months}\n",
        (6, "retention.changes", "is not a time"),
        TIME,
    ),
    "a retention in a list": (
        LEAST + "retention: {changes: [7 days]}\n",
        (6, "retention.changes", "is not a time"),
        TIME,
    ),
    "a retention with keys": (
        LEAST + "retention: {changes: {days: 7}}\n",
        (6, "retention.changes", "is not a time"),
        TIME,
    ),
    "an operation": (
        with_published("{tables: [{table: a.b}], publish: [insert, updates]}"),
        (3, "sources.shop.publications.emea.publish[1]", "should be one of insert, update, delete, truncate"),
        "did you mean 'update'? allowed here: insert, update, delete, truncate",
    ),
    "a boolean": (
        with_subscription("two_phase: maybe"),
        (5, "subscriptions.sales.two_phase", "should be true or false"),
        None,
    ),
    "an empty lake": (
        LEAST.replace("./lake", "''"),
        (1, "lake", "is empty"),
        "leave the key out for its default",
    ),
    "an empty filter": (
        with_published("{tables: [{table: a.b, where: ' '}]}"),
        (3, "sources.shop.publications.emea.tables[0].where", "is empty"),
        "leave the key out for its default",
    ),
    "an empty type": (
        with_subscription("types: {a.b.c: ''}"),
        (5, "subscriptions.sales.types[a.b.c]".replace("[a.b.c]", '."a.b.c"'), "is empty"),
        "leave the key out for its default",
    ),
    "a slot": (
        with_source("slot: Shop-1"),
        (3, "sources.shop.slot", "is not a name for a replication slot"),
        "a-z, 0-9 and _, 63 at most",
    ),
    "a long slot": (
        with_source(f"slot: {'s' * 64}"),
        (3, "sources.shop.slot", "is not a name for a replication slot"),
        "a-z, 0-9 and _, 63 at most",
    ),
    "a slot that ends in a line break": (
        with_source('slot: "shop\\n"'),
        (3, "sources.shop.slot", "is not a name for a replication slot"),
        "a-z, 0-9 and _, 63 at most",
    ),
    "a long capture": (
        with_source(f"capture: {'ü' * 32}"),
        (3, "sources.shop.capture", "should be a name of 1 to 54 bytes"),
        OBJECT,
    ),
    "an empty publication name": (
        LEAST.replace("[p1]", "[p1, '']"),
        (5, "subscriptions.sales.publications[1]", "should be a name of 1 to 63 bytes"),
        OBJECT,
    ),
    "a publication twice": (
        LEAST.replace("[p1]", "[p1, p2, p1]"),
        (5, "subscriptions.sales.publications", "names a publication twice"),
        "keep one of them",
    ),
    "a table without schema": (
        with_published("{tables: [{table: orders}]}"),
        (3, "sources.shop.publications.emea.tables[0].table", "has 1 name where 2 are needed"),
        TABLE,
    ),
    "a table with a database": (
        with_published("{tables: [{table: shop.public.orders}]}"),
        (3, "sources.shop.publications.emea.tables[0].table", "has 3 names where 2 are needed"),
        TABLE,
    ),
    "a table with a space": (
        with_published("{tables: [{table: public.order lines}]}"),
        (3, "sources.shop.publications.emea.tables[0].table", QUOTED),
        TABLE,
    ),
    "a table twice": (
        with_published("{tables: [{table: a.B}, {table: A.b}]}"),
        (3, "sources.shop.publications.emea.tables", "names a table twice"),
        "keep one of them",
    ),
    "a column": (
        with_published("{tables: [{table: a.b, columns: [1st]}]}"),
        (3, "sources.shop.publications.emea.tables[0].columns", QUOTED),
        COLUMN,
    ),
    "a column twice": (
        with_published("{tables: [{table: a.b, columns: [id, ID]}]}"),
        (3, "sources.shop.publications.emea.tables[0].columns", "names a column twice"),
        "keep one of them",
    ),
    "a typed column without its table": (
        with_subscription("types: {orders.amount: string}"),
        (5, 'subscriptions.sales.types."orders.amount"', "has 2 names where 3 are needed"),
        TYPED,
    ),
    "a typed column twice": (
        with_subscription("types: {a.b.c: string, a.B.c: string}"),
        (5, "subscriptions.sales.types", "names a column twice"),
        "keep one of them",
    ),
    "a conninfo": (
        LEAST.replace("dbname=shop", "shop"),
        (3, "sources.shop.conninfo", "is not a connection string that libpq can read"),
        (
            "keyword=value pairs, values with spaces in single quotes; or postgresql://user@host/dbname, "
            "with %-codes for special characters; put a password with such characters into the key `password`"
        ),
    ),
    "an empty password": (
        LEAST.replace("conninfo: ", "password: '', conninfo: "),
        (3, "sources.shop.password", "is empty"),
        "leave the key out if there is no password, or to use that of PGPASSWORD or .pgpass",
    ),
    "a password command for a shell": (
        LEAST.replace("conninfo: ", "password_command: echo secret, conninfo: "),
        (3, "sources.shop.password_command", "should be a list"),
        "write it in brackets, even a single entry: `[…]`",
    ),
    "a password command without a program": (
        LEAST.replace("conninfo: ", "password_command: [''], conninfo: "),
        (3, "sources.shop.password_command", "names no program"),
        "a list: the program, then its arguments one by one; no shell reads them",
    ),
    "two passwords": (
        LEAST.replace("conninfo: ", "password: a, password_command: [b], conninfo: "),
        (3, "sources.shop", "has a `password` and a `password_command`"),
        "keep one of them",
    ),
    # names and references
    "a source with an underscore first": (
        LEAST.replace("shop", "_shop"),
        (3, "sources._shop", "cannot be a name"),
        FOLDER,
    ),
    "a source with a hyphen": (
        LEAST.replace("shop", "my-shop"),
        (3, "sources.my-shop", "cannot be a name"),
        FOLDER,
    ),
    "a subscription with a slash": (
        LEAST.replace("sales", "a/b"),
        (5, 'subscriptions."a/b"', "cannot be a name"),
        FOLDER,
    ),
    "a subscription that ends in a line break": (
        LEAST.replace("sales", '"sales\\n"'),
        (5, 'subscriptions."sales\\n"', "cannot be a name"),
        FOLDER,
    ),
    "a long subscription": (
        LEAST.replace("sales", "s" * 64),
        (5, f"subscriptions.{'s' * 64}", "cannot be a name"),
        FOLDER,
    ),
    "a freshness in a unit that there is not": (
        with_subscription("freshness: 3 fortnights"),
        (5, "subscriptions.sales.freshness", "is not a time to wait for"),
        "a number of minutes, hours, days or weeks, as in `15 minutes`",
    ),
    "an unknown source": (
        LEAST.replace("source: shop", "source: shops"),
        (5, "subscriptions.sales.source", "is not a source of this file"),
        "did you mean 'shop'? allowed here: shop",
    ),
    "two subscriptions that differ in case": (
        LEAST + "  Sales: {source: shop, publications: [p1]}\n",
        (6, "subscriptions.Sales", "differs from sales only in case"),
        "give one of them another name",
    ),
    "two sources on one slot": (
        LEAST.replace("subscriptions", "  b: {conninfo: dbname=shop, slot: pgsieve_shop}\nsubscriptions"),
        (4, "sources.b.slot", "is the slot of source shop too"),
        "only one source can read a slot: give one of them another slot",
    ),
    "a publication of this file for the publisher": (
        LEAST.replace("dbname=shop", "dbname=shop, publications: {p1: {tables: [{table: a.b}]}}").replace(
            "[p1]", "[p0, p1], row_filter: publisher"
        ),
        (
            5,
            "subscriptions.sales.publications[1]",
            "is defined in this file, so the publisher cannot filter by it",
        ),
        "use row_filter: pipeline, or create the publication on the server",
    ),
    "a slot of a subscription that the source has": (
        with_source("slot: pgsieve_shop_sales").replace("[p1]", "[p1], row_filter: publisher"),
        (5, "subscriptions.sales", "needs the slot and folder pgsieve_shop_sales, which source shop has"),
        "give one of them another name",
    ),
    "two subscriptions whose slots meet": (
        (
            "lake: x\n"
            "sources: {a: {conninfo: host=x}, a_b: {conninfo: host=y}}\n"
            "subscriptions:\n"
            "  b_c: {source: a, publications: [p], row_filter: publisher}\n"
            "  c: {source: a_b, publications: [p], row_filter: publisher}\n"
        ),
        (5, "subscriptions.c", "needs the slot and folder pgsieve_a_b_c, which subscription b_c has"),
        "give one of them another name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_value_has_a_line_and_a_reason(case):
    assert_refused(*REFUSED[case])
