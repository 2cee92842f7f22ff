"""Finds requested publications that did not exist when the WAL was written: for these the server refuses to decode.

In: the server's error for a list of publications. Out: the missing publications, and the others.
"""

from collections.abc import Callable, Sequence

import psycopg

from pgsieve.resources.postgres.errors import SourceError

#: The SQLSTATE of a publication that does not exist.
UNDEFINED_OBJECT = "42704"


def missing_publications(refused: SourceError, requested: Sequence[str]) -> list[str]:
    """The requested publications that the server's error names as missing.

    Before 18 a publication that was created after the change is missing, too, because LoadPublications() in
    src/backend/replication/pgoutput/pgoutput.c reads the catalog as of the change.
    """
    cause = refused.__cause__
    message = cause.diag.message_primary or "" if isinstance(cause, psycopg.Error) else ""
    return [name for name in requested if refused.sqlstate == UNDEFINED_OBJECT and f'"{name}"' in message]


def existing_publications(
    requested: Sequence[str], error_for: Callable[[Sequence[str]], SourceError | None]
) -> tuple[tuple[str, ...], SourceError | None]:
    """The requested publications that existed, and the server's error for these, if any.

    `error_for` returns the server's error for a list of publications.
    """
    existing, error = tuple(requested), None
    while (
        existing
        and (error := error_for(existing)) is not None
        and (missing := missing_publications(error, existing))
    ):
        existing = tuple(name for name in existing if name not in missing)
    return existing, error if existing else None
