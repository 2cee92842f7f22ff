"""The rules of tenures, which `net_change` reads where UPDATEs move rows from one key to another. Knows no Spark.

A key is held by one row after the other. Each such holding is a tenure. Four changes, over a replica that has rows
of the keys 1 and 2:

    change       UPDATE of 1   DELETE of 2   UPDATE of 1 to 2   INSERT of 1       net change
    sends        b                           c                  b and c

    key 1    ──────── b ──────────────────────── went              ┌─ b, c ──►    upsert: b and c as inserted
             0: "replica"                         │                2: "insert"
                                                  ▼
    key 2    ──────────────────── ended          came: c ─────────────────────►   upsert: c as moved, b inherited,
             0: "replica"                        2: "arrive"                      the rest of the replica's row of
                                                                                  key 1, the tenure's `base`

A move is two events: the row leaves its old key, then arrives at its new one. `went` of the one tenure and `came` of
the other are the order key of the same UPDATE, so the tenures of one row form a chain. A tenure knows the columns
that it was sent or inherits, and nothing of the tenures before it under the same key.

`tests/fixtures/tenures.py` computes tenures and net changes of a few rows by these rules, without Spark.
"""

#: The events that begin a tenure. A tenure's number is the count of them in its key, its own included, plus the
#: count of `ENDS` before it. So number 0 is the row that the replica has.
BEGINS = ("insert", "arrive")

#: The events that end a tenure. What follows under the same key, but for an event that begins one, meets no row.
ENDS = ("delete", "leave")

#: The first event of a tenure -> its origin, where that event begins it.
ORIGINS = {event: event for event in BEGINS}

#: Without such an event: the origin of number 0, and of a later number, which changes a row that is gone.
ORIGIN_OF_FIRST, ORIGIN_OF_LATER = "replica", "nothing"

#: (origin at the beginning of the chain, whether the last tenure of the key has ended) -> the key's net change.
ACTIONS = {
    ("insert", False): "upsert",
    ("insert", True): "delete",
    ("replica", False): "update",
    ("replica", True): "delete",
    ("nothing", False): "delete",
    ("nothing", True): "delete",
}
