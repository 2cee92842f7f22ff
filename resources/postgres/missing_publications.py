"""Finds the requested publications that did not exist when the WAL was written.

Before PostgreSQL 18, the server refuses to decode the WAL at all if a requested publication is missing.

In: the server's error for a list of publications.
Out: the publications that are missing, and those that exist.
"""

from collections.abc import Callable, Sequence

import psycopg

from pgsieve.resources.postgres.errors import SourceError

#: The SQLSTATE of a publication that does not exist.
UNDEFINED_OBJECT_SQLSTATE = "42704"


def find_missing_publications(error: SourceError, requested_publications: Sequence[str]) -> list[str]:
    """The requested publications that the server's error names as missing.

    Before PostgreSQL 18, a publication also counts as missing if it was created after the change that is decoded:
    LoadPublications() in src/backend/replication/pgoutput/pgoutput.c reads the catalog as it was at the change.
    """
    cause = error.__cause__
    message = cause.diag.message_primary or "" if isinstance(cause, psycopg.Error) else ""
    return [
        name
        for name in requested_publications
        if error.sqlstate == UNDEFINED_OBJECT_SQLSTATE and f'"{name}"' in message
    ]


def find_existing_publications(
    requested_publications: Sequence[str], find_error: Callable[[Sequence[str]], SourceError | None]
) -> tuple[tuple[str, ...], SourceError | None]:
    """The requested publications that existed, and the server's error for these alone, or None if it has none for them.

    `find_error` returns the server's error for a list of publications, or None.
    """
    existing_names, error = tuple(requested_publications), None
    while (
        existing_names
        and (error := find_error(existing_names)) is not None
        and (missing_names := find_missing_publications(error, existing_names))
    ):
        existing_names = tuple(name for name in existing_names if name not in missing_names)
    return existing_names, error if existing_names else None
