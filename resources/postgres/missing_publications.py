"""The publications with which a server decodes, where some did not exist when the WAL was written.

In: why the server refuses to decode for requested publications. Out: the missing ones, and those that are left.
"""

from collections.abc import Callable, Sequence

import psycopg

from pgsieve.resources.postgres.errors import SourceError

#: undefined_object: a publication that does not exist.
UNDEFINED = "42704"


def missing_publications(refused: SourceError, asked: Sequence[str]) -> list[str]:
    """The requested publications that did not exist when the WAL that the server refuses to decode was written.

    Before 18 that is an error, also where the publication was created later (LoadPublications() in
    src/backend/replication/pgoutput/pgoutput.c reads the catalog as of the change).
    """
    cause = refused.__cause__
    message = cause.diag.message_primary or "" if isinstance(cause, psycopg.Error) else ""
    return [name for name in asked if refused.sqlstate == UNDEFINED and f'"{name}"' in message]


def publications_then(
    asked: Sequence[str], refused: Callable[[Sequence[str]], SourceError | None]
) -> tuple[tuple[str, ...], SourceError | None]:
    """The requested publications with which the server decodes, and why it still sends nothing with these.

    `refused` says why nothing is sent with some of them. Without any publication left, there is no such
    reason.
    """
    there, why = tuple(asked), None
    while there and (why := refused(there)) is not None and (missing := missing_publications(why, there)):
        there = tuple(name for name in there if name not in missing)
    return there, why if there else None
