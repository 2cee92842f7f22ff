"""Finds requested publications that did not exist when the WAL was written, with which the server refuses to decode.

In: the server's error for a list of publications. Out: the missing publications, and the others.
"""

from collections.abc import Callable, Sequence

import psycopg

from pgsieve.resources.postgres.errors import SourceError

#: undefined_object: a publication that does not exist.
UNDEFINED = "42704"


def missing_publications(refused: SourceError, requested: Sequence[str]) -> list[str]:
    """The requested publications that did not exist when the WAL was written, by the server's error.

    Before 18 it is an error even if the publication was created later, because LoadPublications() in
    src/backend/replication/pgoutput/pgoutput.c reads the catalog as of the change.
    """
    cause = refused.__cause__
    message = cause.diag.message_primary or "" if isinstance(cause, psycopg.Error) else ""
    return [name for name in requested if refused.sqlstate == UNDEFINED and f'"{name}"' in message]


def publications_then(
    requested: Sequence[str], refused: Callable[[Sequence[str]], SourceError | None]
) -> tuple[tuple[str, ...], SourceError | None]:
    """The requested publications that existed, and the server's error for these, if any.

    `refused` returns the server's error for a list of publications.
    """
    existing, why = tuple(requested), None
    while (
        existing
        and (why := refused(existing)) is not None
        and (missing := missing_publications(why, existing))
    ):
        existing = tuple(name for name in existing if name not in missing)
    return existing, why if existing else None
