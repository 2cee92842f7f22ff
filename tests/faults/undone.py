"""Alterations that are undone at once. Their only trace is in the changes that were sent meanwhile.

In: the publisher. Out: a thread that makes the alterations, one after the other, while pgsieve runs. The tables are used by no other
thread. Each id is used once, so that a row which was sent for a while conflicts with no later row. One alteration has a failing
row filter; its publication has no oracle.
"""

from __future__ import annotations

import itertools
from random import Random

import psycopg

from tests.faults.busy_publisher import Worker

#: Tables of the publisher and the oracles. `REST` is for the oracles only, for rows of other partitions and names.
TABLES = """
CREATE SCHEMA wide;
CREATE TABLE wide.wandering (id int PRIMARY KEY, v text);
CREATE TABLE grafted (id int PRIMARY KEY);
CREATE TABLE trees (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE trees_one PARTITION OF trees FOR VALUES FROM (0) TO (1000000);
CREATE TABLE nothing (id int PRIMARY KEY);
CREATE TABLE fragile (id int PRIMARY KEY, n int);
"""
REST = """
CREATE TABLE trees_rest PARTITION OF trees DEFAULT;
CREATE TABLE wide.w (id int PRIMARY KEY, v text);
CREATE TABLE wandering (id int PRIMARY KEY, v text);
"""
_TABLES = "TABLE wide.wandering WHERE (id > 0), grafted, trees"
_OPERATIONS = "publish = 'insert, update, delete, truncate'"
PUBLICATIONS = f"""
CREATE PUBLICATION undone FOR {_TABLES} WITH (publish_via_partition_root = true);
CREATE PUBLICATION more FOR TABLE nothing;
CREATE PUBLICATION fragile FOR TABLE fragile WHERE (100 / n > 3) WITH (publish = 'insert');
"""
#: The rows of `fragile` that its filter selects, once no row is left on which it fails.
SELECTED = "SELECT id, n FROM fragile WHERE 100 / n > 3"

