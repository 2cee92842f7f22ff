"""Keeps passwords out of messages, including those that libpq, ADBC, Spark or a server wrote.

In: the connection strings and passwords in use (`remember`), and texts. Out: the texts without fragments of
passwords (`conceal_passwords`). Raises nothing.

libpq may split a conninfo elsewhere than its author meant. In `postgresql://me:pass@word@db/shop` it takes
`word@db` for the host, and its error shows that. So everything in a URI between the user's name and the last
@ counts as secret.
"""

import re
from collections import deque
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

#: No text shows as many consecutive characters of a password.
FRAGMENT_LENGTH = 4
#: How many passwords are remembered: a password command makes a new one for each connection.
_MAX_SECRETS = 64

_KEYWORDS = ("password", "sslpassword", "oauth_client_secret")
_AUTHORITY = re.compile(r"\s*postgres(?:ql)?://[^:@/]*:(.*)@", re.DOTALL)
_PLACEHOLDER = "..."

_secrets: deque[str] = deque(maxlen=_MAX_SECRETS)


def remember(*secrets: str | None) -> None:
    """Remember these secrets, so that `conceal_passwords` removes them from texts."""
    for secret in secrets:
        if secret and secret not in _secrets:
            _secrets.append(secret)


def remember_conninfo(conninfo: str) -> None:
    """Remember the passwords of a connection string, even if libpq takes a part of them for something else."""
    try:
        parsed = conninfo_to_dict(conninfo)
    except psycopg.Error:
        parsed = {}
    remember(*(str(parsed[keyword]) for keyword in _KEYWORDS if parsed.get(keyword)))
    if authority := _AUTHORITY.match(conninfo):
        remember(authority[1], unquote(authority[1]))


def conceal_passwords(text: str) -> str:
    """Replace all fragments of four characters of a remembered password, and all shorter passwords, in a text."""
    secret_at = [False] * len(text)
    for secret in tuple(_secrets):  # Other threads may add secrets meanwhile.
        for begin, end in _occurrences(text, secret):
            secret_at[begin:end] = [True] * (end - begin)
    spans = re.finditer("1+|0+", "".join("01"[is_secret] for is_secret in secret_at))
    return "".join(_PLACEHOLDER if span[0][0] == "1" else text[span.start() : span.end()] for span in spans)


def _occurrences(text: str, secret: str) -> list[tuple[int, int]]:
    if len(secret) < FRAGMENT_LENGTH:
        # Many words contain a short password by chance, so only a whole word counts.
        return [m.span() for m in re.finditer(rf"(?<!\w){re.escape(secret)}(?!\w)", text)]
    fragments = {
        secret[index : index + FRAGMENT_LENGTH] for index in range(len(secret) - FRAGMENT_LENGTH + 1)
    }
    places = range(len(text) - FRAGMENT_LENGTH + 1)
    return [
        (index, index + FRAGMENT_LENGTH)
        for index in places
        if text[index : index + FRAGMENT_LENGTH] in fragments
    ]