#: Restores the normal state, also after a crash in the middle of an alteration.
_RESTORED = f"""
ALTER PUBLICATION more SET TABLE nothing;
ALTER PUBLICATION undone SET {_TABLES};
ALTER PUBLICATION undone SET ({_OPERATIONS});
ALTER TABLE wide.wandering REPLICA IDENTITY DEFAULT;
DELETE FROM fragile WHERE n = 0;
"""
_ATTACHED = "ALTER TABLE trees ATTACH PARTITION trees_one FOR VALUES FROM (0) TO (1000000)"
#: `n` is a number: no row has it or one of the next nine. pgsieve may look between these statements.
_APART = {
    "table published for a while": """ALTER PUBLICATION more ADD TABLE wide.wandering;
        INSERT INTO wide.wandering VALUES (-{n}, 'sent'), ({n}, 'sent');
        UPDATE wide.wandering SET v = 'changed' WHERE abs(id) = {n}; ALTER PUBLICATION more DROP TABLE wide.wandering;
        INSERT INTO wide.wandering VALUES (-{n} - 1, 'not sent'); UPDATE wide.wandering SET v = 'last' WHERE abs(id) = {n}""",
    "schema published for a while": """ALTER PUBLICATION more ADD TABLE wide.wandering WHERE (v = 'y');
        ALTER PUBLICATION more ADD TABLES IN SCHEMA wide; INSERT INTO wide.wandering VALUES (-{n}, 'sent');
        ALTER PUBLICATION more DROP TABLES IN SCHEMA wide; INSERT INTO wide.wandering VALUES (-{n} - 1, 'x'), (-{n} - 2, 'y');
        ALTER PUBLICATION more DROP TABLE wide.wandering""",
    "row filter altered and back": """ALTER PUBLICATION undone SET TABLE wide.wandering WHERE (id < 0), grafted, trees;
        INSERT INTO wide.wandering VALUES (-{n}, 'sent'), ({n}, 'not sent');
        ALTER PUBLICATION undone SET TABLE wide.wandering WHERE (id > 0), grafted, trees;
        INSERT INTO wide.wandering VALUES (-{n} - 1, 'not sent'), ({n} + 1, 'sent')""",
    "operations altered and back": """INSERT INTO wide.wandering VALUES ({n}, 'first'), ({n} + 1, 'first');
        ALTER PUBLICATION undone SET (publish = 'insert'); INSERT INTO wide.wandering VALUES ({n} + 2, 'sent');
        UPDATE wide.wandering SET v = 'not sent' WHERE id = {n}; DELETE FROM wide.wandering WHERE id = {n} + 1;
        TRUNCATE trees_one; ALTER PUBLICATION undone SET (publish = 'insert, update, delete, truncate');
        UPDATE wide.wandering SET v = 'sent' WHERE id = {n} + 2""",
    "identity altered and back": """INSERT INTO wide.wandering VALUES ({n}, 'first'), ({n} + 1, 'first');
        ALTER TABLE wide.wandering REPLICA IDENTITY FULL; UPDATE wide.wandering SET v = 'full', id = id + 2 WHERE id = {n};
        ALTER TABLE wide.wandering REPLICA IDENTITY DEFAULT; UPDATE wide.wandering SET v = 'key' WHERE id = {n} + 1""",
    "partition made and dropped": """CREATE TABLE trees_{n} PARTITION OF trees FOR VALUES FROM (2000000 + {n}) TO (2000005 + {n});
        INSERT INTO trees VALUES (2000000 + {n}); ALTER TABLE trees DETACH PARTITION trees_{n};
        INSERT INTO trees_{n} VALUES (2000001 + {n}); DROP TABLE trees_{n}""",
    "partition detached and attached": """INSERT INTO trees VALUES ({n}); ALTER TABLE trees DETACH PARTITION trees_one;
        INSERT INTO trees_one VALUES ({n} + 1); DELETE FROM trees_one WHERE id = {n};
        ALTER TABLE trees ATTACH PARTITION trees_one FOR VALUES FROM (0) TO (1000000); INSERT INTO trees VALUES ({n} + 2)""",
    "failing row filter beside DDL": """INSERT INTO fragile VALUES ({n}, 5), ({n} + 1, 50);
        ALTER PUBLICATION more ADD TABLE wide.wandering; INSERT INTO fragile VALUES ({n} + 2, 0);
        INSERT INTO wide.wandering VALUES (-{n}, 'sent'); ALTER PUBLICATION more DROP TABLE wide.wandering""",
}
#: Each of these is one transaction: in between, a run would see another table, and a subscription would need a refresh.
_AT_ONCE = {
    "renamed and back": """ALTER TABLE wide.wandering RENAME TO w; INSERT INTO wide.w VALUES ({n}, 'not sent');
        ALTER TABLE wide.w RENAME TO wandering; INSERT INTO wide.wandering VALUES ({n} + 1, 'sent')""",
    "moved and back": """ALTER TABLE wide.wandering SET SCHEMA public; INSERT INTO public.wandering VALUES ({n}, 'not sent');
        ALTER TABLE public.wandering SET SCHEMA wide; INSERT INTO wide.wandering VALUES ({n} + 1, 'sent')""",
    "table attached and detached": """ALTER TABLE trees ATTACH PARTITION grafted FOR VALUES FROM (1000000) TO (2000000);
        INSERT INTO grafted VALUES (1000000 + {n}); INSERT INTO trees VALUES (1000001 + {n});
        ALTER TABLE trees DETACH PARTITION grafted; INSERT INTO grafted VALUES (1000002 + {n})""",
    "root altered and back": """ALTER PUBLICATION undone SET (publish_via_partition_root = false);
        INSERT INTO trees VALUES ({n}); ALTER PUBLICATION undone SET (publish_via_partition_root = true);
        INSERT INTO trees VALUES ({n} + 1)""",
}
_ALL = _APART | _AT_ONCE
_numbers = itertools.count(10, 10)


class Undone(Worker):
    """Makes these alterations. If a crash interrupted one, it restores the normal state before the next."""

    def __init__(self, conninfo: str, random: Random, pause: tuple[float, float]) -> None:
        super().__init__(conninfo, random, pause)
        self._whole = True

    def act(self, connection: psycopg.Connection) -> None:
        if not self._whole:
            restore(connection)
        kind = self.random.choice(list(_ALL))
        text, self._whole = _ALL[kind].format(n=next(_numbers)), False
        apart = kind in _APART and self.random.random() < 0.7
        for statement in text.split(";") if apart else [text]:
            connection.execute(statement)
            if apart and self.random.random() < 0.2:
                self.done.wait(self.random.uniform(0, 1))
        self._whole = True
        self.did[kind] += 1


def restore(connection: psycopg.Connection) -> None:
    """Restore the normal state, and delete the rows on which a filter fails."""
    for statement in _RESTORED.split(";"):
        connection.execute(statement)
    if not connection.execute("SELECT FROM pg_inherits WHERE inhrelid = 'trees_one'::regclass").fetchall():
        connection.execute(_ATTACHED)
